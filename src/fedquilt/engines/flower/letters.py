"""Orders and answers as Flower's records: one of arrays, one of settings, one of metrics.

Only the cells of the subnets travel. A message has one record of each kind, so that Flower's mods
(clipping, local differential privacy, message sizes) work on it. Nothing is pickled: a recipe
travels as plain values, a subnet as its bits.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedquilt.engines import flat
from fedquilt.errors import UpdateError
from fedquilt.federation.boundary import shortened
from fedquilt.federation.client import Task, Update
from fedquilt.structure.cut import Params, Parts, take
from fedquilt.structure.groups import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.wire import pack, unpack
from fedquilt.training.plain import as_plain, from_plain

ARRAYS, SETTINGS, METRICS = "arrays", "settings", "metrics"
PROBLEM = "problem"  # instead of an answer
WEIGHT = "weight"  # the metric with which an update counts
LENGTH = 4  # bytes that say how long a subnet is
HEADER, WIDEST = 256, 8  # bytes at most: before an array, and of one number in it
REPORT = 2**19  # bytes at most: of all metrics, and what else an answer says
ANSWERED = {"run", "token", "client", "kept", "subnets"}
DTYPES = {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"}
NO_STATE = 0  # the version of a client that keeps nothing yet


@dataclass(frozen=True)
class Envelope:
    """What an order says beside the work itself.

    ``run`` is ours and survives a restart of the server; ``token`` is this order's alone.
    ``state`` is the version of what the client keeps to work with, ``next`` the one to write, and
    ``keep`` are versions that may still be asked for. ``deadline``: seconds the work may take; 0
    means any. ``structure`` is a digest of what is cut, which both sides must agree on.
    """

    run: str
    token: str
    state: int
    next: int
    keep: tuple[int, ...]
    deadline: float
    structure: str


def order(task: Task, structure: Structure, envelope: Envelope) -> RecordDict:
    """A task as it is sent: with its subnets' cells, or with all its tensors if it names none."""
    parts = [take(task.params, structure, subnet) for subnet in task.subnets]
    settings: dict[str, Any] = {
        **{name: value for name, value in vars(envelope).items() if name != "keep"},
        "keep": json.dumps(envelope.keep),
        "client": task.client,
        "seed": task.seed,
        "recipe": json.dumps(as_plain(task.recipe)),
        "subnets": _joined(task.subnets, structure),
    }
    tensors = flat.packed(parts) if task.subnets else task.params
    return _records(tensors, settings, {})


def read_order(content: RecordDict, structure: Structure, allowed: Sequence[type] = ()) -> Task:
    """The task that an order holds."""
    settings = content.config_records[SETTINGS]
    subnets = _parted(_bytes(settings["subnets"]), structure)
    tensors = {name: _tensor(array) for name, array in content.array_records[ARRAYS].items()}
    params: Params = Parts(subnets, flat.unpacked(tensors, len(subnets))) if subnets else tensors
    recipe = from_plain(json.loads(str(settings["recipe"])), allowed)
    return Task(_int(settings["client"]), subnets, params, recipe, _int(settings["seed"]))


def read_envelope(content: RecordDict) -> Envelope:
    """What an order says beside the work."""
    settings = content.config_records[SETTINGS]
    return Envelope(
        str(settings["run"]),
        str(settings["token"]),
        _int(settings["state"]),
        _int(settings["next"]),
        tuple(json.loads(str(settings["keep"]))),
        float(settings["deadline"]),  # type: ignore[arg-type]
        str(settings["structure"]),
    )


def answer(update: Update, structure: Structure, envelope: Envelope, *, kept: bool) -> RecordDict:
    """An update as it is sent; ``kept``: the client has written its next state."""
    settings = {
        "run": envelope.run,
        "token": envelope.token,
        "client": update.client,
        "kept": kept,
        "subnets": _joined(update.subnets, structure),
    }
    metrics = {name: float(value) for name, value in update.metrics.items()}
    return _records(flat.packed(update.params), settings, {**metrics, WEIGHT: float(update.weight)})


def read_answer(
    content: RecordDict, structure: Structure, sent: Envelope, client: int, most_bytes: int
) -> tuple[Update, bool]:
    """The update that answers an order, and whether the client has kept a state with it.

    Raises an UpdateError if it answers another one, or is larger than an answer may be, whatever
    part of it is.
    """
    try:
        check_size(content, most_bytes)
        problem = problem_of(content)
        if problem is not None:
            raise UpdateError(problem)
        settings = content.config_records[SETTINGS]
        if set(content) != {ARRAYS, SETTINGS, METRICS} or set(settings) != ANSWERED:
            raise ValueError("it has other parts than an answer")
        told = str(settings["run"]), str(settings["token"]), _int(settings["client"])
        if told != (sent.run, sent.token, client):
            raise UpdateError(
                f"client {client} answered another order than it was sent: run {told[0]}, order "
                f"{told[1]}, client {told[2]}"
            )
        arrays = content.array_records[ARRAYS]
        subnets = _parted(_bytes(settings["subnets"]), structure)
        tensors = {name: _tensor(array) for name, array in arrays.items()}
        metrics = {n: float(v) for n, v in content.metric_records[METRICS].items()}  # type: ignore[arg-type]
        weight = metrics.pop(WEIGHT)
        parts = flat.unpacked(tensors, len(subnets))
        return Update(client, subnets, parts, weight, metrics), bool(settings["kept"])
    except UpdateError as problem:
        raise UpdateError(shortened(str(problem))) from problem
    except Exception as problem:  # whatever a foreign message may do to those who read it
        said = f"client {client} sent what cannot be read ({type(problem).__name__}: {problem})"
        raise UpdateError(shortened(said)) from problem


