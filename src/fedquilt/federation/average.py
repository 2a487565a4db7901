"""The one way in which updates come together: a streaming mean, cell by cell."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fedquilt.federation.client import Update
from fedquilt.structure.cut import Params, cells, mesh, source_name, view
from fedquilt.structure.groups import Structure
from fedquilt.structure.subnet import Subnet


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
            for name, index in cells(self._structure, subnet).items():
                if tensors[name].is_floating_point():
                    target = source_name(name, self._structure, subnet)
                    self._add_cells(name, target, index, tensors[name], update.weight)

    def _old(self, name: str, target: str) -> Tensor:
        return self._params.get(target, self._params[name])

    def _add_cells(
        self, name: str, target: str, index: tuple[slice | Tensor, ...], new: Tensor, weight: float
    ) -> None:
        old = self._old(name, target)
        if target not in self._total:
            self._total[target] = torch.zeros_like(old)
        total = self._total[target]
        change = self._room(new)
        torch.sub(new, view(old, index), out=change)
        if all(isinstance(i, slice) for i in index):
            view(total, index).add_(change, alpha=weight)
        else:
            total[mesh(total, index)] = view(total, index).add_(change, alpha=weight)

    def _room(self, like: Tensor) -> Tensor:
        """Memory for one tensor, used again for the next."""
        if self._scratch.numel() < like.numel() or self._scratch.dtype != like.dtype:
            self._scratch = torch.empty(like.numel(), dtype=like.dtype)
        return self._scratch[: like.numel()].view(like.shape)

    def result(self) -> dict[str, Tensor]:
        """New tensors; where nobody sent anything, the old ones."""
        averaged = dict(self._params)
        names = {
            source_name(n, self._structure, s): n
            for s in self._weights
            for n in self._structure.names(s)
        }
        for target in list(self._total):
            name, total = names[target], self._total.pop(target)
            weight = self._weight(name, target, total)
            if isinstance(weight, Tensor):
                total.div_(weight.clamp_(min=torch.finfo(weight.dtype).tiny))
            else:
                total.div_(weight)
            averaged[target] = total.add_(self._old(name, target))
        return averaged

    def _weight(self, name: str, target: str, like: Tensor) -> Tensor | float:
        """The sum of weights per cell; a plain number where every update held the whole tensor."""
        holders = [
            (cells(self._structure, subnet)[name], weight)
            for subnet, weight in self._weights.items()
            if name in self._structure.names(subnet)
            and source_name(name, self._structure, subnet) == target
        ]
        if all(view(like, index).shape == like.shape for index, _ in holders):
            return sum(weight for _, weight in holders) or 1.0
        weights = torch.zeros_like(like)
        for index, weight in holders:
            if all(isinstance(i, slice) for i in index):
                view(weights, index).add_(weight)
            else:
                weights[mesh(weights, index)] = view(weights, index).add_(weight)
        return weights
