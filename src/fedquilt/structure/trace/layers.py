"""Constraints of PyTorch's own layers that their operations do not show."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fedquilt.structure.trace.channels import Channels
from fedquilt.structure.trace.record import Cause
from fedquilt.structure.trace.rules.registry import Dims

LabelsOf = Callable[[Tensor], Dims]


def tie_layers(
    model: nn.Module,
    channels: Channels,
    labels_of: LabelsOf,
    reason_of: Callable[[Cause], int],
) -> None:
    """Ties axes that PyTorch's own layers require to be of one size."""
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            _tie_attention(module, channels, labels_of)
        elif isinstance(module, nn.RNNBase):
            reason = reason_of(Cause("a projected state", path)) if module.proj_size else None
            _tie_recurrent(module, channels, labels_of, reason)


def _tie_attention(module: nn.MultiheadAttention, channels: Channels, labels_of: LabelsOf) -> None:
    packed = module.in_proj_weight
    if packed is None:
        parts = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        rows = [labels_of(part)[0] for part in parts]
        columns = labels_of(module.q_proj_weight)[1]
    else:
        first, columns = labels_of(packed)
        rows = [None if first is None else first[: module.embed_dim]]
    for row in rows:
        channels.tie(columns, row)


def _tie_recurrent(
    module: nn.RNNBase, channels: Channels, labels_of: LabelsOf, reason: int | None
) -> None:
    weights = dict(module.named_parameters(recurse=False))
    states = [labels_of(w)[1] for name, w in weights.items() if name.startswith("weight_hh")]
    for other in states[1:]:
        channels.tie(states[0], other)
    for name, weight in weights.items():
        if name.startswith("weight_hr"):  # PyTorch wants projections to be smaller
            channels.freeze(labels_of(weight)[1], reason)
