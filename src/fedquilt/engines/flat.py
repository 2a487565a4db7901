"""Tensors in a file without a header: written in one go, and mapped when they are read.

Where each tensor lies is told apart from the file, by whoever announces it. Many small updates a
second pass between processes, and this is an order of magnitude quicker than a format that
describes itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ALIGNED = 64  # bytes
MOST_PARTS = 512  # in one call; systems allow 1024


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies in a file, and what it is."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def write(path: Path, tensors: Mapping[str, Tensor]) -> tuple[Slot, ...]:
    """Writes tensors one behind the other; where each of them is."""
    slots: list[Slot] = []
    parts: list[memoryview] = []
    start = 0
    for name, tensor in tensors.items():
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        slots.append(Slot(name, tensor.dtype, tuple(tensor.shape), start, len(data)))
        padding = -len(data) % ALIGNED
        parts += [data.numpy().data, memoryview(bytes(padding))]
        start += len(data) + padding
    with path.open("wb", buffering=0) as file:
        _write(file.fileno(), [part for part in parts if len(part)])
    return tuple(slots)


def _write(file: int, parts: list[memoryview]) -> None:
    """All parts with as few calls to the system as it takes."""
    while parts:
        some = parts[:MOST_PARTS]
        written = os.writev(file, some) if hasattr(os, "writev") else os.write(file, some[0])
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if written:  # the system took a part of a part
            parts[0] = parts[0][written:]


def read(path: Path, slots: tuple[Slot, ...]) -> dict[str, Tensor]:
    """The tensors, in memory that is mapped from the file; the file may be removed then."""
    size = max((slot.start + slot.num_bytes for slot in slots), default=0)
    whole = torch.from_file(str(path), size=size, dtype=torch.uint8) if size else torch.empty(0)
    return {
        slot.name: whole[slot.start : slot.start + slot.num_bytes].view(slot.dtype).view(slot.shape)
        if slot.num_bytes
        else torch.empty(slot.shape, dtype=slot.dtype)
        for slot in slots
    }


def packed(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of several subnets under one roof."""
    return {f"{i}/{name}": tensor for i, part in enumerate(parts) for name, tensor in part.items()}


def unpacked(tensors: Mapping[str, Tensor], count: int) -> tuple[dict[str, Tensor], ...]:
    """The tensors of each subnet again.

    >>> unpacked(packed([{"a": torch.ones(1)}, {}]), 2)
    ({'a': tensor([1.])}, {})
    """
    parts: tuple[dict[str, Tensor], ...] = tuple({} for _ in range(count))
    for name, tensor in tensors.items():
        number, _, rest = name.partition("/")
        parts[int(number)][rest] = tensor
    return parts
