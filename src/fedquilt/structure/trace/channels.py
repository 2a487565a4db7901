"""Which positions of which tensors are one channel: a union-find over tensor positions.

Every position on every axis of every parameter starts as a channel of its own. Following the
model's operations ties positions that must be kept or cut together. Channel 0 is the frozen one:
a channel that is tied to it is never cut.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]  # one channel per position of an axis


FROZEN = 0


NO_REASON = 0  # for being frozen: what meets the input is never cut


NOT_FROZEN = np.iinfo(np.int64).max


class Channels:
    """A growing set of channels that can be tied together, frozen, or pinned.

    Whole axes are tied at once. The representative of tied channels is the smallest of them,
    whatever the order in which they were tied.
    """

    def __init__(self) -> None:
        self._parent = np.zeros(1, np.int64)
        self._cause = np.zeros(1, np.int64)  # of representatives: the reason for being frozen
        self._count = 1  # channels below exist
        self._owned = 1  # channels below are of the model's own tensors
        self._pinned: list[tuple[Labels, int]] = []  # and why
        self.reason = self.reason_met = NO_REASON
        """Why channels that are frozen from now on are: they are asked to be, or they meet an axis
        without labels. Of several reasons the smallest counts."""
        self.has_lost = False  # whether channels of the model's tensors were frozen for a reason

    def create_owned(self, count: int) -> Labels:
        """Creates channels of one of the model's own tensors, before any others are created."""
        assert self._owned == self._count
        labels = self.create(count)
        self._owned = self._count
        return labels

    def create(self, count: int) -> Labels:
        """Creates channels that are tied to nothing and belong to no tensor of the model yet."""
        labels = np.arange(self._count, self._count + count, dtype=np.int64)
        self._count += count
        if self._count > len(self._parent):
            more = max(self._count, 2 * len(self._parent)) - len(self._parent)
            numbers = np.arange(len(self._parent), len(self._parent) + more, dtype=np.int64)
            self._parent = np.concatenate([self._parent, numbers])
            self._cause = np.concatenate([self._cause, np.full(more, NOT_FROZEN)])
        return labels

    def roots(self, labels: Labels) -> Labels:
        """The representatives, position by position."""
        roots = self._find(labels)
        return np.where(self._cause[roots] < NOT_FROZEN, FROZEN, roots)

    def reasons(self) -> Labels:
        """Why each channel is frozen or pinned, by representative; NOT_FROZEN where it is not."""
        causes = self._cause.copy()
        for labels, reason in self._pinned:
            roots = self._find(labels)
            causes[roots] = np.minimum(causes[roots], reason)
        return causes[self._find(np.arange(self._count))]

    def tie(self, left: Labels | None, right: Labels | None) -> Labels | None:
        """Ties two axes position by position; an axis without labels freezes the other."""
        if left is None or right is None:
            self.freeze(left, self.reason_met)
            self.freeze(right, self.reason_met)
            return None
        if left is not right:
            assert len(left) == len(right)
            is_frozen = (left == FROZEN) | (right == FROZEN)
            self.freeze(left[is_frozen], self.reason_met)
            self.freeze(right[is_frozen], self.reason_met)
            self._unite(left[~is_frozen], right[~is_frozen])
        return left

    def freeze(self, labels: Labels | None, reason: int | None = None) -> None:
        """Marks positions that are never cut."""
        if labels is not None:
            reason = self.reason if reason is None else reason
            roots = self._find(labels)
            self._cause[roots] = np.minimum(self._cause[roots], reason)
            is_lost = (self._cause[roots] != NO_REASON) & (roots < self._owned)
            self.has_lost = self.has_lost or (len(labels) > 1 and bool(is_lost.any()))

    def pin(self, labels: Labels | None, reason: int | None = None) -> None:
        """Marks positions that no width cuts but that keep their identity (classes, tokens)."""
        if labels is not None:
            self._pinned.append((labels, self.reason if reason is None else reason))

    def fold(self, labels: Labels | None, count: int) -> None:
        """Ties equal positions of ``count`` equal parts: channels are cut inside each part."""
        if labels is not None and count > 1:
            first, *others = labels.reshape(count, -1)
            self.tie(np.tile(first, len(others)), np.concatenate(others))

    def is_cut(self, labels: Labels | None) -> bool:
        """Whether any position may be cut, and with it a tensor of the model."""
        if labels is None:
            return False
        roots = self.roots(labels)
        return bool(((roots > FROZEN) & (roots < self._owned)).any())

    def pinned(self) -> frozenset[int]:
        """Representatives of the pinned channels."""
        return frozenset(c for labels, _ in self._pinned for c in self.roots(labels).tolist())

    def _find(self, labels: Labels) -> Labels:
        parent = self._parent
        roots = parent[labels]
        while not np.array_equal(above := parent[roots], roots):
            roots = above
        parent[labels] = roots
        return roots

    def _unite(self, left: Labels, right: Labels) -> None:
        a, b = self._find(left), self._find(right)
        while (differ := a != b).any():
            a, b = a[differ], b[differ]
            cause = np.minimum(self._cause[a], self._cause[b])
            np.minimum.at(self._parent, np.maximum(a, b), np.minimum(a, b))
            a, b = self._find(a), self._find(b)
            for roots in (a, b):  # where one channel met several, they are tied in the next turn
                np.minimum.at(self._cause, roots, cause)


def join(parts: Iterable[tuple[Labels | None, int]]) -> Labels | None:
    """Labels of axes laid end to end; parts without labels are frozen."""
    listed = list(parts)
    if all(labels is None for labels, _ in listed):
        return None
    return np.concatenate(
        [np.full(size, FROZEN, np.int64) if labels is None else labels for labels, size in listed]
    )
