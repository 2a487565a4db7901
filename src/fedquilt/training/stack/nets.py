"""Several nets of one shape that learn in one pass, each from its own batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedquilt.learning.batch import Batch
from fedquilt.training.client_loss import ClientLoss, ClientLosses
from fedquilt.training.objectives import PlainLoss, StackableObjective
from fedquilt.training.optimizer_settings import OptimizerSettings
from fedquilt.training.optimizers import WeightOptimizer, make_optimizer
from fedquilt.training.sgd import differentiate
from fedquilt.training.stack.program import Program

PLAIN = PlainLoss()


class NetStack:
    """The tensors of several nets, stacked, and an optimizer of each net.

    An optimizer moves its own net's part of the stack: clipping, momentum and schedules are those
    of a net that is trained alone.

    Args:
        program: Computes all nets.
        tensors: Those of one of the nets, for the shapes.
        count: The number of nets.
        objective: What each net minimizes.
    """

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Tensor],
        count: int,
        objective: StackableObjective = PLAIN,
    ) -> None:
        self._program, self.objective = program, objective
        self._stack = program.make_stack(tensors, count)
        self._weights = [n for n, t in tensors.items() if t.requires_grad]
        self.optimizers: list[WeightOptimizer | None] = [None] * count
        self.draws = [torch.Generator() for _ in range(count)]  # of nets that draw, as in dropout

    @torch.no_grad()
    def load(
        self, number: int, tensors: Mapping[str, Tensor], settings: OptimizerSettings
    ) -> WeightOptimizer:
        """Copies a net into the stack; its new optimizer."""
        for name, tensor in tensors.items():
            self._stack[name][number].copy_(tensor)
        weights = [self._stack[name][number] for name in self._weights]
        optimizer = make_optimizer([w.requires_grad_() for w in weights], settings)
        self.optimizers[number] = optimizer
        return optimizer

    @torch.no_grad()
    def copy_to(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Copies a net out of the stack."""
        for name, tensor in tensors.items():
            tensor.copy_(self._stack[name][number])

    def step(
        self,
        numbers: Sequence[int],
        batches: Sequence[Batch],
        losses: Sequence[ClientLoss],
        generators: Sequence[torch.Generator] = (),
    ) -> Tensor:
        """One step of some of the nets; the loss of each.

        Args:
            numbers: Which nets, in order.
            batches: A batch of each of them, or one batch for all; all of the same shape.
            losses: The loss of each.
            generators: For what the objective draws for each.
        """
        part = self._select(numbers)
        weights = [part[name].requires_grad_() for name in self._weights]
        nets = self._program.use(part, [self.draws[number] for number in numbers])
        inputs, targets = (self._program.stack(values) for values in zip(*batches, strict=True))
        values = self.objective.loss(nets, (inputs, targets), ClientLosses(losses), generators)
        gradients = _divide(differentiate(values.sum(), weights), len(numbers))
        with torch.no_grad():
            self._put_back(numbers, part)
            for number, gradient in zip(numbers, gradients, strict=True):
                optimizer = self.optimizers[number]
                assert optimizer is not None
                optimizer.apply_gradients(gradient)
        return values.detach()

    def _select(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """The tensors of some nets: views of the stack if they are neighbors, else copies."""
        first, last = numbers[0], numbers[-1]
        if list(numbers) == list(range(first, last + 1)):
            return {n: t.detach()[first : last + 1] for n, t in self._stack.items()}
        return {n: t.detach()[list(numbers)] for n, t in self._stack.items()}

    def _put_back(self, numbers: Sequence[int], part: dict[str, Tensor]) -> None:
        """Writes statistics that a pass has changed into the stack, if they are copies."""
        for name, tensor in part.items():
            is_view = tensor.untyped_storage().data_ptr() == self._storage(name)
            if name not in self._weights and not is_view:
                self._stack[name][list(numbers)] = tensor

    def _storage(self, name: str) -> int:
        return self._stack[name].untyped_storage().data_ptr()


def _divide(gradients: Sequence[Tensor | None], count: int) -> list[tuple[Tensor | None, ...]]:
    """The gradients of each net."""
    parts: list[Any] = [[None] * count if g is None else g.unbind(0) for g in gradients]
    return list(zip(*parts, strict=True)) if parts else [()] * count
