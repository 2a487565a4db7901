"""Measure models on a client's test data; only sums leave the client."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.data import ClientData
from fedquilt.devices import fork_generators, seed_generators
from fedquilt.errors import TrainingError
from fedquilt.federation.client import Client, ClientResult, Task, Update, derive_seed
from fedquilt.federation.validation import (
    EXAMPLES,
    LOSS,
    MetricSpec,
    ReplySpec,
    count_spec,
    loss_spec,
)
from fedquilt.learning.batch import Batch, mean_outputs
from fedquilt.learning.known_metrics import count_hits
from fedquilt.learning.losses import classes_last, label_mask
from fedquilt.learning.task import CLASSIFICATION, LearningTask
from fedquilt.structure.tensors import find_tensors, to_arguments
from fedquilt.training.attack import PGD, frozen_model
from fedquilt.training.context import ClientContext
from fedquilt.training.dualnorm import has_dial, set_robustness
from fedquilt.training.loop import run_batches
from fedquilt.training.scaler import scale_outputs
from fedquilt.training.statistics import QueryStatistics, calibrate
from fedquilt.training.tracking import use_batch_statistics

HITS = "hits"  # the number of right answers, by which accuracy is computed
MIN_EXAMPLES = 32  # in a part of the data: fewer in a batch take longer each


@dataclass(frozen=True)
class Evaluate:
    """The recipe: metrics and loss of each ensemble of the task's subnets, at each robustness.

    An ensemble answers with the mean of its subnets' outputs. Statistics that stay on the client,
    and that it does not have for a subnet, are first taken from its training data.

    Where examples have a target at every position each of these counts: ``examples`` are targets
    then, ``sequences`` what they are in, and a batch has no more than ``batch_size`` targets, if
    one sequence does not. A net that draws in use, such as hidden tokens, draws the same for
    every subnet and in every evaluation.

    Args:
        ensembles: The subnets of each ensemble, by number; None: every subnet alone.
        batch_size: Targets in a batch.
        labels: The client's classes, to which "local" accuracy restricts answers.
        part: Which of ``parts`` of the data this task evaluates.
        parts: See above.
        local_params: Patterns of tensors that stay on the client.
        split: The data to evaluate on.
        of: The client whose data they are; None: the task's.
        robustness: The values of λ to evaluate at.
        attack: Hits on attacked inputs are counted too.
        scale: Whether to use HeteroFL's Scaler.
        batch_statistics: Whether every batch is normalized by itself, as papers score nets that
            keep no statistics.
        statistics: How statistics are first taken from the client's training data; None: those
            that the nets have are used.
        metrics: The numbers that the client sums for the metrics of the learning task.
    """

    ensembles: tuple[tuple[int, ...], ...] | None = None
    batch_size: int = 128
    labels: tuple[int, ...] | None = None
    part: int = 0
    parts: int = 1
    local_params: tuple[str, ...] = ()
    split: str = "test"
    of: int | None = None  # whose data, if not the client's own
    robustness: tuple[float, ...] = ()
    attack: PGD | None = None
    scale: bool = False
    batch_statistics: bool = False
    statistics: QueryStatistics | None = None
    metrics: tuple[str, ...] = CLASSIFICATION.numbers

    def run(self, task: Task, context: ClientContext) -> ClientResult:
        """Evaluates every point: all ensembles at the first robustness, then at the next."""
        with fork_generators(context.device):  # others go on as if nothing had been drawn
            seed_generators(task.seed, context.device)
            return ClientResult(self._evaluate(task, context))

    def _evaluate(self, task: Task, context: ClientContext) -> Update:
        examples = context.examples(self.split, task.client if self.of is None else self.of)
        size = self._choose_batch_size(examples, context.task)
        rows = self._select_rows(len(examples), size)
        if self.parts > 1 and not len(rows):
            return Update(task.client, (), (), 0.0, {EXAMPLES: 0})
        modules = [m.eval() for m in context.modules(task.subnets, task.params, self.local_params)]
        seed = derive_seed(task.seed, 1)
        if self.statistics is not None:
            own = context.examples("train", task.client)
            self.statistics.refresh(modules, own, seed, context)
            modules = [module.eval() for module in modules]
        lacking = []
        with ExitStack() as stack:
            for module, subnet in zip(modules, task.subnets, strict=True):
                if self.scale:
                    stack.enter_context(scale_outputs(module, context.structure))
                if self.batch_statistics:
                    stack.enter_context(use_batch_statistics(module))
                elif self.statistics is None and context.lacks_statistics(
                    subnet, self.local_params
                ):
                    lacking.append(module)
            if lacking:
                calibrate(lacking, context.examples("train", task.client), seed)
            batches = _split_in_order(rows, size)
            return self._count_hits(modules, examples, batches, task, context.task)

    def _count_hits(
        self,
        modules: Sequence[nn.Module],
        examples: ClientData,
        batches: Sequence[Tensor],
        task: Task,
        learned: LearningTask,
    ) -> Update:
        """Hits and losses of the modules, ready for use."""
        if self.metrics != learned.numbers:
            raise TrainingError(
                f"it measures {', '.join(learned.numbers) or 'the loss'}, and was asked for "
                f"{', '.join(self.metrics) or 'the loss'}; give both sides the same metrics"
            )
        counter = _PointCounter(self, modules, examples, task.seed, learned)
        run_batches(examples, batches, counter.count)
        for module in modules:
            if has_dial(module):
                set_robustness(module, 0.0)  # modules are used again
        return Update(task.client, (), (), 0.0, counter.metrics)

    def reply_spec(self, task: Task, client: Client) -> ReplySpec:
        """What the reply may be: counts of each point, and how many examples there were."""
        num_ensembles = len(self.ensembles or task.subnets)
        points = range(num_ensembles * max(1, len(self.robustness)))
        counts = ["local"] * (self.labels is not None) + ["robust"] * bool(self.attack)
        counts += [name for name in self.metrics if name == HITS]
        hits = {f"{kind}:{i}": count_spec(of=EXAMPLES) for kind in counts for i in points}
        sums = {
            f"{name}:{i}": MetricSpec(-math.inf, may_diverge=True)
            for name in self.metrics
            if name != HITS
            for i in points
        }
        is_own = self.split == "test" and self.of is None
        max_examples = client.num_tests if is_own else None
        metrics: dict[str, MetricSpec] = {
            EXAMPLES: count_spec(max_examples, low=int(self.parts == 1)),  # a part may be empty
            "sequences": replace(count_spec(of=EXAMPLES), is_required=False),
            **{f"loss:{i}": loss_spec() for i in points},
            **hits,
            **sums,
        }
        return ReplySpec((), 0.0, metrics)

    def _select_rows(self, count: int, batch_size: int) -> Tensor:
        """This task's part of the examples: a few of them at least, or none."""
        least = 2 if self.batch_statistics else max(2, min(batch_size, MIN_EXAMPLES))
        parts = max(1, min(self.parts, count // least))
        every = torch.arange(count)
        return every.tensor_split(parts)[self.part] if self.part < parts else every[:0]

    def _choose_batch_size(self, examples: ClientData, learned: LearningTask) -> int:
        """Examples in a batch: logits of whole sequences over a large vocabulary fill memory."""
        if len(examples) == 0 or not learned.has_classes:
            return self.batch_size
        _, y = examples.batch(torch.zeros(1, dtype=torch.int64))
        return max(1, self.batch_size // y.numel()) if y.ndim == 2 else self.batch_size


def sum_numbers(
    learned: LearningTask, replies: Iterable[Mapping[str, float]], point: int
) -> dict[str, float]:
    """What clients report of one point, summed, as ``LearningTask.compute`` takes it.

    Args:
        learned: The learning task.
        replies: The metrics of each reply.
        point: The number of the point.
    """
    replies = list(replies)  # a part of the data may be empty
    sums = {EXAMPLES: sum(reply[EXAMPLES] for reply in replies)}
    for name in (LOSS, *learned.numbers):
        sums[name] = sum(reply.get(f"{name}:{point}", 0.0) for reply in replies)
    return sums


def _split_in_order(rows: Tensor, size: int) -> list[Tensor]:
    """Rows of each batch; a last one alone joins those before: it has no statistics of its own."""
    batches = list(rows.split(size)) if len(rows) else []
    if size > 1 and len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


class _PointCounter:
    """Sums what every ensemble achieves at every robustness, batch after batch."""

    def __init__(
        self,
        settings: Evaluate,
        modules: Sequence[nn.Module],
        examples: ClientData,
        seed: int,
        learned: LearningTask,
    ) -> None:
        self._modules, self._labels, self._seed = modules, settings.labels, seed
        self._learned = learned
        self._ensembles = settings.ensembles or tuple((i,) for i in range(len(modules)))
        self._attack = settings.attack and settings.attack.for_examples(examples)
        self._generator = torch.Generator().manual_seed(seed)
        self._dials: tuple[float | None, ...] = settings.robustness or (None,)
        if has_dial(modules[0]) and not settings.robustness:
            self._dials = (0.0,)  # as it answers clean inputs
        self._num_batches = 0
        self.metrics: dict[str, float] = {"examples": 0}

    def count(self, batch: Batch) -> None:
        """Adds what the modules answer on a batch."""
        _, y = batch
        self.metrics["examples"] += self._learned.loss.count(y)
        if self._learned.has_classes and y.ndim == 2:
            self._add("sequences", len(y))
        seed, first = derive_seed(self._seed, 2, self._num_batches), 0
        self._num_batches += 1
        for robustness in self._dials:
            for module in self._modules:
                if robustness is not None:
                    set_robustness(module, robustness)
            self._count_clean(batch, first, seed)
            if self._attack is not None:
                self._count_attacked(batch, first, self._attack)
            first += len(self._ensembles)

    @torch.inference_mode()
    def _count_clean(self, batch: Batch, first: int, seed: int) -> None:
        """Every subnet answers once, however many ensembles it is part of."""
        x, y = batch
        answers, inputs = [], to_arguments(x)
        for module in self._modules:
            seed_generators(seed, find_tensors(x)[0].device)
            answers.append(module(*inputs))
        for point, ensemble in enumerate(self._ensembles, start=first):
            output = mean_outputs(answers[i] for i in ensemble)
            for name, value in self._learned.measure(output, y).items():
                self._add(f"{name}:{point}", value)
            loss = self._compute_loss(output, ensemble, batch, seed)
            self._add(f"loss:{point}", loss * self._learned.loss.count(y))
            if self._labels is not None:  # zero probability for classes it does not have
                logits = classes_last(output, y)
                foreign = label_mask(self._labels, logits.shape[-1], logits.device)
                own = logits.masked_fill(foreign, -torch.inf)
                self._add(f"local:{point}", (own.argmax(-1) == y).sum())

    def _compute_loss(
        self, output: Any, ensemble: Sequence[int], batch: Batch, seed: int
    ) -> Tensor:
        """The loss of an ensemble's output, or of the ensemble where the loss wants the model."""
        loss = self._learned.loss
        if not loss.needs_batch:
            return loss.of_output(output, batch[1])
        seed_generators(seed, find_tensors(batch)[0].device)
        chosen = [self._modules[i] for i in ensemble]
        return loss.of_batch(chosen[0] if len(chosen) == 1 else _MeanModule(chosen), batch)

    def _count_attacked(self, batch: Batch, first: int, attack: PGD) -> None:
        """The attack sees the whole ensemble."""
        x, y = batch
        for point, ensemble in enumerate(self._ensembles, start=first):
            chosen = [self._modules[i] for i in ensemble]

            def answer(x: Tensor, chosen: list[nn.Module] = chosen) -> Tensor:
                return mean_outputs(module(x) for module in chosen)  # type: ignore[no-any-return]

            with frozen_model(nn.ModuleList(chosen)):
                worse = attack.perturb(answer, x, y, self._generator)
            with torch.inference_mode():
                self._add(f"robust:{point}", count_hits(answer(worse), y))

    def _add(self, name: str, value: Tensor | float) -> None:
        self.metrics[name] = self.metrics.get(name, 0.0) + float(value)


class _MeanModule(nn.Module):
    """Nets that answer as one."""

    def __init__(self, nets: Sequence[nn.Module]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return mean_outputs(net(*inputs, **named) for net in self.nets)
