"""Tensors in a file without a header: written in one go, and mapped when they are read.

Where each tensor lies is told apart from the file, by whoever announces it. Many small updates a
second pass between processes, and this is an order of magnitude quicker than a format that
describes itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ALIGNED = 64  # bytes


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
    slots, start = [], 0
    with path.open("wb") as file:
        for name, tensor in tensors.items():
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            slots.append(Slot(name, tensor.dtype, tuple(tensor.shape), start, len(data)))
            file.write(data.numpy().data)
            padding = -len(data) % ALIGNED
            file.write(bytes(padding))
            start += len(data) + padding
    return tuple(slots)


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
