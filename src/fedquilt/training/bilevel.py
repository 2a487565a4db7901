"""Training weights and architecture in turn, by gradient (ADDS, Algorithm 1, lines 10-17).

Symbols of the paper -> names here: A = {α^k} -> shares, w, θ -> the module's weights, I -> the
subnet, λ -> weight of the regularizer, ε -> softness, b -> importance, ω -> gates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from fedquilt.data import ClientData
from fedquilt.errors import ConfigError, TrainingError, describe_unknown
from fedquilt.federation.client import Client, ClientResult, Task, Update, derive_seed
from fedquilt.federation.validation import MetricSpec, ReplySpec, training_metrics
from fedquilt.learning.batch import Batch
from fedquilt.structure.groups import count_leading
from fedquilt.structure.structure import Structure, map_followers
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import named_tensors
from fedquilt.training.client_loss import ClientLoss
from fedquilt.training.context import ClientContext
from fedquilt.training.gating import Gates, gate_module
from fedquilt.training.loop import iterate_batches, run_epochs, split_evenly
from fedquilt.training.optimizer_state import OptimizerMemory
from fedquilt.training.optimizers import WeightOptimizer, make_optimizer, trainable_weights
from fedquilt.training.relevance import compute_relevance
from fedquilt.training.sampling import label_divergence, sample_gates
from fedquilt.training.settings import LocalTraining

Importance = Literal["slimming", "lrp"]
WeightStep = Literal["top", "sampled"]
SHARES = "shares"  # under this name a client keeps its architecture


@dataclass(frozen=True)
class Bilevel:
    """The recipe: a step of the shares on validation data and a step of the weights, in turn.

    A step of the shares draws a subnet. A share of channels is trained for each of ``groups``;
    others are whole. In the end the most important channels of each group are the subnet that is
    sent.

    Args:
        local_training: Optimizer of the weights, epochs and batches.
        lr: The learning rate of the weights in this round.
        groups: Width groups whose shares are trained.
        keep_fraction: The share of channels that a new client starts with.
        keep_lr: The learning rate of the shares.
        min_fraction: The least share.
        softness: ε of the sampling of channels.
        strength: λ of the regularizer; None: the divergence of the client's labels from uniform,
            plus 0.5.
        validation: The fraction of the client's training data that the shares are trained on; it
            is drawn anew each time.
        persistent: Whether the client keeps its shares from round to round.
        by_examples: Whether the update's weight is the number of examples; else it is 1.
        importance: By ``"slimming"`` channels matter as the scales of their normalization say, or
            else the activations of the last batch. By ``"lrp"`` they matter by their relevance to
            the validation data, measured before every epoch and at the end. Activations and
            relevances are divided by the mean of their group.
    """

    local_training: LocalTraining
    lr: float
    groups: tuple[str, ...]
    keep_fraction: float = 1.0
    keep_lr: float = 0.01
    min_fraction: float = 0.1
    softness: float = 1.0
    strength: float | None = None
    validation: float = 0.1
    persistent: bool = True
    by_examples: bool = False
    importance: Importance = "slimming"
    weight_step: WeightStep = "top"

    def __post_init__(self) -> None:
        """Refuses words that are not known."""
        for name, words in (("importance", Importance), ("weight_step", WeightStep)):
            given = getattr(self, name)
            if given not in get_args(words):
                problem = describe_unknown(name.replace("_", " "), given, get_args(words))
                raise ConfigError(problem)

    def run(self, task: Task, context: ClientContext) -> ClientResult:
        """Trains, and sends the most important channels."""
        (whole,) = task.subnets
        data = context.examples("train", task.client)
        module = context.module(whole, task.params).train()
        kept = context.client_state.get(SHARES) if self.persistent else None
        new = torch.full((len(self.groups),), self.keep_fraction, device=context.device)
        shares = new if kept is None else kept.clone()
        validation, training = self._split_rows(len(data), task.seed)
        settings = self.local_training.optimizer_at(self.lr, len(training))
        optimizer = make_optimizer(module.parameters(), settings)
        memory = OptimizerMemory(context, is_kept=self.local_training.keep_optimizer)
        memory.attach(optimizer, ((name, whole) for name in trainable_weights(module)))
        with gate_module(module, context.structure, self.groups) as gates:
            local = _BilevelTrainer(
                self, module, context.structure, gates, shares, optimizer, context.client_loss()
            )
            loss = local.train(data, validation, training, task.seed, context.report_progress)
            subnet = local.get_subnet()
        metrics = {"loss": loss, "examples": len(training), "share": float(shares.mean())}
        sent = Subnet(subnet.kept, excluded=whole.excluded)
        tensors = context.tensors(module, sent, whole)
        weight = float(len(data)) if self.by_examples else 1.0
        update = Update(task.client, (sent,), (tensors,), weight, metrics)
        state = {**context.client_state, SHARES: shares} if self.persistent else None
        return ClientResult(update, memory.add_to(state))

    def reply_spec(self, task: Task, client: Client) -> ReplySpec:
        """What the reply may be: any part of the net."""
        weight = float(client.num_examples) if self.by_examples else 1.0
        metrics = training_metrics(client.num_examples, share=MetricSpec(high=1.0))
        return ReplySpec(task.subnets, weight, metrics, is_chosen=True)

    def _split_rows(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """Rows to train the shares on, two or more, and rows to train the weights on.

        A single example serves for both.
        """
        generator = torch.Generator().manual_seed(derive_seed(seed, 2))
        order = torch.randperm(count, generator=generator)
        num_validation = max(min(2, count - 1), 1, round(self.validation * count))
        return order[:num_validation], order[num_validation:] if count > 1 else order

    def penalty(self, data: ClientData, num_classes: int | None) -> float:
        """λ: as given, or by how far the client's labels are from uniform (Sec. 4.1.4).

        Targets without classes have no such divergence: it counts as zero.
        """
        if self.strength is not None:
            return self.strength
        if num_classes is None or data.labels is None:
            return 0.5
        counts = np.bincount(np.asarray(data.labels).reshape(-1), minlength=num_classes)
        return label_divergence(counts) + 0.5


class _BilevelTrainer:
    """One client's weights and shares."""

    def __init__(
        self,
        settings: Bilevel,
        module: nn.Module,
        structure: Structure,
        gates: Gates,
        shares: Tensor,
        optimizer: WeightOptimizer,
        loss: ClientLoss,
    ) -> None:
        self._settings, self._module, self._structure = settings, module, structure
        self._gates, self._shares, self._optimizer = gates, shares, optimizer
        self._loss = loss
        self._norms = read_norm_scales(module, structure, settings.groups)
        self._relevance: Mapping[str, Tensor] | None = None
        self._top: Mapping[str, Tensor] = {}  # the channels of each group that were trained last
        if settings.importance == "slimming":
            gates.wants_activity = frozenset(g for g in settings.groups if not self._norms[g])

    def train(
        self,
        data: ClientData,
        validation: Tensor,
        training: Tensor,
        seed: int,
        report_progress: Callable[[float], None],
    ) -> float:
        """Epochs of both steps in turn, the shares on some rows and the weights on others.

        Returns the mean loss of the last epoch.
        """
        noise = torch.Generator().manual_seed(derive_seed(seed, 1))
        classes = self._structure.classes
        num_classes = self._structure.groups[classes].size if classes else 1
        has_classes = self._loss.loss.has_classes
        strength = self._settings.penalty(data, num_classes if has_classes else None)
        loop = self._settings.local_training.loop
        validation_batches: Iterator[Tensor] | None = None

        def before_epoch() -> None:
            nonlocal validation_batches
            self._measure_relevance(data, validation)
            validation_batches = None

        def step_shares(generator: torch.Generator) -> None:
            nonlocal validation_batches
            if validation_batches is None:
                validation_batches = _cycle_batches(validation, loop.batch_size, generator)
            self._step_shares(data, next(validation_batches), strength, noise)

        def step_weights(batch: Batch, generator: torch.Generator) -> Tensor:
            return self._step_weights(batch, noise)

        loss = run_epochs(
            data,
            step_weights,
            loop,
            seed,
            report_progress,
            rows=training,
            before_epoch=before_epoch,
            before_batch=step_shares,
        )
        if self._settings.weight_step == "sampled":
            self._measure_relevance(data, validation)
            self._top = self._find_top()
        return loss

    def _measure_relevance(self, data: ClientData, rows: Tensor) -> None:
        """Relevance of the whole net's channels, if channels matter by it."""
        settings = self._settings
        if settings.importance != "lrp":
            return
        self._gates.values = {}
        sums = {g: self._zeros(g) for g in settings.groups}
        for batch_rows in split_evenly(rows, settings.local_training.batch_size):
            relevance = compute_relevance(
                self._module, self._structure, settings.groups, *data.batch(batch_rows)
            )
            sums = {g: total + relevance[g] for g, total in sums.items()}
        self._relevance = {g: divide_by_mean(total) for g, total in sums.items()}

    def _step_shares(
        self, data: ClientData, rows: Tensor, strength: float, noise: torch.Generator
    ) -> None:
        """Line 13: A descends on L_val (Eqs. 5, 6, 9), the weights as they are."""
        shares = self._shares.clone().requires_grad_()
        self._draw_gates(shares, noise)
        loss = self._loss.of_batch(self._module, data.batch(rows))
        loss = loss + strength * (shares**2).sum()
        (gradient,) = torch.autograd.grad(loss, [shares])
        self._shares -= self._settings.keep_lr * gradient
        self._shares.clamp_(self._settings.min_fraction, 1.0)
        if not bool(torch.isfinite(self._shares).all()):
            raise TrainingError("its shares are not finite any more; its training diverged")

    def _step_weights(self, batch: Batch, noise: torch.Generator) -> Tensor:
        """Line 14: w descends on L_train, through the top channels or a subnet that is drawn."""
        with torch.no_grad():
            if self._settings.weight_step == "top":
                self._top = self._find_top()
                self._gates.values = {g: self._open(g, rows) for g, rows in self._top.items()}
            else:
                self._draw_gates(self._shares, noise)
        loss = self._loss.of_batch(self._module, batch)
        self._optimizer.step(loss)
        return loss.detach()

    def _draw_gates(self, shares: Tensor, noise: torch.Generator) -> None:
        """Gates of every group; at least the most important channel stays open."""
        drawn = {}
        for number, group in enumerate(self._settings.groups):
            importance = self._compute_importance(group)
            uniform = torch.rand(len(importance), generator=noise, dtype=torch.float64)
            uniform[int(importance.argmax())] = 0.0
            drawn[group] = sample_gates(
                shares[number], importance, self._settings.softness, uniform
            )
        self._gates.values = drawn

    def _compute_importance(self, group: str) -> Tensor:
        """b: relevance; or the scales of normalization, or else activations of the last batch."""
        if self._relevance is not None:
            return self._relevance[group]
        if self._norms[group]:
            return torch.stack([w.detach().abs() for w in self._norms[group]]).mean(0)
        if group not in self._gates.activity:
            return self._zeros(group)
        return divide_by_mean(self._gates.activity[group])

    def _zeros(self, group: str) -> Tensor:
        return torch.zeros(self._structure.groups[group].size, device=self._shares.device)

    def _open(self, group: str, channels: Tensor) -> Tensor:
        """Gates that are open for some channels."""
        return self._zeros(group).index_fill(0, channels, 1.0)

    def _find_top(self) -> Mapping[str, Tensor]:
        """The top ⌈α C⌉ channels of each group."""
        channels = {}
        for share, group in zip(self._shares.tolist(), self._settings.groups, strict=True):
            count = count_leading(self._structure.groups[group].size, share)
            order = self._compute_importance(group).argsort(descending=True, stable=True)
            channels[group] = order[:count]
        return channels

    def get_subnet(self) -> Subnet:
        """Line 16: the top channels; those that the last step trained, if it trained the top."""
        return Subnet.from_channels(
            {
                group: channels.tolist()
                for group, channels in self._top.items()
                if len(channels) < self._structure.groups[group].size
            }
        )


def _cycle_batches(rows: Tensor, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Shuffled batches of rows, again and again."""
    while True:
        for positions in iterate_batches(len(rows), size, generator):
            yield rows[positions]


def divide_by_mean(values: Tensor) -> Tensor:
    """Values divided by their mean, so that they are comparable with a softness; zeros stay.

    >>> divide_by_mean(torch.tensor([1.0, 3.0]))
    tensor([0.5000, 1.5000])
    """
    return values / values.mean().clamp(min=torch.finfo(torch.float32).tiny)


def read_norm_scales(
    module: nn.Module, structure: Structure, groups: tuple[str, ...]
) -> Mapping[str, list[Tensor]]:
    """The scales of batch normalization of each group's channels."""
    tensors = named_tensors(module)
    scales = {
        name
        for path, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.weight is not None
        for name in (f"{path}.weight" if path else "weight",)
    }
    return {g: [tensors[n] for n in map_followers(structure)[g] if n in scales] for g in groups}
