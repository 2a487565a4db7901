"""Changes of weights as integers that can be summed modulo 2^bits, and what their sums say.

Client u with the weight a_u, of at most ``max_weight`` W, sends for each cell the integer

    q_u = round(a_u / W * clip(Δ_u, ±C) / C * L)        with L = (2^(bits - 1) - 1) // clients,

so that a sum over all clients never wraps around. Behind the cells of a ring come two integers: the
weight, round(a_u / W * L), and the number of cells that were clipped. From the sums,

    Σ a_u Δ_u = W C / L * Σ q_u        and        Σ a_u = W / L * Σ round(a_u / W * L).

Everything is computed in double precision and does not depend on the order of clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedquilt.errors import ProtocolError
from fedquilt.federation.secure.integers import Bits, Integers, get_dtype

NUM_EXTRA = 2  # integers behind the cells of a ring: the weight, and how many cells were clipped
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RingSum:
    """What the integers of one ring say, summed over clients.

    Args:
        change: Σ a_u Δ_u, the weighted sum of the changes, cell by cell.
        weight: Σ a_u, the sum of the weights.
        num_clipped: How many changes of single cells were clipped, over all clients.
    """

    change: Floats
    weight: float
    num_clipped: int


@dataclass(frozen=True)
class Quantizer:
    """Integers for the changes of weights.

    Args:
        clip: C, the largest change of a cell.
        max_weight: W, the largest weight of a client.
        num_clients: How many clients are summed at most.
        rounding: ``nearest``, or ``stochastic``: up or down by chance, so that the mean is right.
        bits: The sums are modulo 2 to this power.

    >>> quantizer = Quantizer(clip=1.0, max_weight=2.0, num_clients=2)
    >>> one = quantizer.encode(np.array([0.5, -3.0]), weight=2.0, seed=0)
    >>> two = quantizer.encode(np.array([-1.0, 0.0]), weight=1.0, seed=1)
    >>> total = quantizer.decode(one + two, num_clients=2)
    >>> total.change.round(6).tolist(), round(total.weight, 6), total.num_clipped
    ([0.0, -2.0], 3.0, 1)
    """

    clip: float
    max_weight: float
    num_clients: int
    rounding: Literal["nearest", "stochastic"] = "nearest"
    bits: Bits = 32

    @property
    def levels(self) -> int:
        """L: the integer of a change of ``clip`` with the largest weight.

        In 64 bits it has 52 bits at most, as doubles have.
        """
        return int(min(2 ** (self.bits - 1) - 1, 2**52) // self.num_clients)

    def encode(self, change: Floats, weight: float, seed: int) -> Integers:
        """The integers of one client for one ring.

        Args:
            change: How much the client has moved each cell.
            weight: How much the client counts; more than ``max_weight`` counts as that.
            seed: Of the chance in stochastic rounding.
        """
        part = min(weight, self.max_weight) / self.max_weight
        is_clipped = np.abs(change) > self.clip
        scaled = np.clip(change, -self.clip, self.clip) * (part * self.levels / self.clip)
        if self.rounding == "stochastic":
            scaled = np.floor(scaled + np.random.default_rng(seed).random(len(scaled)))
        limit = round(part * self.levels)
        whole = np.clip(np.rint(scaled), -limit, limit).astype(np.int64)
        extra = np.array([limit, min(int(is_clipped.sum()), self.levels)], np.int64)
        joined: Integers = np.concatenate([whole, extra]).astype(get_dtype(self.bits))
        return joined

    def decode(self, total: Integers, num_clients: int) -> RingSum:
        """The sum of the clients' changes, from the sum of their integers.

        Args:
            total: The sum, modulo 2 to the power of ``bits``.
            num_clients: How many clients were summed.

        Raises:
            ProtocolError: No clients that keep to the rules have such a sum.
        """
        signed = total.view(np.dtype(f"<i{self.bits // 8}")).astype(np.int64)
        cells, (weight, num_clipped) = signed[:-NUM_EXTRA], signed[-NUM_EXTRA:].tolist()
        is_possible = (
            0 <= weight <= num_clients * self.levels
            and 0 <= num_clipped <= num_clients * min(len(cells), self.levels)
            and bool((np.abs(cells) <= weight).all())
        )
        if not is_possible:
            raise ProtocolError("its sum is out of range, so a client has not kept to the rules")
        step = self.max_weight / self.levels
        change: Floats = cells.astype(np.float64) * (step * self.clip)
        return RingSum(change, weight * step, num_clipped)
