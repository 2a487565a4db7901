"""Robust rules that look at each cell by itself: trimmed mean and median."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fedquilt.federation.aggregation.change_store import RingTable
from fedquilt.federation.aggregation.robust import RobustAggregator

NETWORK_COLUMNS = 2**14  # columns that are sorted together, so that they stay in the cache


@dataclass(frozen=True)
class CoordinateRule(RobustAggregator):
    """A rule that looks at each cell by itself.

    >>> from dataclasses import dataclass
    >>> import torch, fedquilt as fq
    >>> @dataclass(frozen=True)
    ... class Midrange(fq.CoordinateRule):
    ...     def combine(self, values, num_hostile):
    ...         return (values.amin(0) + values.amax(0)) / 2
    >>> Midrange(hostile=1).combine(torch.tensor([[1.0], [2.0], [5.0]]), 1)
    tensor([3.])
    """

    def merge_rings(self, table: RingTable, seed: int) -> dict[int, Tensor]:
        """Merges columns in chunks; rings with equal numbers of updates together, unless mixed."""
        merged: dict[int, Tensor] = {}
        for region in table.regions(join=self.mixing == "none"):
            count = region.num_updates
            if not self.is_enough(count):
                continue
            hostile, mix = self.count_hostile(count), None
            if self.mixing != "none":
                products = region.compute_products() if self.mixing == "nnm" else torch.empty(0)
                mix = self.mix(region, products, seed).to(table.dtype)

            def combine(values: Tensor, mix: Tensor | None = mix, hostile: int = hostile) -> Tensor:
                return self.combine(values if mix is None else mix @ values, hostile)

            merged |= region.split(region.map_columns(combine))
        return merged

    @abstractmethod
    def combine(self, values: Tensor, num_hostile: int) -> Tensor:
        """Merges columns.

        Args:
            values: A row for each update, a column for each cell.
            num_hostile: f.

        Returns:
            A value for each column.
        """


@dataclass(frozen=True)
class TrimmedMean(CoordinateRule):
    """The mean of each cell without its f smallest and f largest values.

    Yin, Chen, Kannan, Bartlett. "Byzantine-Robust Distributed Learning: Towards Optimal Statistical
    Rates." ICML 2018, Definition 2.

    >>> import fedquilt as fq
    >>> fq.HeteroFL(aggregator=TrimmedMean(hostile=1)).aggregator
    TrimmedMean(hostile=1, mixing='none', bucket_size=2)
    >>> TrimmedMean().combine(torch.tensor([[1.0], [2.0], [4.0], [99.0]]), 1)
    tensor([3.])
    """

    def combine(self, values: Tensor, num_hostile: int) -> Tensor:
        """The mean of the sorted values between the f-th and the (n − f)-th."""
        if num_hostile == 0:
            return values.mean(0)
        inner = sort_rows(values)[num_hostile : len(values) - num_hostile]
        return torch.stack(inner).mean(0)


@dataclass(frozen=True)
class Median(CoordinateRule):
    """The median of each cell; of an even number of updates, the mean of the two in the middle.

    Yin et al., ICML 2018, Definition 1.

    >>> Median().combine(torch.tensor([[1.0], [2.0], [4.0], [99.0]]), 1)
    tensor([3.])
    """

    def combine(self, values: Tensor, num_hostile: int) -> Tensor:
        """The value in the middle."""
        ordered, count = sort_rows(values), len(values)
        return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2


def sort_rows(values: Tensor) -> list[Tensor]:
    """The rows of the matrix with every column sorted, smallest first.

    Batcher's merge-exchange sort: rows are compared as a whole, which is several times quicker than
    to sort the short columns one by one.

    >>> [row.tolist() for row in sort_rows(torch.tensor([[3, 1], [2, 5], [1, 4]]))]
    [[1, 1], [2, 4], [3, 5]]
    """
    width = values.shape[1]
    if width > NETWORK_COLUMNS:
        parts = [sort_rows(part) for part in values.split(NETWORK_COLUMNS, 1)]
        return [torch.cat(rows) for rows in zip(*parts, strict=True)]
    rows = list(values.unbind(0))
    for low, high in list_comparisons(len(rows)):
        one, other = rows[low], rows[high]
        rows[low], rows[high] = torch.minimum(one, other), torch.maximum(one, other)
    return rows


def list_comparisons(count: int) -> list[tuple[int, int]]:
    """Batcher's comparisons, in order: each puts the smaller of two values first.

    >>> list_comparisons(3)
    [(0, 2), (0, 1), (1, 2)]
    """
    pairs = []
    top = 1 << max(count - 1, 0).bit_length() >> 1
    step = top
    while step > 0:
        gap, start, distance = top, 0, step
        while True:
            pairs += [(i, i + distance) for i in range(count - distance) if i & step == start]
            if gap == step:
                break
            gap, start, distance = gap >> 1, step, gap - step
        step >>= 1
    return pairs
