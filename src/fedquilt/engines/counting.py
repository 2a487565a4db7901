"""An engine that also counts what clients compute, operation by operation.

A task of each kind is done twice: once as always, and once more under PyTorch's counter of
operations. The second result is discarded, so a run has the same bits with and without counting.
All passes count, forward and backward, also those of attacks, distillation and search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fedquilt.devices import fork_generators
from fedquilt.engines.client_work import describe_work, run_task
from fedquilt.engines.engine import OnProgress
from fedquilt.engines.local import LocalEngine
from fedquilt.engines.stacks import PassSizes
from fedquilt.federation.client import Failure, Task, Update
from fedquilt.federation.threads import single_thread
from fedquilt.structure.dispatch import Interceptor, unfused_kernels
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


class CountingEngine:
    """A local engine that also counts the MACs of each kind of work, once.

    Args:
        engine: The engine that does the work.
        counts: Where counts are kept.
    """

    def __init__(self, engine: LocalEngine, counts: MacCounts) -> None:
        self._engine, self._counts = engine, counts

    @property
    def on_progress(self) -> OnProgress:
        """Hears how far clients are."""
        return self._engine.on_progress

    @on_progress.setter
    def on_progress(self, callback: OnProgress) -> None:
        self._engine.on_progress = callback

    @property
    def pass_sizes(self) -> PassSizes:
        """How many clients train in one pass."""
        return self._engine.pass_sizes

    @property
    def device(self) -> torch.device:
        """The first of the devices that clients train on."""
        return self._engine.device

    def run(
        self, tasks: Sequence[Task], *, enough: int | None = None
    ) -> Iterator[Update | Failure]:
        """Does all tasks, after those of new kinds were counted."""
        for task in tasks:
            self._count_once(task)
        yield from self._engine.run(tasks, enough=enough)

    def client_versions(self) -> Mapping[int, int]:
        """The version of each client's state."""
        return self._engine.client_versions()

    def restore(self, versions: Mapping[int, int], *, after: Mapping[int, int] = {}) -> None:
        """Goes back to these versions of clients' states."""
        self._engine.restore(versions, after=after)

    def remove_unused(self, *used: Mapping[int, int]) -> None:
        """Removes versions of clients' states that none of these uses."""
        self._engine.remove_unused(*used)

    def close(self) -> None:
        """Ends all workers, and removes temporary files."""
        self._engine.close()

    def _count_once(self, task: Task) -> None:
        if isinstance(task.recipe, Evaluate):
            return
        context = self._engine.context
        kind = describe_work(context.structure, task.subnets)
        if kind in self._counts.counts.get(self._counts.phase, {}):
            return
        try:
            state = self._engine.read_state(task.client)
            macs = _count_macs(lambda: run_task(task, context, state), self.device)
        except Exception:  # the task itself will fail and say why
            return
        num_examples = len(context.examples("train", task.client))
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
