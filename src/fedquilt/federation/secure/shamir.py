"""Shamir's secret sharing: any ``threshold`` shares give the secret, fewer say nothing about it.

A secret s of 16 bytes is a number of the field of integers modulo p = 2^128 + 51, the smallest
prime above all such numbers. Shares are values of a random polynomial f of degree threshold - 1
with f(0) = s; the secret is found by interpolation at 0.

A. Shamir. "How to share a secret." Communications of the ACM 22 (11), 1979.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

PRIME = 2**128 + 51
SECRET_BYTES = 16
SHARE_BYTES = 17


def split_secret(secret: bytes, threshold: int, points: Sequence[int]) -> dict[int, bytes]:
    """Splits a secret into one share for each point.

    Args:
        secret: 16 bytes.
        threshold: The number of shares that give the secret.
        points: Where the polynomial is evaluated: different numbers from 1 to PRIME - 1.

    >>> shares = split_secret(bytes(range(16)), 2, [1, 2, 3])
    >>> recover_secret({3: shares[3], 1: shares[1]}, 2) == bytes(range(16))
    True
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, got {len(secret)}")
    if len(set(points)) < len(points) or not all(0 < point < PRIME for point in points):
        raise ValueError("the points of shares are different, and between 0 and the prime")
    if not 1 <= threshold <= len(points):
        raise ValueError(f"{len(points)} shares cannot have a threshold of {threshold}")
    first = int.from_bytes(secret, "big")
    coefficients = [first, *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {point: _evaluate(coefficients, point).to_bytes(SHARE_BYTES, "big") for point in points}


def recover_secret(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Recovers a secret from its shares by point.

    Args:
        shares: At least ``threshold`` shares; those of the lowest points are used.
        threshold: The number that the secret was split with.

    Raises:
        ValueError: There are too few shares, or they are no shares of one secret.
    """
    if len(shares) < threshold:
        raise ValueError(f"{threshold} shares give a secret, there are {len(shares)}")
    points = tuple(sorted(shares)[:threshold])
    weights = _interpolate_at_zero(points)
    total = sum(
        weight * _read(shares[point]) for point, weight in zip(points, weights, strict=True)
    )
    secret = total % PRIME
    if secret >> (8 * SECRET_BYTES):
        raise ValueError("these are not shares of one secret")
    return secret.to_bytes(SECRET_BYTES, "big")


def _read(share: bytes) -> int:
    number = int.from_bytes(share, "big")
    if len(share) != SHARE_BYTES or number >= PRIME:
        raise ValueError("a share is a number below the prime, in 17 bytes")
    return number


def _evaluate(coefficients: Sequence[int], point: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * point + coefficient) % PRIME
    return value


@lru_cache(maxsize=4096)
def _interpolate_at_zero(points: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's weights: f(0) is the sum of f(point) times the weight of the point."""
    weights = []
    for point in points:
        above = below = 1
        for other in points:
            if other != point:
                above = above * other % PRIME
                below = below * (other - point) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)
