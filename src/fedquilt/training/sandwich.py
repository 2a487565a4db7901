"""Training a universally slimmable net: sandwich rule and in-place distillation (US-Net)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedquilt.federation.boundary import Terms, training
from fedquilt.federation.client import Client, Task, Update, seed_of
from fedquilt.structure.adjust import Adjustable
from fedquilt.structure.cut import Params, take
from fedquilt.structure.groups import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.descent import Descent, Optimiser
from fedquilt.training.losses import cross_entropy
from fedquilt.training.ordered import imitation
from fedquilt.training.recipe import Workbench
from fedquilt.training.sgd import batches
from fedquilt.training.slimmable import added, gradients
from fedquilt.training.tracking import untracked


@dataclass(frozen=True)
class Sandwich:
    """The recipe: on every batch the whole net, the smallest, and some drawn between; one step.

    The whole net learns from the labels, the others from its answers. A width is drawn for the
    net, or with ``by_group`` one for each width group; groups in ``whole`` are never cut. Every
    batch is normalised by itself: running statistics of so many widths would mean nothing.
    """

    optimiser: Optimiser
    lr: float
    nets: int = 4  # S
    smallest: float = 0.25
    by_group: bool = False
    whole: tuple[str, ...] = ()
    weight: float = 1.0

    def run(self, task: Task, bench: Workbench) -> Update:
        """Trains the task's subnet, which is the whole net."""
        (sent,) = task.subnets
        model = untracked(bench.model)
        structure = bench.structure.among(model)
        own = take(task.params, structure, Subnet())
        loss, count = self._train(model, structure, own, task, bench)
        names = bench.structure.names(sent)
        metrics = {"loss": loss, "examples": count}
        return Update(
            task.client, (sent,), ({n: own[n].detach() for n in names},), self.weight, metrics
        )

    def terms(self, task: Task, client: Client) -> Terms:
        """What its answer may be."""
        return Terms(task.subnets, self.weight, training(client.num_examples))

    def _train(
        self, model: nn.Module, structure: Structure, own: Params, task: Task, bench: Workbench
    ) -> tuple[float, int]:
        """Trains in place; the mean loss of the last epoch, and the number of examples."""
        nets = _Slimmed(model, structure, own, self.optimiser, self.lr)
        examples, settings = bench.examples("train", task.client), self.optimiser
        torch.default_generator.manual_seed(task.seed)
        generator = torch.Generator().manual_seed(task.seed)
        draws = torch.Generator().manual_seed(seed_of(task.seed, 1))  # leaves the batches as is
        total = torch.zeros(())
        for epoch in range(settings.epochs):
            total, count = torch.zeros(()), 0
            for rows in batches(len(examples), settings.batch_size, generator):
                x, y = examples.batch(rows, generator)
                total += nets.step(x, y, self.drawn(structure, draws)) * len(rows)
                count += len(rows)
                bench.tell((epoch + count / len(examples)) / settings.epochs)
            total = total / count
        return float(total), len(examples)

    def drawn(self, structure: Structure, generator: torch.Generator) -> Iterator[Subnet]:
        """The sandwich below the whole net: the smallest, and as many between as are asked for."""
        groups = structure.cut_groups(self.whole)
        yield structure.subnet(dict.fromkeys(groups, self.smallest))
        for _ in range(self.nets - 2):
            count = len(groups) if self.by_group else 1
            shares = torch.rand(count, generator=generator, dtype=torch.float64)
            widths = (self.smallest + (1 - self.smallest) * shares).tolist()
            widths = widths if self.by_group else widths * len(groups)
            yield structure.subnet(dict(zip(groups, widths, strict=True)))


class _Slimmed:
    """A net that learns at several widths of itself."""

    def __init__(
        self, model: nn.Module, structure: Structure, own: Params, settings: Optimiser, lr: float
    ) -> None:
        self._net = Adjustable(model, structure, own)
        self._net.module.train()
        self._own = own
        self._descent = Descent([own[n].requires_grad_() for n in self._held()], settings, lr)

    @torch.no_grad()
    def step(self, x: Tensor, y: Tensor, narrower: Iterator[Subnet]) -> Tensor:
        """One step down the sum of the losses; the loss of the whole net."""
        self._net.take_shape(Subnet())
        with torch.enable_grad():
            answers = self._answers(x)
            loss = cross_entropy(answers, y)
        sums = gradients(loss, self._held())
        for subnet in narrower:
            self._net.take_shape(subnet)
            with torch.enable_grad():
                imitated = imitation(self._answers(x), answers)
            for name, gradient in gradients(imitated, self._held()).items():
                if gradient is not None:
                    where = self._net.where(name)
                    sums[name] = added(sums[name], self._own[name], where, gradient)
        self._descent.follow(list(sums.values()))
        return loss.detach()

    def _held(self) -> dict[str, Tensor]:
        """The weights of the module as it is now."""
        return {n: w for n, w in self._net.module.named_parameters() if w.requires_grad}

    def _answers(self, x: Tensor) -> Tensor:
        answers: Tensor = self._net.module(*self._net.laid_out(x))
        return answers
