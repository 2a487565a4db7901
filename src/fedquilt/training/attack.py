"""Projected gradient descent: the nearby inputs that a model gets most wrong.

Madry, Makelov, Schmidt, Tsipras, Vladu. "Towards Deep Learning Models Resistant to Adversarial
Attacks." ICLR 2018, Sec. 2. Settings as in Split-Mix (Hong et al., ICLR 2022, Sec. 5.2).

Symbols of the papers -> names here: ε -> epsilon, n -> steps, α -> step, x̃ = x + δ -> near.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedquilt.data import ClientData, Normalize
from fedquilt.errors import ConfigError
from fedquilt.learning.losses import classes_last

Draws = torch.Generator | Sequence[torch.Generator]  # of one net, or of several side by side
SLACK = 1e-3  # how far an input may be out of range by rounding, in pixel units


@dataclass(frozen=True)
class PGD:
    """The attack: projected gradient ascent on the loss, within a box around each input.

    Every number is in pixel units.

    Args:
        epsilon: The most that a pixel may change.
        steps: The number of steps uphill on the loss.
        step_size: The size of a step. None: min(1.25 ε, ε + 4/255) / steps, as in the public code
            of Split-Mix (1.43/255 for 8/255 and 7 steps); the text of the paper, Sec. 5.2, says
            2/255.
        random_start: Whether it starts from a random point of the box, or from the input.
        low: The smallest value of a pixel.
        high: The largest value of a pixel.
        scale: The normalization of the inputs. If there is one, the attack is the one on the
            pixels, seen through it.

    >>> round(PGD().step * 255, 3), PGD(step_size=2 / 255).step * 255
    (1.429, 2.0)
    """

    epsilon: float = 8 / 255
    steps: int = 7
    step_size: float | None = None
    random_start: bool = True
    low: float = 0.0
    high: float = 1.0
    scale: Normalize | None = None  # of the inputs; None if they are pixels

    def __post_init__(self) -> None:
        """Refuses settings that make no sense."""
        if not self.epsilon >= 0 or self.steps < 1 or not self.low < self.high:
            raise ConfigError(
                "an attack needs epsilon >= 0, steps >= 1 and low < high, got "
                f"epsilon={self.epsilon}, steps={self.steps}, low={self.low}, high={self.high}; "
                "the usual one is PGD(epsilon=8/255, steps=7)"
            )
        if self.step_size is not None and not self.step_size > 0:
            raise ConfigError(
                f"the step size of an attack must be positive, got {self.step_size}; leave it out "
                "for min(1.25 ε, ε + 4/255) / steps"
            )

    @property
    def step(self) -> float:
        """The size of one step."""
        if self.step_size is not None:
            return self.step_size
        return min(1.25 * self.epsilon, self.epsilon + 4 / 255) / self.steps

    def for_examples(self, examples: ClientData) -> PGD:
        """The same attack for inputs that were normalized as these examples are."""
        scale = getattr(examples, "scale", None)
        return self if scale is None else replace(self, scale=scale)

    def perturb(
        self,
        model: Callable[[Tensor], Tensor],
        x: Tensor,
        y: Tensor,
        generator: Draws | None = None,
    ) -> Tensor:
        """Inputs near ``x`` on which the model is wrong about ``y``.

        x̃ <- P(x̃ + α sign ∇ L(f(x̃), y)), with L the cross entropy summed over the batch and P the
        projection on the ε-ball around x and on the range of pixels. The start is uniform in the
        ball if ``random_start``, drawn from ``generator``, else x itself.

        The model is used as it is: put it in ``frozen`` first. Its parameters get no gradient.
        With a generator for each of several nets, ``x``, ``y`` and what the model answers have a
        first axis of nets, which are attacked in one pass.
        """
        with torch.inference_mode(False), torch.enable_grad():
            x, y = x.detach().clone(), y.clone()  # so that it works in inference mode, too
            pixel, lowest, highest = self._pixel_units(x)
            _check_range(x, lowest - SLACK * pixel, highest + SLACK * pixel, self)
            answer = model
            if isinstance(generator, Sequence):
                y, answer = y.flatten(0, 1), lambda x: model(x).flatten(0, 1)
            radius, step = self.epsilon * pixel, self.step * pixel
            low, high = (x - radius).clamp(lowest, highest), (x + radius).clamp(lowest, highest)
            near = x.clamp(low, high)
            if self.random_start:
                near = (x + radius * _draw_noise(x, generator)).clamp(low, high)
            for _ in range(self.steps):
                near = (near + step * _compute_input_gradient(answer, near, y).sign()).clamp(
                    low, high
                )
        return near

    def _pixel_units(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One pixel unit, the lowest and the highest pixel, as the inputs have them."""
        if self.scale is None:
            return x.new_tensor(1.0), x.new_tensor(self.low), x.new_tensor(self.high)
        mean, std = (x.new_tensor(c).view(-1, 1, 1) for c in (self.scale.mean, self.scale.std))
        return 1 / std, (self.low - mean) / std, (self.high - mean) / std


def _check_range(x: Tensor, lowest: Tensor, highest: Tensor, attack: PGD) -> None:
    if bool(((x < lowest) | (x > highest)).any()):
        raise ConfigError(
            f"an attack needs inputs with pixels in [{attack.low}, {attack.high}], got inputs from "
            f"{x.min().item():.3g} to {x.max().item():.3g}; give PGD the inputs' "
            "scale=Normalize(mean, std), or their low and high"
        )


def _draw_noise(x: Tensor, generator: Draws | None) -> Tensor:
    """Uniform in [-1, 1), drawn where the generator lives."""
    if isinstance(generator, Sequence):
        nets = zip(x, generator, strict=True)
        return torch.stack([_draw_noise(inputs, draws) for inputs, draws in nets])
    device = x.device if generator is None else generator.device
    drawn = torch.rand(x.shape, generator=generator, device=device, dtype=x.dtype)
    return 2 * drawn.to(x.device) - 1


def _compute_input_gradient(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The gradient of the loss with respect to the inputs."""
    x = x.detach().requires_grad_()
    logits = classes_last(model(x), y)
    # summed: the gradient of an input does not shrink with the number of its neighbors
    loss = F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum")
    (gradient,) = torch.autograd.grad(loss, x)
    return gradient


@contextmanager
def frozen_model(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode and without gradients; afterwards exactly as it was.

    An attack on the model leaves no trace then: neither statistics nor gradients (Split-Mix,
    Algorithm 4, line 10). Modes are set directly, not by ``eval()``: a layer that does work when
    its mode changes could not undo it.
    """
    in_training = [module for module in model.modules() if module.training]
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        for module in in_training:
            module.training = False
        for weight in trainable:
            weight.requires_grad_(False)
        yield
    finally:
        for module in in_training:
            module.training = True
        for weight in trainable:
            weight.requires_grad_(True)
