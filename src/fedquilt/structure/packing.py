"""A subnet as bytes: at most one byte and one bit per channel, and less for leading channels.

Both sides know the structure, so groups need no names: their bits follow one another. Of two
layouts the shorter one is sent. The first has the bits of all channels. The second has for every
group a bit that says whether it is whole, else a bit that says whether it keeps leading channels,
and then their number or the bits of all its channels.
"""

from __future__ import annotations

import json
from dataclasses import replace

from fedquilt.errors import StructureError
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet, is_prefix, prefix_mask

BY_GROUP, WITH_WORDS = 1, 2  # bits of the first byte


def pack_subnet(subnet: Subnet, structure: Structure) -> bytes:
    """The subnet as bytes, for a receiver with the same structure.

    >>> from torch import nn, zeros
    >>> from fedquilt.structure.create import trace_structure
    >>> structure = trace_structure(nn.Sequential(nn.Linear(3, 32), nn.Linear(32, 2)), zeros(1, 3))
    >>> len(pack_subnet(structure.subnet(0.5), structure))
    3
    """
    subnet = _drop_full_groups(subnet, structure)
    plain, by_group = _write_all_channels(subnet, structure), _write_by_group(subnet, structure)
    bits = min(plain, by_group, key=lambda writer: writer.count)
    first = BY_GROUP * (bits is by_group)
    words = [subnet.excluded, subnet.private, subnet.owner, subnet.skipped]
    if not any(words):
        return bytes([first]) + bits.data
    text = json.dumps(words, separators=(",", ":")).encode()
    return bytes([first | WITH_WORDS]) + bits.data + text


def unpack_subnet(data: bytes, structure: Structure) -> Subnet:
    """The subnet that ``pack_subnet`` wrote; raises if the bytes are none of this structure."""
    try:
        return _read_subnet(data, structure)
    except (ValueError, TypeError, IndexError) as problem:
        raise StructureError(
            f"{len(data)} bytes are no subnet of this model ({problem}); does the sender have the "
            "same model?"
        ) from problem


def _read_subnet(data: bytes, structure: Structure) -> Subnet:
    first, bits = data[0], _Reader(data[1:])
    if first & ~(BY_GROUP | WITH_WORDS):
        raise ValueError(f"the first byte is {first}")
    kept = {}
    for name, group in sorted(structure.groups.items()):
        if not first & BY_GROUP:
            mask = bits.read(group.size)
        elif bits.read(1):
            mask = prefix_mask(group.size)
        elif bits.read(1):
            mask = prefix_mask(bits.read(group.size.bit_length()))
        else:
            mask = bits.read(group.size)
        if mask.bit_length() > group.size:
            raise ValueError(f"'{name}' has {group.size} channels")
        if mask != prefix_mask(group.size):
            kept[name] = mask
    rest = bits.rest()
    subnet = Subnet(tuple(kept.items()))
    if not first & WITH_WORDS:
        if rest:
            raise ValueError("there are bytes after the end")
        return subnet
    without, own, owner, skipped = json.loads(rest)
    lists = (without, own, skipped)
    if not isinstance(owner, str) or not all(
        isinstance(words, list) and all(isinstance(word, str) for word in words) for words in lists
    ):
        raise ValueError("names are text")
    return replace(
        subnet, excluded=tuple(without), private=tuple(own), owner=owner, skipped=tuple(skipped)
    )


def _drop_full_groups(subnet: Subnet, structure: Structure) -> Subnet:
    """The same subnet without entries for groups that it keeps whole."""
    kept = tuple(
        (name, mask)
        for name, mask in sorted(subnet.kept)
        if mask != prefix_mask(structure.groups[name].size)
    )
    return replace(subnet, kept=kept)


def _write_all_channels(subnet: Subnet, structure: Structure) -> _Writer:
    bits, kept = _Writer(), dict(subnet.kept)
    for name, group in sorted(structure.groups.items()):
        bits.write(kept.get(name, prefix_mask(group.size)), group.size)
    return bits


def _write_by_group(subnet: Subnet, structure: Structure) -> _Writer:
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
    """Writes numbers with given numbers of bits one after the other, lowest bit first."""

    def __init__(self) -> None:
        self._all = self.count = 0

    def write(self, number: int, size: int) -> None:
        self._all |= int(number) << self.count
        self.count += size

    @property
    def data(self) -> bytes:
        return self._all.to_bytes(-(-self.count // 8), "little")


class _Reader:
    """Reads what ``_Writer`` wrote, and the whole bytes after it."""

    def __init__(self, data: bytes) -> None:
        self._data, self._all, self._count = data, int.from_bytes(data, "little"), 0

    def read(self, size: int) -> int:
        if self._count + size > 8 * len(self._data):
            raise ValueError("they end too early")
        number = self._all >> self._count & prefix_mask(size)
        self._count += size
        return number

    def rest(self) -> bytes:
        used = -(-self._count // 8)
        if self._all >> self._count & prefix_mask(8 * used - self._count):
            raise ValueError("unused bits are set")
        return self._data[used:]
