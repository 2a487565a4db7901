"""The data of clients on a device: kept there where it fits, and else copied batch by batch."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from fedquilt.data import ClientData
from fedquilt.data.examples import Rows
from fedquilt.devices import CPU, get_free_memory
from fedquilt.structure.tensors import find_tensors, map_tensors

RESIDENT_FRACTION = 0.25  # of the memory that is free at the start; the rest is for training


def get_device(data: ClientData) -> torch.device:
    """The device of a client's batches; what changes data leaves them where they are."""
    while not isinstance(data, DeviceExamples) and hasattr(data, "data"):
        data = data.data
    return data.device if isinstance(data, DeviceExamples) else CPU


class ResidentData:
    """Whole data of clients on a device, those used last, within a part of its memory.

    Args:
        device: The device.
        max_bytes: The most that is kept; None: a quarter of what is free now.
    """

    def __init__(self, device: torch.device, max_bytes: int | None = None) -> None:
        self.device = device
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._sizes: dict[Hashable, int] = {}

    def wrap(self, data: ClientData, key: Hashable) -> DeviceExamples:
        """The data with batches on the device; ``key`` tells it from other data."""
        return DeviceExamples(data, self, key)

    def find(self, data: ClientData, key: Hashable) -> Any:
        """All examples as one batch on the device; None if they do not fit, or change."""
        if key not in self._kept:
            if not (getattr(data, "has_fixed_batches", False) and len(data)):
                return None
            one = data.batch(torch.zeros(1, dtype=torch.int64))
            size = len(data) * sum(t.nbytes for t in find_tensors(one))
            if not self._make_room(size):
                return None
            whole = data.batch(torch.arange(len(data)))
            self._kept[key] = map_tensors(lambda t: t.to(self.device), whole)
            self._sizes[key] = size
        self._kept.move_to_end(key)
        return self._kept[key]

    def _make_room(self, size: int) -> bool:
        if self._max_bytes is None:
            free = get_free_memory(self.device)
            self._max_bytes = int(RESIDENT_FRACTION * free) if math.isfinite(free) else 0
        if size > self._max_bytes:
            return False
        while self._sizes and sum(self._sizes.values()) + size > self._max_bytes:
            oldest, _ = self._kept.popitem(last=False)
            del self._sizes[oldest]
        return True

    def release(self) -> None:
        """Keeps nothing any more, because the memory is needed."""
        self._kept.clear()
        self._sizes.clear()
        self._max_bytes = 0


class DeviceExamples:
    """The data of a client with batches on a device.

    Rows are chosen, and augmentation is drawn, on the host, by the same generators as for the CPU.
    So every device sees the same batches. All but the batches stays on the host.
    """

    def __init__(self, data: ClientData, resident: ResidentData, key: Hashable) -> None:
        self._data, self._resident, self._key = data, resident, key

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of its own, before it is made
            raise AttributeError(name)
        return getattr(self._data, name)  # such as the scale of images, which attacks need

    def __len__(self) -> int:
        """The number of examples."""
        return len(self._data)

    @property
    def device(self) -> torch.device:
        """Where batches are."""
        return self._resident.device

    @property
    def labels(self) -> Tensor | None:
        """The label of every example, on the host."""
        return self._data.labels

    @property
    def label_set(self) -> tuple[int, ...]:
        """The labels present, in order."""
        return self._data.label_set

    def batch(self, rows: Tensor, generator: torch.Generator | None = None) -> Any:
        """Returns inputs and labels of some rows, on the device."""
        whole = self._resident.find(self._data, self._key)
        if whole is None:
            return map_tensors(self._copy, self._data.batch(rows, generator))
        there = rows.to(self.device)
        return map_tensors(lambda t: t.index_select(0, there), whole)

    def _copy(self, tensor: Tensor) -> Tensor:
        """A tensor on the device; the copy goes on while the host prepares what follows."""
        if self.device.type != "mps":  # whose memory is the host's
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def select(self, rows: Rows) -> DeviceExamples:
        """Selects some rows."""
        rows = torch.as_tensor(rows)
        key = self._key, rows.numpy().tobytes()
        return DeviceExamples(self._data.select(rows), self._resident, key)
