"""Noise and sampling that nobody can compute without the run's secret.

Noise that follows from the public seed could be subtracted again. So it comes from a secret of 32
random bytes, through SHAKE-256: the same secret and the same purpose give the same numbers, which a
resumed run needs, and nothing else tells anything about them.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedquilt.errors import CorruptFileError
from fedquilt.federation.columns import Integers
from fedquilt.federation.registry import MANY_CLIENTS
from fedquilt.files import fsync

Numbers = npt.NDArray[np.float64]
SECRET_BYTES = 32
SUMMED = 4  # normal variates that one value is the sum of


def make_secret() -> bytes:
    """Draws a secret from the operating system."""
    return secrets.token_bytes(SECRET_BYTES)


def write_secret(path: Path, secret: bytes) -> None:
    """Writes a secret to a file that only its owner can read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{secret.hex()}\n")
    fsync(path)


def read_secret(path: Path) -> bytes:
    """Reads a secret; raises a CorruptFileError if there is none."""
    try:
        secret = bytes.fromhex(path.read_text())
    except (OSError, ValueError) as problem:
        raise CorruptFileError(f"{path} is damaged or missing ({problem})") from problem
    if len(secret) != SECRET_BYTES:
        raise CorruptFileError(f"{path} is damaged: it has {len(secret)} bytes")
    return secret


def derive_secret(secret: bytes, *purpose: int | str) -> bytes:
    """A secret for one purpose, from which the other cannot be found.

    >>> key = bytes(32)
    >>> derive_secret(key, "client", 1) == derive_secret(key, "client", 1)
    True
    >>> derive_secret(key, "client", 1) == derive_secret(key, "client", 11)
    False
    """
    return hashlib.shake_256(secret + _encode(purpose)).digest(SECRET_BYTES)


def draw_uniform(secret: bytes, purpose: Sequence[int | str], count: int) -> Numbers:
    """Numbers in [0, 1)."""
    stream = hashlib.shake_256(secret + _encode(purpose)).digest(8 * count)
    return (np.frombuffer(stream, "<u8") >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw_poisson(secret: bytes, purpose: Sequence[int | str], count: int, rate: float) -> Integers:
    """Draws each of the rows with the same probability, independently of the others; in order.

    Above ``MANY_CLIENTS`` time and memory are those of the rows that are drawn: what is drawn are
    the gaps between them, which have a geometric distribution.
    """
    if count <= MANY_CLIENTS or rate >= 1:
        return np.flatnonzero(draw_uniform(secret, purpose, count) < rate)
    drawn, last, part = [], -1, 0
    while last < count:
        uniform = draw_uniform(secret, (*purpose, part), math.ceil(count * rate) + 64)
        gaps = np.minimum(np.log1p(-uniform) / math.log1p(-rate), count).astype(np.int64) + 1
        drawn.append(last + np.cumsum(gaps))
        last, part = int(drawn[-1][-1]), part + 1
    rows: Integers = np.concatenate(drawn)
    return rows[rows < count]


def draw_rows(secret: bytes, purpose: Sequence[int | str], count: int, size: int) -> Integers:
    """Draws so many of the rows without replacement, all sets alike; in order.

    Above ``MANY_CLIENTS`` time and memory are those of the rows that are drawn (Floyd's algorithm).
    """
    size = min(size, count)
    if count <= MANY_CLIENTS:
        return np.sort(np.argsort(draw_uniform(secret, purpose, count), kind="stable")[:size])
    drawn: set[int] = set()
    for last, uniform in enumerate(draw_uniform(secret, purpose, size).tolist(), count - size):
        row = int(uniform * (last + 1))
        drawn.add(last if row in drawn else row)
    return np.array(sorted(drawn), np.int64)


def draw_normal(secret: bytes, purpose: Sequence[int | str], count: int) -> Numbers:
    """Standard normal numbers.

    Each is half the sum of four, so that its last bits do not tell which uniform numbers it was
    computed from (Holohan and Braghin, 2021).
    """
    pairs = math.ceil(count * SUMMED / 2)
    uniform = draw_uniform(secret, purpose, 2 * pairs)
    radius = np.sqrt(-2.0 * np.log1p(-uniform[:pairs]))
    angle = 2.0 * math.pi * uniform[pairs:]
    normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    summed: Numbers = normal[: count * SUMMED].reshape(SUMMED, count).sum(axis=0)
    return summed / math.sqrt(SUMMED)


def draw_noise(
    secret: bytes, client: int, round: int, shapes: Mapping[str, Sequence[int]], std: float
) -> dict[str, Tensor]:
    """Draws the Gaussian noise of a client, or of the server, in a round.

    With noise that clients share, each of n draws its part with the standard deviation σC/√n, from
    a secret of its own, and the parts add up to N(0, σ²C²).

    Args:
        secret: Whoever has it can compute the noise.
        client: Whose noise; ``SERVER`` for the server's.
        round: The number of the round.
        shapes: The shape of each tensor, by name.
        std: The standard deviation of every value.

    Returns:
        For each name a tensor of float64.

    >>> noise = draw_noise(bytes(32), client=3, round=0, shapes={"weight": (2, 50)}, std=2.0)
    >>> noise["weight"].shape, noise["weight"].dtype
    (torch.Size([2, 50]), torch.float64)
    """
    return {
        name: torch.from_numpy(
            std * draw_normal(secret, ("noise", client, round, name), math.prod(shape))
        ).reshape(tuple(shape))
        for name, shape in shapes.items()
    }


def digest_tensors(tensors: Iterable[Tensor]) -> str:
    """A hash of values, by which noise on other values is other noise.

    If a round that was not saved is repeated and the values differ, nobody can subtract one release
    from the other.
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def _encode(purpose: Sequence[int | str]) -> bytes:
    """The parts of a purpose as bytes that no other parts have."""
    words = [str(part).encode() for part in purpose]
    return b"".join(len(word).to_bytes(4, "little") + word for word in words)
