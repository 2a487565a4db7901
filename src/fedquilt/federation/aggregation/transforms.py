"""Transforms of single updates: clipped changes, and weights that a client cannot choose."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedquilt.federation.aggregation.change_store import compute_changes, move_to_disk
from fedquilt.federation.aggregation.parts import UpdateTransform
from fedquilt.federation.client import Update
from fedquilt.federation.rings import Rings, find_rings, list_averaged
from fedquilt.federation.state import Setup, State
from fedquilt.ranges import Fraction, Positive, check_fields
from fedquilt.structure.cut import view_subnet_tensors


@dataclass(frozen=True)
class EqualWeights(UpdateTransform):
    """Every update counts the same; one of weight 0 still does not count.

    >>> EqualWeights().transform(None, None, Update(0, (), (), 250.0, {})).weight
    1.0
    """

    def transform(self, setup: Setup, state: State, update: Update) -> Update:
        """Sets the weight to 1."""
        return replace(update, weight=float(update.weight > 0))


@dataclass(frozen=True)
class CapWeight(UpdateTransform):
    """No update counts more than a limit.

    Args:
        limit: The largest weight.

    >>> CapWeight(100.0).transform(None, None, Update(0, (), (), 250.0, {})).weight
    100.0
    """

    limit: Positive

    def __post_init__(self) -> None:
        """Refuses a limit that is not above 0."""
        check_fields(self)

    def transform(self, setup: Setup, state: State, update: Update) -> Update:
        """Lowers the weight to the limit."""
        return replace(update, weight=min(update.weight, self.limit))


@dataclass(frozen=True)
class ClipNorm(UpdateTransform):
    """Shortens a change of the server's values that is longer than a limit.

    The norm is over all tensors of an update together; cells that a client does not hold count as
    zero. Sun, Kairouz, Suresh, McMahan. "Can You Really Backdoor Federated Learning?" 2019.

    Args:
        limit: The largest norm.

    >>> import fedquilt as fq
    >>> fq.HeteroFL(transforms=(fq.ClipNorm(2.0),)).transforms
    (ClipNorm(limit=2.0),)
    """

    limit: Positive

    is_linear = False
    needs_values = True

    def __post_init__(self) -> None:
        """Refuses a limit that is not above 0."""
        check_fields(self)

    def transform(self, setup: Setup, state: State, update: Update) -> Update:
        """Clips one update; one that is short enough is returned as it is."""
        changes = compute_changes(setup, state, update, list_averaged(setup))
        norm = compute_norm(changes)
        return update if norm <= self.limit else scale(setup, state, update, self.limit / norm)


@dataclass(frozen=True)
class ClipQuantile(UpdateTransform):
    """Shortens changes to a quantile of the norms of the round.

    All updates have to come first, so they wait on disk.

    Args:
        quantile: The fraction of the updates that keep their norm; 0.5: up to the median.
        per_ring: Whether each ring has its own norms, quantile and clipping. Otherwise the updates
            of wide subnets, which have more cells, are clipped more often.

    >>> import fedquilt as fq
    >>> method = fq.FedAvg(aggregator=fq.Median(), transforms=(fq.ClipQuantile(0.8),))
    """

    quantile: Fraction = 0.5
    per_ring: bool = False

    is_linear = False
    needs_all_updates = True
    needs_values = True

    def __post_init__(self) -> None:
        """Refuses settings that are not of their types, or out of range."""
        check_fields(self)

    def transform(self, setup: Setup, state: State, update: Update) -> Update:
        """A single update is all there is, and keeps its norm."""
        return update

    def transform_all(
        self, setup: Setup, state: State, updates: Iterable[Update]
    ) -> Iterator[Update]:
        """Clips the updates when all have come; they are passed on in their order."""
        names = list_averaged(setup)
        waiting: list[Update] = []
        norms: list[dict[int, float]] = []
        for update in updates:
            waiting.append(move_to_disk(update))
            if not self.per_ring:
                norms.append({0: compute_norm(compute_changes(setup, state, update, names))})
        rings = None
        if self.per_ring:
            rings = find_rings(setup.structure, [update.subnets for update in waiting], names)
            norms = [_compute_ring_norms(setup, state, update, rings) for update in waiting]
        limits = _find_quantiles(norms, self.quantile)
        for own in norms:
            update = waiting.pop(0)  # which unmaps its file
            factors = {
                ring: min(1.0, limits[ring] / norm) if norm else 1.0 for ring, norm in own.items()
            }
            if min(factors.values(), default=1.0) == 1.0:
                yield update
            elif rings is None:
                yield scale(setup, state, update, factors[0])
            else:
                yield scale_rings(setup, state, update, rings, factors)


def _find_quantiles(norms: Sequence[Mapping[int, float]], quantile: float) -> dict[int, float]:
    """The quantile of each ring's norms, which is one of them."""
    rings = {ring for own in norms for ring in own}
    return {
        ring: float(
            np.quantile([own[ring] for own in norms if ring in own], quantile, method="lower")
        )
        for ring in rings
    }


def _compute_ring_norms(
    setup: Setup, state: State, update: Update, rings: Rings
) -> dict[int, float]:
    changes = compute_changes(setup, state, update, list_averaged(setup))
    vectors = rings.gather(update.subnets, changes)
    return {ring: compute_norm([{"": vector}]) for ring, vector in vectors.items()}


def compute_norm(changes: Sequence[Mapping[str, Tensor]]) -> float:
    """The Euclidean norm of all tensors together, summed in double precision.

    >>> compute_norm([{"a": torch.tensor([3.0])}, {"b": torch.tensor([4.0])}])
    5.0
    """
    squares = (
        float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2
        for part in changes
        for tensor in part.values()
    )
    return math.sqrt(sum(squares))


def scale(setup: Setup, state: State, update: Update, factor: float) -> Update:
    """The update with its change multiplied by a factor."""
    changes = compute_changes(setup, state, update, list_averaged(setup))
    scaled = tuple({n: factor * t for n, t in part.items()} for part in changes)
    return replace_changes(setup, state, update, scaled)


def scale_rings(
    setup: Setup, state: State, update: Update, rings: Rings, factors: Mapping[int, float]
) -> Update:
    """The update with its change in each ring multiplied by a factor."""
    changes = compute_changes(setup, state, update, list_averaged(setup))
    vectors = rings.gather(update.subnets, changes)
    scaled = {ring: factors[ring] * vector for ring, vector in vectors.items()}
    return replace_changes(setup, state, update, rings.scatter(update.subnets, scaled, changes))


def replace_changes(
    setup: Setup, state: State, update: Update, changes: Sequence[Mapping[str, Tensor]]
) -> Update:
    """The update that changes the server's values by these tensors; others stay as they are."""
    params = []
    for subnet, sent, change in zip(update.subnets, update.params, changes, strict=True):
        old = view_subnet_tensors(state.params, setup.structure, subnet)
        params.append({n: old[n] + change[n] if n in change else t for n, t in sent.items()})
    return replace(update, params=tuple(params))
