"""Encodes tasks and updates as Flower messages, and decodes them.

A message has one record of arrays, one of settings and one of metrics, so that Flower's mods
(clipping, local differential privacy, message sizes) work on it. The arrays hold only the cells of
the subnets. Nothing is pickled: a recipe is sent as plain values, a subnet as packed bits.
"""

from __future__ import annotations

import io
import json
import math
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedquilt.errors import UpdateError
from fedquilt.federation import flat_tensors
from fedquilt.federation.client import Task, Update
from fedquilt.federation.validation import shorten
from fedquilt.structure.cut import Params, SubnetTensors, copy_subnet_tensors
from fedquilt.structure.packing import pack_subnet, unpack_subnet
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.serialization import from_plain, to_plain

ARRAYS, SETTINGS, METRICS = "arrays", "settings", "metrics"
ERROR = "error"  # the only setting of an error reply
WEIGHT = "weight"  # the metric that holds an update's weight in the mean
LENGTH_BYTES = 4  # the length of a packed subnet, before the subnet itself
MAX_ARRAY_HEADER = 256  # bytes before the values of an array
MAX_VALUE_BYTES = 8  # of one number
MAX_REPLY_EXTRA = 2**19  # bytes for all metrics and settings of a reply
REPLY_SETTINGS = {"run", "token", "client", "saved_state", "subnets"}
DTYPES = {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"}
MAX_ENCODED = 16  # subnets of a round whose arrays are kept for the next client
NO_STATE = 0  # the version of a client that has stored no state yet

Arrays = Mapping[str, Array]


@dataclass(frozen=True)
class MessageHeader:
    """What a task message says beside the task.

    Args:
        run: The name of the run. It stays the same when the server restarts.
        token: Identifies this message; the reply repeats it.
        state: The version of the client's state to work with.
        next: The version under which the client stores its new state.
        keep: Versions that a later message may ask for; the client removes the others.
        deadline: Seconds that the work may take; 0 means no limit.
        structure: A digest of the model's structure, which both sides must agree on.
    """

    run: str
    token: str
    state: int
    next: int
    keep: tuple[int, ...]
    deadline: float
    structure: str


class TaskEncoder:
    """Encodes the tasks of a round; the arrays that several clients get are made once.

    Args:
        structure: What can be cut in the model.
    """

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._made: OrderedDict[tuple[int, tuple[Subnet, ...]], tuple[Params, Arrays]] = (
            OrderedDict()
        )

    def encode(self, task: Task, header: MessageHeader) -> RecordDict:
        """Encodes a task: with the cells of its subnets, or all tensors if it names no subnet."""
        settings: dict[str, Any] = {
            **{name: value for name, value in vars(header).items() if name != "keep"},
            "keep": json.dumps(header.keep),
            "client": task.client,
            "seed": task.seed,
            "recipe": json.dumps(to_plain(task.recipe)),
            "subnets": _pack_subnets(task.subnets, self._structure),
        }
        return _make_records(self._make_arrays(task), settings, {})

    def forget(self) -> None:
        """Drops the arrays of a round that is over."""
        self._made.clear()

    def _make_arrays(self, task: Task) -> Arrays:
        if not task.subnets:  # tensors of another kind, which are mostly of one client alone
            return _encode_arrays(task.params)
        key = (id(task.params), task.subnets)
        if key not in self._made:
            parts = [copy_subnet_tensors(task.params, self._structure, s) for s in task.subnets]
            arrays = _encode_arrays(flat_tensors.join_parts(parts))
            self._made[key] = task.params, arrays  # the number of tensors that are alive is theirs
            if len(self._made) > MAX_ENCODED:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return self._made[key][1]


def decode_task(
    content: RecordDict,
    structure: Structure,
    allowed: Sequence[type] = (),
    functions: Collection[str] = (),
) -> Task:
    """Decodes the task of a message.

    Args:
        content: The message.
        structure: What can be cut in the model.
        allowed: Further classes of recipes.
        functions: Paths of functions that the recipe may name.
    """
    settings = content.config_records[SETTINGS]
    subnets = _unpack_subnets(_require_bytes(settings["subnets"]), structure)
    tensors = {name: _decode_array(array) for name, array in content.array_records[ARRAYS].items()}
    params: Params = (
        SubnetTensors(subnets, flat_tensors.split_parts(tensors, len(subnets)))
        if subnets
        else tensors
    )
    recipe = from_plain(json.loads(str(settings["recipe"])), allowed, functions)
    return Task(_to_int(settings["client"]), subnets, params, recipe, _to_int(settings["seed"]))


def decode_header(content: RecordDict) -> MessageHeader:
    """Decodes the header of a task message."""
    settings = content.config_records[SETTINGS]
    return MessageHeader(
        str(settings["run"]),
        str(settings["token"]),
        _to_int(settings["state"]),
        _to_int(settings["next"]),
        tuple(json.loads(str(settings["keep"]))),
        float(settings["deadline"]),  # type: ignore[arg-type]
        str(settings["structure"]),
    )


def encode_update(
    update: Update, structure: Structure, header: MessageHeader, *, saved_state: bool
) -> RecordDict:
    """Encodes an update; ``saved_state``: the client has stored its next state."""
    settings = {
        "run": header.run,
        "token": header.token,
        "client": update.client,
        "saved_state": saved_state,
        "subnets": _pack_subnets(update.subnets, structure),
    }
    metrics = {name: float(value) for name, value in update.metrics.items()}
    arrays = _encode_arrays(flat_tensors.join_parts(update.params))
    return _make_records(arrays, settings, {**metrics, WEIGHT: float(update.weight)})


def decode_update(
    content: RecordDict, structure: Structure, header: MessageHeader, client: int, max_bytes: int
) -> tuple[Update, bool]:
    """Decodes the reply to a task message: the update, and whether the client stored its state.

    Raises an UpdateError if the reply is for another message, or if any part of it is too large.
    """
    try:
        check_size(content, max_bytes)
        error = decode_error(content)
        if error is not None:
            raise UpdateError(error)
        settings = content.config_records[SETTINGS]
        if set(content) != {ARRAYS, SETTINGS, METRICS} or set(settings) != REPLY_SETTINGS:
            raise ValueError("a reply has other records or settings")
        run, token = str(settings["run"]), str(settings["token"])
        replied = _to_int(settings["client"])
        if (run, token, replied) != (header.run, header.token, client):
            raise UpdateError(
                f"client {client} replied to another message: run {run}, token {token}, client "
                f"{replied}"
            )
        arrays = content.array_records[ARRAYS]
        subnets = _unpack_subnets(_require_bytes(settings["subnets"]), structure)
        tensors = {name: _decode_array(array) for name, array in arrays.items()}
        metrics = {n: float(v) for n, v in content.metric_records[METRICS].items()}  # type: ignore[arg-type]
        weight = metrics.pop(WEIGHT)
        parts = flat_tensors.split_parts(tensors, len(subnets))
        return Update(client, subnets, parts, weight, metrics), bool(settings["saved_state"])
    except UpdateError as problem:
        raise UpdateError(shorten(str(problem))) from problem
    except Exception as problem:  # an untrusted message may raise anything while it is read
        reason = f"client {client} sent an unreadable reply ({type(problem).__name__}: {problem})"
        raise UpdateError(shorten(reason)) from problem


def encode_error(reason: str) -> RecordDict:
    """Encodes the reply of a client that failed."""
    return _make_records({}, {ERROR: reason}, {})


def decode_error(content: RecordDict) -> str | None:
    """Decodes why a client failed; None if it did not."""
    settings = content.config_records.get(SETTINGS)
    if settings is None or ERROR not in settings:
        return None
    return str(settings[ERROR]).strip() or "the client gave no reason"


def encode_query(run_name: str) -> RecordDict:
    """Encodes the query for a node's information, for a run."""
    return _make_records({}, {"run": run_name}, {})


def decode_query(content: RecordDict) -> str:
    """Decodes the name of the run that a query is for."""
    return str(content.config_records[SETTINGS]["run"])


def count_message_bytes(content: RecordDict) -> int:
    """Counts the bytes of a message's arrays, texts and binary settings."""
    arrays = sum(
        len(array.data) for record in content.array_records.values() for array in record.values()
    )
    return arrays + sum(
        len(value)
        for record in content.config_records.values()
        for value in record.values()
        if isinstance(value, (bytes, str))
    )


def count_tensor_bytes(content: RecordDict) -> int:
    """Counts the bytes of a message's tensors alone, without the headers of arrays."""
    arrays = (a for record in content.array_records.values() for a in record.values())
    return sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in arrays)


