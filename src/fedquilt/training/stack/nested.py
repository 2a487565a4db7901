"""Nets of several widths that share the weights of the widest, several such families at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.structure.cut import Index, view_cells
from fedquilt.structure.tensors import to_arguments
from fedquilt.training.attack import Draws
from fedquilt.training.client_loss import ClientLoss, ClientLosses
from fedquilt.training.stack.program import StackedModel

Place = tuple[str, tuple[Index, ...] | None]  # a tensor's name, and its cells; None: all of them


class NestedProgram(nn.Module):
    """Computes several families of nets at once; what it gives is the outputs of each width.

    Args:
        programs: What computes the nets of each width, the widest first.
        places: Where each width has its tensors among those of a family.
    """

    def __init__(
        self, programs: Sequence[StackedModel], places: Sequence[Mapping[str, Place]]
    ) -> None:
        super().__init__()
        self._programs: Any = nn.ModuleList(programs)
        self._places = places
        self._widest = programs[0]

    def make_stack(self, tensors: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
        """Memory for the tensors of several families, not filled."""
        return self._widest.make_stack(tensors, count)

    def use(
        self, tensors: Mapping[str, Tensor], generators: Sequence[torch.Generator]
    ) -> NestedProgram:
        """The same with these tensors of the families; narrow nets have views of wide ones'."""
        for program, places in zip(self._programs, self._places, strict=True):
            program.use(
                {
                    name: tensors[key] if index is None else view_cells(tensors[key], index)
                    for name, (key, index) in places.items()
                },
                generators,
            )
        return self

    def forward(self, *inputs: Any) -> list[Any]:
        """The outputs of each width."""
        return [program(*inputs) for program in self._programs]

    def stack(self, values: Sequence[Any]) -> Any:
        """Inputs or targets of all families as one."""
        return self._widest.stack(values)


@dataclass(frozen=True)
class SumOverWidths:
    """The sum of the losses of all widths, of each family."""

    stackable = True

    def loss(
        self,
        module: nn.Module,
        batch: tuple[Any, Any],
        loss: ClientLoss | ClientLosses,
        generator: Draws,
    ) -> Tensor:
        """The sums on a batch."""
        inputs, targets = batch
        first, *others = (loss(output, targets) for output in module(*to_arguments(inputs)))
        return sum(others, first)
