"""FedDyn: each client's loss is bent so that its optimum is that of all clients together.

Acar, Zhao, Matas, Mattina, Whatmough, Saligrama. "Federated Learning Based on Dynamic
Regularization." ICLR 2021, Algorithm 1.

Symbols of the paper -> names here: θ_k -> trained, θ of the server -> start, ∇L_k(θ_k) -> pull,
h -> drift, γ (the mean of the θ_k) -> mean, α -> alpha, P_t / m -> shares.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedquilt.federation.client import Client, ClientResult, Task
from fedquilt.federation.validation import ReplySpec, training_metrics
from fedquilt.learning.batch import Batch
from fedquilt.structure.cut import Params
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.client_loss import ClientLoss
from fedquilt.training.context import ClientContext
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.objectives import Objective
from fedquilt.training.optimizers import trainable_weights


@dataclass(frozen=True)
class FedDynTraining:
    """The recipe: ``sgd`` on one subnet, with the terms of dynamic regularization.

    θ_k = argmin L_k(θ) − ⟨pull, θ⟩ + α/2 ‖θ − start‖², and then pull <- pull − α (θ_k − start).
    A client keeps its pull, for the weights that it trains and sends; at first it is zero.

    Args:
        sgd: How the subnet is trained.
        alpha: α.
    """

    sgd: LocalSGD
    alpha: float

    def run(self, task: Task, context: ClientContext) -> ClientResult:
        """Trains the subnet, and remembers the client's new pull."""
        (subnet,) = task.subnets
        module = context.module(subnet, task.params)
        sent = set(context.structure.tensor_names(subnet))
        start = {n: w.detach().clone() for n, w in trainable_weights(module).items() if n in sent}
        before = context.client_state
        pull = {name: before.get(name, torch.zeros_like(w)) for name, w in start.items()}
        bent = RegularizedObjective(self.sgd.objective, self.alpha, start, pull)
        result = replace(self.sgd, objective=bent).run(task, context)
        (trained,) = result.update.params
        new_pull = {n: pull[n] - self.alpha * (trained[n] - w) for n, w in start.items()}
        return replace(result, state={**before, **(result.state or {}), **new_pull})

    def reply_spec(self, task: Task, client: Client) -> ReplySpec:
        """What the reply may be; its loss has terms that may be negative."""
        least = training_metrics(client.num_examples, -math.inf)
        return replace(self.sgd.reply_spec(task, client), metrics=least)


@dataclass(frozen=True, eq=False)
class RegularizedObjective:
    """The objective: another one, and − ⟨pull, θ⟩ + α/2 ‖θ − start‖²."""

    plain: Objective
    alpha: float
    start: Params
    pull: Params

    def loss(
        self,
        module: nn.Module,
        batch: Batch,
        loss: ClientLoss,
        generator: torch.Generator,
    ) -> Tensor:
        """The loss of one batch."""
        total = self.plain.loss(module, batch, loss, generator)
        weights = trainable_weights(module)
        for name, start in self.start.items():
            away = weights[name] - start
            total = total - (self.pull[name] * weights[name]).sum()
            total = total + self.alpha / 2 * away.square().sum()
        return total


def compute_server_model(mean: Params, drift: Params, alpha: float) -> dict[str, Tensor]:
    """What clients start from: θ = γ − h/α. A tensor that has not drifted is the mean itself."""
    return {**mean, **{name: mean[name] - h / alpha for name, h in drift.items()}}


def update_drift(
    drift: Params, start: Params, mean: Params, shares: Mapping[str, float], alpha: float
) -> dict[str, Tensor]:
    """h <- h − α (1/m) Σ_k (θ_k − θ), for the tensors that were trained.

    ``shares`` is how many of the m clients that hold a tensor trained it in this round, so that h
    is the mean of all their pulls.
    """
    moved = {}
    for name, share in shares.items():
        step = alpha * share * (mean[name] - start[name])
        moved[name] = drift[name] - step if name in drift else -step
    return {**drift, **moved}


def compute_trained_fractions(
    names: Iterable[str],
    structure: Structure,
    trained: Mapping[Subnet, int],
    held: Mapping[Subnet, int],
) -> dict[str, float]:
    """The fraction of a tensor's holders that trained it, for tensors that were trained."""
    counts, holders = (_count_holders(structure, subnets) for subnets in (trained, held))
    return {name: counts[name] / holders[name] for name in names if counts[name]}


def _count_holders(structure: Structure, subnets: Mapping[Subnet, int]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for subnet, count in subnets.items():
        counts.update(dict.fromkeys(structure.tensor_names(subnet), count))
    return counts
