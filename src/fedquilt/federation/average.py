"""The one way in which updates come together: a streaming mean, cell by cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedquilt.federation.client import Update
from fedquilt.structure.cut import WHOLE, Index, Params, cells, put, source_name, view
from fedquilt.structure.groups import Structure
from fedquilt.structure.subnet import Subnet

IN_CACHE = 2**15  # numbers that are worked on at a time


def average(params: Params, structure: Structure, updates: Iterable[Update]) -> dict[str, Tensor]:
    """Averages each cell over the updates that hold it; leaves the others alone.

    For cell c and the set S_c of updates whose subnet contains c,

        w_c <- w_c + Σ_{u in S_c} a_u (w_{u,c} - w_c) / Σ_{u in S_c} a_u    if S_c is not empty,
        w_c <- w_c                                                          otherwise,

    with a_u = ``update.weight``: the weighted mean of what came back, written so that what did not
    change stays the same to the last bit. Updates are taken one at a time and never kept.

    Running statistics are averaged like any other cell, if they are part of the subnet. Integer
    and boolean tensors (counters, masks) are never averaged: the server's stay.
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


class Mean:
    """A mean in the making: it holds one model, whatever the number of updates."""

    def __init__(self, params: Params, structure: Structure) -> None:
        self._params, self._structure = params, structure
        self._total: dict[str, Tensor] = {}
        self._weights: dict[Subnet, float] = {}  # instead of a second model of weights per cell
        self._scratch = torch.empty(0)

    def add(self, update: Update) -> None:
        """Adds one update; its tensors may be thrown away afterwards."""
        for subnet, tensors in zip(update.subnets, update.params, strict=True):
            self._weights[subnet] = self._weights.get(subnet, 0.0) + update.weight
            for place in _places(self._structure, subnet):
                new = tensors[place.name]
                if new.is_floating_point():
                    self._add_cells(place, new, update.weight)

    def _add_cells(self, place: _Place, new: Tensor, weight: float) -> None:
        old = self._old(place)
        total = self._total.get(place.target)
        if total is None:
            total = self._total[place.target] = torch.zeros_like(old)
        if place.stretches is not None:
            self._add_change(total[place.stretches], new, old[place.stretches], weight)
        else:
            held = view(total, place.index)
            self._add_change(held, new, view(old, place.index), weight)
            put(total, place.index, held)

    def _add_change(self, total: Tensor, new: Tensor, old: Tensor, weight: float) -> None:
        """total += weight * (new - old), a few rows at a time so that the change stays in cache."""
        if new.numel() <= IN_CACHE:
            total.add_(torch.sub(new, old, out=self._room(new)), alpha=weight)
            return
        rows = max(1, IN_CACHE * len(new) // new.numel())
        for some, fresh, before in zip(
            total.split(rows), new.split(rows), old.split(rows), strict=True
        ):
            some.add_(torch.sub(fresh, before, out=self._room(fresh)), alpha=weight)

    def _old(self, place: _Place) -> Tensor:
        old = self._params.get(place.target)
        return self._params[place.name] if old is None else old

    def _room(self, like: Tensor) -> Tensor:
        """Memory for one tensor, used again for the next."""
        if self._scratch.numel() < like.numel() or self._scratch.dtype != like.dtype:
            self._scratch = torch.empty(like.numel(), dtype=like.dtype)
        return self._scratch[: like.numel()].view(like.shape)

    def result(self) -> dict[str, Tensor]:
        """New tensors; where nobody sent anything, the old ones."""
        averaged = dict(self._params)
        holders: dict[str, list[tuple[_Place, float]]] = {}
        for subnet, weight in self._weights.items():
            for place in _places(self._structure, subnet):
                holders.setdefault(place.target, []).append((place, weight))
        for target in list(self._total):
            total, held = self._total.pop(target), holders[target]
            averaged[target] = total.div_(_weight_of(held, total)).add_(self._old(held[0][0]))
        return averaged


def _weight_of(holders: Sequence[tuple[_Place, float]], like: Tensor) -> Tensor | float:
    """The sum of weights per cell (1 where there is none); a number if all held the whole."""
    if all(i == WHOLE for place, _ in holders for i in place.stretches or (None,)):
        return sum(weight for _, weight in holders) or 1.0
    weights = torch.zeros_like(like)
    for place, weight in holders:
        if place.stretches is not None:
            weights[place.stretches].add_(weight)
        else:
            put(weights, place.index, view(weights, place.index).add_(weight))
    return weights.masked_fill_(weights == 0, 1.0)
