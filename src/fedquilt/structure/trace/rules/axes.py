"""Rules of operations that move, add, join or split whole axes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fedquilt.structure.trace.channels import join
from fedquilt.structure.trace.rules.registry import Call, Dims, normalize_dim, register_rule


@register_rule("t")
def _t(call: Call) -> Sequence[Dims]:
    return [list(reversed(call.dims("self")))]


@register_rule("transpose", "swapaxes")
def _transpose(call: Call) -> Sequence[Dims]:
    x = call.dims("self")
    a, b = (normalize_dim(call[name], len(x)) for name in ("dim0", "dim1"))
    x[a], x[b] = x[b], x[a]
    return [x]


@register_rule("permute")
def _permute(call: Call) -> Sequence[Dims]:
    x = call.dims("self")
    return [[x[normalize_dim(d, len(x))] for d in call["dims"]]]


@register_rule("unsqueeze")
def _unsqueeze(call: Call) -> Sequence[Dims]:
    x = call.dims("self")
    x.insert(normalize_dim(call["dim"], len(x) + 1), None)
    return [x]


@register_rule("squeeze")
def _squeeze(call: Call) -> Sequence[Dims]:
    source: Tensor = call["self"]
    given = call.arguments.get("dim", range(source.ndim))
    asked = {normalize_dim(d, source.ndim) for d in ([given] if isinstance(given, int) else given)}
    kept: Dims = []
    for axis, labels in enumerate(call.dims("self")):
        if axis in asked and source.shape[axis] == 1:
            call.channels.freeze(labels)
        else:
            kept.append(labels)
    return [kept]


@register_rule("expand")
def _expand(call: Call) -> Sequence[Dims]:
    source, out = call["self"], call.outputs[0]
    dims: Dims = [None] * (out.ndim - source.ndim)
    for size, new, labels in zip(
        source.shape, out.shape[len(dims) :], call.dims("self"), strict=True
    ):
        if size != new:
            call.channels.freeze(labels)
        dims.append(labels if size == new else call.channels.create(new))
    return [dims]


@register_rule("repeat", "tile")
def _repeat(call: Call) -> Sequence[Dims]:
    source, out = call["self"], call.outputs[0]
    dims: Dims = [None] * (out.ndim - source.ndim)
    for size, new, labels in zip(
        source.shape, out.shape[len(dims) :], call.dims("self"), strict=True
    ):
        if size == 1 and new > 1:
            call.channels.freeze(labels)
            dims.append(call.channels.create(new))  # alike at every position, as from expand
        else:
            dims.append(None if labels is None else np.tile(labels, new // max(size, 1)))
    return [dims]


@register_rule("cat")
def _cat(call: Call) -> Sequence[Dims]:
    tensors = [t for t in call["tensors"] if t.numel() or t.ndim > 1]
    axis = normalize_dim(call.arguments.get("dim", 0), tensors[0].ndim)
    dims = [call.labels(t) for t in tensors]
    first = list(dims[0])
    for other in dims[1:]:
        for i, labels in enumerate(other):
            if i != axis:
                first[i] = call.channels.tie(first[i], labels)
    first[axis] = join((d[axis], t.shape[axis]) for d, t in zip(dims, tensors, strict=True))
    return [first]


@register_rule("stack")
def _stack(call: Call) -> Sequence[Dims]:
    first = call.labels(call["tensors"][0])
    for tensor in call["tensors"][1:]:
        first = [call.channels.tie(a, b) for a, b in zip(first, call.labels(tensor), strict=True)]
    first.insert(normalize_dim(call.arguments.get("dim", 0), len(first) + 1), None)
    return [first]


@register_rule("split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes")
def _split(call: Call) -> Sequence[Dims]:
    source: Tensor = call.tensors()[0]
    x = call.labels(source)
    axis = normalize_dim(call.arguments.get("dim", 0), source.ndim)
    sizes = [out.shape[axis] for out in call.outputs]
    if len(set(sizes)) == 1 and ("with_sizes" not in call.name or call.equal_parts):
        call.channels.fold(x[axis], len(sizes))  # equal parts must stay equal
    ends = np.cumsum(sizes)
    results = []
    for size, end in zip(sizes, ends, strict=True):
        labels = x[axis]
        part = None if labels is None else labels[end - size : end]
        results.append([*x[:axis], part, *x[axis + 1 :]])
    return results


@register_rule("unbind")
def _unbind(call: Call) -> Sequence[Dims]:
    source: Tensor = call["self"]
    x = call.dims("self")
    axis = normalize_dim(call.arguments.get("dim", 0), source.ndim)
    call.channels.freeze(x[axis])
    return [[*x[:axis], *x[axis + 1 :]] for _ in call.outputs]


@register_rule("select")
def _select(call: Call) -> Sequence[Dims]:
    x = call.dims("self")
    axis = normalize_dim(call["dim"], len(x))
    call.channels.freeze(x[axis])
    return [[*x[:axis], *x[axis + 1 :]]]


@register_rule("slice")
def _slice(call: Call) -> Sequence[Dims]:
    source: Tensor = call["self"]
    x = call.dims("self")
    axis = normalize_dim(call.arguments.get("dim", 0), source.ndim)
    size, out = source.shape[axis], call.outputs[0].shape[axis]
    labels = x[axis]
    if labels is None or size == out:
        return [x]
    start = call.arguments.get("start") or 0
    start = start + size if start < 0 else start
    step = call.arguments.get("step", 1)
    if step == 1 and out and size % out == 0 and start % out == 0:
        call.channels.fold(labels, size // out)  # one of several equal parts: they stay equal
    elif step > 1 and out * step == size:
        call.channels.fold(labels.reshape(-1, step).T.reshape(-1), step)  # even and odd, in pairs
    else:
        call.channels.freeze(labels)
    x[axis] = labels[start : start + out * step : step]
    return [x]


@register_rule("glu")
def _glu(call: Call) -> Sequence[Dims]:
    source: Tensor = call["self"]
    x = call.dims("self")
    axis = normalize_dim(call.arguments.get("dim", -1), source.ndim)
    call.channels.fold(x[axis], 2)
    labels = x[axis]
    x[axis] = None if labels is None else labels[: source.shape[axis] // 2]
    return [x]
