"""Rules of convolutions, pooling, padding, and other operations over space."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from fedquilt.structure.trace.channels import NO_REASON, join
from fedquilt.structure.trace.rules.registry import (
    Call,
    Dims,
    freeze_tensor,
    normalize_dim,
    register_rule,
)


@register_rule("convolution", "_convolution", "mkldnn_convolution")
def _convolution(call: Call) -> Sequence[Dims]:
    channels, groups = call.channels, call["groups"]
    x, weight = call.dims("input"), call.dims("weight")
    transposed = call.arguments.get("transposed", False)
    for labels in weight[2:]:
        channels.freeze(labels, NO_REASON)  # a kernel's height and width
    for labels in x[2:]:
        channels.freeze(labels)
    into, out = (weight[0], weight[1]) if transposed else (weight[1], weight[0])
    if groups > 1 and call["input"].shape[1] == groups:  # depthwise: outputs follow their input
        channels.freeze(weight[1])
        repeats = call.outputs[0].shape[1] // groups
        if transposed:
            channels.tie(x[1], into)
            out = None if x[1] is None else np.repeat(x[1], repeats)
        else:
            channels.tie(None if x[1] is None else np.repeat(x[1], repeats), out)
    elif groups > 1:
        channels.fold(weight[0], groups)
        if transposed:
            channels.tie(x[1], into)
            out = None if out is None else np.tile(out, groups)
        else:
            channels.tie(x[1], None if into is None else np.tile(into, groups))
    else:
        channels.tie(x[1], into)
    if call["bias"] is not None:
        out = channels.tie(out, call.dims("bias")[0])
    return [[x[0], out, *([None] * (len(x) - 2))]]


@register_rule("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d")
@register_rule(
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d"
)
@register_rule("max_pool2d", "max_pool1d", "mkldnn_max_pool2d", "avg_pool1d", "adaptive_avg_pool1d")
@register_rule(
    "upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_linear1d"
)
@register_rule("upsample_bicubic2d", "reflection_pad1d", "reflection_pad2d", "replication_pad2d")
@register_rule(
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "replication_pad1d", "replication_pad3d"
)
@register_rule(
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"
)
@register_rule("upsample_nearest3d", "upsample_trilinear3d", "reflection_pad3d", "grid_sampler_2d")
@register_rule("grid_sampler_3d", "max_unpool2d", "max_unpool3d", "fractional_max_pool2d")
def _freeze_space(call: Call) -> Sequence[Dims]:
    x = call.labels(call.tensors()[0])
    spatial = 2 if "2d" in call.name else 3 if "3d" in call.name else 1
    for labels in x[-spatial:]:
        call.channels.freeze(labels)
    if "grid" in call.name:
        freeze_tensor(call, call["grid"])
    return [[*x[:-spatial], *([None] * spatial)] for _ in call.outputs]


@register_rule("constant_pad_nd")
def _pad(call: Call) -> Sequence[Dims]:
    x, pads = call.dims("self"), call["pad"]
    for back in range(1, len(pads) // 2 + 1):
        before, after = pads[2 * back - 2], pads[2 * back - 1]
        if (before or after) and x[-back] is not None:
            if before < 0 or after < 0:
                call.channels.freeze(x[-back])
                x[-back] = None
            else:
                x[-back] = join(((None, before), (x[-back], 0), (None, after)))
    return [x]


@register_rule("unfold")
def _unfold(call: Call) -> Sequence[Dims]:
    """Windows along one axis, as a new last axis."""
    x = call.dims("self")
    axis = normalize_dim(call["dimension"], len(x))
    call.channels.freeze(x[axis])
    x[axis] = None
    return [[*x, None]]


@register_rule("im2col")
def _unfold_patches(call: Call) -> Sequence[Dims]:
    """(batch, channels, height, width) -> (batch, channels × patch positions, patches)."""
    x = call.dims("self")
    for labels in x[-2:]:
        call.channels.freeze(labels)
    labels = x[-3]
    return [
        [*x[:-3], None if labels is None else np.repeat(labels, prod(call["kernel_size"])), None]
    ]


@register_rule("col2im")
def _fold_patches(call: Call) -> Sequence[Dims]:
    """The inverse of ``_unfold_patches``; the positions of a patch belong to one channel."""
    x, size = call.dims("self"), prod(call["kernel_size"])
    call.channels.freeze(x[-1])
    labels = x[-2]
    if labels is not None:
        parts = labels.reshape(-1, size)
        call.channels.fold(parts.T.reshape(-1), size)
        labels = parts[:, 0].copy()
    return [[*x[:-2], labels, None, None]]


@register_rule("pixel_shuffle")
def _pixel_shuffle(call: Call) -> Sequence[Dims]:
    """Every output channel is made of neighboring input channels."""
    x = call.dims("self")
    if x[-3] is not None:
        parts = x[-3].reshape(-1, call["upscale_factor"] ** 2)
        call.channels.fold(parts.T.reshape(-1), parts.shape[1])
        x[-3] = parts[:, 0].copy()
    return [[*x[:-2], None, None]]


@register_rule("pixel_unshuffle")
def _pixel_unshuffle(call: Call) -> Sequence[Dims]:
    x = call.dims("self")
    labels = x[-3]
    x[-3] = None if labels is None else np.repeat(labels, call["downscale_factor"] ** 2)
    return [[*x[:-2], None, None]]


@register_rule("channel_shuffle", "native_channel_shuffle")
def _channel_shuffle(call: Call) -> Sequence[Dims]:
    x = call.dims("self")
    if x[1] is not None:
        call.channels.fold(x[1], call["groups"])
        x[1] = x[1].reshape(call["groups"], -1).T.reshape(-1)
    return [x]
