"""What a subnet costs: parameters, bytes to send, multiply-accumulates, peak training memory.

Nothing is trained and nothing large is allocated: the subnet is built without storage (PyTorch's
``meta`` device) and a forward, or a whole training step, is run on shapes alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from fedquilt.structure.groups import Axis
from fedquilt.structure.measure import (
    build_on_meta,
    count_layer_macs,
    count_macs,
    count_weight_uses,
    measure_peak_memory,
)
from fedquilt.structure.structure import Structure, cache_per_structure, map_followers
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import Example, named_tensors, to_arguments


@dataclass(frozen=True)
class Cost:
    """The cost of a subnet.

    Args:
        params: The number of parameters.
        bytes: The size of all tensors.
        macs: Multiply-accumulate operations for one example.
        memory: The peak of one training step, in bytes.

    >>> import fedquilt as fq
    >>> fq.Cost(params=35, bytes=140, macs=28, memory=1108).bytes
    140
    """

    params: int
    bytes: int  # what travels one way: every tensor of the subnet
    macs: int  # one example, forward; multiply-accumulates of convolutions and matrix products
    memory: int

    def __add__(self, other: Cost) -> Cost:
        """The cost of both, side by side."""
        return Cost(
            self.params + other.params,
            self.bytes + other.bytes,
            self.macs + other.macs,
            self.memory + other.memory,
        )


def compute_cost(
    model: nn.Module,
    structure: Structure,
    subnet: Subnet,
    example: Example,
    *,
    batch_size: int = 10,
    memory: bool = True,
    optimizer_tensors: int = 1,
) -> Cost:
    """Computes parameters, bytes, MACs per example, and peak memory of a training step.

    Args:
        model: The whole model.
        structure: What can be cut in it.
        subnet: The part whose cost is wanted.
        example: An input of the model.
        batch_size: The size of the batches of a training step.
        memory: Whether to compute the memory, which takes longest; if not, it is 0.
        optimizer_tensors: What an optimizer keeps of each weight: 1 of momentum, 2 of Adam.

    >>> import torch, fedquilt as fq
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> structure = fq.trace_structure(model, torch.zeros(1, 4))
    >>> fq.compute_cost(model, structure, structure.subnet(0.5), torch.zeros(1, 4), memory=False)
    Cost(params=35, bytes=140, macs=28, memory=0)
    """
    alike = _to_leading(subnet, _list_even_groups(structure))
    workload = _Workload(model, _describe_shapes(example), example)
    steps = batch_size, optimizer_tensors
    return _measure_cost(structure, workload, alike, steps if memory else None)


def _to_leading(subnet: Subnet, groups: frozenset[str]) -> Subnet:
    """The subnet with as many leading channels of these groups: a net of the same shapes.

    So a method that draws other channels in every round needs one cost, not thousands.
    """
    kept = ((g, (1 << m.bit_count()) - 1 if g in groups else m) for g, m in subnet.kept)
    return replace(subnet, kept=tuple(kept))


@cache_per_structure(max_entries=1)
def _list_even_groups(structure: Structure) -> frozenset[str]:
    """Groups whose channels all cost the same: every axis has each of them equally often."""
    uneven = set()
    for axis in (axis for axes in structure.axes.values() for axis in axes if axis is not None):
        for span in axis:
            if span.group is not None:
                size = structure.groups[span.group].size
                times = Counter(span.channels)
                if len(times) != size or len(set(times.values())) != 1:
                    uneven.add(span.group)
    return frozenset(structure.groups.keys() - uneven)


@dataclass(frozen=True)
class _Workload:
    """What is run to measure a cost; equal for one model and inputs of equal shapes."""

    model: nn.Module  # compared by identity
    shapes: tuple[Any, ...]
    example: Example = field(compare=False)


def _describe_shapes(example: Example) -> tuple[Any, ...]:
    return tuple(
        (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in to_arguments(example)
    )


@cache_per_structure(max_entries=256)
def _measure_cost(
    structure: Structure, workload: _Workload, subnet: Subnet, steps: tuple[int, int] | None
) -> Cost:
    """The cost of a subnet; ``steps`` are the size of batches and what an optimizer keeps."""
    small = build_on_meta(workload.model, structure, subnet)
    sent = set(structure.tensor_names(subnet))
    return Cost(
        params=sum(p.numel() for p in small.parameters()),
        bytes=sum(t.nbytes for n, t in named_tensors(small).items() if n in sent),
        macs=count_macs(small, workload.example),
        memory=0 if steps is None else measure_peak_memory(small, workload.example, *steps),
    )


class CostTable:
    """Costs of many subnets of leading channels, each in the time of a few hundred additions.

    MACs of a layer are its weights times the positions at which they are used, at every width.
    If that does not explain all MACs of a model (attention multiplies activations with each
    other), they are counted on a built subnet. Memory is always counted.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        example: Example,
        *,
        batch_size: int = 10,
        local_params: tuple[str, ...] = (),
    ) -> None:
        """``local_params`` names tensors that are not sent."""
        self._model, self._structure, self._example = model, structure, example
        self._batch_size, self._home = batch_size, local_params
        tensors = named_tensors(model)
        self._lengths = {
            name: tuple(_Length(axis, n) for axis, n in zip(axes, tensors[name].shape, strict=True))
            for name, axes in structure.axes.items()
        }
        self._last: tuple[dict[str, int], dict[str, int]] = (
            {},
            {name: tensor.numel() for name, tensor in tensors.items()},
        )
        self._is_weight = {n: isinstance(t, nn.Parameter) for n, t in tensors.items()}
        self._item = {name: tensor.element_size() for name, tensor in tensors.items()}
        self._unsent = structure.match_names(local_params)
        self._uses = self._find_uses()

    def __call__(self, subnet: Subnet, *, memory: bool = False) -> Cost:
        """The cost of a subnet; without ``memory`` that is 0."""
        cells = self._count_cells(subnet)
        counted = self._measure(subnet) if self._uses is None or memory else None
        return Cost(
            params=sum(n for name, n in cells.items() if self._is_weight[name]),
            bytes=sum(
                n * self._item[name] for name, n in cells.items() if name not in self._unsent
            ),
            macs=(
                counted.macs
                if counted is not None
                else sum(uses * cells[name] for name, uses in (self._uses or {}).items())
            ),
            memory=counted.memory if counted is not None and memory else 0,
        )

    def _count_cells(self, subnet: Subnet) -> Mapping[str, int]:
        """The number of cells of each tensor, updated from those of the last subnet."""
        counts = {group: mask.bit_count() for group, mask in subnet.kept}
        known, cells = self._last
        cells = dict(cells)
        for group in {**known, **counts}:
            if known.get(group) != counts.get(group):
                for name in map_followers(self._structure)[group]:
                    cells[name] = math.prod(length(counts) for length in self._lengths[name])
        self._last = counts, cells
        return cells

    def _measure(self, subnet: Subnet) -> Cost:
        return compute_cost(
            self._model, self._structure, subnet, self._example, batch_size=self._batch_size
        )

    def _find_uses(self) -> Mapping[str, int] | None:
        """How often each weight is used on an example, if that explains all MACs."""
        used = count_weight_uses(
            build_on_meta(self._model, self._structure, Subnet()), self._example
        )
        groups = self._structure.cut_groups()
        uneven = {group: (i + 1) / (len(groups) + 1) for i, group in enumerate(groups)}
        for width in (1.0, 0.5, uneven):
            subnet = self._structure.subnet(width)
            small = build_on_meta(self._model, self._structure, subnet)
            weights = named_tensors(small)
            if sum(n * weights[name].numel() for name, n in used.items()) != count_macs(
                small, self._example
            ):
                return None
        return used


class _Length:
    """The length of an axis for each number of leading channels of its groups."""

    def __init__(self, axis: Axis | None, size: int) -> None:
        self._fixed, self._spans = size, list[tuple[str, list[int]]]()
        for span in axis or ():
            if span.group is not None:
                self._fixed -= len(span.channels)
                first = sorted(span.channels)
                kept = [bisect_left(first, n) for n in range(max(span.channels) + 2)]
                self._spans.append((span.group, kept))

    def __call__(self, counts: Mapping[str, int]) -> int:
        return self._fixed + sum(kept[counts.get(group, -1)] for group, kept in self._spans)


def count_macs_by_layer(model: nn.Module, structure: Structure, example: Example) -> dict[str, int]:
    """MACs of one example in each layer of the whole model that has any.

    Layers are modules without children. What other modules compute themselves is not included.
    """
    return count_layer_macs(build_on_meta(model, structure, Subnet()), example)
