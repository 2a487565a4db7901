"""Sparse ternary vectors as few bits: gaps in a Golomb code, a bit for every sign, one magnitude.

Sattler, Wiedemann, Müller, Samek. "Robust and Communication-Efficient Federated Learning from
Non-IID Data." IEEE TNNLS 2020, Algorithms 3 and 4.

Symbols of the paper -> names here: p -> sparsity, μ -> magnitude, b* -> remainder_bits, b_pos ->
bits_per_position, n -> size.

The layout: how many entries there are and their magnitude, four bytes each; then of all gaps d,
with d - 1 = q 2^b + r, the q in unary (q ones and a zero); then all r, b bits each; then a bit for
each entry that is negative; zeros fill the last byte. These are the bits of Algorithm 3, ordered so
that all entries can be read at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

HEADER = np.dtype([("count", "<u4"), ("magnitude", "<f4")])
GOLDEN = (math.sqrt(5) + 1) / 2


@dataclass(frozen=True, eq=False)
class Ternary:
    """The entries of a vector that are not zero, all of one magnitude; positions ascend."""

    positions: npt.NDArray[np.int64]
    is_negative: npt.NDArray[np.bool_]
    magnitude: np.float32

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """The entries themselves."""
        return np.where(self.is_negative, -self.magnitude, self.magnitude)


def max_entries(size: int, sparsity: float) -> int:
    """How many entries of a vector may be other than zero: k = max(⌊n p⌋, 1).

    >>> max_entries(1000, 0.01), max_entries(30, 0.01), max_entries(0, 0.01)
    (10, 1, 0)
    """
    return min(size, max(1, math.floor(size * sparsity)))


def remainder_bits(sparsity: float) -> int:
    """b* = 1 + ⌊log2(log(φ - 1) / log(1 - p))⌋, at least 0.

    >>> [remainder_bits(p) for p in (1 / 400, 0.01, 0.05, 0.5, 1.0)]
    [8, 6, 4, 0, 0]
    """
    if sparsity == 1:
        return 0
    return max(0, 1 + math.floor(math.log2(math.log(GOLDEN - 1) / math.log1p(-sparsity))))


def bits_per_position(sparsity: float) -> float:
    """What a position takes on average: b* + 1 / (1 - (1 - p)^(2^b*)).

    >>> round(bits_per_position(1 / 400), 3)
    10.114
    """
    bits = remainder_bits(sparsity)
    return float(bits + 1 / (1 - (1 - sparsity) ** 2**bits))


def encode(ternary: Ternary, size: int, sparsity: float) -> npt.NDArray[np.uint8]:
    """The code of a vector of so many entries."""
    bits = _remainder_bits(size, sparsity)
    gaps = np.diff(ternary.positions, prepend=-1) - 1
    quotients, count = gaps >> bits, len(gaps)
    unary = np.ones(int(quotients.sum()) + count, np.uint8)
    unary[np.cumsum(quotients + 1) - 1] = 0
    remainders = gaps[:, None] >> np.arange(bits)[::-1] & 1  # (entries, bits), highest first
    signs = ternary.is_negative
    stream = np.packbits(np.concatenate([unary, remainders.reshape(-1), signs]).astype(np.uint8))
    header = np.array([(count, ternary.magnitude)], HEADER).view(np.uint8)
    return np.concatenate([header, stream])


def decode(code: npt.NDArray[np.uint8], size: int, sparsity: float) -> Ternary:
    """The vector that a code means; a ValueError says why it means none of so many entries.

    It takes no more memory than codes of such vectors need, whatever the code claims.
    """
    if len(code) < HEADER.itemsize:
        raise ValueError(f"is too short: it has {len(code)} bytes")
    header = np.ascontiguousarray(code[: HEADER.itemsize]).view(HEADER)
    count, magnitude = int(header["count"][0]), header["magnitude"][0]
    if not (np.isfinite(magnitude) and magnitude >= 0):
        raise ValueError(f"has the magnitude {magnitude}, which is not finite or not positive")
    if count > (most := max_entries(size, sparsity)):
        raise ValueError(f"is too long: it has {count} entries, and {most} were asked for")
    positions, negative = _read(code[HEADER.itemsize :], count, size, sparsity)
    return Ternary(positions, negative, magnitude)


def _read(
    code: npt.NDArray[np.uint8], count: int, size: int, sparsity: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    bits = _remainder_bits(size, sparsity)
    longest = (size >> bits) + count * (bits + 2)
    if 8 * len(code) >= longest + 8:
        raise ValueError(f"is too long: it has {len(code)} bytes for {count} entries")
    stream = np.unpackbits(code)
    ends = np.flatnonzero(stream == 0)[:count]
    if len(ends) < count:
        raise ValueError(f"is too short: it has {len(ends)} of {count} entries")
    first = int(ends[-1]) + 1 if count else 0
    last = first + count * (bits + 1)
    if not last <= len(stream) < last + 8:
        length = "short" if len(stream) < last else "long"
        raise ValueError(f"is too {length}: it has {len(stream)} bits, and {last} were to come")
    if stream[last:].any():
        raise ValueError("is damaged: there is something behind its end")
    remainders = stream[first : first + count * bits].reshape(count, bits)
    weights = np.int64(1) << np.arange(bits, dtype=np.int64)[::-1]
    quotients = np.diff(ends, prepend=-1) - 1
    positions = np.cumsum((quotients << bits) + remainders @ weights + 1) - 1
    if count and positions[-1] >= size:
        raise ValueError(f"is damaged: it has the position {positions[-1]} of {size}")
    return positions, stream[last - count : last].astype(np.bool_)


def _remainder_bits(size: int, sparsity: float) -> int:
    """b* of the sparsity, or of the one entry that there is at least."""
    return remainder_bits(max(sparsity, 1 / max(size, 1)))
