"""Robust rules that weigh whole updates: geometric median, centered clipping, Krum.

They look at the inner products of a ring's updates alone. The result is a combination of the
updates, and its coefficients follow from a small matrix, whatever the number of cells.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedquilt.errors import TrainingError
from fedquilt.federation.aggregation.change_store import Region, RingTable
from fedquilt.federation.aggregation.robust import RobustAggregator, compute_distances
from fedquilt.ranges import Count, Positive

MAX_PRODUCTS = 2**25  # inner products of all rings together


@dataclass(frozen=True)
class VectorRule(RobustAggregator):
    """A rule whose result is a combination of the updates, by their inner products.

    >>> from dataclasses import dataclass
    >>> import torch, fedquilt as fq
    >>> @dataclass(frozen=True)
    ... class Shortest(fq.VectorRule):  # the update that changes least
    ...     def weigh(self, products, num_hostile):
    ...         return torch.eye(len(products))[products.diagonal().argmin()]
    >>> Shortest().weigh(torch.tensor([[4.0, 0.0], [0.0, 1.0]]), 0)
    tensor([0., 1.])
    """

    def merge_rings(self, table: RingTable, seed: int) -> dict[int, Tensor]:
        """Weighs the updates of each ring, and adds them up."""
        require_few_rings(table, self)
        merged: dict[int, Tensor] = {}
        for region in table.regions(join=False):
            if self.is_enough(region.num_updates):
                merged |= region.split(add_up(region, self._weigh_region(region, seed)))
        return merged

    def _weigh_region(self, region: Region, seed: int) -> Tensor:
        """The coefficient of each update of a ring."""
        products = region.compute_products()
        mix = self.mix(region, products, seed)
        hostile = self.count_hostile(region.num_updates)
        return mix.T @ self.weigh(mix @ products @ mix.T, hostile)

    @abstractmethod
    def weigh(self, products: Tensor, num_hostile: int) -> Tensor:
        """Finds the coefficients.

        Args:
            products: The inner products of all rows, in double precision.
            num_hostile: f.

        Returns:
            A coefficient for each row.
        """


def add_up(region: Region, coefficients: Tensor) -> Tensor:
    """The combination of a ring's updates with these coefficients."""
    dtype = region.table.dtype
    return region.map_columns(lambda values: (coefficients @ values.double()).to(dtype))


def require_few_rings(table: RingTable, rule: RobustAggregator) -> None:
    """Refuses a rule by vectors where clients hold so scattered cells that rings are tiny."""
    products = int((table.held.sum(0, dtype=np.int64) ** 2).sum())
    if products > MAX_PRODUCTS:
        raise TrainingError(
            f"{type(rule).__name__} compares whole rings, and the cells of these "
            f"{len(table.clients)} clients are so scattered that there are {len(table.rings)} "
            "rings; choose trimmed-mean or median"
        )


@dataclass(frozen=True)
class GeometricMedian(VectorRule):
    """The point whose distances to all updates have the smallest sum, by Weiszfeld's steps.

    Pillutla, Kakade, Harchaoui. "Robust Aggregation for Federated Learning." IEEE Transactions on
    Signal Processing, 2022, Algorithm 2. It starts at the server's values.

    Args:
        iterations: How many steps are made.
        smoothing: ν, the smallest distance that is told from zero.

    >>> points = torch.tensor([[0.0], [1.0], [9.0]], dtype=torch.float64)
    >>> (GeometricMedian().weigh(points @ points.T, 1) @ points).round(decimals=3)
    tensor([1.], dtype=torch.float64)
    """

    iterations: Count = 100
    smoothing: Positive = 1e-6

    def weigh(self, products: Tensor, num_hostile: int) -> Tensor:
        """z <- Σ β_i x_i / Σ β_i with β_i = 1 / max(ν, ‖x_i − z‖)."""
        weights = torch.zeros(len(products), dtype=torch.float64)
        for _ in range(self.iterations):
            near = 1 / distance_from(products, weights).clamp(min=self.smoothing)
            weights = near / near.sum()
        return weights


