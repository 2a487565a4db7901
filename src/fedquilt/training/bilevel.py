"""Training weights and architecture in turn, by gradient (ADDS, Algorithm 1, lines 10-17).

Symbols of the paper -> names here: A = {α^k} -> shares, w, θ -> the module's weights, I -> the
subnet, λ -> weight of the regulariser, ε -> softness, b -> importance, ω -> gates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from fedquilt.data import ClientData
from fedquilt.errors import ConfigError, TrainingError, unknown
from fedquilt.federation.boundary import Metric, Terms, training
from fedquilt.federation.client import Client, Task, Update, seed_of
from fedquilt.structure.groups import Structure, following, leading
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.trace import named_tensors
from fedquilt.training.descent import Descent, Optimiser
from fedquilt.training.gating import Gated, gated
from fedquilt.training.losses import cross_entropy
from fedquilt.training.recipe import Workbench
from fedquilt.training.relevance import relevances
from fedquilt.training.sampling import divergence, gates
from fedquilt.training.sgd import batches

Importance = Literal["slimming", "lrp"]
SHARES = "shares"  # under this name a client keeps its architecture


@dataclass(frozen=True)
class Bilevel:
    """The recipe: in turn a step of the shares on validation data and one of the weights.

    Every step draws a subnet. Shares of channels are trained for ``groups``, one each, within
    [``least``, 1]; others are whole. In the end the most important channels are the subnet that
    goes back, and its channels are the index map. ``validation`` is the part of the client's
    training data, drawn anew each time, that the shares are trained on. ``strength`` is λ; None:
    the divergence of the client's labels from uniform, plus 0.5. With ``persistent`` the shares are
    kept by the client from round to round; with ``by_examples`` it counts by the size of its data.

    By ``importance="slimming"`` channels matter as the scales of their normalisation say, or else
    the activations of the last batch; by ``"lrp"`` as their relevance to the validation data does,
    found anew before every epoch and at the end. Both of the latter are in means of their group.
    """

    optimiser: Optimiser
    lr: float
    groups: tuple[str, ...]
    share: float = 1.0
    share_lr: float = 0.01
    least: float = 0.1
    softness: float = 1.0
    strength: float | None = None
    validation: float = 0.1
    persistent: bool = True
    by_examples: bool = False
    importance: Importance = "slimming"

    def __post_init__(self) -> None:
        """Refuses an importance that there is not."""
        refuse_no_importance(self.importance)

    def run(self, task: Task, bench: Workbench) -> Update:
        """Trains, and sends what was found to matter."""
        (whole,) = task.subnets
        data = bench.examples("train", task.client)
        module = bench.module(whole, task.params).train()
        kept = (bench.kept or {}).get(SHARES) if self.persistent else None
        shares = torch.full((len(self.groups),), self.share) if kept is None else kept.clone()
        with gated(module, bench.structure, self.groups) as gates:
            local = _Local(self, module, bench.structure, gates, shares)
            loss, examples = local.train(data, task.seed, bench)
            if not bool(torch.isfinite(shares).all()):
                raise TrainingError("its shares are not finite any more; its training diverged")
            subnet = local.subnet()
        if self.persistent:
            bench.to_keep = {**(bench.kept or {}), SHARES: shares}
        metrics = {"loss": loss, "examples": examples, "share": float(shares.mean())}
        sent = Subnet(subnet.kept, without=whole.without)
        tensors = bench.tensors(module, sent, whole)
        weight = float(len(data)) if self.by_examples else 1.0
        return Update(task.client, (sent,), (tensors,), weight, metrics)

    def terms(self, task: Task, client: Client) -> Terms:
        """What its answer may be: any part of the net."""
        weight = float(client.num_examples) if self.by_examples else 1.0
        metrics = training(client.num_examples, share=Metric(high=1.0))
        return Terms(task.subnets, weight, metrics, is_chosen=True)

    def penalty(self, data: ClientData, num_classes: int) -> float:
        """λ: as given, or by how far the client's labels are from uniform (Sec. 4.1.4)."""
        if self.strength is not None:
            return self.strength
        counts = np.bincount(np.asarray(data.labels).reshape(-1), minlength=num_classes)
        return divergence(counts) + 0.5