def check_size(content: RecordDict, max_bytes: int) -> None:
    """Raises an UpdateError if a message has more bytes than allowed, in any of its parts."""
    size = sum(_count_bytes(name) + _count_bytes(record) for name, record in content.items())
    if size > max_bytes:
        raise UpdateError(f"the reply has {size:,} bytes, and at most {max_bytes:,} are allowed")


def _count_bytes(value: Any) -> int:
    if isinstance(value, (bytes, str)):
        return len(value)
    if isinstance(value, Array):
        return sum(
            _count_bytes(part) for part in (value.dtype, value.stype, value.data, [*value.shape])
        )
    if isinstance(value, Mapping):
        return sum(_count_bytes(name) + _count_bytes(part) for name, part in value.items())
    return sum(map(_count_bytes, value)) if isinstance(value, (list, tuple)) else MAX_VALUE_BYTES


def get_max_bytes(task: Task, structure: Structure, size: int) -> int:
    """How large a reply may be, given the size of the task's message.

    As large as the message, or as the full model if the task names no subnet.
    """
    if task.subnets:
        return size + MAX_REPLY_EXTRA
    full = sum(
        math.prod(shape) * MAX_VALUE_BYTES + MAX_ARRAY_HEADER for shape in structure.shapes.values()
    )
    return max(size, full) + MAX_REPLY_EXTRA