def apology(problem: str) -> RecordDict:
    """What a client sends that could not do its work, and why."""
    return _records({}, {PROBLEM: problem}, {})


def problem_of(content: RecordDict) -> str | None:
    """Why a client could not do its work; None if it could."""
    record = content.config_records.get(SETTINGS)
    return None if record is None or PROBLEM not in record else str(record[PROBLEM])


def question(run_name: str) -> RecordDict:
    """Asks a node who it is, for a run."""
    return _records({}, {"run": run_name}, {})


def read_name(content: RecordDict) -> str:
    """For which run a node is asked."""
    return str(content.config_records[SETTINGS]["run"])


def num_bytes(content: RecordDict) -> int:
    """The bytes of a message's arrays and of its binary settings."""
    arrays = sum(
        len(array.data) for record in content.array_records.values() for array in record.values()
    )
    return arrays + sum(
        len(value)
        for record in content.config_records.values()
        for value in record.values()
        if isinstance(value, (bytes, str))
    )


def tensor_bytes(content: RecordDict) -> int:
    """The bytes of an order's numbers alone: what its subnets are, without any heading."""
    arrays = (a for record in content.array_records.values() for a in record.values())
    return sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in arrays)


def check_size(content: RecordDict, most: int) -> None:
    """Refuses a message of more bytes than there may be, in whatever part of it they are."""
    size = sum(_size(name) + _size(record) for name, record in content.items())
    if size > most:
        raise UpdateError(f"the answer has {size:,} bytes, and {most:,} are allowed")


def _size(value: Any) -> int:
    if isinstance(value, (bytes, str)):
        return len(value)
    if isinstance(value, Array):
        return sum(_size(part) for part in (value.dtype, value.stype, value.data, [*value.shape]))
    if isinstance(value, Mapping):
        return sum(_size(name) + _size(part) for name, part in value.items())
    return sum(map(_size, value)) if isinstance(value, (list, tuple)) else WIDEST


def most_bytes(task: Task, structure: Structure, size: int) -> int:
    """How long an answer may be: as the order, or as the whole model if that names no subnet."""
    if task.subnets:
        return size + REPORT
    whole = sum(math.prod(shape) * WIDEST + HEADER for shape in structure.shapes.values())
    return max(size, whole) + REPORT


def _records(
    tensors: Mapping[str, Tensor], settings: dict[str, Any], metrics: dict[str, float]
) -> RecordDict:
    arrays = {name: Array(tensor.detach().cpu().numpy()) for name, tensor in tensors.items()}
    return RecordDict(
        {
            ARRAYS: ArrayRecord(arrays),
            SETTINGS: ConfigRecord(settings),
            METRICS: MetricRecord(dict(metrics)),
        }
    )


def _tensor(array: Array) -> Tensor:
    """An array's tensor; nothing is made room for that is not there."""
    stream = io.BytesIO(array.data)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("an array is no plain one")
    shape, by_column, dtype = np.lib.format.read_array_header_1_0(stream)
    if str(dtype) not in DTYPES:
        raise ValueError(f"an array is of {dtype}")
    size = math.prod(shape) * dtype.itemsize
    if size != len(array.data) - stream.tell():
        raise ValueError(f"an array says {dtype} {shape} and has {len(array.data)} bytes")
    values = np.frombuffer(array.data, dtype, offset=stream.tell())
    return torch.from_numpy(values.reshape(shape, order="F" if by_column else "C").copy("C"))


def _joined(subnets: Sequence[Subnet], structure: Structure) -> bytes:
    packed = [pack(subnet, structure) for subnet in subnets]
    return b"".join(len(data).to_bytes(LENGTH, "big") + data for data in packed)


def _parted(data: bytes, structure: Structure) -> tuple[Subnet, ...]:
    found, first = [], 0
    while first < len(data):
        size = int.from_bytes(data[first : first + LENGTH], "big")
        first += LENGTH
        if first + size > len(data):
            raise ValueError("a subnet is cut off")
        found.append(unpack(data[first : first + size], structure))
        first += size
    return tuple(found)


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"bytes were expected, got {type(value).__name__}")
    return value


def _int(value: Any) -> int:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"a whole number was expected, got {value}")
    return int(value)
