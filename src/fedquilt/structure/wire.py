"""A subnet on the wire: at most one bit a channel and one byte, and less for leading channels.

Both sides know the structure, so that groups need no names: their bits follow one another. Of two
layouts the shorter one is sent: the bits of all channels; or for every group whether it is whole,
and if not, whether it is its leading channels, and then how many or which.
"""

from __future__ import annotations

import json
from dataclasses import replace

from fedquilt.errors import StructureError
from fedquilt.structure.groups import Structure
from fedquilt.structure.subnet import Subnet, is_prefix, prefix

BY_GROUP, WITH_WORDS = 1, 2  # bits of the first byte


def pack(subnet: Subnet, structure: Structure) -> bytes:
    """The subnet as bytes, for whoever knows the structure.

    >>> from torch import nn, zeros
    >>> structure = Structure.trace(nn.Sequential(nn.Linear(3, 32), nn.Linear(32, 2)), zeros(1, 3))
    >>> len(pack(structure.subnet(0.5), structure))
    3
    """
    subnet = _without_full(subnet, structure)
    plain, by_group = _all_channels(subnet, structure), _each_group(subnet, structure)
    bits = min(plain, by_group, key=lambda writer: writer.count)
    first = BY_GROUP * (bits is by_group)
    words = [subnet.without, subnet.own, subnet.owner, subnet.skipped]
    if not any(words):
        return bytes([first]) + bits.data
    text = json.dumps(words, separators=(",", ":")).encode()
    return bytes([first | WITH_WORDS]) + bits.data + text


def unpack(data: bytes, structure: Structure) -> Subnet:
    """The subnet that ``pack`` wrote; refused if there is none of this structure in the bytes."""
    try:
        return _unpacked(data, structure)
    except (ValueError, TypeError, IndexError) as problem:
        raise StructureError(
            f"{len(data)} bytes are no subnet of this model ({problem}); does the sender have the "
            "same model?"
        ) from problem


def _unpacked(data: bytes, structure: Structure) -> Subnet:
    first, bits = data[0], _Reader(data[1:])
    if first & ~(BY_GROUP | WITH_WORDS):
        raise ValueError(f"they start with {first}")
    kept = {}
    for name, group in sorted(structure.groups.items()):
        if not first & BY_GROUP:
            mask = bits.read(group.size)
        elif bits.read(1):
            mask = prefix(group.size)
        elif bits.read(1):
            mask = prefix(bits.read(group.size.bit_length()))
        else:
            mask = bits.read(group.size)
        if mask.bit_length() > group.size:
            raise ValueError(f"'{name}' has {group.size} channels")
        if mask != prefix(group.size):
            kept[name] = mask
    rest = bits.rest()
    subnet = Subnet(tuple(kept.items()))
    if not first & WITH_WORDS:
        if rest:
            raise ValueError("there are more than it takes")
        return subnet
    without, own, owner, skipped = json.loads(rest)
    lists = (without, own, skipped)
    if not isinstance(owner, str) or not all(
        isinstance(words, list) and all(isinstance(word, str) for word in words) for words in lists
    ):
        raise ValueError("names are text")
    return replace(
        subnet, without=tuple(without), own=tuple(own), owner=owner, skipped=tuple(skipped)
    )


def _without_full(subnet: Subnet, structure: Structure) -> Subnet:
    """The same subnet, silent about groups of which it keeps all."""
    kept = tuple(
        (name, mask)
        for name, mask in sorted(subnet.kept)
        if mask != prefix(structure.groups[name].size)
    )
    return replace(subnet, kept=kept)


def _all_channels(subnet: Subnet, structure: Structure) -> _Writer:
    bits, kept = _Writer(), dict(subnet.kept)
    for name, group in sorted(structure.groups.items()):
        bits.write(kept.get(name, prefix(group.size)), group.size)
    return bits


def _each_group(subnet: Subnet, structure: Structure) -> _Writer:
    bits, kept = _Writer(), dict(subnet.kept)
    for name, group in sorted(structure.groups.items()):
        mask = kept.get(name)
        bits.write(mask is None, 1)
        if mask is None:
            continue
        bits.write(is_prefix(mask), 1)
        if is_prefix(mask):
            bits.write(mask.bit_count(), group.size.bit_length())
        else:
            bits.write(mask, group.size)
    return bits


class _Writer:
    """Numbers of so many bits, one behind the other, lowest bit first."""

    def __init__(self) -> None:
        self._all = self.count = 0

    def write(self, number: int, size: int) -> None:
        self._all |= int(number) << self.count
        self.count += size

    @property
    def data(self) -> bytes:
        return self._all.to_bytes(-(-self.count // 8), "little")


class _Reader:
    """What ``_Writer`` wrote, and whole bytes behind it."""

    def __init__(self, data: bytes) -> None:
        self._data, self._all, self._count = data, int.from_bytes(data, "little"), 0

    def read(self, size: int) -> int:
        if self._count + size > 8 * len(self._data):
            raise ValueError("there are fewer than it takes")
        number = self._all >> self._count & prefix(size)
        self._count += size
        return number

    def rest(self) -> bytes:
        used = -(-self._count // 8)
        if self._all >> self._count & prefix(8 * used - self._count):
            raise ValueError("there is something between")
        return self._data[used:]
