"""Count right answers on a client's test data; only the counts leave the client."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedquilt.data import ClientData
from fedquilt.federation.boundary import EXAMPLES, Metric, Terms, count, loss
from fedquilt.federation.client import Client, Task, Update, seed_of
from fedquilt.training.attack import PGD, frozen
from fedquilt.training.dualnorm import has_dial, set_robustness
from fedquilt.training.losses import cross_entropy, label_mask
from fedquilt.training.mixing import mixed
from fedquilt.training.recipe import Workbench
from fedquilt.training.scaler import scaled
from fedquilt.training.statistics import calibrate
from fedquilt.training.tracking import batch_statistics


@dataclass(frozen=True)
class Evaluate:
    """The recipe: hits and loss of each mix of the task's subnets, at each robustness.

    A mix answers with the mean of its subnets' logits; by default every subnet stands alone.
    ``labels`` are the client's own classes, to which "Local" accuracy restricts answers; ``part``
    of ``parts`` is the share of the data that this task looks at. With an ``attack`` hits on
    attacked inputs are counted too. Statistics that stay at home, and that the client does not have
    for a subnet, are first taken from its training data. With ``batch_statistics`` every batch is
    normalised by itself instead, as papers score nets that keep no statistics. ``scale`` is
    HeteroFL's Scaler.

    Where examples have a target at every position each of these counts: ``examples`` are targets
    then, ``sequences`` what they are in, and a batch has no more than ``batch_size`` targets, if
    one sequence does not. A net that draws in use, such as hidden tokens, draws the same for
    every subnet and in every evaluation.
    """

    mixes: tuple[tuple[int, ...], ...] | None = None
    batch_size: int = 128
    labels: tuple[int, ...] | None = None
    part: int = 0
    parts: int = 1
    home: tuple[str, ...] = ()
    split: str = "test"
    of: int | None = None  # whose data, if not the client's own
    robustness: tuple[float, ...] = ()
    attack: PGD | None = None
    scale: bool = False
    batch_statistics: bool = False

    def run(self, task: Task, bench: Workbench) -> Update:
        """Evaluates every point: mixes at the first robustness, then at the next."""
        with torch.random.fork_rng(devices=[]):  # others go on as if nothing had been drawn
            torch.default_generator.manual_seed(task.seed)
            return self._run(task, bench)

    def _run(self, task: Task, bench: Workbench) -> Update:
        modules = [m.eval() for m in bench.modules(task.subnets, task.params, self.home)]
        with ExitStack() as stack:
            for module, subnet in zip(modules, task.subnets, strict=True):
                if self.scale:
                    stack.enter_context(scaled(module, bench.structure))
                if self.batch_statistics:
                    stack.enter_context(batch_statistics(module))
                elif bench.lacks_statistics(subnet, self.home):
                    calibrate(module, bench.examples("train", task.client), seed_of(task.seed, 1))
            return self._count(modules, task, bench)

    def _count(self, modules: Sequence[nn.Module], task: Task, bench: Workbench) -> Update:
        """Hits and losses of the modules, ready for use."""
        examples = bench.examples(self.split, task.client if self.of is None else self.of)
        rows = self._rows(len(examples))
        mixes = self.mixes or tuple((i,) for i in range(len(modules)))
        count = _Count()
        generator = torch.Generator().manual_seed(task.seed)
        dials: tuple[float | None, ...] = self.robustness or (None,)
        if has_dial(modules[0]) and not self.robustness:
            dials = (0.0,)  # as it answers clean inputs
        for number, some in enumerate(_batches(rows, self._size(examples))):
            x, y = examples.batch(some)
            count.targets(y)
            seed, first = seed_of(task.seed, 2, number), 0
            for robustness in dials:
                for module in modules:
                    if robustness is not None:
                        set_robustness(module, robustness)
                self._clean(modules, mixes, x, y, count, first, seed)
                if self.attack is not None:
                    attack = self.attack.on(examples)
                    _attacked(attack, modules, mixes, x, y, count, first, generator)
                first += len(mixes)
        for module in modules:
            if has_dial(module):
                set_robustness(module, 0.0)  # modules are used again
        return Update(task.client, (), (), 0.0, count.metrics)

    def terms(self, task: Task, client: Client) -> Terms:
        """What its answer may be: counts of each point, and how many examples there were."""
        num_mixes = len(self.mixes or task.subnets)
        points = range(num_mixes * max(1, len(self.robustness)))
        kinds = ["hits"] + ["local"] * (self.labels is not None) + ["robust"] * bool(self.attack)
        hits = {f"{kind}:{i}": count(of=EXAMPLES) for kind in kinds for i in points}
        is_own = self.split == "test" and self.of is None
        most = client.num_tests if is_own else None
        metrics: dict[str, Metric] = {
            EXAMPLES: count(most, least=int(self.parts == 1)),  # a part may be empty
            "sequences": replace(count(of=EXAMPLES), is_required=False),
            **{f"loss:{i}": loss() for i in points},
            **hits,
        }
        return Terms((), 0.0, metrics)

    def _rows(self, count: int) -> Tensor:
        """This task's part of the examples: at least two of them, or none."""
        parts = max(1, min(self.parts, count // 2))
        every = torch.arange(count)
        return every.tensor_split(parts)[self.part] if self.part < parts else every[:0]

    def _size(self, examples: ClientData) -> int:
        """Examples in a batch: logits of whole sequences over a large vocabulary fill memory."""
        if len(examples) == 0:
            return self.batch_size
        _, y = examples.batch(torch.zeros(1, dtype=torch.int64))
        return max(1, self.batch_size // y.numel())

    def _clean(
        self,
        modules: Sequence[nn.Module],
        mixes: Sequence[tuple[int, ...]],
        x: Tensor,
        y: Tensor,
        count: _Count,
        first: int,
        seed: int,
    ) -> None:
        """Every subnet is asked once, whatever the number of mixes it is part of."""
        with torch.inference_mode():
            answers = []
            for module in modules:
                torch.default_generator.manual_seed(seed)
                answers.append(module(x))
            for point, mix in enumerate(mixes, start=first):
                logits = mixed(answers[i] for i in mix)
                count.add(f"hits:{point}", (logits.argmax(-1) == y).sum())
                count.add(f"loss:{point}", cross_entropy(logits, y) * y.numel())
                if self.labels is not None:  # zero probability for classes it does not have
                    foreign = label_mask(self.labels, logits.shape[-1])
                    own = logits.masked_fill(foreign, -torch.inf)
                    count.add(f"local:{point}", (own.argmax(-1) == y).sum())


def _batches(rows: Tensor, size: int) -> list[Tensor]:
    """Rows of each batch; a last one alone joins those before: it has no statistics of its own."""
    found = list(rows.split(size)) if len(rows) else []
    if size > 1 and len(found) > 1 and len(found[-1]) == 1:
        found[-2:] = [torch.cat(found[-2:])]
    return found


def _attacked(
    attack: PGD,
    modules: Sequence[nn.Module],
    mixes: Sequence[tuple[int, ...]],
    x: Tensor,
    y: Tensor,
    count: _Count,
    first: int,
    generator: torch.Generator,
) -> None:
    """The attack sees the whole mix."""
    for point, mix in enumerate(mixes, start=first):
        chosen = [modules[i] for i in mix]

        def answer(x: Tensor, chosen: list[nn.Module] = chosen) -> Tensor:
            return mixed(module(x) for module in chosen)

        with frozen(nn.ModuleList(chosen)):
            worse = attack.perturbed(answer, x, y, generator)
        with torch.inference_mode():
            count.add(f"robust:{point}", (answer(worse).argmax(-1) == y).sum())


class _Count:
    def __init__(self) -> None:
        self.metrics: dict[str, float] = {"examples": 0}

    def targets(self, y: Tensor) -> None:
        self.metrics["examples"] += y.numel()
        if y.ndim > 1:
            self.metrics["sequences"] = self.metrics.get("sequences", 0) + len(y)

    def add(self, name: str, value: Tensor) -> None:
        self.metrics[name] = self.metrics.get(name, 0.0) + float(value)
