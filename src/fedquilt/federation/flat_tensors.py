"""Tensors in a file without a header: written in one go, and mapped when they are read.

The positions of tensors are kept apart from the file: they are sent with the message about it. For
many small updates a second this is ten times quicker than a format that describes itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fedquilt.structure.memory import map_tensor

ALIGNMENT = 64  # bytes
MAX_PARTS = 512  # in one call; systems allow 1024
MAX_HELD_BYTES = 2**24  # of tensors that wait for the next call
MIN_MAPPED_BYTES = 2**26  # of tensors that are mapped one by one


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies in a file, and what it is."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def write_flat(path: Path, tensors: Mapping[str, Tensor]) -> tuple[Slot, ...]:
    """Writes tensors one behind the other; returns where each of them is."""
    with path.open("wb", buffering=0) as file:
        return _write_all(file.fileno(), tensors)


def _write_all(file: int, tensors: Mapping[str, Tensor]) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    parts: list[memoryview] = []
    start = held = 0
    for name, tensor in tensors.items():
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        slots.append(Slot(name, tensor.dtype, tuple(tensor.shape), start, len(data)))
        padding = -len(data) % ALIGNMENT
        if len(data):
            parts += [data.numpy().data, memoryview(bytes(padding))][: 1 + bool(padding)]
        start += len(data) + padding
        held += len(data)
        if held > MAX_HELD_BYTES:
            _write(file, parts)
            parts, held = [], 0
    _write(file, parts)
    return tuple(slots)


def _write(file: int, parts: list[memoryview]) -> None:
    """Writes all parts, several in one call where the system can."""
    while parts:
        first = parts[:MAX_PARTS]
        written = os.writev(file, first) if hasattr(os, "writev") else os.write(file, first[0])
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if written:  # the system wrote a part only in part
            parts[0] = parts[0][written:]


def read_flat(path: Path, slots: tuple[Slot, ...]) -> Mapping[str, Tensor]:
    """Reads tensors by mapping the file into memory; the file may then be removed."""
    size = sum(slot.num_bytes for slot in slots)
    if (
        size >= max(MIN_MAPPED_BYTES, 1) and sys.platform != "win32"
    ):  # where an open file cannot be removed
        return MappedTensors(_OpenFile(os.open(path, os.O_RDONLY)), slots)
    size = max((slot.start + slot.num_bytes for slot in slots), default=0)
    size += -size % ALIGNMENT
    whole = _map_file(path, size) if size else torch.empty(0, dtype=torch.uint8)
    views = {dtype: whole.view(dtype) for dtype in {slot.dtype for slot in slots}}
    tensors = {}
    for slot in slots:
        first = slot.start // slot.dtype.itemsize
        last = first + slot.num_bytes // slot.dtype.itemsize
        tensors[slot.name] = views[slot.dtype][first:last].view(slot.shape)
    return tensors


def _map_file(path: Path, size: int) -> Tensor:
    if sys.platform == "win32":  # where a mapped file cannot be removed
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)[:size]
    return torch.from_file(str(path), size=size, dtype=torch.uint8)


def offload(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The same tensors in a temporary file, of which only what is in use takes memory.

    Small ones stay in memory. So do those for which there is no room in the file system, and all
    where an open file cannot be removed.
    """
    size = 0 if isinstance(tensors, MappedTensors) else sum(t.nbytes for t in tensors.values())
    if size >= max(MIN_MAPPED_BYTES, 1) and sys.platform != "win32":
        with contextlib.suppress(OSError):
            number, path = tempfile.mkstemp()
            os.unlink(path)
            file = _OpenFile(number)
            return MappedTensors(file, _write_all(number, tensors))
    return tensors


class _OpenFile:
    """A file that stays open as long as tensors may be read from it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.number)  # os itself may be gone when Python ends


class MappedTensors(Mapping[str, Tensor]):
    """Large tensors in a file, each mapped when it is asked for.

    So they take memory while they are in use only. Who asks for one that is in use gets the same.
    A copy of the mapping is a dict.

    >>> tensors = offload({"large": torch.ones(2**24), "small": torch.ones(1)})
    >>> float(tensors["small"])
    1.0
    """

    def __init__(self, file: _OpenFile, slots: Iterable[Slot]) -> None:
        self._file = file
        self._slots = {slot.name: slot for slot in slots}
        self._in_use: WeakValueDictionary[str, Tensor] = WeakValueDictionary()

    def select(self, names: Mapping[str, str]) -> MappedTensors:
        """Some of the tensors, under other names."""
        slots = (replace(self._slots[old], name=new) for new, old in names.items())
        return MappedTensors(self._file, slots)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._in_use.get(name)
        if tensor is None:
            slot = self._slots[name]
            tensor = map_tensor(
                self._file.number, slot.start, slot.dtype, slot.shape, slot.num_bytes
            )
            self._in_use[name] = tensor
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._slots

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def join_parts(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of several subnets in one mapping."""
    return {f"{i}/{name}": tensor for i, part in enumerate(parts) for name, tensor in part.items()}


def split_parts(tensors: Mapping[str, Tensor], count: int) -> tuple[Mapping[str, Tensor], ...]:
    """The tensors of each subnet: the inverse of ``join_parts``.

    Without subnets there may be one set of tensors of another kind.

    >>> split_parts(join_parts([{"a": torch.ones(1)}, {}]), 2)
    ({'a': tensor([1.])}, {})
    >>> split_parts(join_parts([{"a": torch.ones(1)}]), 0), split_parts({}, 0)
    (({'a': tensor([1.])},), ())
    """
    names: tuple[dict[str, str], ...] = tuple({} for _ in range(max(count, bool(tensors))))
    for name in tensors:
        number, _, rest = name.partition("/")
        names[int(number)][rest] = name
    if isinstance(tensors, MappedTensors):
        return tuple(tensors.select(part) for part in names)
    return tuple({rest: tensors[name] for rest, name in part.items()} for part in names)
