"""Gates on the channels of a net: a subnet's output, and a gradient for every channel, at once.

A channel is gated where layers take it in, so that every path through it goes through one gate,
whatever made the channel: a convolution, a sum of several, a normalization.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from fedquilt.structure.cut import build_module
from fedquilt.structure.groups import Axis
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import Example, named_tensors, to_arguments


class Gates:
    """A module with a gate for every channel of some groups, and what goes through them."""

    def __init__(self, module: nn.Module, structure: Structure, groups: Sequence[str]) -> None:
        self.values: Mapping[str, Tensor] = {}  # gates of the moment; a group without has none
        self.activity: dict[str, Tensor] = {}  # mean |input| of every channel, when last seen
        self.wants_activity: frozenset[str] = frozenset()
        self._groups = frozenset(groups)
        self._hooks = [
            layer.register_forward_pre_hook(self._add_gate(axis, last, layer.weight.device))
            for layer, axis, last in find_consumers(module, structure)
            if any(span.group in self._groups for span in axis)
        ]

    def remove(self) -> None:
        """Takes all gates away."""
        for hook in self._hooks:
            hook.remove()

    def _add_gate(self, axis: Axis, last: bool, device: Any) -> Any:
        spans = [(span.group, torch.tensor(span.channels, device=device)) for span in axis]

        def hook(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            x, *rest = inputs
            self._record_activity(x, spans, last)
            if not any(group in self.values for group, _ in spans):
                return inputs
            parts = [
                x.new_ones(len(channels))
                if group is None or group not in self.values
                else self.values[group][channels]
                for group, channels in spans
            ]
            gates = parts[0] if len(parts) == 1 else torch.cat(parts)
            return x * (gates if last else gates.view(-1, *[1] * (x.ndim - 2))), *rest

        return hook

    def _record_activity(
        self, x: Tensor, spans: list[tuple[str | None, Tensor]], last: bool
    ) -> None:
        """Mean absolute inputs by channel, before gates."""
        wanted = [group for group, _ in spans if group in self.wants_activity]
        if not wanted:
            return
        with torch.no_grad():
            axes = [a for a in range(x.ndim) if a != (x.ndim - 1 if last else 1)]
            size, first = x.detach().abs().mean(axes), 0
            for group, channels in spans:
                part = size[first : first + len(channels)]
                first += len(channels)
                if group in self.wants_activity:
                    assert group is not None
                    count = int(channels.max()) + 1
                    sums = part.new_zeros(count).index_add_(0, channels, part)
                    self.activity[group] = sums / torch.bincount(channels, minlength=count)


@contextmanager
def gate_module(module: nn.Module, structure: Structure, groups: Sequence[str]) -> Iterator[Gates]:
    """The module with gates, between ``with`` and its end."""
    gates = Gates(module, structure, groups)
    try:
        yield gates
    finally:
        gates.remove()


def find_consumers(
    module: nn.Module, structure: Structure
) -> Iterator[tuple[nn.Module, Axis, bool]]:
    """Layers that take channels in, the axis of those, and whether it is the last of an input."""
    name_of = {id(tensor): name for name, tensor in named_tensors(module).items()}
    for layer in module.modules():
        weight = getattr(layer, "weight", None)
        is_linear = isinstance(layer, nn.Linear)
        if not isinstance(weight, Tensor) or not (is_linear or isinstance(layer, _ConvNd)):
            continue
        axis = structure.axes[name_of[id(weight)]][isinstance(layer, _ConvTransposeNd) ^ 1]
        if axis is not None and not (isinstance(layer, _ConvNd) and layer.groups > 1):
            yield layer, axis, is_linear


def find_gateable_groups(
    model: nn.Module, structure: Structure, example: Example
) -> tuple[str, ...]:
    """Groups whose gates do what their subnets do, tried on the example with half of each closed.

    Not those that reach something other than a linear layer or a convolution, such as recurrent
    layers and PyTorch's attention, which ask their weights and not their modules.
    """
    groups = []
    for group in structure.cut_groups():
        size = structure.groups[group].size
        if size > 1 and _matches_subnet(model, structure, example, group, size):
            groups.append(group)
    return tuple(groups)


@torch.no_grad()
def _matches_subnet(
    model: nn.Module, structure: Structure, example: Example, group: str, size: int
) -> bool:
    half = Subnet.from_channels({group: range(0, size, 2)})
    whole, small = (build_module(model, structure, s).double().eval() for s in (Subnet(), half))
    with torch.random.fork_rng(devices=[]), gate_module(whole, structure, [group]) as gates:
        torch.default_generator.manual_seed(0)
        inputs = tuple(
            torch.rand(2, *x.shape[1:], dtype=torch.float64)
            if isinstance(x, Tensor) and x.is_floating_point()
            else x
            for x in to_arguments(example)
        )
        gates.values = {group: (torch.arange(size) % 2 == 0).double()}
        return torch.allclose(whole(*inputs), small(*inputs), rtol=1e-6, atol=1e-9)
