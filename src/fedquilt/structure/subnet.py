"""A subnet: a part of the global model, as a small value that can be sent and compared."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True)
class Subnet:
    """A choice of channels per group, and of blocks; everything else is kept whole.

    Names in ``excluded`` and ``private`` may be patterns (``*.bias``) or one of the named sets
    (``:statistics``, ``:tracked``, ``:norms``, ``:steps``, ``:outputs``).

    Args:
        kept: for each group that is cut, an integer with one bit per channel.
        excluded: names of tensors that are not part of it: neither sent nor averaged.
        private: names of tensors that are not shared with other subnets. In the global model they
            are called ``name@owner``.
        owner: whose the private tensors are.
        skipped: names of blocks that are neither computed nor stored nor sent.
    """

    kept: tuple[tuple[str, int], ...] = ()
    excluded: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    owner: str = ""
    skipped: tuple[str, ...] = ()

    @staticmethod
    def from_channels(channels: Mapping[str, Iterable[int]]) -> Subnet:
        """The subnet with these channels of these groups.

        >>> Subnet.from_channels({"conv1": [0, 2]})
        Subnet(conv1: 0,2)
        """
        return Subnet(tuple(sorted((g, _make_mask(c)) for g, c in channels.items())))

    def channels(self, group: str) -> Tensor | None:
        """Indices kept of a group, ascending; None: all of them."""
        for name, mask in self.kept:
            if name == group:
                return _list_indices(mask)
        return None

    def count(self, group: str) -> int | None:
        """How many channels of a group are kept; None: all of them."""
        for name, mask in self.kept:
            if name == group:
                return mask.bit_count()
        return None

    def restricted_to(self, group: str, channels: Iterable[int]) -> Subnet:
        """The same subnet with other channels of one group."""
        rest = tuple(pair for pair in self.kept if pair[0] != group)
        return replace(self, kept=tuple(sorted((*rest, (group, _make_mask(channels))))))

    def without_blocks(self, *blocks: str) -> Subnet:
        """The same subnet, also without the named blocks."""
        return replace(self, skipped=tuple(sorted({*self.skipped, *blocks})))

    def differing_groups(self, other: Subnet) -> list[str]:
        """Groups of which the two subnets keep different channels.

        >>> one, other = {"a": [0], "b": [0]}, {"a": [0], "b": [1], "c": [0]}
        >>> Subnet.from_channels(one).differing_groups(Subnet.from_channels(other))
        ['b', 'c']
        """
        mine, theirs = dict(self.kept), dict(other.kept)
        return [group for group in {**mine, **theirs} if mine.get(group) != theirs.get(group)]

    def shared_by(self, *others: Subnet, holders: int = 1) -> Subnet:
        """The same subnet without channels and blocks that fewer than ``holders`` others have."""
        kept = dict(self.kept)
        for group in {name for other in others for name, _ in other.kept}:
            masks = [mask for other in others for name, mask in other.kept if name == group]
            missing = holders - (len(others) - len(masks))  # the rest have all channels
            if missing > 0:
                held = _select_common_bits(masks, missing)
                kept[group] = kept[group] & held if group in kept else held
        skips = Counter(block for other in others for block in other.skipped)
        gone = (block for block, count in skips.items() if len(others) - count < holders)
        return replace(self, kept=tuple(sorted(kept.items()))).without_blocks(*gone)

    @property
    def shape(self) -> Subnet:
        """Its channels and blocks alone: subnets of one shape are built alike."""
        return Subnet(self.kept, skipped=self.skipped)

    def excluding(self, *names: str) -> Subnet:
        """The same subnet without the named tensors."""
        return replace(
            self, excluded=(*self.excluded, *(n for n in names if n not in self.excluded))
        )

    def with_private(self, owner: str, *names: str) -> Subnet:
        """The same subnet with the named tensors private to ``owner``."""
        return replace(self, private=names, owner=owner)

    def encode(self) -> bytes:
        """The subnet as text, for files; ``pack_subnet`` is shorter."""
        kept = [[g, m.bit_count() if is_prefix(m) else f"{m:x}"] for g, m in self.kept]
        return json.dumps(
            [kept, self.excluded, self.private, self.owner, self.skipped], separators=(",", ":")
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
            listed = [str(i) for i in _list_indices(mask).tolist()]
            prefix = f"first {len(listed)}"
            words.append(f"{group}: {prefix if is_prefix(mask) else ','.join(listed)}")
        if self.skipped:
            words.append(f"skips {', '.join(self.skipped)}")
        if self.excluded:
            words.append(f"without {', '.join(self.excluded)}")
        if self.owner:
            words.append(f"own {', '.join(self.private)} of {self.owner}")
        return f"Subnet({'; '.join(words)})"


def _make_mask(channels: Iterable[int]) -> int:
    positions = np.fromiter((int(channel) for channel in channels), np.int64)
    if not len(positions):
        return 0
    if positions.min() < 0:
        raise ValueError(f"channels are counted from 0, got {positions.min()}")
    is_kept = np.zeros(positions.max() + 1, bool)
    is_kept[positions] = True
    return _pack_bits(is_kept)


def _pack_bits(bits: npt.NDArray[np.bool_]) -> int:
    """The mask of these bits, the lowest first; in one go, as there may be 100,000 tokens."""
    return int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")


def unpack_bits(mask: int, size: int) -> npt.NDArray[np.bool_]:
    """The first ``size`` bits of a mask, which has no others.

    >>> unpack_bits(0b0110, 4)
    array([False,  True,  True, False])
    """
    data = np.frombuffer(mask.to_bytes(-(-size // 8), "little"), np.uint8)
    return np.unpackbits(data, count=size, bitorder="little").view(bool)


def _select_common_bits(masks: Sequence[int], count: int) -> int:
    """The bits that at least ``count`` masks have.

    >>> bin(_select_common_bits([0b0011, 0b0111, 0b0001], 2))
    '0b11'
    """
    size = max(mask.bit_length() for mask in masks)
    holders = np.zeros(size, np.int64)
    for mask in masks:
        holders += unpack_bits(mask, size)
    return _pack_bits(holders >= count)


def prefix_mask(count: int) -> int:
    """The bits of the first ``count`` channels."""
    return (1 << count) - 1


def is_prefix(mask: int) -> bool:
    """Whether these are the bits of leading channels."""
    return mask & (mask + 1) == 0


@lru_cache(maxsize=4096)
def _list_indices(mask: int) -> Tensor:
    return torch.from_numpy(np.flatnonzero(unpack_bits(mask, mask.bit_length())))
