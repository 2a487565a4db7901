"""A subnet: which part of the global model, as a small value that can be sent and compared."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Subnet:
    """A choice of channels per group and of blocks; what is not mentioned is kept whole.

    ``kept`` holds one bit per channel of each group that is cut. ``skipped`` names blocks that are
    left out: not computed, not stored, not sent. ``without`` names tensors that are
    no part of it: not sent, not stitched. The tensors that ``own`` names are not shared with other
    subnets but belong to ``owner``: in the global model their name is ``name@owner``.
    Names in ``without`` and ``own`` may be patterns (``*.bias``) or one of the structure's sets
    (``:statistics``, ``:tracked``, ``:norms``, ``:steps``, ``:outputs``).
    """

    kept: tuple[tuple[str, int], ...] = ()
    without: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    owner: str = ""
    skipped: tuple[str, ...] = ()

    @staticmethod
    def of(channels: Mapping[str, Iterable[int]]) -> Subnet:
        """The subnet with these channels of these groups.

        >>> Subnet.of({"conv1": [0, 2]})
        Subnet(conv1: 0,2)
        """
        return Subnet(tuple(sorted((g, _mask(c)) for g, c in channels.items())))

    def channels(self, group: str) -> Tensor | None:
        """Indices kept of a group, ascending; None: all of them."""
        for name, mask in self.kept:
            if name == group:
                return _indices(mask)
        return None

    def count(self, group: str) -> int | None:
        """How many channels of a group are kept; None: all of them."""
        for name, mask in self.kept:
            if name == group:
                return mask.bit_count()
        return None

    def keeping(self, group: str, channels: Iterable[int]) -> Subnet:
        """The same subnet with other channels of one group."""
        rest = tuple(pair for pair in self.kept if pair[0] != group)
        return replace(self, kept=tuple(sorted((*rest, (group, _mask(channels))))))

    def skipping(self, *blocks: str) -> Subnet:
        """The same subnet without the named blocks either."""
        return replace(self, skipped=tuple(sorted({*self.skipped, *blocks})))

    def differing(self, other: Subnet) -> list[str]:
        """Groups of which the other keeps other channels.

        >>> Subnet.of({"a": [0], "b": [0]}).differing(Subnet.of({"a": [0], "b": [1], "c": [0]}))
        ['b', 'c']
        """
        mine, theirs = dict(self.kept), dict(other.kept)
        return [group for group in {**mine, **theirs} if mine.get(group) != theirs.get(group)]

    def within(self, *others: Subnet, holders: int = 1) -> Subnet:
        """The same subnet without the channels and blocks that fewer of the others have."""
        kept = dict(self.kept)
        for group in {name for other in others for name, _ in other.kept}:
            masks = [mask for other in others for name, mask in other.kept if name == group]
            missing = holders - (len(others) - len(masks))  # the rest have all channels
            if missing > 0:
                held = _in_at_least(masks, missing)
                kept[group] = kept[group] & held if group in kept else held
        skips = Counter(block for other in others for block in other.skipped)
        gone = (block for block, count in skips.items() if len(others) - count < holders)
        return replace(self, kept=tuple(sorted(kept.items()))).skipping(*gone)

    @property
    def shape(self) -> Subnet:
        """What is built for it: channels and blocks, whatever is shared, sent or owned."""
        return Subnet(self.kept, skipped=self.skipped)

    def leaving(self, *names: str) -> Subnet:
        """The same subnet without the named tensors."""
        return replace(self, without=(*self.without, *(n for n in names if n not in self.without)))

    def owning(self, owner: str, *names: str) -> Subnet:
        """The same subnet whose named tensors are its own."""
        return replace(self, own=names, owner=owner)

    def encode(self) -> bytes:
        """The subnet as text, for files; ``wire.pack`` is shorter."""
        kept = [[g, m.bit_count() if is_prefix(m) else f"{m:x}"] for g, m in self.kept]
        return json.dumps(
            [kept, self.without, self.own, self.owner, self.skipped], separators=(",", ":")
        ).encode()

    @staticmethod
    def decode(data: bytes) -> Subnet:
        """The subnet that ``encode`` wrote."""
        kept, without, own, owner, skipped = json.loads(data)
        masks = ((g, (1 << m) - 1 if isinstance(m, int) else int(m, 16)) for g, m in kept)
        return Subnet(tuple(masks), tuple(without), tuple(own), owner, tuple(skipped))

    def __repr__(self) -> str:
        """Leading channels as a count, others as a list; blocks by name."""
        words = []
        for group, mask in self.kept:
            listed = [str(i) for i in _indices(mask).tolist()]
            prefix = f"first {len(listed)}"
            words.append(f"{group}: {prefix if is_prefix(mask) else ','.join(listed)}")
        if self.skipped:
            words.append(f"skips {', '.join(self.skipped)}")
        if self.without:
            words.append(f"without {', '.join(self.without)}")
        if self.owner:
            words.append(f"own {', '.join(self.own)} of {self.owner}")
        return f"Subnet({'; '.join(words)})"


def _mask(channels: Iterable[int]) -> int:
    mask = 0
    for channel in channels:
        if channel < 0:
            raise ValueError(f"channels are counted from 0, got {channel}")
        mask |= 1 << int(channel)
    return mask


def _in_at_least(masks: Sequence[int], count: int) -> int:
    """The bits that at least so many masks have.

    >>> bin(_in_at_least([0b0011, 0b0111, 0b0001], 2))
    '0b11'
    """
    found = 0
    for bit in range(max(mask.bit_length() for mask in masks)):
        found |= (sum(mask >> bit & 1 for mask in masks) >= count) << bit
    return found


def prefix(count: int) -> int:
    """The bits of the first ``count`` channels."""
    return (1 << count) - 1


def is_prefix(mask: int) -> bool:
    """Whether these are the bits of leading channels."""
    return mask & (mask + 1) == 0


@lru_cache(maxsize=4096)
def _indices(mask: int) -> Tensor:
    return torch.tensor([i for i in range(mask.bit_length()) if mask >> i & 1], dtype=torch.int64)
