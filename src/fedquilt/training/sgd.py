"""SGD in a few operations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fedquilt.training.optimizer_settings import SGDSettings

MOMENTUM = "momentum"  # under this name its state is kept


class SGDStep:
    """One client's SGD in one round: weight decay, clipping, momentum.

    The same steps as ``torch.optim.SGD`` makes, without what an optimizer needs to be general. With
    the small nets of small devices that saves an eighth of the time of training.

    Args:
        weights: Those to move; weights that need no gradient are left out.
        settings: Learning rate, momentum, weight decay and clipping.
    """

    def __init__(self, weights: Iterable[Tensor], settings: SGDSettings) -> None:
        self._weights = [w for w in weights if w.requires_grad]
        self._settings, self._lr = settings, settings.lr
        self._momenta: dict[int, Tensor] = {}  # by position; a tensor without gradient has none

    @torch.no_grad()
    def step(self, loss: Tensor) -> None:
        """Goes down the gradient of the loss."""
        self.apply_gradients(self.compute_gradients(loss))

    def compute_gradients(self, loss: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the weights that move; None where a weight has no part in the loss."""
        return differentiate(loss, self._weights)

    def scale_lr(self, factor: float) -> None:
        """Makes the learning rate ``factor`` times that of the settings, from the next step on."""
        self._lr = self._settings.lr * factor

    def state(self) -> list[dict[str, Tensor]]:
        """The momentum of each weight that moves; empty where it has none."""
        count = range(len(self._weights))
        return [{MOMENTUM: self._momenta[i].clone()} if i in self._momenta else {} for i in count]

    def load_state(self, state: Sequence[Mapping[str, Tensor]]) -> None:
        """Goes on from what ``state`` gave, in the order of the weights."""
        self._momenta = {i: one[MOMENTUM].clone() for i, one in enumerate(state) if one}

    @torch.no_grad()
    def apply_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """One step along gradients, which are left as they are: v <- μ v + g + d w, w <- w - η v.

        A weight whose gradient is None has no part in the step.
        """
        used = [i for i, gradient in enumerate(gradients) if gradient is not None]
        present: list[Tensor] = [g for g in gradients if g is not None]
        weights: list[Tensor] = [self._weights[i] for i in used]
        settings, scale = self._settings, 1.0
        if settings.max_grad_norm is not None and present:
            scale = min(
                1.0, settings.max_grad_norm / (float(nn.utils.get_total_norm(present)) + 1e-6)
            )
        if not settings.momentum:
            if settings.weight_decay:
                torch._foreach_mul_(weights, 1 - self._lr * settings.weight_decay)
            torch._foreach_add_(weights, present, alpha=-self._lr * scale)
            return
        for i, gradient in zip(used, present, strict=True):
            if i not in self._momenta:
                self._momenta[i] = torch.zeros_like(gradient)
        momenta = [self._momenta[i] for i in used]
        torch._foreach_mul_(momenta, settings.momentum)
        torch._foreach_add_(momenta, present, alpha=scale)
        if settings.weight_decay:
            torch._foreach_add_(momenta, weights, alpha=settings.weight_decay)
        torch._foreach_add_(weights, momenta, alpha=-self._lr)


def differentiate(loss: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradient of a loss, in the precision of the weights also within autocast."""
    if not torch.is_autocast_enabled(loss.device.type):
        return torch.autograd.grad(loss, weights, allow_unused=True)
    with torch.autocast(loss.device.type, enabled=False):
        return torch.autograd.grad(loss, weights, allow_unused=True)
