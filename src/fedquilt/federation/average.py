"""The one way in which updates come together: a streaming mean, cell by cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedquilt.federation.client import Update
from fedquilt.federation.constants import keep_constants
from fedquilt.structure.cut import WHOLE, Index, Params, cells, put, source_name, view
from fedquilt.structure.groups import Structure
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
    """
    mean = Mean(params, structure)
    for update in updates:
        mean.add(update)
    return mean.result()


@dataclass(frozen=True)
class _Place:
    """Where one tensor of a subnet lies in the global model."""

    name: str
    target: str  # its global name
    index: tuple[Index, ...]
    stretches: tuple[slice, ...] | None  # the same, if it is all stretches


@lru_cache(maxsize=1024)
def _places(structure: Structure, subnet: Subnet) -> tuple[_Place, ...]:
    return tuple(
        _Place(name, source_name(name, structure, subnet), index, _stretches(index))
        for name, index in cells(structure, subnet).items()
    )


def _stretches(index: tuple[Index, ...]) -> tuple[slice, ...] | None:
    found = tuple(i for i in index if isinstance(i, slice))
    return found if len(found) == len(index) else None


@dataclass
class _Sum:
    """What has come for one tensor: a mean over the first holder's place, and a sum elsewhere.

    Most clients hold the same place of a tensor, and a mean there costs one pass over the update.
    """

    first: _Place
    mean: Tensor  # over the updates that hold just that place
    weight: float
    rest: Tensor | None = None  # Σ a_u (w_u - w) of the others


class Mean:
    """A mean in the making: it holds no update, and no more however many there were."""

    def __init__(self, params: Params, structure: Structure) -> None:
        self._params, self._structure = params, structure
        self._sums: dict[str, _Sum] = {}
        self._weights: dict[Subnet, float] = {}  # instead of a model of weights per cell

    def add(self, update: Update) -> None:
        """Adds one update; its tensors may be thrown away afterwards."""
        for subnet, tensors in zip(update.subnets, update.params, strict=True):
            self._weights[subnet] = self._weights.get(subnet, 0.0) + update.weight
            self._add_part(subnet, tensors, update.weight)

    def _add_part(self, subnet: Subnet, tensors: Params, weight: float) -> None:
        moves: dict[float, tuple[list[Tensor], list[Tensor]]] = {}  # by how far, all in one call
        for place in _places(self._structure, subnet):
            new = tensors[place.name]
            if not new.is_floating_point():
                continue
            found = self._sums.get(place.target)
            if found is not None and _is_same(place, found.first):
                found.weight += weight
                if weight:
                    means, news = moves.setdefault(weight / found.weight, ([], []))
                    means.append(found.mean)
                    news.append(new)
            else:
                self._add_cells(found, place, new, weight)
        for share, (means, news) in moves.items():
            torch._foreach_lerp_(means, news, share)

    def _add_cells(self, found: _Sum | None, place: _Place, new: Tensor, weight: float) -> None:
        if found is None:
            self._sums[place.target] = _Sum(place, new.clone(), weight)
        else:
            if found.rest is None:
                found.rest = _zeros(self._old(place))
            _add_to(found.rest, place, new.sub(view(self._old(place), place.index)), weight)

    def _old(self, place: _Place) -> Tensor:
        old = self._params.get(place.target)
        return self._params[place.name] if old is None else old

    def result(self) -> dict[str, Tensor]:
        """New tensors; where nobody sent anything, the old ones."""
        averaged = dict(self._params)
        holders: dict[str, list[tuple[_Place, float]]] = {}
        for subnet, weight in self._weights.items():
            for place in _places(self._structure, subnet):
                holders.setdefault(place.target, []).append((place, weight))
        for target in list(self._sums):
            found = self._sums.pop(target)
            new = self._averaged(found, holders[target])
            averaged[target] = keep_constants(new, self._old(found.first))
        return averaged

    def _averaged(self, found: _Sum, holders: Sequence[tuple[_Place, float]]) -> Tensor:
        old = self._old(found.first)
        if found.rest is None and found.weight and found.mean.shape == old.shape:
            return found.mean
        new = old.clone()
        if found.rest is None:
            if found.weight:
                _write(new, found.first, found.mean)
            return new
        change = found.mean.sub_(view(old, found.first.index))
        _add_to(found.rest, found.first, change, found.weight)
        bounds = _bounds([place for place, _ in holders])
        new[bounds].add_(found.rest[bounds].div_(_weight_per_cell(holders, bounds, old)))
        return new


def _is_same(place: _Place, other: _Place) -> bool:
    return place is other or (place.stretches is not None and place.stretches == other.stretches)


def _add_to(total: Tensor, place: _Place, values: Tensor | float, weight: float = 1.0) -> None:
    """total[place] += weight * values."""
    if place.stretches is not None:
        total[place.stretches].add_(values, alpha=weight)
    else:
        put(total, place.index, view(total, place.index).add_(values, alpha=weight))


def _write(total: Tensor, place: _Place, values: Tensor) -> None:
    if place.stretches is not None:
        total[place.stretches] = values
    else:
        put(total, place.index, values)


def _bounds(places: Sequence[_Place]) -> tuple[slice, ...]:
    """The smallest block that holds every place; cells outside of it stay as they are."""
    indices = [place.stretches for place in places if place.stretches is not None]
    if len(indices) < len(places):
        return ()
    return tuple(
        WHOLE if WHOLE in axis else slice(min(i.start for i in axis), max(i.stop for i in axis))
        for axis in zip(*indices, strict=True)
    )


def _weight_per_cell(
    holders: Sequence[tuple[_Place, float]], bounds: tuple[slice, ...], like: Tensor
) -> Tensor:
    """The sum of weights per cell of a block; 1 where there is none."""
    weights = _zeros(like)
    for place, weight in holders:
        _add_to(weights, place, weight)
    block = weights[bounds]
    return block.masked_fill_(block == 0, 1.0)


def _zeros(like: Tensor) -> Tensor:
    """Zeros whose memory is taken from the system only where it is used."""
    if like.dtype in (torch.float32, torch.float64):
        kind = np.float32 if like.dtype == torch.float32 else np.float64
        return torch.from_numpy(np.zeros(tuple(like.shape), kind))
    return torch.zeros_like(like)
