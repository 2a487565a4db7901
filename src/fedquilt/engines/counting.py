"""An engine that also counts what clients compute, operation by operation.

A task of each kind is done twice: once as always, and once more under PyTorch's counter of
operations. The second result is discarded, so a run has the same bits with and without counting.
All passes count, forward and backward, also those of attacks, distillation and search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from fedquilt.data import ClientData
from fedquilt.devices import CPU, fork_generators
from fedquilt.engines.client_state import read_client_state
from fedquilt.engines.client_work import run_task
from fedquilt.engines.local import LocalEngine
from fedquilt.engines.worker import Timeouts
from fedquilt.federation.client import Failure, Task, Update
from fedquilt.federation.threads import single_thread
from fedquilt.structure.cut import compute_shapes
from fedquilt.structure.dispatch import Interceptor, unfused_kernels
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.evaluate import Evaluate


@dataclass
class MacCounts:
    """MACs per training example and round of a client, by phase and by what the client received.

    Args:
        counts: The counts so far; a phase has one for each kind of work in it.
        on_change: Is called when a kind of work was counted.
    """

    counts: dict[str, dict[str, float]] = field(default_factory=dict)
    on_change: Callable[[MacCounts], None] | None = None
    phase: str = ""  # of the round that is under way

    def add(self, kind: str, macs: float) -> None:
        """Adds a kind of work of the present phase."""
        self.counts.setdefault(self.phase, {})[kind] = macs
        if self.on_change is not None:
            self.on_change(self)

    def find(self, phase: str, kind: str) -> float | None:
        """The MACs of a kind of work; those of the phase's largest where it was not counted."""
        known = self.counts.get(phase, {})
        return known.get(kind, max(known.values(), default=None))


def describe_work(structure: Structure, subnets: Sequence[Subnet]) -> str:
    """A kind of work: the number of values in each subnet that a client received."""
    sizes = (
        sum(torch.Size(shape).numel() for shape in compute_shapes(structure, subnet).values())
        for subnet in subnets
    )
    return "+".join(map(str, sizes))


class CountingEngine(LocalEngine):
    """A local engine that counts the MACs of each kind of work once."""

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        data: Mapping[str, Mapping[int, ClientData]],
        counts: MacCounts,
        *,
        workers: int,
        folder: Path | None = None,
        timeouts: Timeouts | None = None,
        devices: Sequence[torch.device] = (CPU,),
    ) -> None:
        super().__init__(
            model,
            structure,
            data,
            workers=workers,
            folder=folder,
            timeouts=timeouts,
            devices=devices,
        )
        self._counts = counts

    def run(
        self, tasks: Sequence[Task], *, enough: int | None = None
    ) -> Iterator[Update | Failure]:
        """Does all tasks, after those of new kinds were counted."""
        for task in tasks:
            self._count_once(task)
        yield from super().run(tasks, enough=enough)

    def _count_once(self, task: Task) -> None:
        if isinstance(task.recipe, Evaluate):
            return
        kind = describe_work(self._context.structure, task.subnets)
        if kind in self._counts.counts.get(self._counts.phase, {}):
            return
        state = read_client_state(self._states.current_path(task.client))
        try:
            macs = _count_macs(lambda: run_task(task, self._context, state), self.device)
        except Exception:  # the task itself will fail and say why
            return
        num_examples = len(self._context.examples("train", task.client))
        self._counts.add(kind, macs / max(num_examples, 1))


def _count_macs(work: Callable[[], Any], device: torch.device) -> float:
    counter = _OperationCounter()
    with single_thread(), fork_generators(device), unfused_kernels(), counter:
        work()
    return counter.num_operations / 2


class _OperationCounter(Interceptor):
    """Adds up the operations of matrix products and convolutions, two for each MAC."""

    def __init__(self) -> None:
        super().__init__()
        self.num_operations = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        count = FORMULAS.get(func._overloadpacket)
        if count is None:
            with self:  # operations that are made of others
                result = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if result is NotImplemented else result
        result = func(*args, **kwargs)
        self.num_operations += count(*args, **kwargs, out_val=result)
        return result


def _count_convolution_backward(
    grad: Tensor, inputs: Tensor, weight: Tensor, *more: Any, out_val: object = None
) -> int:
    """As many operations as the convolution for each gradient that is wanted, in groups as well.

    PyTorch's own formula takes a convolution in groups for one without.
    """
    *_, is_transposed, _, _, wanted = more
    positions = inputs.numel() if is_transposed else grad.numel()
    return 2 * positions * weight[0].numel() * (bool(wanted[0]) + bool(wanted[1]))


FORMULAS: dict[Any, Callable[..., float]] = {
    **flop_registry,
    torch.ops.aten.convolution_backward: _count_convolution_backward,
}
