"""The default aggregator: a streaming mean, cell by cell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import NamedTuple

import torch
from torch import Tensor

from fedquilt.federation.aggregation.parts import Aggregate, Aggregator, RingSums
from fedquilt.federation.client import Update
from fedquilt.federation.constants import keep_constants
from fedquilt.federation.rings import Rings
from fedquilt.federation.state import Setup, State
from fedquilt.federation.threads import Job, run_on_cores
from fedquilt.structure.cut import (
    WHOLE,
    Index,
    Params,
    compute_offsets,
    global_name,
    index_cells,
    is_sliced,
    write_cells,
)
from fedquilt.structure.memory import make_zeros
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet

CHUNK_BYTES = 2**22  # of tensors that are merged in one call
CACHE_BYTES = 2**20  # of one tensor that are merged in one call


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
    return tuple(i for i in index if isinstance(i, slice)) if is_sliced(index) else None


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
        jobs: list[Job[None]] = []
        moves: dict[float, list[_Move]] = {}  # by how far: many small tensors in one call
        for cells in ranges:
            new = tensors[cells.name]
            if not new.is_floating_point():
                continue
            total = self._sums.get(cells.target)
            if total is None:
                self._sums[cells.target] = total = _RunningSum(cells, new, weight)
                jobs.append(Job(new.nbytes, partial(_copy_mean, total)))
            elif _is_same(cells, total.first):
                total.weight += weight
                if weight:
                    move = _Move(total.mean, cells.name, new.nbytes)
                    moves.setdefault(weight / total.weight, []).append(move)
            else:
                add = partial(self._add_cells, total, cells, tensors, weight)
                jobs.append(Job(new.nbytes, add))
        for fraction, some in moves.items():
            for chunk in _split(some):
                size = sum(move.size for move in chunk)
                jobs.append(Job(size, partial(_move_means, chunk, tensors, fraction)))
        run_on_cores(jobs)

    def _add_cells(
        self, total: _RunningSum, cells: CellRange, tensors: Params, weight: float
    ) -> None:
        old = self._old(cells)
        if total.rest is None:
            total.rest = make_zeros(old)
        _add_change(total.rest, cells, tensors[cells.name], old, weight)

    def _old(self, cells: CellRange) -> Tensor:
        old = self._params.get(cells.target)
        return self._params[cells.name] if old is None else old

    def result(self) -> dict[str, Tensor]:
        """Returns the new tensors, and the old ones that no update holds; to be called once."""
        for subnet, weight in self._weights.items():
            for cells in self._ranges[subnet]:
                self._holders.setdefault(cells.target, []).append((cells, weight))
        targets = list(self._sums)
        jobs = [
            Job(self._sums[target].mean.nbytes, partial(self._finish, target)) for target in targets
        ]
        params, new = self._params, dict(zip(targets, run_on_cores(jobs), strict=True))
        return {name: new[name] if name in new else params[name] for name in params} | new

    def held_weight(self, target: str) -> Tensor:
        """Returns the sum of weights of the updates that hold each cell; after ``result``."""
        weights = torch.zeros(self._structure.shapes[target.partition("@")[0]])
        for cells, weight in self._holders.get(target, ()):
            _add_weight(weights, cells, weight)
        return weights

    def trained(self, target: str) -> Tensor:
        """Returns a mask of the cells that were held with a weight above 0; after ``result``."""
        return self.held_weight(target) > 0

    def _finish(self, target: str) -> Tensor:
        """The new tensor; what was held for it goes."""
        total = self._sums.pop(target)
        old = self._old(total.first)
        return keep_constants(self._compute_mean(total, old, self._holders[target]), old)

    def _compute_mean(
        self, total: _RunningSum, old: Tensor, holders: Sequence[tuple[CellRange, float]]
    ) -> Tensor:
        if total.rest is None and total.weight and total.mean.shape == old.shape:
            return total.mean
        if total.rest is None:
            new = make_zeros(old).copy_(old)
            if total.weight:
                write_cells(new, total.first.index, total.mean)
            return new
        _add_change(total.rest, total.first, total.mean, old, total.weight)
        total.mean = total.mean.new_empty(0)  # its memory is needed for the weights
        bounds = _find_bounds([cells for cells, _ in holders])
        total.rest[bounds].div_(_sum_weights(holders, bounds, old)).add_(old[bounds])
        _copy_outside(total.rest, old, bounds)
        return total.rest


def _copy_outside(target: Tensor, source: Tensor, bounds: tuple[slice, ...]) -> None:
    """Copies all cells outside of a block."""
    for axis, inside in enumerate(bounds):
        if inside != WHOLE:
            for outside in (slice(0, inside.start), slice(inside.stop, None)):
                block = (*bounds[:axis], outside)
                target[block] = source[block]


class _Move(NamedTuple):
    """A mean that goes towards a client's tensor."""

    mean: Tensor
    name: str
    size: int


