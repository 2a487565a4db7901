"""Training through a Moreau envelope: a model of the client's own near the one it sends (pFedMe).

Dinh, Tran, Nguyen. "Personalized Federated Learning with Moreau Envelopes." NeurIPS 2020.

Symbols of the paper -> names here: w_i -> sent, θ_i -> the module's weights, K -> steps,
λ -> attraction, η -> lr, R -> the batches of optimiser.epochs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedquilt.data import ClientData
from fedquilt.federation.boundary import Terms, training
from fedquilt.federation.client import PERSONAL, Client, Task, Update
from fedquilt.structure.subnet import Subnet
from fedquilt.training.descent import Descent, Optimiser
from fedquilt.training.dynamic import learned
from fedquilt.training.losses import cross_entropy
from fedquilt.training.recipe import Workbench
from fedquilt.training.sgd import batches


@dataclass(frozen=True)
class Moreau:
    """The recipe: Algorithm 1 on the client; each batch is one local round.

    θ goes down f(θ) + λ/2 ‖θ − w‖² on the batch by plain gradient, K times at the rate
    ``personal_lr``; then w <- w − η λ (w − θ), which is a step down the envelope's gradient, with
    the momentum, decay and clipping of ``optimiser``. θ starts at the server's model and goes on
    from batch to batch. It stays on the client, which would itself use it; w is sent.
    """

    optimiser: Optimiser
    lr: float
    steps: int = 5
    attraction: float = 15.0
    personal_lr: float = 0.05

    def run(self, task: Task, bench: Workbench) -> Update:
        """Trains both models; sends one, keeps the other."""
        (subnet,) = task.subnets
        examples = bench.examples("train", task.client)
        module = bench.module(subnet, task.params).train()
        near = _Near(module, self)
        loss = self._train(near, examples, task.seed, bench)
        own = bench.tensors(module, subnet, subnet)
        bench.keep(module, personal(subnet), ("*",))
        bench.own = (task.subnets, (own,))
        sent = {**own, **{name: w.detach() for name, w in near.sent.items()}}
        metrics = {"loss": loss, "examples": len(examples)}
        return Update(task.client, task.subnets, (sent,), 1.0, metrics)

    def terms(self, task: Task, client: Client) -> Terms:
        """What its answer may be."""
        return Terms(task.subnets, 1.0, training(client.num_examples))

    def _train(self, near: _Near, examples: ClientData, seed: int, bench: Workbench) -> float:
        """Trains in place; the mean loss of θ in the last epoch."""
        settings = self.optimiser
        torch.default_generator.manual_seed(seed)  # what dropout and the like draw from
        generator = torch.Generator().manual_seed(seed)
        total = torch.zeros(())
        for epoch in range(settings.epochs):
            total, count = torch.zeros(()), 0
            for rows in batches(len(examples), settings.batch_size, generator):
                x, y = examples.batch(rows, generator)
                total += near.step(x, y) * len(rows)
                count += len(rows)
                bench.tell((epoch + count / len(examples)) / settings.epochs)
            total = total / count
        return float(total)


def personal(subnet: Subnet) -> Subnet:
    """The net of that shape all of whose tensors are the client's own, as it keeps them."""
    return subnet.shape.owning(PERSONAL, "*")


class _Near:
    """A client's two models: w, and in a module θ near it."""

    def __init__(self, module: nn.Module, settings: Moreau) -> None:
        self._module, self._settings = module, settings
        weights = learned(module)
        self._weights: list[Tensor] = list(weights.values())
        self.sent = {n: w.detach().clone().requires_grad_() for n, w in weights.items()}
        plain = Optimiser(momentum=0.0, weight_decay=0.0, clip=None)
        self._inner = Descent(self._weights, plain, settings.personal_lr)
        self._outer = Descent(self.sent.values(), settings.optimiser, settings.lr)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """K steps of θ, and one of w; the loss before the last step of θ."""
        attraction = self._settings.attraction
        for _ in range(self._settings.steps):
            loss = cross_entropy(self._module(x), y)
            slopes = torch.autograd.grad(loss, self._weights, allow_unused=True)
            pairs = zip(slopes, self._apart(attraction), strict=True)
            self._inner.follow(
                [pull if slope is None else pull.add_(slope) for slope, pull in pairs]
            )
        self._outer.follow(self._apart(-attraction))
        return loss.detach()

    @torch.no_grad()
    def _apart(self, times: float) -> tuple[Tensor, ...]:
        """So many times θ − w."""
        sent: list[Tensor] = list(self.sent.values())
        apart = torch._foreach_sub(self._weights, sent)
        torch._foreach_mul_(apart, times)
        return apart
