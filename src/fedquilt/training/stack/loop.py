"""The loop in which several clients train in one pass, each on its own batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from fedquilt.data import ClientData
from fedquilt.learning.batch import Batch, as_batch
from fedquilt.training.client_loss import ClientLoss
from fedquilt.training.device_data import get_device
from fedquilt.training.loop import BatchInfo, MeanLoss, autocast, draw_batches
from fedquilt.training.settings import LoopSettings
from fedquilt.training.stack.layers import UnstackableError
from fedquilt.training.stack.nets import NetStack

Drawn = tuple[Batch, BatchInfo]
MAX_ROWS = 8  # that a program is checked on


@dataclass(eq=False)
class StackMember:
    """A client that trains with others.

    Args:
        net: The number of its net in the stack.
        examples: Its data.
        loss: What its net minimizes.
        settings: Epochs, batches and precision.
        seed: Of its random numbers.
        draws: Takes the place of PyTorch's default generator for its data and its net.
        report_progress: Hears which part of its work is done.
    """

    net: int
    examples: ClientData
    loss: ClientLoss
    settings: LoopSettings
    seed: int
    draws: torch.Generator
    report_progress: Callable[[float], None]
    problem: Exception | None = field(default=None, init=False)  # its data raised it

    def __post_init__(self) -> None:
        self.mean = MeanLoss(get_device(self.examples))
        self._batches: Iterator[Drawn] = draw_batches(self.examples, self.settings, self.seed)
        self.draws.manual_seed(self.seed)

    def draw(self) -> Drawn | None:
        """The next batch, the same as if the client trained alone; None: there is no other."""
        try:
            if getattr(self.examples, "has_fixed_batches", False):
                return next(self._batches, None)
            return self._draw_at_random()
        except Exception as problem:  # of its own data, which is no concern of the others
            self.problem = problem
            return None

    def _draw_at_random(self) -> Drawn | None:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.draws.get_state())
            drawn = next(self._batches, None)
            self.draws.set_state(torch.get_rng_state())
        return drawn


def train_members(stack: NetStack, members: Sequence[StackMember]) -> None:
    """Trains clients to the end of their batches; who has fewer than others leaves the stack.

    In each step those whose batches have one shape go through one pass.

    Args:
        stack: The nets of all of them.
        members: The clients, whose loops have the same settings.
    """
    active = list(members)
    with refuse_random_numbers():
        while active:
            drawn = [(member, batch) for member in active if (batch := member.draw()) is not None]
            for group in _group_by_shape(drawn):
                _step(stack, group)
            active = [member for member, _ in drawn]


@contextmanager
def refuse_random_numbers() -> Iterator[None]:
    """Raises an UnstackableError if steps draw from PyTorch's own generator.

    Clients of a pass have generators of their own, and that one would be of none of them.
    """
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        yield
        if not torch.equal(before, torch.get_rng_state()):
            raise UnstackableError("its loss or its optimizer draws random numbers")


def _step(stack: NetStack, group: list[tuple[StackMember, Drawn]]) -> None:
    members = [member for member, _ in group]
    with autocast(get_device(members[0].examples), members[0].settings.precision):
        losses = stack.step(
            [member.net for member in members],
            [batch for _, (batch, _) in group],
            [member.loss for member in members],
            [info.generator for _, (_, info) in group],
        )
    for (member, (_, info)), loss in zip(group, losses, strict=True):
        member.mean.add(loss, info)
        member.report_progress(info.done)


def _group_by_shape(
    drawn: Sequence[tuple[StackMember, Drawn]],
) -> list[list[tuple[StackMember, Drawn]]]:
    groups: dict[Any, list[tuple[StackMember, Drawn]]] = {}
    for member, (batch, info) in drawn:
        leaves, form = tree_flatten(tuple(batch))
        shapes = [(x.shape, x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves]
        groups.setdefault((form, *shapes), []).append((member, (batch, info)))
    return list(groups.values())


def draw_batch(examples: ClientData, size: int = MAX_ROWS) -> Batch:
    """A batch of the first examples, to try something with; no draw is missed later."""
    rows = torch.arange(min(len(examples), size))
    with torch.random.fork_rng(devices=[]):
        return as_batch(examples.batch(rows, torch.Generator()))
