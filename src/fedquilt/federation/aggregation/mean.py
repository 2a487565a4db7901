"""The default aggregator: a streaming mean, cell by cell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedquilt.federation.aggregation.parts import Aggregate, Aggregator, RingSums
from fedquilt.federation.client import Update
from fedquilt.federation.constants import keep_constants
from fedquilt.federation.rings import Rings
from fedquilt.federation.state import Setup, State
from fedquilt.structure.cut import (
    WHOLE,
    Index,
    Params,
    global_name,
    index_cells,
    view_cells,
    write_cells,
)
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet


def average(params: Params, structure: Structure, updates: Iterable[Update]) -> dict[str, Tensor]:
    """Averages each cell over the updates that hold it; leaves the others alone.

    For cell c and the set S_c of updates whose subnet contains c,

        w_c <- w_c + Σ_{u in S_c} a_u (w_{u,c} - w_c) / Σ_{u in S_c} a_u    if S_c is not empty,
        w_c <- w_c                                                          otherwise,

    with a_u = ``update.weight``: the weighted mean of what came back, computed so that what did not
    change stays the same to the last bit. Updates are taken one at a time and never kept.

    Running statistics are averaged like any other cell, if they are part of the subnet. Integer
    and boolean tensors (counters, masks) are never averaged, nor are cells that are not finite (the
    -inf of a mask): the server's stay.

    Args:
        params: The global tensors before.
        structure: What the subnets of the updates are cut from.
        updates: What clients sent; the iterable is read once.

    Returns:
        The global tensors after; those that no update holds are the given ones themselves.

    >>> import torch, fedquilt as fq
    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Linear(2, 1))
    >>> structure = fq.trace_structure(model, torch.ones(1, 1))
    >>> params = {name: torch.zeros_like(t) for name, t in model.state_dict().items()}
    >>> def fill(client, width, value):
    ...     subnet = structure.subnet(width)
    ...     cells = fq.copy_subnet_tensors(params, structure, subnet)
    ...     tensors = {name: torch.full_like(t, value) for name, t in cells.items()}
    ...     return fq.Update(client, (subnet,), (tensors,), weight=1.0, metrics={})
    >>> updates = [fill(0, width=1.0, value=1.0), fill(1, width=0.5, value=3.0)]
    >>> average(params, structure, updates)["0.bias"]  # the second channel is held by one client
    tensor([2., 1.])
    """
    return accumulate(params, structure, updates).result()


@dataclass(frozen=True)
class Mean(Aggregator):
    """The mean of every cell over the updates that hold it, by their weights; see ``average``.

    >>> import fedquilt as fq
    >>> fq.chain().aggregator  # it is the default
    Mean()
    """

    def replaced_by(self, rule: Aggregator) -> Aggregator:
        """The rule itself."""
        return rule

    def aggregate(self, setup: Setup, state: State, updates: Iterable[Update]) -> Aggregate:
        """Averages the updates as they come."""
        mean = accumulate(state.params, setup.structure, updates)
        return Aggregate(mean.result(), mean.trained)

    def aggregate_sums(self, setup: Setup, state: State, sums: RingSums) -> Aggregate:
        """Moves the cells of each ring by the sum of the changes over the sum of the weights."""
        means = {
            ring: change / sums.weights[ring]
            for ring, change in sums.changes.items()
            if sums.weights[ring] > 0
        }
        return move_rings(setup, state, sums.rings, means)


def move_rings(
    setup: Setup, state: State, rings: Rings, changes: Mapping[int, Tensor]
) -> Aggregate:
    """Moves the cells of some rings; the others keep the server's values."""
    old = rings.gather_global(state.params)
    new = {ring: old[ring].double() + change for ring, change in changes.items()}

    def find_moved(name: str) -> Tensor:
        if name not in rings.names:
            return torch.zeros(setup.structure.shapes[name.partition("@")[0]], dtype=torch.bool)
        return torch.isin(rings.label_cells(name), torch.tensor(list(changes), dtype=torch.int32))

    return Aggregate(rings.scatter_global(new, state.params), find_moved)


@dataclass(frozen=True)
class LabelAwareMean(Mean):
    """The mean where clients send only the rows of classes that they have and tokens they read.

    Each row of the output layer and of embeddings is then averaged over the clients that have it
    (HeteroFL's masked aggregation). The arithmetic is that of ``Mean``: an update's subnet says
    which rows came. But those rows tell which labels and words a client has.
    """

    reveals_data = True


@dataclass(frozen=True)
class CellRange:
    """Where one tensor of a subnet lies in the global model."""

    name: str
    target: str  # its global name
    index: tuple[Index, ...]
    slices: tuple[slice, ...] | None  # the same index, if every axis is a slice


def _find_ranges(structure: Structure, subnet: Subnet) -> tuple[CellRange, ...]:
    return tuple(
        CellRange(name, global_name(name, structure, subnet), index, _as_slices(index))
        for name, index in index_cells(structure, subnet).items()
    )


def _as_slices(index: tuple[Index, ...]) -> tuple[slice, ...] | None:
    slices = tuple(i for i in index if isinstance(i, slice))
    return slices if len(slices) == len(index) else None


@dataclass
class _RunningSum:
    """What has come for one tensor: a mean over the first holder's range, and a sum elsewhere.

    Most clients hold the same range of a tensor, and a mean there costs one pass over the update.
    """

    first: CellRange
    mean: Tensor  # over the updates that hold just that range
    weight: float
    rest: Tensor | None = None  # Σ a_u (w_u - w) of the others


def accumulate(params: Params, structure: Structure, updates: Iterable[Update]) -> MeanAccumulator:
    """Adds all updates to a new accumulator."""
    mean = MeanAccumulator(params, structure)
    for update in updates:
        mean.add(update)
    return mean


