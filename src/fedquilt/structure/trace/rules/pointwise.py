"""Rules of operations that work element by element."""

from __future__ import annotations

from collections.abc import Sequence

from fedquilt.structure.trace.channels import Labels
from fedquilt.structure.trace.rules.registry import Call, Dims, register_rule


@register_rule("copy", "_prelu_kernel", "hardswish", "log_sigmoid_forward", "rrelu_with_noise")
@register_rule("polar", "complex", "floor_divide", "normal")
def tie_pointwise(call: Call) -> Sequence[Dims]:
    """Tensors that meet element by element share their channels, as broadcasting aligns them."""
    result: list[Dims] = []
    for out in call.outputs:
        dims: Dims = []
        for back in range(out.ndim, 0, -1):
            dims.append(_tie_axis(call, out.shape[-back], back))
        result.append(dims)
    return result


def _tie_axis(call: Call, size: int, back: int) -> Labels | None:
    meeting: list[Labels | None] = []
    for tensor in call.tensors():
        if tensor.ndim < back:
            continue
        labels = call.labels(tensor)[-back]
        if tensor.shape[-back] == size:
            meeting.append(labels)
        else:
            call.channels.freeze(labels)
    if not meeting:
        return None
    first = meeting[0]
    for other in meeting[1:]:
        first = call.channels.tie(first, other)
    return first


@register_rule(
    "clone", "detach", "alias", "_to_copy", "lift_fresh", "lift_fresh_copy", "contiguous"
)
@register_rule("native_dropout", "dropout", "_conj", "resolve_conj", "positive", "bernoulli")
@register_rule("rand_like", "randn_like", "empty_like", "zeros_like", "ones_like", "full_like")
@register_rule("uniform", "exponential", "fill", "zero", "_fw_primal")
def _pass_on(call: Call) -> Sequence[Dims]:
    dims = call.labels(call.tensors()[0])
    return [dims for _ in call.outputs]
