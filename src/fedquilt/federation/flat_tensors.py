"""Tensors in a file without a header: written in one go, and mapped when they are read.

The positions of tensors are kept apart from the file: they are sent with the message about it. For
many small updates a second this is ten times quicker than a format that describes itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedquilt.structure.memory import map_tensor

ALIGNMENT = 64  # bytes
MAX_PARTS = 512  # in one call; systems allow 1024
MIN_MAPPED_BYTES = 2**26  # of an update whose tensors are mapped one by one


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
    slots: list[Slot] = []
    parts: list[memoryview] = []
    start = 0
    for name, tensor in tensors.items():
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        slots.append(Slot(name, tensor.dtype, tuple(tensor.shape), start, len(data)))
        padding = -len(data) % ALIGNMENT
        parts += [data.numpy().data, memoryview(bytes(padding))]
        start += len(data) + padding
    with path.open("wb", buffering=0) as file:
        _write(file.fileno(), [part for part in parts if len(part)])
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
    is_large = sum(slot.num_bytes for slot in slots) >= max(MIN_MAPPED_BYTES, 1)
    if is_large and sys.platform != "win32":  # where an open file cannot be removed
        return MappedTensors(_OpenFile(path), {slot.name: slot for slot in slots})
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


class _OpenFile:
    """A file that stays open as long as tensors may be read from it."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self.number)


class MappedTensors(Mapping[str, Tensor]):
    """Large tensors in a file, each mapped when it is asked for.

    So an update takes memory for the tensors in use only, not for all that were read before.
    """

    def __init__(self, file: _OpenFile, slots: Mapping[str, Slot]) -> None:
        self._file, self._slots = file, slots

    def select(self, names: Mapping[str, str]) -> MappedTensors:
        """Some of the tensors, under other names."""
        return MappedTensors(self._file, {new: self._slots[old] for new, old in names.items()})

    def __getitem__(self, name: str) -> Tensor:
        slot = self._slots[name]
        return map_tensor(self._file.number, slot.start, slot.dtype, slot.shape, slot.num_bytes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)


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
