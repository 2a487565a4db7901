"""Clients whose work is done in one pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Protocol, cast

import torch
from torch import nn

from fedquilt.data import ClientData
from fedquilt.devices import is_accelerator
from fedquilt.federation.client import ClientResult, Task
from fedquilt.learning.batch import Batch
from fedquilt.structure.tensors import to_arguments
from fedquilt.training.client_loss import ClientLoss
from fedquilt.training.context import ClientContext
from fedquilt.training.device_data import get_device
from fedquilt.training.scaler import has_hooked_scale, scale_outputs
from fedquilt.training.settings import LoopSettings
from fedquilt.training.stack.layers import UnstackableError
from fedquilt.training.stack.loop import (
    StackMember,
    draw_batch,
    refuse_random_numbers,
    train_members,
)
from fedquilt.training.stack.nets import NetStack
from fedquilt.training.stack.program import StackedModel, find_program
from fedquilt.training.stack.trial import Trial, try_counts


class StackableJob(Protocol):
    """One client's work, which can be done with that of others.

    Modules are the same for all clients of a worker: so jobs are made in turn, and each is loaded
    into the stack before the next one is made.
    """

    examples: ClientData
    loss: ClientLoss
    loop: LoopSettings
    seed: int
    context: ClientContext

    def make_stack(self, count: int) -> NetStack:
        """Room for as many nets; raises UnstackableError if there is no way."""
        ...

    def load(self, stack: NetStack, number: int) -> None:
        """Copies the client's net into a stack."""
        ...

    def finish(self, stack: NetStack, number: int, loss: float) -> ClientResult:
        """What comes of the trained net, with the mean loss of the last epoch."""
        ...

    def make_step(self) -> Callable[[Batch, torch.Generator], object]:
        """What trains the client alone on a batch; to see how long it takes."""
        ...


def require_program(
    job: StackableJob, module: nn.Module, *, scale: bool, in_evaluation: bool = False
) -> StackedModel:
    """What computes several nets of a module's shape.

    Args:
        job: The work that a client does on one of them.
        module: The net.
        scale: Whether to use HeteroFL's Scaler.
        in_evaluation: Whether the net runs in evaluation mode, too.

    Raises:
        UnstackableError: There is nothing.
    """
    if job.loss.loss.needs_batch:
        raise UnstackableError("its loss asks the model itself")
    is_hooked = has_hooked_scale(module)
    with scale_outputs(module, job.context.structure) if scale and not is_hooked else nullcontext():
        program = find_program(
            module,
            lambda: to_arguments(draw_batch(job.examples)[0]),
            in_evaluation=in_evaluation,
        )
    if program.draws and is_accelerator(get_device(job.examples)):
        raise UnstackableError("it draws random numbers, on an accelerator from one generator")
    return program


class StackableRecipe(ABC):
    """A recipe whose work several clients can do in one pass."""

    @abstractmethod
    def make_job(self, task: Task, context: ClientContext) -> StackableJob:
        """The work of one client."""

    def run_stacked(
        self, tasks: Sequence[Task], contexts: Sequence[ClientContext]
    ) -> list[ClientResult | Exception]:
        """Does the work of several clients in one pass.

        Results are those of ``run`` but for rounding. What a client's own data raise is in its
        place of the list.

        Args:
            tasks: The work of each client, with subnets of one shape and equal ``stack_key``.
            contexts: The context of each client.

        Raises:
            UnstackableError: Nets of this kind cannot be trained in one pass.
        """
        stack: NetStack | None = None
        loaded: list[tuple[StackableJob, StackMember]] = []
        for number, (task, context) in enumerate(zip(tasks, contexts, strict=True)):
            job = cast(StackableRecipe, task.recipe).make_job(task, context)
            stack = stack or job.make_stack(len(tasks))
            job.load(stack, number)
            draws, report = stack.draws[number], context.report_progress
            member = StackMember(number, job.examples, job.loss, job.loop, job.seed, draws, report)
            loaded.append((job, member))
        assert stack is not None
        train_members(stack, [member for _, member in loaded])
        return [m.problem or job.finish(stack, m.net, float(m.mean)) for job, m in loaded]

    def try_stacking(self, task: Task, context: ClientContext, counts: Sequence[int]) -> Trial:
        """Times a step of training, alone and with others in one pass; nothing comes of it.

        Args:
            task: The work of a client.
            context: The client's context.
            counts: The numbers of clients in one pass that are tried.

        Raises:
            UnstackableError: Nets of this kind cannot be trained in one pass.
        """
        job = self.make_job(task, context)

        def make_stack(count: int) -> NetStack:
            stack = job.make_stack(count)
            for number in range(count):
                job.load(stack, number)
            return stack

        one = make_stack(1)  # raises if there is no way, also if no number is tried
        batch = draw_batch(job.examples, job.loop.batch_size)
        with refuse_random_numbers():
            one.step(range(1), [batch], [job.loss], [torch.Generator()])
        return try_counts(job.make_step(), make_stack, batch, job.loss, counts=counts)
