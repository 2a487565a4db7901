"""Count right answers on a client's test data; only the counts leave the client."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedquilt.data import ClientData
from fedquilt.devices import fork_generators, seed_generators
from fedquilt.federation.client import Client, ClientResult, Task, Update, derive_seed
from fedquilt.federation.validation import EXAMPLES, MetricSpec, ReplySpec, count_spec, loss_spec
from fedquilt.training.attack import PGD, frozen_model
from fedquilt.training.context import ClientContext
from fedquilt.training.dualnorm import has_dial, set_robustness
from fedquilt.training.ensemble import mean_logits
from fedquilt.training.loop import Batch, run_batches
from fedquilt.training.losses import cross_entropy, label_mask
from fedquilt.training.scaler import scale_outputs
from fedquilt.training.statistics import calibrate
from fedquilt.training.tracking import use_batch_statistics


@dataclass(frozen=True)
class Evaluate:
    """The recipe: hits and loss of each ensemble of the task's subnets, at each robustness.

    An ensemble answers with the mean of its subnets' logits. Statistics that stay on the client,
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

    def run(self, task: Task, context: ClientContext) -> ClientResult:
        """Evaluates every point: all ensembles at the first robustness, then at the next."""
        with fork_generators(context.device):  # others go on as if nothing had been drawn
            seed_generators(task.seed, context.device)
            return ClientResult(self._evaluate(task, context))

    def _evaluate(self, task: Task, context: ClientContext) -> Update:
        modules = [m.eval() for m in context.modules(task.subnets, task.params, self.local_params)]
        with ExitStack() as stack:
            for module, subnet in zip(modules, task.subnets, strict=True):
                if self.scale:
                    stack.enter_context(scale_outputs(module, context.structure))
                if self.batch_statistics:
                    stack.enter_context(use_batch_statistics(module))
                elif context.lacks_statistics(subnet, self.local_params):
                    calibrate(
                        module, context.examples("train", task.client), derive_seed(task.seed, 1)
                    )
            return self._count_hits(modules, task, context)

    def _count_hits(
        self, modules: Sequence[nn.Module], task: Task, context: ClientContext
    ) -> Update:
        """Hits and losses of the modules, ready for use."""
        examples = context.examples(self.split, task.client if self.of is None else self.of)
        rows = self._select_rows(len(examples))
        counter = _PointCounter(self, modules, examples, task.seed)
        run_batches(
            examples, _split_in_order(rows, self._choose_batch_size(examples)), counter.count
        )
        for module in modules:
            if has_dial(module):
                set_robustness(module, 0.0)  # modules are used again
        return Update(task.client, (), (), 0.0, counter.metrics)

    def reply_spec(self, task: Task, client: Client) -> ReplySpec:
        """What the reply may be: counts of each point, and how many examples there were."""
        num_ensembles = len(self.ensembles or task.subnets)
        points = range(num_ensembles * max(1, len(self.robustness)))
        kinds = ["hits"] + ["local"] * (self.labels is not None) + ["robust"] * bool(self.attack)
        hits = {f"{kind}:{i}": count_spec(of=EXAMPLES) for kind in kinds for i in points}
        is_own = self.split == "test" and self.of is None
        max_examples = client.num_tests if is_own else None
        metrics: dict[str, MetricSpec] = {
            EXAMPLES: count_spec(max_examples, low=int(self.parts == 1)),  # a part may be empty
            "sequences": replace(count_spec(of=EXAMPLES), is_required=False),
            **{f"loss:{i}": loss_spec() for i in points},
            **hits,
        }
        return ReplySpec((), 0.0, metrics)

    def _select_rows(self, count: int) -> Tensor:
        """This task's part of the examples: at least two of them, or none."""
        parts = max(1, min(self.parts, count // 2))
        every = torch.arange(count)
        return every.tensor_split(parts)[self.part] if self.part < parts else every[:0]

    def _choose_batch_size(self, examples: ClientData) -> int:
        """Examples in a batch: logits of whole sequences over a large vocabulary fill memory."""
        if len(examples) == 0:
            return self.batch_size
        _, y = examples.batch(torch.zeros(1, dtype=torch.int64))
        return max(1, self.batch_size // y.numel())


def _split_in_order(rows: Tensor, size: int) -> list[Tensor]:
    """Rows of each batch; a last one alone joins those before: it has no statistics of its own."""
    batches = list(rows.split(size)) if len(rows) else []
    if size > 1 and len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


class _PointCounter:
    """Counts the hits of every ensemble at every robustness, batch after batch."""

    def __init__(
        self, settings: Evaluate, modules: Sequence[nn.Module], examples: ClientData, seed: int
    ) -> None:
        self._modules, self._labels, self._seed = modules, settings.labels, seed
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
        self.metrics["examples"] += y.numel()
        if y.ndim > 1:
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
        answers = []
        for module in self._modules:
            seed_generators(seed, x.device)
            answers.append(module(x))
        for point, ensemble in enumerate(self._ensembles, start=first):
            logits = mean_logits(answers[i] for i in ensemble)
            self._add(f"hits:{point}", (logits.argmax(-1) == y).sum())
            self._add(f"loss:{point}", cross_entropy(logits, y) * y.numel())
            if self._labels is not None:  # zero probability for classes it does not have
                foreign = label_mask(self._labels, logits.shape[-1], logits.device)
                own = logits.masked_fill(foreign, -torch.inf)
                self._add(f"local:{point}", (own.argmax(-1) == y).sum())

    def _count_attacked(self, batch: Batch, first: int, attack: PGD) -> None:
        """The attack sees the whole ensemble."""
        x, y = batch
        for point, ensemble in enumerate(self._ensembles, start=first):
            chosen = [self._modules[i] for i in ensemble]

            def answer(x: Tensor, chosen: list[nn.Module] = chosen) -> Tensor:
                return mean_logits(module(x) for module in chosen)

            with frozen_model(nn.ModuleList(chosen)):
                worse = attack.perturb(answer, x, y, self._generator)
            with torch.inference_mode():
                self._add(f"robust:{point}", (answer(worse).argmax(-1) == y).sum())

    def _add(self, name: str, value: Tensor | int) -> None:
        self.metrics[name] = self.metrics.get(name, 0.0) + float(value)