class _Local:
    """One client's weights and shares."""

    def __init__(
        self,
        settings: Bilevel,
        module: nn.Module,
        structure: Structure,
        gates: Gated,
        shares: Tensor,
    ) -> None:
        self._settings, self._module, self._structure = settings, module, structure
        self._gates, self._shares = gates, shares
        self._norms = norms(module, structure, settings.groups)
        self._relevance: Mapping[str, Tensor] | None = None
        if settings.importance == "slimming":
            gates.wants_activity = frozenset(g for g in settings.groups if not self._norms[g])
        self._descent = Descent(module.parameters(), settings.optimiser, settings.lr)

    def train(self, data: ClientData, seed: int, bench: Workbench) -> tuple[float, int]:
        """Epochs of both steps in turn; the mean loss of the last, and the examples trained on."""
        settings, optimiser = self._settings, self._settings.optimiser
        torch.default_generator.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        noise = torch.Generator().manual_seed(seed_of(seed, 1))
        held_back, rest = self._parted(len(data), torch.Generator().manual_seed(seed_of(seed, 2)))
        classes = self._structure.classes
        num_classes = self._structure.groups[classes].size if classes else 1
        strength = settings.penalty(data, num_classes)
        total = torch.zeros(())
        for epoch in range(optimiser.epochs):
            self._look(data, held_back)
            total, count = torch.zeros(()), 0
            checks = self._endless(held_back, generator)
            for rows in batches(len(rest), optimiser.batch_size, generator):
                self._move_shares(data, next(checks), strength, noise)
                x, y = data.batch(rest[rows], generator)
                total += self._move_weights(x, y, noise) * len(rows)
                count += len(rows)
                bench.tell((epoch + count / len(rest)) / optimiser.epochs)
            total = total / count
        self._look(data, held_back)
        return float(total), len(rest)

    def _look(self, data: ClientData, rows: Tensor) -> None:
        """Relevance of the whole net's channels, if it is what counts."""
        settings = self._settings
        if settings.importance != "lrp":
            return
        self._gates.values = {}
        sums = {g: torch.zeros(self._structure.groups[g].size) for g in settings.groups}
        for some in rows.tensor_split(math.ceil(len(rows) / settings.optimiser.batch_size)):
            found = relevances(self._module, self._structure, settings.groups, *data.batch(some))
            sums = {g: total + found[g] for g, total in sums.items()}
        self._relevance = {g: in_means(total) for g, total in sums.items()}

    def _parted(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows to train the shares on, two or more, and rows to train the weights on.

        Of a single example both are.
        """
        order = torch.randperm(count, generator=generator)
        held_back = max(min(2, count - 1), 1, round(self._settings.validation * count))
        return order[:held_back], order[held_back:] if count > 1 else order

    def _endless(self, rows: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
        while True:
            for some in batches(len(rows), self._settings.optimiser.batch_size, generator):
                yield rows[some]

    def _move_shares(
        self, data: ClientData, rows: Tensor, strength: float, noise: torch.Generator
    ) -> None:
        """Line 13: A descends on L_val (Eqs. 5, 6, 9), the weights as they are."""
        shares = self._shares.clone().requires_grad_()
        self._draw(shares, noise)
        x, y = data.batch(rows)
        loss = cross_entropy(self._module(x), y) + strength * (shares**2).sum()
        (gradient,) = torch.autograd.grad(loss, [shares])
        self._shares -= self._settings.share_lr * gradient
        self._shares.clamp_(self._settings.least, 1.0)

    def _move_weights(self, x: Tensor, y: Tensor, noise: torch.Generator) -> Tensor:
        """Line 14: w descends on L_train, through a subnet that is drawn."""
        with torch.no_grad():
            self._draw(self._shares, noise)
        loss = cross_entropy(self._module(x), y)
        self._descent.step(loss)
        return loss.detach()

    def _draw(self, shares: Tensor, noise: torch.Generator) -> None:
        """Gates of every group; at least the most important channel stays open."""
        drawn = {}
        for number, group in enumerate(self._settings.groups):
            importance = self._importance(group)
            uniform = torch.rand(len(importance), generator=noise, dtype=torch.float64)
            uniform[importance.argmax()] = 0.0
            drawn[group] = gates(shares[number], importance, self._settings.softness, uniform)
        self._gates.values = drawn

    def _importance(self, group: str) -> Tensor:
        """b: relevance; or the scales of normalisation, or else activations of the last batch."""
        if self._relevance is not None:
            return self._relevance[group]
        if self._norms[group]:
            return torch.stack([w.detach().abs() for w in self._norms[group]]).mean(0)
        if group not in self._gates.activity:
            return torch.zeros(self._structure.groups[group].size)
        return in_means(self._gates.activity[group])

    def subnet(self) -> Subnet:
        """Line 16: the top ⌈α C⌉ channels of each group."""
        found = {}
        for share, group in zip(self._shares.tolist(), self._settings.groups, strict=True):
            count = leading(self._structure.groups[group].size, share)
            order = self._importance(group).argsort(descending=True, stable=True)
            found[group] = order[:count].tolist()
        return Subnet.of(
            {g: c for g, c in found.items() if len(c) < self._structure.groups[g].size}
        )


def in_means(values: Tensor) -> Tensor:
    """Values divided by their mean, so that they are comparable with a softness; zeros stay.

    >>> in_means(torch.tensor([1.0, 3.0]))
    tensor([0.5000, 1.5000])
    """
    return values / values.mean().clamp(min=torch.finfo(torch.float32).tiny)


def refuse_no_importance(given: str) -> None:
    """Refuses what is no measure of importance."""
    if given not in get_args(Importance):
        raise ConfigError(unknown("importance", given, get_args(Importance)))


def norms(
    module: nn.Module, structure: Structure, groups: tuple[str, ...]
) -> Mapping[str, list[Tensor]]:
    """The scales of batch normalisation of each group's channels."""
    tensors = named_tensors(module)
    scales = {
        name
        for path, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.weight is not None
        for name in (f"{path}.weight" if path else "weight",)
    }
    return {g: [tensors[n] for n in following(structure)[g] if n in scales] for g in groups}
