"""The aggregator of secure aggregation: another one, that sees sums of integers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from fedquilt.errors import ConfigError
from fedquilt.federation.aggregation.mean import Mean
from fedquilt.federation.aggregation.parts import Aggregate, Aggregator, RingSums
from fedquilt.federation.client import Update, derive_seed
from fedquilt.federation.rings import Rings, find_rings, list_averaged
from fedquilt.federation.secure.encoding import decode_sums, encode_change
from fedquilt.federation.secure.integers import Integers
from fedquilt.federation.secure.quantization import RingSum
from fedquilt.federation.secure.settings import SecureAggregation
from fedquilt.federation.state import Setup, State
from fedquilt.structure.cut import view_subnet_tensors

ROUNDING = 5  # the stream of random numbers for stochastic rounding


@dataclass(frozen=True)
class SecureSum(Aggregator):
    """Aggregates sums that were opened by secure aggregation.

    Args:
        settings: How updates become integers.
        inner: What is made of the sums.

    >>> import fedquilt as fq
    >>> fq.chain(SecureSum(SecureAggregation(threshold=3))).is_linear
    True
    """

    settings: SecureAggregation
    inner: Aggregator = field(default_factory=Mean)
    needs_linear_parts = True
    needs_all_updates = True

    def __post_init__(self) -> None:
        """Refuses an aggregator that tells of clients' data, or has to see single updates."""
        if self.inner.reveals_data:
            raise ConfigError(
                f"a secure sum hides what clients send, and with {self.inner} the rows that they "
                "send tell which labels they have; set method.own_rows = false"
            )
        if type(self.inner).aggregate_sums is Aggregator.aggregate_sums:
            raise ConfigError(
                f"{self.inner} has to see single updates, and a secure sum hides them; leave one "
                "of the two out"
            )

    def __str__(self) -> str:
        """How messages speak of it."""
        return "a secure sum"

    @property
    def has_public_denominator(self) -> bool:  # type: ignore[override]
        """As the inner one."""
        return self.inner.has_public_denominator

    def aggregate(self, setup: Setup, state: State, updates: Iterable[Update]) -> Aggregate:
        """Sums the same integers of updates that are in the clear, without any masks.

        So one sees what rounding and clipping do, and tests have something to compare with.
        """
        updates = list(updates)
        structure = setup.structure
        rings = find_rings(structure, [u.subnets for u in updates], list_averaged(setup))
        largest = max(update.weight for update in updates)
        quantizer = self.settings.make_quantizer(largest, len(updates))
        totals: dict[int, Integers] = {}
        counts: Counter[int] = Counter()
        for update in updates:
            subnets = update.subnets
            before = [view_subnet_tensors(state.params, structure, subnet) for subnet in subnets]
            seed = derive_rounding_seed(setup, state, update.client)
            encoded = encode_change(
                rings,
                subnets,
                before,
                update.params,
                quantizer,
                client=update.client,
                weight=update.weight,
                seed=seed,
            )
            for ring, vector in encoded.items():
                totals[ring] = totals[ring] + vector if ring in totals else vector
                counts[ring] += 1
        threshold = self.settings.threshold
        opened = {ring: total for ring, total in totals.items() if counts[ring] >= threshold}
        sums, _ = decode_sums(quantizer, opened, counts)
        return self.aggregate_sums(setup, state, join_sums(rings, sums))

    def aggregate_sums(self, setup: Setup, state: State, sums: RingSums) -> Aggregate:
        """Lets the inner aggregator make the aggregate."""
        return self.inner.aggregate_sums(setup, state, sums)


def derive_rounding_seed(setup: Setup, state: State, client: int) -> int:
    """The seed of a client's stochastic rounding in a round."""
    return derive_seed(setup.seed, state.round, client, ROUNDING)


def join_sums(rings: Rings, sums: Mapping[int, RingSum]) -> RingSums:
    """The sums of all rings as an aggregator takes them."""
    return RingSums(
        rings,
        {ring: torch.from_numpy(part.change) for ring, part in sums.items()},
        {ring: part.weight for ring, part in sums.items()},
    )
