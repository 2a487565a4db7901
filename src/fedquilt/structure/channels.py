"""Which positions of which tensors are one channel: a union-find over tensor positions.

Every position on every axis of every parameter starts as a channel of its own. Following the
model's operations ties positions that must be kept or cut together. Channel 0 is the frozen one:
what is tied to it is never cut.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]  # one channel per position of an axis
FROZEN = 0


class Channels:
    """A growing set of channels that can be tied together, frozen, or pinned."""

    def __init__(self) -> None:
        self._parent: list[int] = [FROZEN]
        self._owned = 1  # channels below are of the model's own tensors
        self._pinned: set[int] = set()

    def owned(self, count: int) -> Labels:
        """Channels of one of the model's own tensors; these are asked for before any others."""
        assert self._owned == len(self._parent)
        labels = self.fresh(count)
        self._owned = len(self._parent)
        return labels

    def fresh(self, count: int) -> Labels:
        """New channels, tied to nothing: no tensor of the model has them yet."""
        start = len(self._parent)
        self._parent.extend(range(start, start + count))
        return np.arange(start, start + count, dtype=np.int64)

    def find(self, channel: int) -> int:
        """The representative of all channels that are tied to this one."""
        parent = self._parent
        while parent[channel] != channel:
            parent[channel] = parent[parent[channel]]
            channel = parent[channel]
        return channel

    def roots(self, labels: Labels) -> Labels:
        """The representatives, position by position."""
        return np.fromiter((self.find(int(c)) for c in labels), np.int64, len(labels))

    def tie(self, left: Labels | None, right: Labels | None) -> Labels | None:
        """Makes two axes one, position by position; an axis without labels freezes the other."""
        if left is None or right is None:
            self.freeze(left)
            self.freeze(right)
            return None
        if left is not right:
            for a, b in zip(left.tolist(), right.tolist(), strict=True):
                self._union(a, b)
        return left

    def freeze(self, labels: Labels | None) -> None:
        """These positions are never cut."""
        if labels is not None:
            for channel in np.unique(labels).tolist():
                self._union(FROZEN, channel)

    def pin(self, labels: Labels | None) -> None:
        """These positions are never cut by width, but keep their identity (classes, tokens)."""
        if labels is not None:
            self._pinned.update(self.find(c) for c in labels.tolist())

    def fold(self, labels: Labels | None, count: int) -> None:
        """Ties the same place of ``count`` equal stretches: channels are cut inside each."""
        if labels is not None and count > 1:
            stretches = labels.reshape(count, -1)
            for stretch in stretches[1:]:
                self.tie(stretches[0], stretch)

    def is_cut(self, labels: Labels | None) -> bool:
        """Whether any position may be cut, and with it a tensor of the model."""
        if labels is None:
            return False
        return any(FROZEN < self.find(c) < self._owned for c in labels.tolist())

    def pinned(self) -> frozenset[int]:
        """Representatives of the pinned channels."""
        return frozenset(self.find(c) for c in self._pinned)

    def _union(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            low, high = (a, b) if a < b else (b, a)  # so the model's own channels represent others
            self._parent[high] = low


def join(parts: Iterable[tuple[Labels | None, int]]) -> Labels | None:
    """Labels of axes laid end to end; stretches without labels are frozen."""
    listed = list(parts)
    if all(labels is None for labels, _ in listed):
        return None
    return np.concatenate(
        [np.full(size, FROZEN, np.int64) if labels is None else labels for labels, size in listed]
    )