@dataclass(frozen=True)
class CenteredClipping(VectorRule):
    """Steps towards the updates, each as far as a radius at most.

    Karimireddy, He, Jaggi. "Learning from History for Byzantine Robust Optimization." ICML 2021,
    Algorithm 2. It starts at the server's values; the papers' workers send momenta, and start at
    those of the round before.

    Args:
        radius: τ. Left out: the median of the distances, anew in each step.
        iterations: L, how many steps are made.

    >>> points = torch.tensor([[1.0], [1.0], [9.0]], dtype=torch.float64)
    >>> CenteredClipping(radius=2.0, iterations=1).weigh(points @ points.T, 1) @ points
    tensor([1.3333], dtype=torch.float64)
    """

    radius: Positive | None = None
    iterations: Count = 5

    def weigh(self, products: Tensor, num_hostile: int) -> Tensor:
        """v <- v + (1/n) Σ (x_i − v) min(1, τ / ‖x_i − v‖)."""
        count = len(products)
        weights = torch.zeros(count, dtype=torch.float64)
        for _ in range(self.iterations):
            distances = distance_from(products, weights)
            radius = distances.median() if self.radius is None else self.radius
            steps = (radius / distances.clamp(min=1e-300)).clamp(max=1) / count
            weights = weights * (1 - steps.sum()) + steps
        return weights


def distance_from(products: Tensor, weights: Tensor) -> Tensor:
    """The distances of all points from their combination with these weights."""
    along = products @ weights
    return (products.diagonal() - 2 * along + weights @ along).clamp(min=0).sqrt()


@dataclass(frozen=True)
class MultiKrum(VectorRule):
    """The mean of the n − f updates that are closest to their neighbors.

    Blanchard, El Mhamdi, Guerraoui, Stainer. "Machine Learning with Adversaries: Byzantine Tolerant
    Gradient Descent." NeurIPS 2017. An update's score is its mean squared distance to its
    n − f − 1 nearest neighbors; the paper takes one neighbor less and so needs 2 f + 3 updates.

    Args:
        scope: Where clients are compared. common: on the ring that all of them hold, and the
            selected clients count in every ring. ring: in each ring anew. With common, a client
            may be honest in that ring and hostile in others.

    >>> points = torch.tensor([[0.0], [1.0], [9.0]], dtype=torch.float64)
    >>> MultiKrum().weigh(points @ points.T, 1)
    tensor([0.5000, 0.5000, 0.0000], dtype=torch.float64)
    """

    scope: Literal["common", "ring"] = "common"

    def merge_rings(self, table: RingTable, seed: int) -> dict[int, Tensor]:
        """In the common ring the rule selects; the other rings follow, or select themselves."""
        if self.scope == "ring":
            return super().merge_rings(table, seed)
        common = table.rings.common
        if common is None or not self.is_enough(len(table.clients)):
            return {}
        selected = self._weigh_region(table.region(common), seed).numpy()
        merged: dict[int, Tensor] = {}
        for region in table.regions(join=False):
            weights = selected[region.rows]
            if weights.sum() > 0 and self.is_enough(region.num_updates):
                coefficients = torch.from_numpy(weights / weights.sum())
                merged |= region.split(add_up(region, coefficients))
        return merged

    def weigh(self, products: Tensor, num_hostile: int) -> Tensor:
        """Equal weights of the selected."""
        return self.select(products, num_hostile, len(products) - num_hostile)

    @staticmethod
    def select(products: Tensor, num_hostile: int, count: int) -> Tensor:
        """Equal weights of the ``count`` updates with the best scores."""
        near = compute_distances(products).sort(1).values[:, 1 : len(products) - num_hostile]
        best = near.sum(1).argsort(stable=True)[:count]
        return torch.zeros(len(products), dtype=torch.float64).index_fill_(0, best, 1 / count)


@dataclass(frozen=True)
class Krum(MultiKrum):
    """The one update that is closest to its neighbors.

    Blanchard et al., NeurIPS 2017. Where it has no cells, in rings that it does not hold, the
    server's values stay, unless each ring selects for itself.

    >>> points = torch.tensor([[0.0], [1.0], [1.5]], dtype=torch.float64)
    >>> Krum().weigh(points @ points.T, 1)
    tensor([0., 1., 0.], dtype=torch.float64)
    """

    def weigh(self, products: Tensor, num_hostile: int) -> Tensor:
        """The weight of one is 1."""
        return self.select(products, num_hostile, 1)
