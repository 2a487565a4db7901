"""Once-for-all adversarial training: layers that are told how robust to be.

Wang, Chen, Gui, Hu, Liu, Wang. "Once-for-All Adversarial Training: In-Situ Tradeoff between
Robustness and Accuracy for Free." NeurIPS 2020. FiLM is from Perez et al., AAAI 2018.

Symbols of the paper -> names here: λ -> robustness, γ -> 1 + scale, β -> shift.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedquilt.training.dualnorm import DualNorm, Share, hold_attribute, on_path, replace_norms

CODE = 128  # numbers that stand for one λ, as in the public code
SLOWEST, FASTEST = math.pi / 4, 16 * math.pi  # frequencies of the code


def encode_robustness(robustness: Share, like: Tensor) -> Tensor:
    """λ as a row of numbers: cos(ω λ) for frequencies ω that grow geometrically; a row for each λ.

    The public code gives each of a few values of λ an orthogonal vector (of a random rotation, or
    of the discrete cosine transform), so it knows no others. These cosines tell the trained values
    apart, too, and give values in between a code in between: the dial has no gaps.
    """
    ends = math.log(SLOWEST), math.log(FASTEST)
    frequencies = torch.linspace(*ends, CODE, device=like.device, dtype=like.dtype).exp()
    if is_per_example(robustness):
        robustness = robustness.to(like.device, like.dtype).unsqueeze(1)
        return (frequencies * robustness).cos()
    return (frequencies * robustness).cos().unsqueeze(0)


def is_per_example(robustness: Share) -> TypeGuard[Tensor]:
    """Whether every example has a λ of its own."""
    return isinstance(robustness, Tensor) and robustness.ndim == 1


class FiLM(nn.Module):
    """A scale and a shift per channel that λ decides: y = γ(λ)·x + β(λ).

    ``robustness`` is the λ of all examples, or in training a λ for each.

    γ and β come from two layers with 2C hidden units, as in the public code. Here γ = 1 and β = 0
    at first whatever λ is, and no activation follows them (there: a leaky ReLU).
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(CODE, 2 * channels)
        self.scale = nn.Linear(2 * channels, channels)
        self.shift = nn.Linear(2 * channels, channels)
        self.robustness: Share = 0.0
        for tensor in (*self.scale.parameters(), *self.shift.parameters()):
            nn.init.zeros_(tensor)

    def forward(self, x: Tensor) -> Tensor:
        """The input, scaled and shifted as λ says."""
        hidden = F.leaky_relu(self.hidden(encode_robustness(self.robustness, self.hidden.weight)))
        if is_per_example(self.robustness):
            shape = (*x.shape[:2], *[1] * (x.ndim - 2))
            moved: Tensor = x * (1 + self.scale(hidden)).view(shape)
            moved += self.shift(hidden).view(shape)
            return moved
        scale, shift = 1 + self.scale(hidden).squeeze(0), self.shift(hidden).squeeze(0)
        # a normalization by nothing: one pass over x, whatever its number of axes
        zeros, ones = torch.zeros_like(scale), torch.ones_like(scale)
        return F.batch_norm(x, zeros, ones, scale, shift, eps=0.0)


@contextmanager
def at_robustnesses(model: nn.Module, shares: Tensor) -> Iterator[None]:
    """The model with a λ > 0 for each example of a batch; afterwards every layer has its own again.

    All examples use the noise halves.
    """
    layers = [module for module in model.modules() if isinstance(module, FiLM)]
    with on_path(model, 1.0), hold_attribute(layers, "robustness", shares):
        yield


def make_conditional(model: nn.Module) -> nn.Module:
    """A copy of the model in which every batch normalization is dual and followed by ``FiLM``.

    The clean half is for λ = 0, the noise half for every λ > 0. A tensor
    ``<name>.weight`` becomes ``<name>.norm.clean.weight`` and ``<name>.norm.noise.weight``, and
    ``<name>.film.*`` is new. The hidden layers are drawn from torch's generator, as layers are.
    """
    return replace_norms(model, _make_conditional_norm)


def _make_conditional_norm(clean: _BatchNorm, noise: _BatchNorm) -> nn.Module:
    film = FiLM(clean.num_features)
    like = next(itertools.chain(clean.parameters(), clean.buffers()), None)
    if like is not None:
        film.to(like.device, like.dtype)
    layers = nn.Sequential(
        OrderedDict(norm=DualNorm(clean, noise, switched=True), film=film.train(clean.training))
    )
    layers.training = clean.training
    return layers
