"""The table of rules: how each ATen operation carries channels to its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedquilt.structure.trace.channels import Channels, Labels

Dims = list[Labels | None]  # labels per axis of one tensor; None: never cut


@dataclass
class Call:
    """One executed operation, with access to the labels of its tensors."""

    name: str
    arguments: dict[str, Any]
    outputs: tuple[Tensor, ...]
    channels: Channels
    labels: Callable[[Tensor], Dims]
    is_weight: Callable[[Tensor], bool]  # made of the model's tensors alone
    split_first: bool = False  # where a reshape splits channels: label the first part, not the last
    equal_parts: bool = False  # parts that are listed by size, and equal, stay equal
    statistics: list[Tensor] = field(default_factory=list)  # running statistics it meets
    across: list[Labels] = field(default_factory=list)  # channels it computes across
    places: list[tuple[Tensor, Labels]] = field(default_factory=list)
    """Outputs that are positions in these channels, such as those of a maximum."""
    splits: list[tuple[Labels, tuple[int, ...]]] = field(default_factory=list)
    """Axes that it split into parts of these sizes, each of which could carry the channels."""

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def dims(self, name: str) -> Dims:
        """Labels of a tensor argument, axis by axis."""
        return self.labels(self.arguments[name])

    def tensors(self) -> list[Tensor]:
        """All tensor arguments, also those in lists."""
        tensors: list[Tensor] = []
        for value in self.arguments.values():
            items = value if isinstance(value, (list, tuple)) else (value,)
            tensors.extend(item for item in items if isinstance(item, Tensor))
        return tensors

    def cross(self, labels: Labels | None) -> None:
        """Notes that something is computed across these channels, if they may be cut.

        A subnet then differs from the masked supernet.
        """
        if labels is not None and self.channels.is_cut(labels):
            self.across.append(labels)


Rule = Callable[[Call], Sequence[Dims]]


RULES: dict[str, Rule] = {}


def register_rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers the rule of the named ATen operations."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def unlabelled_dims(tensors: Sequence[Tensor]) -> list[Dims]:
    """Axes without labels, for outputs that have no channels."""
    return [[None] * tensor.ndim for tensor in tensors]


def normalize_dim(dim: int, rank: int) -> int:
    """The dimension counted from the front, for negative ones too."""
    return dim % rank if rank else 0


def freeze_tensor(call: Call, tensor: Tensor) -> None:
    """Freezes every axis of the tensor."""
    for labels in call.labels(tensor):
        call.channels.freeze(labels)
