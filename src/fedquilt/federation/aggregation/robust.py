"""Robust rules: the updates of a round come together so that a few hostile ones do little harm.

Rules compare what clients sent, so they work ring by ring (``federation/rings.py``): within a ring
all holders have the same cells. They merge the changes of the server's values, and every update
counts the same, because a weight is something that a client says about itself. An update of weight
0 does not take part.

Each rule withstands f hostile updates in every ring. A ring with too few updates for that keeps the
server's values, and the metrics of the aggregate say how many cells did.

There are two kinds of rules: ``coordinate_rules.py`` and ``vector_rules.py``.

Symbols of the papers -> names here: n -> number of updates of a ring, f -> ``count_hostile``,
x_i -> rows.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedquilt.errors import ConfigError
from fedquilt.federation.aggregation.change_store import ChangeStore, Region, RingTable
from fedquilt.federation.aggregation.parts import Aggregate, Aggregator
from fedquilt.federation.client import Update, derive_seed
from fedquilt.federation.state import Setup, State
from fedquilt.federation.threads import single_thread
from fedquilt.ranges import Count, NotNegative, check_fields

KEPT_CELLS = "cells_kept"  # metrics of the aggregate
HELD_CELLS = "cells_held"
BUCKETS = 11  # the stream of random numbers that fills buckets


@dataclass(frozen=True)
class RobustAggregator(Aggregator):
    """What all robust rules have in common: how many hostile updates, and what comes before.

    Args:
        hostile: The hostile updates that every ring withstands. From 1: their number. Below 1: a
            fraction of the ring's updates, rounded up, which is enough if hostile clients are
            spread over all sizes alike.
        mixing: What is done to the updates of a ring before the rule. nnm: each becomes the mean of
            its nearest neighbors. buckets: means of a few, drawn at random, take their place.
        bucket_size: How many updates are in a bucket.

    >>> import fedquilt as fq
    >>> rule: fq.RobustAggregator = fq.Median(hostile=0.2)
    >>> [rule.count_hostile(num_updates) for num_updates in (3, 5, 10)]
    [1, 1, 2]
    """

    hostile: NotNegative = 0.2
    mixing: Literal["none", "nnm", "buckets"] = "none"
    bucket_size: Count = 2

    is_linear = False
    needs_all_updates = True

    def __post_init__(self) -> None:
        """Refuses settings that are not of their types, or out of range."""
        check_fields(self)
        if self.hostile >= 1 and self.hostile != int(self.hostile):
            raise ConfigError(
                f"hostile is a number of clients, or a fraction below 1, got {self.hostile}"
            )

    def count_hostile(self, num_updates: int) -> int:
        """f: the hostile updates that a ring withstands.

        Args:
            num_updates: The updates of the ring.
        """
        if self.hostile >= 1:
            return int(self.hostile)
        return math.ceil(self.hostile * num_updates - 1e-9)

    def is_enough(self, num_updates: int) -> bool:
        """Whether the updates of a ring are enough: more than 2 f, or so many buckets.

        Args:
            num_updates: The updates of the ring.
        """
        rows = num_updates
        if self.mixing == "buckets":
            rows = math.ceil(num_updates / self.bucket_size)
        return rows > 2 * self.count_hostile(num_updates)

    def count_needed(self, limit: int) -> int | None:
        """The smallest number of updates that is enough.

        Args:
            limit: The largest number that there can be; None is returned if it is not enough.
        """
        return next((n for n in range(1, limit + 1) if self.is_enough(n)), None)

    def aggregate(self, setup: Setup, state: State, updates: Iterable[Update]) -> Aggregate:
        """Collects all changes on disk, and merges them ring by ring."""
        store = ChangeStore(setup, state)
        for update in updates:
            if update.weight > 0:
                store.add(update)
        with single_thread(), store.arrange() as table:
            merged = self.merge_rings(table, derive_seed(setup.seed, state.round, BUCKETS))
        rings = table.rings
        old = rings.gather_global(state.params)
        moved = {ring: old[ring] + change for ring, change in merged.items()}
        params = rings.scatter_global(moved, state.params)
        held = int(table.sizes[table.held.any(0)].sum())
        kept = held - sum(len(vector) for vector in moved.values())
        inside = torch.tensor(sorted(moved), dtype=torch.int32)
        known = frozenset(rings.names)

        def find_trained(name: str) -> Tensor:
            if name not in known:
                shape = setup.structure.shapes[name.partition("@")[0]]
                return torch.zeros(shape, dtype=torch.bool)
            return torch.isin(rings.label_cells(name), inside)

        return Aggregate(params, find_trained, metrics={HELD_CELLS: held, KEPT_CELLS: kept})

    @abstractmethod
    def merge_rings(self, table: RingTable, seed: int) -> dict[int, Tensor]:
        """Merges the changes of all rings that have enough updates.

        Args:
            table: The changes.
            seed: Of the random numbers of this round.

        Returns:
            The merged change of each such ring.
        """

    def mix(self, region: Region, products: Tensor, seed: int) -> Tensor:
        """The rows that the rule is applied to, as combinations of a ring's updates.

        Args:
            region: The ring.
            products: The inner products of its updates.
            seed: Of the random numbers of this round.
        """
        count = region.num_updates
        if self.mixing == "nnm":
            return mix_neighbors(products, self.count_hostile(count))
        if self.mixing == "buckets":
            order = np.random.default_rng(seed).permutation(len(region.table.clients))
            rank = {row: position for position, row in enumerate(region.rows)}
            drawn = [rank[row] for row in order.tolist() if row in rank]
            return fill_buckets(drawn, self.bucket_size)
        return torch.eye(count, dtype=torch.float64)


def mix_neighbors(products: Tensor, num_hostile: int) -> Tensor:
    """NNM: every update becomes the mean of its n − f nearest neighbors, itself among them.

    Allouah, Farhadkhani, Guerraoui, Gupta, Pinot, Stephan. "Fixing by Mixing: A Recipe for Optimal
    Byzantine ML under Heterogeneity." AISTATS 2023, Algorithm 2.

    >>> points = torch.tensor([[0.0], [1.0], [9.0]], dtype=torch.float64)
    >>> (mix_neighbors(points @ points.T, 1) @ points).flatten().tolist()
    [0.5, 0.5, 5.0]
    """
    count = len(products)
    nearest = compute_distances(products).argsort(dim=1, stable=True)[:, : count - num_hostile]
    return torch.zeros_like(products).scatter_(1, nearest, 1 / (count - num_hostile))


def fill_buckets(order: list[int], size: int) -> Tensor:
    """Bucketing: means of ``size`` updates each; the last may be of fewer.

    Karimireddy, He, Jaggi. "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing."
    ICLR 2022, Algorithm 1.

    >>> fill_buckets([2, 0, 1], 2).tolist()
    [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]]
    """
    buckets = [order[start : start + size] for start in range(0, len(order), size)]
    mix = torch.zeros(len(buckets), len(order), dtype=torch.float64)
    for row, bucket in enumerate(buckets):
        mix[row, bucket] = 1 / len(bucket)
    return mix


def compute_distances(products: Tensor) -> Tensor:
    """The squared distances of all pairs of points, from their inner products."""
    squares = products.diagonal()
    distances = squares[:, None] + squares[None, :] - 2 * products
    return distances.clamp_(min=0).fill_diagonal_(0)