class MeanAccumulator:
    """A mean in the making: its memory does not depend on the number of updates."""

    def __init__(self, params: Params, structure: Structure) -> None:
        self._params, self._structure = params, structure
        self._sums: dict[str, _RunningSum] = {}
        self._weights: dict[Subnet, float] = {}  # instead of a model of weights per cell
        self._ranges: dict[Subnet, tuple[CellRange, ...]] = {}
        self._holders: dict[str, list[tuple[CellRange, float]]] = {}  # of each tensor, in the end

    def add(self, update: Update) -> None:
        """Adds one update; its tensors may be thrown away afterwards."""
        for subnet, tensors in zip(update.subnets, update.params, strict=True):
            if subnet not in self._ranges:
                self._ranges[subnet] = _find_ranges(self._structure, subnet)
            self._weights[subnet] = self._weights.get(subnet, 0.0) + update.weight
            self._add_part(self._ranges[subnet], tensors, update.weight)

    def _add_part(self, ranges: Sequence[CellRange], tensors: Params, weight: float) -> None:
        moves: dict[float, tuple[list[Tensor], list[Tensor]]] = {}  # by how far, all in one call
        for cells in ranges:
            new = tensors[cells.name]
            if not new.is_floating_point():
                continue
            total = self._sums.get(cells.target)
            if total is not None and _is_same(cells, total.first):
                total.weight += weight
                if weight:
                    means, news = moves.setdefault(weight / total.weight, ([], []))
                    means.append(total.mean)
                    news.append(new)
            else:
                self._add_cells(total, cells, new, weight)
        for fraction, (means, news) in moves.items():
            torch._foreach_lerp_(means, news, fraction)

    def _add_cells(
        self, total: _RunningSum | None, cells: CellRange, new: Tensor, weight: float
    ) -> None:
        if total is None:
            self._sums[cells.target] = _RunningSum(cells, new.clone(), weight)
        else:
            if total.rest is None:
                total.rest = _make_zeros(self._old(cells))
            _add_to(total.rest, cells, new.sub(view_cells(self._old(cells), cells.index)), weight)

    def _old(self, cells: CellRange) -> Tensor:
        old = self._params.get(cells.target)
        return self._params[cells.name] if old is None else old

    def result(self) -> dict[str, Tensor]:
        """Returns the new tensors, and the old ones that no update holds; to be called once."""
        averaged = dict(self._params)
        for subnet, weight in self._weights.items():
            for cells in self._ranges[subnet]:
                self._holders.setdefault(cells.target, []).append((cells, weight))
        for target in list(self._sums):
            total = self._sums.pop(target)
            new = self._finish(total, self._holders[target])
            averaged[target] = keep_constants(new, self._old(total.first))
        return averaged

    def held_weight(self, target: str) -> Tensor:
        """Returns the sum of weights of the updates that hold each cell; after ``result``."""
        weights = torch.zeros(self._structure.shapes[target.partition("@")[0]])
        for cells, weight in self._holders.get(target, ()):
            _add_to(weights, cells, weight)
        return weights

    def trained(self, target: str) -> Tensor:
        """Returns a mask of the cells that were held with a weight above 0; after ``result``."""
        return self.held_weight(target) > 0

    def _finish(self, total: _RunningSum, holders: Sequence[tuple[CellRange, float]]) -> Tensor:
        old = self._old(total.first)
        if total.rest is None and total.weight and total.mean.shape == old.shape:
            return total.mean
        new = old.clone()
        if total.rest is None:
            if total.weight:
                _write(new, total.first, total.mean)
            return new
        change = total.mean.sub_(view_cells(old, total.first.index))
        _add_to(total.rest, total.first, change, total.weight)
        bounds = _find_bounds([cells for cells, _ in holders])
        new[bounds].add_(total.rest[bounds].div_(_sum_weights(holders, bounds, old)))
        return new


def _is_same(cells: CellRange, other: CellRange) -> bool:
    return cells is other or (cells.slices is not None and cells.slices == other.slices)


def _add_to(total: Tensor, cells: CellRange, values: Tensor | float, weight: float = 1.0) -> None:
    """total[cells] += weight * values."""
    if cells.slices is not None:
        total[cells.slices].add_(values, alpha=weight)
    else:
        write_cells(total, cells.index, view_cells(total, cells.index).add_(values, alpha=weight))


def _write(total: Tensor, cells: CellRange, values: Tensor) -> None:
    if cells.slices is not None:
        total[cells.slices] = values
    else:
        write_cells(total, cells.index, values)


def _find_bounds(ranges: Sequence[CellRange]) -> tuple[slice, ...]:
    """The smallest block that holds every range; cells outside of it stay as they are."""
    indices = [cells.slices for cells in ranges if cells.slices is not None]
    if len(indices) < len(ranges):
        return ()
    return tuple(
        WHOLE if WHOLE in axis else slice(min(i.start for i in axis), max(i.stop for i in axis))
        for axis in zip(*indices, strict=True)
    )


def _sum_weights(
    holders: Sequence[tuple[CellRange, float]], bounds: tuple[slice, ...], like: Tensor
) -> Tensor:
    """The sum of weights per cell of a block; 1 where there is none."""
    weights = _make_zeros(like)
    for cells, weight in holders:
        _add_to(weights, cells, weight)
    block = weights[bounds]
    return block.masked_fill_(block == 0, 1.0)


def _make_zeros(like: Tensor) -> Tensor:
    """Zeros whose memory is taken from the system only where it is used."""
    if like.device.type == "cpu" and like.dtype in (torch.float32, torch.float64):
        kind = np.float32 if like.dtype == torch.float32 else np.float64
        return torch.from_numpy(np.zeros(tuple(like.shape), kind))
    return torch.zeros_like(like)
