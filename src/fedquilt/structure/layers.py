"""Sizes that PyTorch's own layers keep as attributes, set from their tensors."""

from __future__ import annotations

from functools import singledispatch

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from fedquilt.structure.computed import find_stored_weight, refresh_computed


def resize_layers(model: nn.Module) -> None:
    """Sets the sizes of every known layer of a freshly cut model."""
    for module in model.modules():
        refresh_computed(module)
        set_sizes(module)


def _shape(layer: nn.Module, name: str = "weight") -> tuple[int, ...]:
    weight = find_stored_weight(layer, name)
    assert isinstance(weight, Tensor)
    return tuple(weight.shape)


@singledispatch
def set_sizes(layer: nn.Module) -> None:
    """Sets the sizes of one layer. Those of unknown classes are found by tracing."""


def may_hold_sizes(layer: nn.Module) -> bool:
    """Whether attributes of this layer may be sizes that ``set_sizes`` does not set."""
    if type(layer).__module__ in _WITHOUT_CHANNELS:
        return False
    is_known = set_sizes.dispatch(type(layer)) is not set_sizes.dispatch(nn.Module)
    return not is_known or not any(True for _ in layer.parameters(recurse=False))


_WITHOUT_CHANNELS = frozenset(
    f"torch.nn.modules.{kind}"
    for kind in (
        "activation",
        "channelshuffle",
        "container",
        "distance",
        "dropout",
        "fold",
        "padding",
        "pixelshuffle",
        "pooling",
        "upsampling",
    )
)


@set_sizes.register(nn.Linear)
def _linear(layer: nn.Linear) -> None:
    layer.out_features, layer.in_features = _shape(layer)


@set_sizes.register(nn.Bilinear)
def _bilinear(layer: nn.Bilinear) -> None:
    layer.out_features, layer.in1_features, layer.in2_features = _shape(layer)


@set_sizes.register(nn.Embedding)
@set_sizes.register(nn.EmbeddingBag)
def _embedding(layer: nn.Embedding | nn.EmbeddingBag) -> None:
    layer.num_embeddings, layer.embedding_dim = _shape(layer)


@set_sizes.register(_ConvNd)
def _conv(layer: _ConvNd) -> None:
    rows, columns = _shape(layer)[:2]
    if isinstance(layer, _ConvTransposeNd):
        if layer.groups > 1 and layer.groups == layer.in_channels:  # depthwise: a group a channel
            layer.groups = rows
        layer.in_channels, layer.out_channels = rows, columns * layer.groups
        return
    if layer.groups > 1 and layer.groups == layer.in_channels:  # depthwise: a group a channel
        layer.groups = rows // (layer.out_channels // layer.in_channels)
    layer.out_channels, layer.in_channels = rows, columns * layer.groups


@set_sizes.register(_NormBase)
def _batch_norm(layer: _NormBase) -> None:
    sized = layer.weight if layer.weight is not None else layer.running_mean
    if sized is not None:
        layer.num_features = sized.shape[0]


@set_sizes.register(nn.GroupNorm)
def _group_norm(layer: nn.GroupNorm) -> None:
    if layer.weight is not None:
        if layer.num_groups == layer.num_channels:  # one group a channel
            layer.num_groups = layer.weight.shape[0]
        layer.num_channels = layer.weight.shape[0]


@set_sizes.register(nn.LayerNorm)
@set_sizes.register(nn.RMSNorm)
def _layer_norm(layer: nn.LayerNorm | nn.RMSNorm) -> None:
    if layer.weight is not None:
        layer.normalized_shape = tuple(layer.weight.shape)


@set_sizes.register(nn.PReLU)
def _prelu(layer: nn.PReLU) -> None:
    layer.num_parameters = layer.weight.shape[0]


@set_sizes.register(nn.MultiheadAttention)
def _attention(layer: nn.MultiheadAttention) -> None:
    packed = layer.in_proj_weight is not None
    weight = layer.in_proj_weight if packed else layer.q_proj_weight
    layer.embed_dim = weight.shape[1]
    layer.kdim = weight.shape[1] if packed else layer.k_proj_weight.shape[1]
    layer.vdim = weight.shape[1] if packed else layer.v_proj_weight.shape[1]
    layer.head_dim = layer.embed_dim // layer.num_heads


@set_sizes.register(nn.RNNBase)
def _recurrent(layer: nn.RNNBase) -> None:
    layer.input_size = _shape(layer, "weight_ih_l0")[1]
    if layer.proj_size > 0:
        layer.proj_size, layer.hidden_size = _shape(layer, "weight_hr_l0")
    else:
        layer.hidden_size = _shape(layer, "weight_hh_l0")[1]
    layer._init_flat_weights()


@set_sizes.register(nn.RNNCellBase)
def _cell(layer: nn.RNNCellBase) -> None:
    layer.hidden_size, layer.input_size = layer.weight_hh.shape[1], layer.weight_ih.shape[1]
