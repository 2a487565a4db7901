"""Layers of several nets of one shape as one: convolutions in groups, matrix products in batches.

What flows between layers is folded in one of two ways. With ``channels`` the nets are side by side
on the second axis: (batch, nets × channels, ...). Then images stay as they are between
convolutions, and pooling, activations and ``flatten(1)`` of the model's own code do the right thing
unchanged. With ``rows`` they are one after another on the first axis: (nets × batch, ...), which
suits texts and perceptrons. Which of the two a model allows is tried out, see ``program``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from fedquilt.errors import FedquiltError

Fold = Literal["channels", "rows"]
Tensors = Mapping[str, Tensor | None]  # of one layer, by their names there; the first axis: nets
Rule = Callable[[Any, Tensors, Tensor, int], Tensor]  # layer, its tensors, input, number of nets


class UnstackableError(FedquiltError):
    """Nets of this kind train one by one; the message says why."""


def find_rule(layer: nn.Module, fold: Fold) -> Rule:
    """What computes a layer of all nets at once.

    A subclass is taken for its base class if it does not change ``forward``.

    Args:
        layer: A layer with tensors of its own.
        fold: How inputs and outputs are folded.
    """
    for kind in type(layer).__mro__:
        if kind in CHANNELS or kind in ROWS:
            if type(layer).forward is not kind.forward:  # type: ignore[attr-defined]
                break
            if fold == "rows":
                return ROWS.get(kind) or _through_channels(CHANNELS[kind])
            if kind in CHANNELS:
                return CHANNELS[kind]
            raise UnstackableError(f"{kind.__name__} has no channels on its second axis")
    raise UnstackableError(f"{type(layer).__name__} has tensors and no rule for a stack")


def fold_input(x: Tensor, fold: Fold) -> Tensor:
    """An input with a first axis of nets, as layers take it."""
    if fold == "rows":
        return x.flatten(0, 1)
    if x.ndim < 3:
        raise UnstackableError("an input has no channels")
    return x[0] if x.stride(0) == 0 else x.transpose(0, 1).flatten(1, 2)


def unfold_output(output: Tensor, fold: Fold, count: int) -> Tensor:
    """An output with a first axis of nets."""
    axis = 1 if fold == "channels" else 0
    if output.ndim <= axis or output.shape[axis] % count:
        raise UnstackableError("an output cannot be divided among the nets")
    nets: Tensor = output.unflatten(axis, (count, -1))
    return nets.movedim(axis, 0)


class StackedScalar:
    """A number of each net, in place of a tensor without axes that a model's code multiplies by.

    Such are the steps of blocks, ``x + s · F(x)``.

    Args:
        fold: How the other factor is folded.
    """

    def __init__(self, fold: Fold) -> None:
        self.values: Tensor | None = None  # one of each net
        self._axis = 1 if fold == "channels" else 0

    def __mul__(self, other: Tensor) -> Tensor:
        """The product with what is folded."""
        assert self.values is not None
        count = len(self.values)
        nets = other.unflatten(self._axis, (count, -1))
        shape = [1] * self._axis + [count] + [1] * (other.ndim - self._axis)
        product: Tensor = (nets * self.values.view(shape)).flatten(self._axis, self._axis + 1)
        return product

    __rmul__ = __mul__

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Tensor:
        """Multiplies in either order; nothing else is known of it."""
        if func not in (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__) or kwargs:
            raise UnstackableError(f"a number of each net goes into {func.__name__}")
        one, other = args
        product: Tensor = one * other if isinstance(one, cls) else other * one
        return product


class StackedDropout:
    """The forward of ``nn.Dropout`` for several nets, each with random numbers of its own.

    The numbers are those that the net would draw by itself.

    Args:
        layer: The layer.
        fold: How inputs are folded.
    """

    def __init__(self, layer: nn.Dropout, fold: Fold) -> None:
        self.generators: Sequence[torch.Generator] = ()  # one of each net
        self._layer, self._axis = layer, 1 if fold == "channels" else 0

    def __call__(self, x: Tensor) -> Tensor:
        """The input without some of its values."""
        rate = self._layer.p
        if not self._layer.training or rate in (0, 1):
            return F.dropout(x, rate, self._layer.training)
        nets = x.detach().unflatten(self._axis, (len(self.generators), -1)).unbind(self._axis)
        kept = [
            torch.empty_like(net).bernoulli_(1 - rate, generator=generator)
            for net, generator in zip(nets, self.generators, strict=True)
        ]
        return x * torch.cat(kept, self._axis).div_(1 - rate)


def _convolve(layer: _ConvNd, own: Tensors, x: Tensor, count: int) -> Tensor:
    weight, bias = _flat(own, "weight"), _flat(own, "bias")
    assert weight is not None
    groups, padding = count * layer.groups, layer.padding
    if x.shape[1] == layer.in_channels:  # one input for all nets
        x, groups = (x, 1) if layer.groups == 1 else (_repeat(x, count), groups)
    dims = len(layer.kernel_size)
    convolve: Any
    if isinstance(layer, _ConvTransposeNd):
        x = x if x.shape[1] == count * layer.in_channels else _repeat(x, count)
        convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
        more: tuple[Any, ...] = (layer.output_padding, count * layer.groups, layer.dilation)
    else:
        if layer.padding_mode != "zeros":
            sides = layer._reversed_padding_repeated_twice
            x, padding = F.pad(x, sides, mode=layer.padding_mode), (0,) * dims
        convolve, more = (F.conv1d, F.conv2d, F.conv3d)[dims - 1], (layer.dilation, groups)
    result: Tensor = convolve(x, weight, bias, layer.stride, padding, *more)
    return result


def _multiply(layer: nn.Linear, own: Tensors, x: Tensor, count: int) -> Tensor:
    weight, bias = own["weight"], own.get("bias")
    assert weight is not None
    if x.ndim != 2:
        raise UnstackableError("a linear layer is used along another axis than the second")
    if x.shape[1] == layer.in_features:  # one input for all nets
        folded = x.expand(count, *x.shape)
    else:
        folded = x.unflatten(1, (count, -1)).transpose(0, 1)
    return _multiply_batches(folded, weight, bias).transpose(0, 1).flatten(1)


def _multiply_rows(layer: nn.Linear, own: Tensors, x: Tensor, count: int) -> Tensor:
    weight = own["weight"]
    assert weight is not None
    rows = x.reshape(count, -1, layer.in_features)
    product = _multiply_batches(rows, weight, own.get("bias"))
    return product.view(*x.shape[:-1], layer.out_features)


def _multiply_batches(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.bmm(x, weight.transpose(1, 2))
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


def _normalize_batch(layer: Any, own: Tensors, x: Tensor, count: int) -> Tensor:
    x = x if x.shape[1] == count * layer.num_features else _repeat(x, count)
    mean, variance, steps = (own.get(n) for n in ("running_mean", "running_var", STEPS))
    if layer.momentum is None:
        raise UnstackableError("batch normalization has no momentum")
    if steps is not None and layer.training and not isinstance(layer, _InstanceNorm):
        steps.add_(1)
    by_batch = layer.training or mean is None
    statistics = [None if t is None else t.view(-1) for t in (mean, variance)]
    weight, bias = _flat(own, "weight"), _flat(own, "bias")
    normalize: Any = F.instance_norm if isinstance(layer, _InstanceNorm) else F.batch_norm
    result: Tensor = normalize(x, *statistics, weight, bias, by_batch, layer.momentum, layer.eps)
    return result


def _normalize_groups(layer: nn.GroupNorm, own: Tensors, x: Tensor, count: int) -> Tensor:
    x = x if x.shape[1] == count * layer.num_channels else _repeat(x, count)
    groups = count * layer.num_groups
    return F.group_norm(x, groups, _flat(own, "weight"), _flat(own, "bias"), layer.eps)


def _normalize_groups_of_rows(layer: nn.GroupNorm, own: Tensors, x: Tensor, count: int) -> Tensor:
    normal = F.group_norm(x, layer.num_groups, eps=layer.eps).unflatten(0, (count, -1))
    shape = (count, 1, layer.num_channels, *[1] * (x.ndim - 2))
    return _scale(normal, own, shape).flatten(0, 1)


def _normalize_layer(layer: nn.LayerNorm, own: Tensors, x: Tensor, count: int) -> Tensor:
    shape = tuple(layer.normalized_shape)
    folded = x.unflatten(1, (count, -1))
    if folded.shape[2:] != shape:
        raise UnstackableError("a layer is normalized along other axes than from the second on")
    normal = F.layer_norm(folded, shape, eps=layer.eps)
    return _scale(normal, own, (1, count, *shape)).flatten(1, 2)


def _normalize_layer_of_rows(layer: nn.LayerNorm, own: Tensors, x: Tensor, count: int) -> Tensor:
    shape = tuple(layer.normalized_shape)
    normal = F.layer_norm(x, shape, eps=layer.eps).reshape(count, -1, *shape)
    return _scale(normal, own, (count, 1, *shape)).view(x.shape)


def _scale(x: Tensor, own: Tensors, shape: tuple[int, ...]) -> Tensor:
    weight, bias = own.get("weight"), own.get("bias")
    x = x if weight is None else x * weight.view(shape)
    return x if bias is None else x + bias.view(shape)


def _embed_rows(layer: nn.Embedding, own: Tensors, x: Tensor, count: int) -> Tensor:
    weight = own["weight"]
    assert weight is not None
    if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
        raise UnstackableError("an embedding has max_norm, scale_grad_by_freq or sparse gradients")
    if layer.padding_idx is not None:  # a row that is not trained
        is_padding = torch.arange(layer.num_embeddings, device=x.device) == layer.padding_idx
        weight = torch.where(is_padding[:, None], weight.detach(), weight)
    first = torch.arange(count, device=x.device).unsqueeze(1) * layer.num_embeddings
    rows = (x.reshape(count, -1) + first).view(x.shape)
    return F.embedding(rows, weight.flatten(0, 1))


def _rectify(layer: nn.PReLU, own: Tensors, x: Tensor, count: int) -> Tensor:
    weight = own["weight"]
    assert weight is not None
    return F.prelu(x, weight.expand(count, x.shape[1] // count).flatten())


def _through_channels(rule: Rule) -> Rule:
    """The rule for rows: nets go side by side for this layer, and back."""

    def compute(layer: Any, own: Tensors, x: Tensor, count: int) -> Tensor:
        beside = x.unflatten(0, (count, -1)).transpose(0, 1).flatten(1, 2)
        result = rule(layer, own, beside, count)
        rows: Tensor = result.unflatten(1, (count, -1)).transpose(0, 1).flatten(0, 1)
        return rows

    return compute


def _repeat(x: Tensor, count: int) -> Tensor:
    return x.repeat(1, count, *[1] * (x.ndim - 2))


def _flat(own: Tensors, name: str) -> Tensor | None:
    tensor = own.get(name)
    return None if tensor is None else tensor.flatten(0, 1)


STEPS = "num_batches_tracked"
CHANNELS: Mapping[type[nn.Module], Rule] = {
    nn.Conv1d: _convolve,
    nn.Conv2d: _convolve,
    nn.Conv3d: _convolve,
    nn.ConvTranspose1d: _convolve,
    nn.ConvTranspose2d: _convolve,
    nn.ConvTranspose3d: _convolve,
    nn.Linear: _multiply,
    nn.BatchNorm1d: _normalize_batch,
    nn.BatchNorm2d: _normalize_batch,
    nn.BatchNorm3d: _normalize_batch,
    nn.InstanceNorm1d: _normalize_batch,
    nn.InstanceNorm2d: _normalize_batch,
    nn.InstanceNorm3d: _normalize_batch,
    nn.GroupNorm: _normalize_groups,
    nn.LayerNorm: _normalize_layer,
    nn.PReLU: _rectify,
}
ROWS: Mapping[type[nn.Module], Rule] = {
    nn.Linear: _multiply_rows,
    nn.GroupNorm: _normalize_groups_of_rows,
    nn.LayerNorm: _normalize_layer_of_rows,
    nn.Embedding: _embed_rows,
}
