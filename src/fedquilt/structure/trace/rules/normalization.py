"""Rules of normalization layers and of softmax."""

from __future__ import annotations

from collections.abc import Sequence

from fedquilt.structure.trace.rules.registry import (
    Call,
    Dims,
    normalize_dim,
    register_rule,
    unlabelled_dims,
)


@register_rule(
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"
)
@register_rule("_batch_norm_with_update", "_batch_norm_no_update", "batch_norm", "cudnn_batch_norm")
@register_rule("_batch_norm_with_update_functional")
def _batch_norm(call: Call) -> Sequence[Dims]:
    x = call.dims("input")
    for name in ("weight", "bias", "running_mean", "running_var"):
        if call.arguments.get(name) is not None:
            x[1] = call.channels.tie(x[1], call.dims(name)[0])
            if name.startswith("running"):
                call.statistics.append(call[name])
    return [x, *unlabelled_dims(call.outputs[1:])]


@register_rule("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm")
def _layer_norm(call: Call) -> Sequence[Dims]:
    x, tail = call.dims("input"), len(call["normalized_shape"])
    for name in ("weight", "bias"):
        if call.arguments.get(name) is not None:
            for back, labels in enumerate(reversed(call.dims(name)), start=1):
                x[-back] = call.channels.tie(x[-back], labels)
    for labels in x[-tail:]:
        call.cross(labels)
    return [x, *unlabelled_dims(call.outputs[1:])]


@register_rule("native_group_norm", "group_norm")
def _group_norm(call: Call) -> Sequence[Dims]:
    x, groups = call.dims("input"), call["group"]
    for name in ("weight", "bias"):
        if call[name] is not None:
            x[1] = call.channels.tie(x[1], call.dims(name)[0])
    if groups < call["input"].shape[1]:  # one group a channel is per channel, and stays so
        call.channels.fold(x[1], groups)
        call.cross(x[1])
    return [x, *unlabelled_dims(call.outputs[1:])]


@register_rule("_softmax", "_log_softmax", "_safe_softmax")
def _softmax(call: Call) -> Sequence[Dims]:
    """Channels that share a softmax are never cut but keep their identity, as classes do."""
    x = call.dims("self")
    call.channels.pin(x[normalize_dim(call["dim"], len(x))] if x else None)
    return [x]
