"""Rules of matrix products, linear layers and attention."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedquilt.structure.trace.channels import NO_REASON, Labels
from fedquilt.structure.trace.rules.registry import Call, Dims, register_rule, unlabelled_dims


@register_rule("mm", "bmm", "matmul")
def _matrix_product(call: Call) -> Sequence[Dims]:
    left_name, right_name = list(call.arguments)[:2]
    return [_product(call, call[left_name], call[right_name])]


def _product(call: Call, left: Tensor, right: Tensor) -> Dims:
    a, b = call.labels(left), call.labels(right)
    _contract(call, left, right, a[-1], b[-2])
    batch: Dims = []
    if left.ndim == 3:
        batch = [call.channels.tie(a[0], b[0])]
    return [*batch, a[-2], b[-1]]


def _contract(call: Call, left: Tensor, right: Tensor, a: Labels | None, b: Labels | None) -> None:
    """Ties the channels over which a sum of products runs."""
    call.channels.tie(a, b)
    if not (call.is_weight(left) or call.is_weight(right)):
        call.cross(a)  # an attention score: its temperature depends on the width


@register_rule("addmm", "baddbmm")
def _biased_product(call: Call) -> Sequence[Dims]:
    names = list(call.arguments)
    dims = _product(call, call[names[1]], call[names[2]])
    bias: Tensor = call[names[0]]
    for back, labels in enumerate(reversed(call.labels(bias)), start=1):
        if bias.shape[-back] == call.outputs[0].shape[-back]:
            dims[-back] = call.channels.tie(dims[-back], labels)
    return [dims]


@register_rule("mv", "dot", "vdot")
def _vector_product(call: Call) -> Sequence[Dims]:
    left, right = call.tensors()[:2]
    a, b = call.labels(left), call.labels(right)
    _contract(call, left, right, a[-1], b[0])
    return [a[:-1]]


@register_rule("linear")
def _linear(call: Call) -> Sequence[Dims]:
    x, weight = call.dims("input"), call.dims("weight")
    _contract(call, call["input"], call["weight"], x[-1], weight[1])
    if call["bias"] is not None:
        call.channels.tie(weight[0], call.dims("bias")[0])
    return [[*x[:-1], weight[0]]]


@register_rule("_trilinear")
def _bilinear(call: Call) -> Sequence[Dims]:
    """As nn.Bilinear calls it: (batch, -, in1, -), (out, in1, in2), (batch, -, -, in2)."""
    names = ("i1", "i2", "i3")
    axes = [call.dims(name) for name in names]
    for dims, name in zip(axes, names, strict=True):
        for place in sorted(call[f"expand{name[1]}"]):
            dims.insert(place, None)
    met: Dims = []
    for place, alike in enumerate(zip(*axes, strict=True)):
        given = [
            dims
            for dims, name in zip(alike, names, strict=True)
            if place not in call[f"expand{name[1]}"]
        ]
        first = given[0]
        for other in given[1:]:
            first = call.channels.tie(first, other)
        met.append(first)
    return [[labels for place, labels in enumerate(met) if place not in call["sumdim"]]]


@register_rule("_weight_norm_interface")
def _weight_norm(call: Call) -> Sequence[Dims]:
    v, g, axis = call.dims("v"), call.dims("g"), call["dim"]
    for i, labels in enumerate(v):
        if i != axis:
            call.cross(labels)
            call.channels.freeze(g[i])
    v[axis] = call.channels.tie(v[axis], g[axis])
    return [v, [v[axis] if i == axis else None for i in range(len(v))]]


@register_rule("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")
@register_rule(
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_fused_attention_overrideable"
)
@register_rule("scaled_dot_product_attention", "_scaled_dot_product_attention_math")
def _attention(call: Call) -> Sequence[Dims]:
    q, k, v = (call.dims(name) for name in ("query", "key", "value"))
    call.channels.tie(q[-1], k[-1])
    call.cross(q[-1])
    mask = call.arguments.get("attn_mask", call.arguments.get("attn_bias"))
    for labels in (*q[:-1], *k[:-1], *v[:-1], *([] if mask is None else call.labels(mask))):
        call.channels.freeze(labels, NO_REASON)  # examples, heads and places
    out: Dims = [*([None] * (len(q) - 1)), v[-1]]
    return [out, *unlabelled_dims(call.outputs[1:])]
