"""Integers modulo 2^32 or 2^64: what is masked and summed."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.unsignedinteger]  # modulo 2^32 or 2^64
Bits = Literal[32, 64]


def get_dtype(bits: int) -> np.dtype[np.unsignedinteger]:
    """The type of integers of so many bits, the same on every machine."""
    return np.dtype(f"<u{bits // 8}")
