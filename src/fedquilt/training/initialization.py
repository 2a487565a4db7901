"""First values drawn anew: several nets of one shape that start apart."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import cached

from fedquilt.structure.computed import (
    detach_computed,
    find_stored_weight,
    list_computed_names,
    set_computed,
)
from fedquilt.structure.structure import Structure
from fedquilt.structure.tensors import named_tensors


def reinitialize_copy(model: nn.Module, seed: int) -> nn.Module:
    """A copy of a model whose first values are drawn anew.

    By the model's own ``reset_parameters`` if it has one, else by those of its layers. Tensors that
    no layer resets keep their values.
    """
    detach_computed(model)
    fresh = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if not _reset(fresh):
            _reset_below(fresh)
    return fresh


def _reset_below(module: nn.Module) -> None:
    """Resets the layers in the order in which they are made: a layer after those inside it."""
    for child in module.children():
        _reset_below(child)
        _reset(child)


def _reset(layer: nn.Module) -> bool:
    for name in ("reset_parameters", "_reset_parameters"):  # nn.MultiheadAttention has the latter
        reset = getattr(layer, name, None)
        if callable(reset):
            with _write_back_computed(layer):
                reset()
            return True
    return False


@contextmanager
def _write_back_computed(module: nn.Module) -> Iterator[None]:
    """What is drawn in place for a weight that is computed goes to what it is computed from."""
    computed = [(layer, name) for layer in module.modules() for name in list_computed_names(layer)]
    if not computed:
        yield
        return
    with cached():  # the tensors that are drawn into are the ones that are looked at afterwards
        before = [getattr(layer, name).clone() for layer, name in computed]
        yield
        drawn = [getattr(layer, name).detach().clone() for layer, name in computed]
    for (layer, name), old, new in zip(computed, before, drawn, strict=True):
        if not torch.equal(old, new):
            set_computed(layer, name, new)


MAX_P_VALUE = 1e-9  # how unlikely equally distributed values must be to be taken for others
MAX_VALUES = 100_000  # values of a tensor that are looked at


def find_given_value(model: nn.Module) -> str | None:
    """A tensor that has other values than are drawn for it: trained, loaded or made otherwise.

    None: all could be fresh. Tensors that are always drawn alike, such as the scales of
    normalization, are compared by value; others by a Kolmogorov-Smirnov test against a draw.
    """
    from scipy.stats import ks_2samp  # slow to import, and seldom needed

    one, other = (named_tensors(reinitialize_copy(model, seed)) for seed in (0, 1))
    for name, tensor in named_tensors(model).items():
        if torch.equal(one[name], other[name]):
            is_drawn = torch.equal(tensor, one[name])
        else:
            given, drawn = (_sample(values) for values in (tensor, one[name]))
            is_drawn = float(ks_2samp(given, drawn).pvalue) > MAX_P_VALUE
        if not is_drawn:
            return name
    return None


def _sample(values: Tensor) -> npt.NDArray[np.float64]:
    flat = values.detach().flatten()
    return flat[:: -(-len(flat) // MAX_VALUES)].double().numpy()


@torch.no_grad()
def rescale_initial(model: nn.Module, structure: Structure) -> None:
    """First values as large as in the whole net, in place (Split-Mix, Sec. 4.2).

    Kaiming's initialization is uniform up to 1/√(fan-in). A narrow layer has fewer inputs and so
    larger values; they are made as small as those of the net that it was cut from.
    """
    if structure.origin is None:
        return
    names = {id(tensor): name for name, tensor in named_tensors(model).items()}
    done: set[int] = set()
    for layer in model.modules():
        stored = find_stored_weight(layer) if isinstance(layer, (_ConvNd, nn.Linear)) else None
        if stored is None or id(stored) in done:
            continue
        done.add(id(stored))
        share = math.sqrt(_fan_in(stored.shape) / _fan_in(structure.origin[names[id(stored)]]))
        if stored is layer.weight:
            stored.mul_(share)
        else:
            set_computed(layer, "weight", cast(Tensor, layer.weight) * share)
        if isinstance(layer.bias, Tensor):
            layer.bias.mul_(share)


def _fan_in(shape: Sequence[int]) -> int:
    return math.prod(shape[1:])