def _encode_arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    return {name: Array(tensor.detach().cpu().numpy()) for name, tensor in tensors.items()}


def _make_records(
    arrays: Arrays, settings: dict[str, Any], metrics: dict[str, float]
) -> RecordDict:
    return RecordDict(
        {
            ARRAYS: ArrayRecord(dict(arrays)),
            SETTINGS: ConfigRecord(settings),
            METRICS: MetricRecord(dict(metrics)),
        }
    )


def _decode_array(array: Array) -> Tensor:
    """Decodes an array; checks its header first, so that no memory is allocated for a lie."""
    stream = io.BytesIO(array.data)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("an array is not in NumPy's format 1.0")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    if str(dtype) not in DTYPES:
        raise ValueError(f"an array has the type {dtype}")
    size = math.prod(shape) * dtype.itemsize
    if size != len(array.data) - stream.tell():
        raise ValueError(f"an array of {dtype} {shape} has {len(array.data)} bytes")
    values = np.frombuffer(array.data, dtype, offset=stream.tell())
    return torch.from_numpy(values.reshape(shape, order="F" if is_fortran else "C").copy("C"))


def _pack_subnets(subnets: Sequence[Subnet], structure: Structure) -> bytes:
    packed = [pack_subnet(subnet, structure) for subnet in subnets]
    return b"".join(len(data).to_bytes(LENGTH_BYTES, "big") + data for data in packed)


def _unpack_subnets(data: bytes, structure: Structure) -> tuple[Subnet, ...]:
    subnets, start = [], 0
    while start < len(data):
        size = int.from_bytes(data[start : start + LENGTH_BYTES], "big")
        start += LENGTH_BYTES
        if start + size > len(data):
            raise ValueError("a packed subnet is truncated")
        subnets.append(unpack_subnet(data[start : start + size], structure))
        start += size
    return tuple(subnets)


def _require_bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"bytes are required, got {type(value).__name__}")
    return value


def _to_int(value: Any) -> int:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"an integer is required, got {value}")
    return int(value)
