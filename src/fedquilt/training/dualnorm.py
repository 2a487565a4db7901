"""Dual batch normalization: one set of weights, two normalizations, a dial between them.

Hong, Wang, Wang, Zhou. "Efficient Split-Mix Federated Learning for On-Demand and In-Situ
Customization." ICLR 2022, Sec. 4.3 and Fig. 3; two normalizations are from Xie & Yuille, ICLR 2020.

Symbols of the paper -> names here: BN_c -> clean, BN_n -> noise, λ -> robustness.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from fedquilt.errors import ConfigError

NO_DIAL = (
    "this run's model has no robustness to choose; train with SplitMix(robust=True), in settings "
    "method.robust = true"
)
Share = float | Tensor  # how much of the noise half: a number in [0, 1], as a tensor with no axes


class DualNorm(nn.Module):
    """Two batch normalizations of the same kind: for clean and for adversarial inputs.

    In evaluation, Eq. 2: DBN(x) = (1 − λ) BN_c(x) + λ BN_n(x), with λ = ``robustness``. It costs
    one normalization: each half is a scale and a shift per channel, and so is their blend. In
    training λ is 0 or 1, and only that half is used and learns. ``path`` (0 or 1) names the half
    whatever λ is; ``switched`` uses the noise half for every λ > 0 instead of blending.
    """

    def __init__(self, clean: _BatchNorm, noise: _BatchNorm, *, switched: bool = False) -> None:
        super().__init__()
        self.clean, self.noise = clean, noise
        self.switched = switched
        self.robustness: Share = 0.0
        self.path: float | None = None
        self.training = clean.training

    def forward(self, x: Tensor) -> Tensor:
        """The input, normalized by one half or by the blend."""
        share = self._current_share()
        is_learning = self.clean.training or self.noise.training
        if is_learning:
            share = float(share)
        if not isinstance(share, Tensor) and share in (0, 1):
            half: Tensor = (self.noise if share else self.clean)(x)
            return half
        if is_learning:
            raise ConfigError(
                f"a dual normalization trains one half at a time, got the robustness {share}; "
                "train within with_path(model, 0.0) or with_path(model, 1.0)"
            )
        return _blend(x, self.clean, self.noise, share)

    def _current_share(self) -> Share:
        if self.path is not None:
            return self.path
        if not self.switched:
            return self.robustness
        is_noise = self.robustness > 0
        return is_noise.to(torch.float32) if isinstance(is_noise, Tensor) else float(is_noise)


def _blend(x: Tensor, clean: _BatchNorm, noise: _BatchNorm, share: Share) -> Tensor:
    """(1 − λ) BN_c(x) + λ BN_n(x) in evaluation: a few sums of C numbers, then one pass over x."""
    if not (_is_affine(clean) and _is_affine(noise)):
        blended: Tensor = (1 - share) * clean(x) + share * noise(x)
        return blended
    clean._check_input_dim(x)
    weight, bias = _express_noise_on_clean(clean, noise)
    weight = _interpolate(1.0 if clean.weight is None else clean.weight, weight, share)
    bias = _interpolate(0.0 if clean.bias is None else clean.bias, bias, share)
    mean, var = clean.running_mean, clean.running_var
    return F.batch_norm(x, mean, var, weight, bias, training=mean is None, eps=clean.eps)


def _express_noise_on_clean(
    clean: _BatchNorm, noise: _BatchNorm
) -> tuple[Tensor | None, Tensor | None]:
    """The weight and bias that make the clean half compute what the noise half does.

    γ' (x − μ_c) / σ_c + β' = γ_n (x − μ_n) / σ_n + β_n for γ' = γ_n σ_c / σ_n and
    β' = β_n + γ_n (μ_c − μ_n) / σ_n. Without running statistics both normalize by the batch.
    """
    weight, bias = noise.weight, noise.bias
    if clean.running_mean is None or clean.running_var is None:
        return weight, bias
    assert noise.running_mean is not None
    assert noise.running_var is not None
    gain = (noise.running_var + noise.eps).rsqrt()
    gain = gain if weight is None else gain * weight
    shift = (clean.running_mean - noise.running_mean) * gain
    return gain * (clean.running_var + clean.eps).sqrt(), shift if bias is None else shift + bias


def _interpolate(clean: Share, noise: Tensor | None, share: Share) -> Tensor | None:
    """(1 − λ) clean + λ noise; None if the noise half has no such tensor."""
    return None if noise is None else (1 - share) * clean + share * noise


def _is_affine(norm: _BatchNorm) -> bool:
    """Whether it computes what batch normalization does; a subclass may do something else."""
    return type(norm).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def make_dual(model: nn.Module) -> nn.Module:
    """A copy of the model with a ``DualNorm`` for every batch normalization.

    Both halves start as copies of the original, so at first every λ gives what the model gave. A
    tensor ``<name>.weight`` becomes ``<name>.clean.weight`` and ``<name>.noise.weight``.
    """
    return replace_norms(model, DualNorm)


def replace_norms(
    model: nn.Module, combine: Callable[[_BatchNorm, _BatchNorm], nn.Module]
) -> nn.Module:
    """A copy of the model with ``combine(clean, noise)`` for every batch normalization."""
    copies: dict[int, Any] = {}  # of the model, with the clean halves
    noise_copies: dict[int, Any] = {}  # apart, so that tied layers stay tied within each half
    for norm in _list_norms(model):
        clean, noise = copy.deepcopy(norm, copies), copy.deepcopy(norm, noise_copies)
        copies[id(norm)] = combine(clean, noise)
    return copy.deepcopy(model, copies)


def _list_norms(model: nn.Module) -> list[_BatchNorm]:
    norms = []
    for name, module in model.named_modules():
        if isinstance(module, DualNorm):
            raise ConfigError(
                f"each batch normalization is doubled once, but '{name}' is doubled already; "
                "start from the model as it was before"
            )
        if isinstance(module, _LazyNormBase):
            raise ConfigError(
                f"'{name}' ({type(module).__name__}) does not know its number of channels yet; "
                "run the model once on an example, then double its normalizations"
            )
        if isinstance(module, _BatchNorm):
            norms.append(module)
    if not norms:
        raise ConfigError(
            "a robustness dial needs batch normalization, but "
            f"{type(model).__name__} has none; use a model with nn.BatchNorm layers, or train it "
            "for one fixed robustness"
        )
    return norms


def set_robustness(model: nn.Module, value: Share) -> None:
    """Turns the dial: λ = ``value`` in every layer that has one, in place.

    Those are all modules with an attribute ``robustness``. No tensor is touched or copied.
    """
    set_dials(_require_dials(model, value), value)


def set_dials(layers: Iterable[nn.Module], value: Share) -> None:
    """Turns the dial of layers that have one, when the value is known to be good."""
    for layer in layers:
        vars(layer)["robustness"] = value  # a module's own way to set attributes is slow


def find_dials(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that have a robustness dial."""
    return [module for module in _list_modules(model) if "robustness" in vars(module)]


