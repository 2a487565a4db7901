"""Training through a Moreau envelope: a model of the client's own near the one it sends (pFedMe).

Dinh, Tran, Nguyen. "Personalized Federated Learning with Moreau Envelopes." NeurIPS 2020.

Symbols of the paper -> names here: w_i -> sent, θ_i -> the module's weights, K -> steps,
λ -> attraction, η -> lr, R -> the batches of local_training.epochs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedquilt.federation.client import PERSONAL, Client, ClientResult, Task, Update
from fedquilt.federation.validation import ReplySpec, training_metrics
from fedquilt.learning.batch import Batch
from fedquilt.structure.subnet import Subnet
from fedquilt.training.client_loss import ClientLoss
from fedquilt.training.context import ClientContext
from fedquilt.training.loop import run_epochs
from fedquilt.training.optimizer_settings import SGDSettings
from fedquilt.training.optimizer_state import OptimizerMemory
from fedquilt.training.optimizers import make_optimizer, trainable_weights
from fedquilt.training.settings import LocalTraining
from fedquilt.training.sgd import SGDStep


@dataclass(frozen=True)
class Moreau:
    """The recipe: Algorithm 1 on the client; each batch is one local round.

    θ goes down f(θ) + λ/2 ‖θ − w‖² on the batch by plain gradient, K times. Then
    w <- w − η λ (w − θ), which is a step down the envelope's gradient, with the momentum, decay and
    clipping of ``local_training``. θ starts at the server's model and goes on from batch to batch.
    It stays on the client, which would itself use it; w is sent.

    Args:
        local_training: Optimizer of w, epochs and batches.
        lr: η, the learning rate of w in this round.
        steps: K, the steps of θ on each batch.
        attraction: λ.
        personal_lr: The learning rate of θ.
    """

    local_training: LocalTraining
    lr: float
    steps: int = 5
    attraction: float = 15.0
    personal_lr: float = 0.05

    def run(self, task: Task, context: ClientContext) -> ClientResult:
        """Trains both models; sends one, keeps the other."""
        (subnet,) = task.subnets
        examples = context.examples("train", task.client)
        module = context.module(subnet, task.params).train()
        near = _MoreauStep(module, self, len(examples), context.client_loss())
        memory = OptimizerMemory(context, is_kept=self.local_training.keep_optimizer)
        memory.attach(near.optimizer, ((name, subnet) for name in near.sent))
        loop = self.local_training.loop
        loss = run_epochs(examples, near.step, loop, task.seed, context.report_progress)
        own = context.tensors(module, subnet, subnet)
        state = context.next_client_state([module], [personal_subnet(subnet)], ("*",))
        sent = {**own, **{name: w.detach() for name, w in near.sent.items()}}
        metrics = {"loss": loss, "examples": len(examples)}
        update = Update(task.client, task.subnets, (sent,), 1.0, metrics)
        return ClientResult(update, memory.add_to(state), local_model=(task.subnets, (own,)))

    def reply_spec(self, task: Task, client: Client) -> ReplySpec:
        """What the reply may be."""
        return ReplySpec(task.subnets, 1.0, training_metrics(client.num_examples))


def personal_subnet(subnet: Subnet) -> Subnet:
    """The net of that shape all of whose tensors are the client's own, as it keeps them."""
    return subnet.shape.with_private(PERSONAL, "*")


class _MoreauStep:
    """A client's two models: w, and in a module θ near it."""

    def __init__(
        self, module: nn.Module, settings: Moreau, num_examples: int, loss: ClientLoss
    ) -> None:
        self._module, self._settings, self._loss = module, settings, loss
        weights = trainable_weights(module)
        self._weights: list[Tensor] = list(weights.values())
        self.sent = {n: w.detach().clone().requires_grad_() for n, w in weights.items()}
        self._inner = SGDStep(self._weights, SGDSettings(settings.personal_lr))
        outer = settings.local_training.optimizer_at(settings.lr, num_examples)
        self.optimizer = make_optimizer(self.sent.values(), outer)

    def step(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """K steps of θ, and one of w; the loss before the last step of θ."""
        attraction = self._settings.attraction
        for _ in range(self._settings.steps):
            loss = self._loss.of_batch(self._module, batch)
            slopes = self._inner.compute_gradients(loss)
            pairs = zip(slopes, self._distance(attraction), strict=True)
            self._inner.apply_gradients(
                [pull if slope is None else pull.add_(slope) for slope, pull in pairs]
            )
        self.optimizer.apply_gradients(self._distance(-attraction))
        return loss.detach()

    @torch.no_grad()
    def _distance(self, factor: float) -> tuple[Tensor, ...]:
        """``factor`` times θ − w."""
        sent: list[Tensor] = list(self.sent.values())
        distance = torch._foreach_sub(self._weights, sent)
        torch._foreach_mul_(distance, factor)
        return distance
