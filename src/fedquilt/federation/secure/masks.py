"""Masks: uniform integers that a short key expands to, with AES-256 in counter mode."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedquilt.federation.secure.integers import Integers

CHUNK_BYTES = 2**18  # which stay in a processor's cache between the cipher and the sum
BLOCK_BYTES = 16  # of AES
_ZEROS = bytes(CHUNK_BYTES)


def add_mask(total: Integers, key: bytes) -> None:
    """Adds the mask of a key to a vector, in place; every key is for one vector."""
    _apply(total, key, np.add)


def subtract_mask(total: Integers, key: bytes) -> None:
    """Subtracts the mask of a key from a vector, in place."""
    _apply(total, key, np.subtract)


def _apply(total: Integers, key: bytes, operation: np.ufunc) -> None:
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(BLOCK_BYTES))).encryptor()
    buffer = bytearray(CHUNK_BYTES + BLOCK_BYTES)
    step = CHUNK_BYTES // total.itemsize
    mask: Integers = np.frombuffer(buffer, total.dtype, count=step)
    for start in range(0, len(total), step):
        part = total[start : start + step]
        stream.update_into(_ZEROS[: len(part) * total.itemsize], buffer)
        operation(part, mask[: len(part)], out=part)
