"""Training a universally slimmable net: sandwich rule and in-place distillation (US-Net)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedquilt.federation.client import Client, ClientResult, Task, Update, derive_seed
from fedquilt.federation.validation import ReplySpec, training_metrics
from fedquilt.learning.batch import Batch
from fedquilt.structure.cut import Params, copy_subnet_tensors
from fedquilt.structure.derive import restrict_structure
from fedquilt.structure.resizable import ResizableModule
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import to_arguments
from fedquilt.training.client_loss import ClientLoss
from fedquilt.training.context import ClientContext
from fedquilt.training.loop import run_epochs
from fedquilt.training.optimizer_settings import OptimizerSettings
from fedquilt.training.optimizer_state import OptimizerMemory
from fedquilt.training.optimizers import make_optimizer
from fedquilt.training.settings import LocalTraining
from fedquilt.training.slimmable import add_at, compute_gradients
from fedquilt.training.tracking import without_running_stats

Redraw = Literal["epoch", "batch"]


@dataclass(frozen=True)
class Sandwich:
    """The recipe: on every batch the whole net, the smallest, and some drawn between; one step.

    The whole net learns from the labels, the others from its logits. Every batch is normalized by
    itself: one set of running statistics cannot fit all widths.

    Args:
        local_training: Optimizer, epochs and batches.
        lr: The learning rate of this round.
        nets: How many nets are trained on each batch, S.
        smallest: The width of the smallest.
        by_group: Whether a width is drawn for each width group; else one for the net.
        whole: Width groups that are never cut.
        weight: How much the update counts in the mean.
        redraw: Whether the widths between are drawn for each epoch or for each batch.
    """

    local_training: LocalTraining
    lr: float
    nets: int = 4  # S
    smallest: float = 0.25
    by_group: bool = False
    whole: tuple[str, ...] = ()
    weight: float = 1.0
    redraw: Redraw = "epoch"

    def run(self, task: Task, context: ClientContext) -> ClientResult:
        """Trains the task's subnet, which is the whole net."""
        (sent,) = task.subnets
        model = without_running_stats(context.model)
        structure = restrict_structure(context.structure, model)
        own = copy_subnet_tensors(task.params, structure, Subnet())
        examples, loop = context.examples("train", task.client), self.local_training.loop
        settings = self.local_training.optimizer_at(self.lr, len(examples))
        net = _SandwichStep(model, structure, own, settings, context.client_loss())
        memory = OptimizerMemory(context, is_kept=self.local_training.keep_optimizer)
        memory.attach(net.optimizer, ((name, Subnet()) for name in net.moved))
        draws = torch.Generator().manual_seed(derive_seed(task.seed, 1))  # leaves the batches as is
        narrower: tuple[Subnet, ...] = ()

        def draw_widths() -> None:
            nonlocal narrower
            narrower = tuple(self.draw_subnets(structure, draws))

        def step(batch: Batch, generator: torch.Generator) -> Tensor:
            if self.redraw == "batch":
                draw_widths()
            return net.step(batch, narrower)

        before_epoch = draw_widths if self.redraw == "epoch" else None
        loss = run_epochs(
            examples, step, loop, task.seed, context.report_progress, before_epoch=before_epoch
        )
        tensors = {n: own[n].detach() for n in context.structure.tensor_names(sent)}
        metrics = {"loss": loss, "examples": len(examples)}
        update = Update(task.client, (sent,), (tensors,), self.weight, metrics)
        return ClientResult(update, memory.add_to(None))

    def reply_spec(self, task: Task, client: Client) -> ReplySpec:
        """What the reply may be."""
        return ReplySpec(task.subnets, self.weight, training_metrics(client.num_examples))

    def draw_subnets(self, structure: Structure, generator: torch.Generator) -> Iterator[Subnet]:
        """The sandwich below the whole net: the smallest, and as many between as are asked for."""
        groups = structure.cut_groups(self.whole)
        yield structure.subnet(dict.fromkeys(groups, self.smallest))
        for _ in range(self.nets - 2):
            count = len(groups) if self.by_group else 1
            shares = torch.rand(count, generator=generator, dtype=torch.float64)
            widths = (self.smallest + (1 - self.smallest) * shares).tolist()
            widths = widths if self.by_group else widths * len(groups)
            yield structure.subnet(dict(zip(groups, widths, strict=True)))


class _SandwichStep:
    """A net that learns at several widths of itself."""

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        own: Params,
        settings: OptimizerSettings,
        loss: ClientLoss,
    ) -> None:
        self._loss = loss
        self._net = ResizableModule(model, structure, own)
        self._net.module.train()
        self._own = own
        self.moved = list(self._current_weights())
        self.optimizer = make_optimizer([own[n].requires_grad_() for n in self.moved], settings)

    @torch.no_grad()
    def step(self, batch: Batch, narrower: Iterable[Subnet]) -> Tensor:
        """One step down the sum of the losses; the loss of the whole net."""
        x, y = batch
        self._net.resize_to(Subnet())
        with torch.enable_grad():
            answers = self._compute_output(x)
            loss = self._loss(answers, y)
        sums = compute_gradients(loss, self._current_weights())
        for subnet in narrower:
            self._net.resize_to(subnet)
            with torch.enable_grad():
                imitated = self._loss.loss.distil(self._compute_output(x), answers, y)
            for name, gradient in compute_gradients(imitated, self._current_weights()).items():
                if gradient is not None:
                    where = self._net.index_of(name)
                    sums[name] = add_at(sums[name], self._own[name], where, gradient)
        self.optimizer.apply_gradients(list(sums.values()))
        return loss.detach()

    def _current_weights(self) -> dict[str, Tensor]:
        """The weights of the module as it is now."""
        return {n: w for n, w in self._net.module.named_parameters() if w.requires_grad}

    def _compute_output(self, x: Any) -> Any:
        return self._net.module(*self._net.arrange_inputs(*to_arguments(x)))
