"""How much privacy a number of rounds costs: ε at δ, by the accountants of dp-accounting."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from fedquilt.errors import ConfigError
from fedquilt.federation.state import Sampling

MAX_NOISE = 1e6  # a multiplier beyond which there is nothing but noise
TOLERANCE = 1e-3  # of the noise multiplier that is found
PLD_STEP = 1e-3  # of the discretized privacy loss


@dataclass(frozen=True)
class Accountant:
    """Finds ε of Gaussian noise that is added to sums over random cohorts.

    ``poisson``: every client takes part with probability ``rate``, and neighbors differ in whether
    one client is there. ``fixed``: cohorts of one size, and neighbors differ in the data of one
    client; then the sum moves by twice the clipping norm, which is taken into account.

    Args:
        delta: δ of the guarantee.
        rate: The probability that a client is in a cohort.
        sampling: poisson or fixed.
        kind: pld: privacy loss distributions, tight; rdp: Rényi divergences. None: pld where it can
            be.

    >>> accountant = Accountant(delta=1e-5, rate=0.01)
    >>> round(accountant.compute_epsilon(noise_multiplier=1.0, rounds=1000), 2)
    1.83
    """

    delta: float
    rate: float
    sampling: Sampling = "poisson"
    kind: Literal["pld", "rdp"] | None = None

    def __post_init__(self) -> None:
        """Refuses an accountant that does not know the sampling."""
        if self.sampling == "fixed" and self.kind == "pld":
            raise ConfigError(
                "cohorts of a fixed size are accounted for by rdp, got privacy.accountant = 'pld'; "
                "leave it out, or let sampling be 'poisson'"
            )

    def compute_epsilon(self, noise_multiplier: float, rounds: int) -> float:
        """ε of so many rounds; infinite without noise.

        Args:
            noise_multiplier: σ, the noise's standard deviation over the clipping norm.
            rounds: The number of releases.
        """
        if not rounds:
            return 0.0
        if not noise_multiplier:
            return math.inf
        return _compute_epsilon(self, noise_multiplier, rounds)

    def find_noise_multiplier(self, epsilon: float, rounds: int) -> float:
        """The least σ, within a thousandth, with which so many rounds cost at most ε."""
        low, high = 0.0, 1.0
        while self.compute_epsilon(high, rounds) > epsilon:
            low, high = high, 2 * high
            if high > MAX_NOISE:
                raise ConfigError(
                    f"no noise gives ε = {epsilon:g} at δ = {self.delta:g} over {rounds} rounds; "
                    "allow more, or train for fewer rounds"
                )
        while high - low > TOLERANCE * high:
            middle = (low + high) / 2
            if self.compute_epsilon(middle, rounds) > epsilon:
                low = middle
            else:
                high = middle
        return high

    def count_rounds(self, noise_multiplier: float, epsilon: float, most: int) -> int:
        """How many rounds, ``most`` at most, cost no more than ε."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.compute_epsilon(noise_multiplier, middle) <= epsilon:
                low = middle
            else:
                high = middle - 1
        return low


@dataclass(frozen=True)
class PrivacySpent:
    """What a run has spent so far.

    Args:
        epsilon: ε of all rounds so far; None: there is no bound, as without noise.
        delta: δ.
        noise_multiplier: σ of the whole release of a round.
        clip: The clipping norm of the round.
        noise_std: By the number of registered clients that hold a cell, the standard deviation of
            the noise in the cell after the division.
        tier_epsilon: With clipping per ring, ε of clients by the number of parameters they hold.
        mechanism: Who adds the noise, and what is protected.
    """

    epsilon: float | None
    delta: float
    noise_multiplier: float
    clip: float
    noise_std: dict[str, float] = field(default_factory=dict)
    tier_epsilon: dict[str, float | None] = field(default_factory=dict)
    mechanism: str = "central"

    def __str__(self) -> str:
        """What was spent, for a line of progress.

        >>> print(PrivacySpent(3.981, 1e-5, 0.9, 1.0), PrivacySpent(None, 1e-5, 0.0, 1.0), sep="; ")
        ε 3.98; ε unbounded
        """
        return "ε unbounded" if self.epsilon is None else f"ε {self.epsilon:.3g}"


def import_dp_accounting() -> Any:
    """The library, or a sentence that says what to install."""
    try:
        import dp_accounting
        from dp_accounting import pld, rdp
    except ImportError as problem:
        raise ConfigError(
            "accounting for privacy needs the extra: pip install 'fedquilt[privacy]'"
        ) from problem
    return dp_accounting, pld, rdp


@lru_cache(maxsize=4096)
def _compute_epsilon(accountant: Accountant, noise_multiplier: float, rounds: int) -> float:
    dp, pld, rdp = import_dp_accounting()
    relation = dp.NeighboringRelation
    if accountant.sampling == "fixed" and accountant.rate < 1:
        event = dp.SampledWithoutReplacementDpEvent(
            10**9, round(accountant.rate * 10**9), dp.GaussianDpEvent(noise_multiplier / 2)
        )
        spent = rdp.RdpAccountant(neighboring_relation=relation.REPLACE_ONE)
    else:
        event = dp.GaussianDpEvent(noise_multiplier)
        if accountant.rate < 1:
            event = dp.PoissonSampledDpEvent(accountant.rate, event)
        spent = (
            rdp.RdpAccountant()
            if accountant.kind == "rdp"
            else pld.PLDAccountant(value_discretization_interval=PLD_STEP)
        )
    with _quiet():
        spent.compose(event, rounds)
        return float(spent.get_epsilon(accountant.delta))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings of orders that do not converge, which are left out."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
