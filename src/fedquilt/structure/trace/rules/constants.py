"""Rules of operations that make new tensors, or that read values and sizes."""

from __future__ import annotations

from collections.abc import Sequence

from fedquilt.structure.trace.rules.registry import (
    Call,
    Dims,
    freeze_tensor,
    register_rule,
    unlabelled_dims,
)


@register_rule("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty")
@register_rule("rand", "randn", "scalar_tensor", "new_empty_strided", "empty_strided")
def _make_interchangeable(call: Call) -> Sequence[Dims]:
    """Equal values or noise: they fit any size until they meet channels."""
    return [[call.channels.create(size) for size in out.shape] for out in call.outputs]


@register_rule("arange", "tril", "triu", "eye", "linspace", "tril_indices", "triu_indices")
@register_rule(
    "affine_grid_generator", "bucketize", "searchsorted", "randperm", "randint", "multinomial"
)
@register_rule("size", "sym_size", "equal", "_local_scalar_dense", "is_same_size", "item")
def _freeze_inputs(call: Call) -> Sequence[Dims]:
    for tensor in call.tensors():
        freeze_tensor(call, tensor)
    return unlabelled_dims(call.outputs)