def has_dial(model: nn.Module) -> bool:
    """Whether a model's robustness can be chosen."""
    return bool(find_dials(model))


def validate_robustness(value: float) -> float:
    """The robustness, if it is one."""
    if not 0 <= value <= 1:
        raise ConfigError(
            f"a robustness is a number from 0 (accurate) to 1 (robust), got {value:g}; "
            "0.5 is between"
        )
    return float(value)


@contextmanager
def at_robustness(model: nn.Module, value: Share) -> Iterator[None]:
    """The model at λ = ``value``; afterwards every layer has its own again."""
    with hold_attribute(_require_dials(model, value), "robustness", value):
        yield


@contextmanager
def on_path(model: nn.Module, path: float | None) -> Iterator[None]:
    """The model with its clean halves (0.0) or its noise halves (1.0); None means as λ says.

    A model without dual normalization stays as it is.
    """
    if path not in (0, 1, None):
        raise ConfigError(f"a path is 0.0 (clean), 1.0 (noise) or None (as λ says), got {path}")
    layers = [module for module in _list_modules(model) if isinstance(module, DualNorm)]
    with hold_attribute(layers, "path", path):
        yield


def _require_dials(model: nn.Module, value: Share) -> list[nn.Module]:
    """The layers with a dial, once it is clear that it can be turned to the value."""
    if isinstance(value, Tensor) and value.ndim:
        raise ConfigError(
            "a robustness is one number for the whole batch, got a tensor of shape "
            f"{tuple(value.shape)}; give a number, or a tensor with no axes"
        )
    if not isinstance(value, Tensor):
        validate_robustness(value)
    layers = find_dials(model)
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no robustness dial; build it with dual(model) or "
            "conditional(model), and train it with an adversarial objective"
        )
    return layers


def _list_modules(model: nn.Module) -> Iterable[nn.Module]:
    """What ``model.modules()`` gives, in another order and in less than half of its time."""
    modules, todo = {id(model): model}, [model]
    while todo:
        for child in todo.pop()._modules.values():
            if child is not None and id(child) not in modules:
                modules[id(child)] = child
                todo.append(child)
    return modules.values()


@contextmanager
def hold_attribute(
    layers: Sequence[nn.Module], attribute: str, value: Share | None
) -> Iterator[None]:
    """Layers with another value of an attribute; afterwards each has its own again."""
    before = [vars(layer)[attribute] for layer in layers]
    try:
        for layer in layers:
            vars(layer)[attribute] = value
        yield
    finally:
        for layer, old in zip(layers, before, strict=True):
            vars(layer)[attribute] = old
