"""DP-SGD on a client: what is protected is each single example (optional extra ``dpsgd``).

Abadi et al. "Deep Learning with Differential Privacy." CCS 2016. In every step each example is in
the batch with probability B/n. Its gradient is clipped to the norm C. The sum gets Gaussian noise
of standard deviation σC, and is divided by the expected size B of the batch. Gradients of single
examples are those of opacus.

Symbols of the paper -> names here: C -> clip, σ -> noise_multiplier, L -> batch_size.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.data import ClientData
from fedquilt.devices import seed_generators
from fedquilt.errors import ConfigError, TrainingError
from fedquilt.federation.client import Client, ClientResult, Task, Update
from fedquilt.federation.privacy.noise import digest_tensors, draw_noise, draw_uniform
from fedquilt.federation.validation import ReplySpec
from fedquilt.learning.batch import as_batch
from fedquilt.training.client_loss import ClientLoss
from fedquilt.training.context import ClientContext
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.objectives import Objective, bind_examples
from fedquilt.training.optimizers import make_optimizer
from fedquilt.training.private import mix_secret
from fedquilt.training.scaler import scale_outputs


@dataclass(frozen=True)
class DPSGD:
    """The recipe: local training in which every step is private for the examples.

    There are as many steps as whole batches in the epochs of ``sgd``. The loss is over all classes,
    as those that a client has depend on single examples.

    Args:
        sgd: Optimizer, epochs, the size of batches, and the objective.
        noise_multiplier: σ.
        clip: C, the largest norm of an example's gradient.
        min_examples: A client with fewer examples does not train: ε would be larger for it.
        secret: What noise and batches are drawn from, as hexadecimal digits.
        round: The number of the round.
    """

    sgd: LocalSGD
    noise_multiplier: float
    clip: float
    min_examples: int
    secret: str
    round: int

    def run(self, task: Task, context: ClientContext) -> ClientResult:
        """Trains the subnets, one after another, on batches of their own."""
        examples = context.examples("train", task.client)
        if len(examples) < self.min_examples:
            raise TrainingError(
                f"client {task.client} has fewer than the {self.min_examples} examples that "
                "privacy.min_examples promises"
            )
        modules = [m.train() for m in context.modules(task.subnets, task.params)]
        seed_generators(task.seed, context.device)
        with ExitStack() as stack:
            for module in modules if self.sgd.scale else ():
                stack.enter_context(scale_outputs(module, context.structure))
            for number, module in enumerate(modules):
                self._train(module, examples, task, number, context)
        tensors = tuple(map(context.tensors, modules, task.subnets, task.subnets))
        update = Update(task.client, task.subnets, tensors, 1.0, {})
        return ClientResult(update, context.next_client_state(modules, task.subnets, ()))

    def reply_spec(self, task: Task, client: Client) -> ReplySpec:
        """The task's subnets, and no metrics."""
        return ReplySpec(task.subnets, 1.0, {})

    def _train(
        self,
        module: nn.Module,
        examples: ClientData,
        task: Task,
        number: int,
        context: ClientContext,
    ) -> None:
        settings = self.sgd.local_training
        weights = [weight for weight in module.parameters() if weight.requires_grad]
        optimizer = make_optimizer(weights, settings.optimizer_at(self.sgd.lr, len(examples)))
        objective = bind_examples(self.sgd.objective, examples)
        loss, generator = context.client_loss(), torch.Generator().manual_seed(task.seed)
        secret, size = mix_secret(self.secret, context), settings.batch_size
        count = count_steps(len(examples), size, settings.epochs)
        rate = min(1.0, size / len(examples))
        with per_example_gradients(module) as wrapped:
            for step in range(count):
                purpose = (task.client, self.round, number, step)
                draws = draw_uniform(secret, ("batch", *purpose), len(examples))
                rows = torch.from_numpy(draws < rate).nonzero().flatten()
                sums = self._sum_clipped(
                    wrapped, weights, objective, examples, rows, loss, generator
                )
                name = f"{number}/{step}/{digest_tensors(sums)}"
                shapes = {f"{name}/{i}": tuple(total.shape) for i, total in enumerate(sums)}
                std = self.noise_multiplier * self.clip
                noise = draw_noise(secret, task.client, self.round, shapes, std)
                pairs = zip(sums, noise.values(), strict=True)
                optimizer.apply_gradients([(s + n.to(s)) / size for s, n in pairs])
                context.report_progress((step + 1) / count)

    def _sum_clipped(
        self,
        module: nn.Module,
        weights: Sequence[Tensor],
        objective: Objective,
        examples: ClientData,
        rows: Tensor,
        loss: ClientLoss,
        generator: torch.Generator,
    ) -> list[Tensor]:
        """The sum of the clipped gradients of a batch; zero for an empty one."""
        if not len(rows):
            return [torch.zeros_like(weight) for weight in weights]
        batch = as_batch(examples.batch(rows, generator))
        with torch.enable_grad():
            objective.loss(module, batch, loss, generator).backward()
        gradients = [_take_gradients(weight, len(rows)) for weight in weights]
        squares = [gradient.flatten(1).square().sum(1) for gradient in gradients]
        norms = torch.stack(squares).sum(0).sqrt()
        scales = (self.clip / norms.clamp(min=1e-12)).clamp(max=1.0)
        return [torch.einsum("b,b...->...", scales, gradient) for gradient in gradients]


def count_steps(num_examples: int, batch_size: int, epochs: int) -> int:
    """Steps of local training: the whole batches of all epochs, one in each at least.

    >>> count_steps(25, batch_size=10, epochs=2)
    4
    """
    return epochs * max(1, num_examples // batch_size)


@torch.no_grad()
def _take_gradients(weight: Any, count: int) -> Tensor:
    """The gradients of single examples that opacus left on a weight; zero if it had no part."""
    gradients = getattr(weight, "grad_sample", None)
    weight.grad, weight.grad_sample = None, None
    if gradients is None:
        return torch.zeros((count, *weight.shape), device=weight.device)
    if isinstance(gradients, list):  # of a layer that was used several times
        gradients = torch.stack(gradients).sum(0)
    found: Tensor = gradients.detach()
    return found


@contextmanager
def per_example_gradients(module: nn.Module) -> Iterator[nn.Module]:
    """The module with hooks that find the gradients of single examples; afterwards without."""
    opacus = import_opacus()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of hooks on inputs that need no gradient
        wrapped = opacus.GradSampleModule(module, strict=False)
        try:
            yield wrapped
        finally:
            wrapped.to_standard_module()


def refuse_unsupported(model: nn.Module) -> None:
    """Raises a ConfigError if a layer mixes the examples of a batch, or cannot be followed."""
    import_opacus()
    from opacus.validators import ModuleValidator

    if ModuleValidator.validate(model, strict=False):
        kinds = [
            f"'{name}' ({type(layer).__name__})"
            for name, layer in model.named_modules()
            if not any(layer.children()) and ModuleValidator.validate(layer, strict=False)
        ]
        who = ", ".join(kinds) or "a layer"
        raise ConfigError(
            f"dp-sgd needs the gradient of every single example, and {who} does not allow it; use "
            "group normalization, and layers that opacus supports"
        )


def import_opacus() -> Any:
    """The library, or a sentence that says what to install."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import opacus
    except ImportError as problem:
        raise ConfigError("dp-sgd needs the extra: pip install 'fedquilt[dpsgd]'") from problem
    return opacus