def _split(moves: Sequence[_Move]) -> Iterator[list[_Move]]:
    """The same moves in lists of about ``CHUNK_BYTES``."""
    chunk: list[_Move] = []
    size = 0
    for move in moves:
        chunk.append(move)
        size += move.size
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _move_means(moves: Sequence[_Move], tensors: Params, fraction: float) -> None:
    torch._foreach_lerp_(
        [move.mean for move in moves], [tensors[move.name] for move in moves], fraction
    )


def _copy_mean(total: _RunningSum) -> None:
    total.mean = make_zeros(total.mean).copy_(total.mean)


def _is_same(cells: CellRange, other: CellRange) -> bool:
    return cells is other or (cells.slices is not None and cells.slices == other.slices)


def _add_change(total: Tensor, cells: CellRange, new: Tensor, old: Tensor, weight: float) -> None:
    """total[cells] += weight * (new - old[cells])."""
    if cells.slices is not None:
        total, old = total[cells.slices], old[cells.slices]
        for rows in _split_rows(new):
            total[rows].add_(new[rows].sub(old[rows]), alpha=weight)
        return
    offsets = compute_offsets(old.shape, cells.index)
    change = new.reshape(-1).sub(old.reshape(-1).index_select(0, offsets))
    flat = total.view(-1)
    flat.scatter_(0, offsets, flat.index_select(0, offsets).add_(change, alpha=weight))


def _split_rows(tensor: Tensor) -> Iterator[slice | EllipsisType]:
    """Parts along the first axis whose changes stay in a processor's cache; a small one is whole.

    So a change takes no memory worth mentioning, and less time.
    """
    if tensor.nbytes <= CACHE_BYTES or not tensor.ndim:
        yield ...
        return
    step = max(1, CACHE_BYTES * len(tensor) // tensor.nbytes)
    for start in range(0, len(tensor), step):
        yield slice(start, start + step)


def _add_weight(total: Tensor, cells: CellRange, weight: float) -> None:
    """total[cells] += weight."""
    if cells.slices is not None:
        total[cells.slices].add_(weight)
        return
    offsets, flat = compute_offsets(total.shape, cells.index), total.view(-1)
    flat.scatter_(0, offsets, flat.index_select(0, offsets).add_(weight))


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
    """The sum of weights per cell of a block, or what broadcasts to it; 1 where there is none."""
    block = None if bounds else _multiply_weights(holders, like)
    if block is None:
        weights = make_zeros(like)
        for cells, weight in holders:
            _add_weight(weights, cells, weight)
        block = weights[bounds]
    return block.masked_fill_(block == 0, 1.0)


def _multiply_weights(holders: Sequence[tuple[CellRange, float]], like: Tensor) -> Tensor | None:
    """The sums for scattered cells, as a product of who holds what of one axis and of another.

    It has length 1 along axes that all hold whole. None if more than two axes are cut, or if the
    order of the sum might matter, as it does not for whole numbers below 2^24.
    """
    numbers = [weight for _, weight in holders]
    is_exact = all(float(n).is_integer() for n in numbers) and sum(numbers) < 2**24
    cut = [
        axis
        for axis in range(like.ndim)
        if any(isinstance(i, Tensor) or i != WHOLE for i in (c.index[axis] for c, _ in holders))
    ]
    if not is_exact or len(cut) not in (1, 2) or like.dtype not in (torch.float32, torch.float64):
        return None
    held = []
    for axis in cut:
        table = torch.zeros(len(holders), like.shape[axis], dtype=like.dtype)
        for row, (cells, _) in zip(table, holders, strict=True):
            row[cells.index[axis]] = 1.0
        held.append(table)
    first = torch.tensor(numbers, dtype=like.dtype)
    sums = first @ held[0] if len(cut) == 1 else (held[0] * first[:, None]).T @ held[1]
    return sums.reshape([n if axis in cut else 1 for axis, n in enumerate(like.shape)])
