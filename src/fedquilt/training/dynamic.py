"""FedDyn: each client's loss is bent so that its optimum is that of all clients together.

Acar, Zhao, Matas, Mattina, Whatmough, Saligrama. "Federated Learning Based on Dynamic
Regularization." ICLR 2021, Algorithm 1.

Symbols of the paper -> names here: θ_k -> trained, θ of the server -> start, ∇L_k(θ_k) -> pull,
h -> drift, γ (the mean of the θ_k) -> mean, α -> alpha, P_t / m -> shares.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedquilt.federation.boundary import Terms, training
from fedquilt.federation.client import Client, Task, Update
from fedquilt.structure.cut import Params
from fedquilt.structure.groups import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.objectives import Objective
from fedquilt.training.recipe import Workbench
from fedquilt.training.sgd import SGD


@dataclass(frozen=True)
class Dynamic:
    """The recipe: ``sgd`` on one subnet, with the terms of dynamic regularization.

    θ_k = argmin L_k(θ) − ⟨pull, θ⟩ + α/2 ‖θ − start‖², and then pull <- pull − α (θ_k − start).
    A client keeps its pull, for the weights that it trains and sends; at first it is zero.
    """

    sgd: SGD
    alpha: float

    def run(self, task: Task, bench: Workbench) -> Update:
        """Trains the subnet, and remembers the client's new pull."""
        (subnet,) = task.subnets
        module = bench.module(subnet, task.params)
        sent = set(bench.structure.names(subnet))
        start = {n: w.detach().clone() for n, w in learned(module).items() if n in sent}
        kept = dict(bench.kept or {})
        pull = {name: kept.get(name, torch.zeros_like(w)) for name, w in start.items()}
        bent = Bent(self.sgd.objective, self.alpha, start, pull)
        update = replace(self.sgd, objective=bent).run(task, bench)
        (trained,) = update.params
        moved = {n: pull[n] - self.alpha * (trained[n] - w) for n, w in start.items()}
        bench.to_keep = {**kept, **moved}
        return update

    def terms(self, task: Task, client: Client) -> Terms:
        """What its answer may be; its loss has terms that may be negative."""
        least = training(client.num_examples, -math.inf)
        return replace(self.sgd.terms(task, client), metrics=least)


@dataclass(frozen=True, eq=False)
class Bent:
    """The objective: another one, and − ⟨pull, θ⟩ + α/2 ‖θ − start‖²."""

    plain: Objective
    alpha: float
    start: Params
    pull: Params

    def loss(
        self,
        module: nn.Module,
        x: Tensor,
        y: Tensor,
        own: tuple[int, ...] | None,
        generator: torch.Generator,
    ) -> Tensor:
        """The loss of one batch."""
        total = self.plain.loss(module, x, y, own, generator)
        weights = learned(module)
        for name, start in self.start.items():
            away = weights[name] - start
            total = total - (self.pull[name] * weights[name]).sum()
            total = total + self.alpha / 2 * away.square().sum()
        return total


def learned(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that training moves; statistics are only averaged."""
    return {n: w for n, w in module.named_parameters() if w.requires_grad}


def server_model(mean: Params, drift: Params, alpha: float) -> dict[str, Tensor]:
    """What clients start from: θ = γ − h/α. A tensor that has not drifted is the mean itself."""
    return {**mean, **{name: mean[name] - h / alpha for name, h in drift.items()}}


def drifted(
    drift: Params, start: Params, mean: Params, shares: Mapping[str, float], alpha: float
) -> dict[str, Tensor]:
    """h <- h − α (1/m) Σ_k (θ_k − θ), for the tensors that somebody has trained.

    ``shares`` is how many of the m clients that hold a tensor trained it in this round, so that h
    is the mean of all their pulls.
    """
    moved = {}
    for name, share in shares.items():
        step = alpha * share * (mean[name] - start[name])
        moved[name] = drift[name] - step if name in drift else -step
    return {**drift, **moved}


def shares_of(
    names: Iterable[str],
    structure: Structure,
    trained: Mapping[Subnet, int],
    held: Mapping[Subnet, int],
) -> dict[str, float]:
    """Which part of those that hold a tensor trained it, for tensors that somebody did."""
    counts, holders = (_count(structure, subnets) for subnets in (trained, held))
    return {name: counts[name] / holders[name] for name in names if counts[name]}


def _count(structure: Structure, subnets: Mapping[Subnet, int]) -> Counter[str]:
    found: Counter[str] = Counter()
    for subnet, count in subnets.items():
        found.update(dict.fromkeys(structure.names(subnet), count))
    return found


def counted(updates: Iterable[Update], subnets: Counter[Subnet]) -> Iterator[Update]:
    """The updates as they come; which subnets they were of is counted meanwhile."""
    for update in updates:
        subnets.update(update.subnets)
        yield update
