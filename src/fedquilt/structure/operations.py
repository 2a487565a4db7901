"""How each tensor operation carries channels from its inputs to its outputs.

One small rule per ATen operation, by name; everything PyTorch computes is made of these. A rule
gets the call, ties what the operation makes inseparable, and returns the labels of its outputs. An
operation without a rule is refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedquilt.structure.channels import NO_REASON, Channels, Labels, join

Dims = list[Labels | None]  # labels per axis of one tensor; None: never cut


@dataclass
class Call:
    """One executed operation, with the labels of its tensors at hand."""

    name: str
    arguments: dict[str, Any]
    outputs: tuple[Tensor, ...]
    channels: Channels
    labels: Callable[[Tensor], Dims]
    is_weight: Callable[[Tensor], bool]  # made of the model's tensors alone
    split_first: bool = False  # where a reshape splits channels: label the first part, not the last
    equal_parts: bool = False  # parts that are listed by size, and equal, stay equal
    statistics: list[Tensor] = field(default_factory=list)  # running statistics it meets
    across: list[Labels] = field(default_factory=list)  # channels it computes across
    places: list[tuple[Tensor, Labels]] = field(default_factory=list)
    """Outputs that say at which of these channels something was found."""
    splits: list[tuple[Labels, tuple[int, ...]]] = field(default_factory=list)
    """Axes that it split into several of these sizes, of which each could carry the channels."""

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def dims(self, name: str) -> Dims:
        """Labels of a tensor argument, axis by axis."""
        return self.labels(self.arguments[name])

    def tensors(self) -> list[Tensor]:
        """All tensor arguments, also those in lists."""
        found: list[Tensor] = []
        for value in self.arguments.values():
            items = value if isinstance(value, (list, tuple)) else (value,)
            found.extend(item for item in items if isinstance(item, Tensor))
        return found

    def cross(self, labels: Labels | None) -> None:
        """Notes that something is computed across these channels, if they may be cut.

        A subnet then differs from the masked supernet.
        """
        if labels is not None and self.channels.is_cut(labels):
            self.across.append(labels)


NOISE = frozenset(
    ("rand", "randn", "rand_like", "randn_like", "uniform", "normal", "exponential", "bernoulli")
)
Rule = Callable[[Call], Sequence[Dims]]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers the rule of the named ATen operations."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def _unlabelled(tensors: Sequence[Tensor]) -> list[Dims]:
    return [[None] * tensor.ndim for tensor in tensors]


def _axis(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


def pointwise(call: Call) -> Sequence[Dims]:
    """Tensors that meet element by element share their channels, as broadcasting aligns them."""
    result: list[Dims] = []
    for out in call.outputs:
        dims: Dims = []
        for back in range(out.ndim, 0, -1):
            dims.append(_meet(call, out.shape[-back], back))
        result.append(dims)
    return result


def _meet(call: Call, size: int, back: int) -> Labels | None:
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


@rule("clone", "detach", "alias", "_to_copy", "lift_fresh", "lift_fresh_copy", "contiguous")
@rule("native_dropout", "dropout", "_conj", "resolve_conj", "positive", "bernoulli")
@rule("rand_like", "randn_like", "empty_like", "zeros_like", "ones_like", "full_like")
@rule("uniform", "exponential", "fill", "zero", "_fw_primal")
def _same(call: Call) -> Sequence[Dims]:
    dims = call.labels(call.tensors()[0])
    return [dims for _ in call.outputs]


@rule("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty")
@rule("rand", "randn", "scalar_tensor", "new_empty_strided", "empty_strided")
def _uniform(call: Call) -> Sequence[Dims]:
    """Values that no position tells apart, or noise: of any size, until they meet channels."""
    return [[call.channels.fresh(size) for size in out.shape] for out in call.outputs]


@rule("arange", "tril", "triu", "eye", "linspace", "tril_indices", "triu_indices")
@rule("affine_grid_generator", "bucketize", "searchsorted", "randperm", "randint", "multinomial")
@rule("size", "sym_size", "equal", "_local_scalar_dense", "is_same_size", "item")
def _constant(call: Call) -> Sequence[Dims]:
    for tensor in call.tensors():
        _freeze_all(call, tensor)
    return _unlabelled(call.outputs)


def _freeze_all(call: Call, tensor: Tensor) -> None:
    for labels in call.labels(tensor):
        call.channels.freeze(labels)


@rule("mm", "bmm", "matmul")
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
    """The channels that a sum of products runs over are the same on both sides."""
    call.channels.tie(a, b)
    if not (call.is_weight(left) or call.is_weight(right)):
        call.cross(a)  # an attention score: its temperature depends on the width


@rule("addmm", "baddbmm")
def _biased_product(call: Call) -> Sequence[Dims]:
    names = list(call.arguments)
    dims = _product(call, call[names[1]], call[names[2]])
    bias: Tensor = call[names[0]]
    for back, labels in enumerate(reversed(call.labels(bias)), start=1):
        if bias.shape[-back] == call.outputs[0].shape[-back]:
            dims[-back] = call.channels.tie(dims[-back], labels)
    return [dims]


@rule("mv", "dot", "vdot")
def _vector_product(call: Call) -> Sequence[Dims]:
    left, right = call.tensors()[:2]
    a, b = call.labels(left), call.labels(right)
    _contract(call, left, right, a[-1], b[0])
    return [a[:-1]]


@rule("linear")
def _linear(call: Call) -> Sequence[Dims]:
    x, weight = call.dims("input"), call.dims("weight")
    _contract(call, call["input"], call["weight"], x[-1], weight[1])
    if call["bias"] is not None:
        call.channels.tie(weight[0], call.dims("bias")[0])
    return [[*x[:-1], weight[0]]]


@rule("_trilinear")
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


@rule("_weight_norm_interface")
def _weight_norm(call: Call) -> Sequence[Dims]:
    v, g, axis = call.dims("v"), call.dims("g"), call["dim"]
    for i, labels in enumerate(v):
        if i != axis:
            call.cross(labels)
            call.channels.freeze(g[i])
    v[axis] = call.channels.tie(v[axis], g[axis])
    return [v, [v[axis] if i == axis else None for i in range(len(v))]]


@rule("convolution", "_convolution", "mkldnn_convolution")
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


@rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training")
@rule("_batch_norm_with_update", "_batch_norm_no_update", "batch_norm", "cudnn_batch_norm")
@rule("_batch_norm_with_update_functional")
def _batch_norm(call: Call) -> Sequence[Dims]:
    x = call.dims("input")
    for name in ("weight", "bias", "running_mean", "running_var"):
        if call.arguments.get(name) is not None:
            x[1] = call.channels.tie(x[1], call.dims(name)[0])
            if name.startswith("running"):
                call.statistics.append(call[name])
    return [x, *_unlabelled(call.outputs[1:])]


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm")
def _layer_norm(call: Call) -> Sequence[Dims]:
    x, tail = call.dims("input"), len(call["normalized_shape"])
    for name in ("weight", "bias"):
        if call.arguments.get(name) is not None:
            for back, labels in enumerate(reversed(call.dims(name)), start=1):
                x[-back] = call.channels.tie(x[-back], labels)
    for labels in x[-tail:]:
        call.cross(labels)
    return [x, *_unlabelled(call.outputs[1:])]


@rule("native_group_norm", "group_norm")
def _group_norm(call: Call) -> Sequence[Dims]:
    x, groups = call.dims("input"), call["group"]
    for name in ("weight", "bias"):
        if call[name] is not None:
            x[1] = call.channels.tie(x[1], call.dims(name)[0])
    if groups < call["input"].shape[1]:  # one group a channel is per channel, and stays so
        call.channels.fold(x[1], groups)
        call.cross(x[1])
    return [x, *_unlabelled(call.outputs[1:])]


@rule("embedding", "_embedding_bag")
def _embedding(call: Call) -> Sequence[Dims]:
    weight = call.dims("weight")
    call.channels.pin(weight[0], NO_REASON)  # words
    return [[*call.dims("indices"), weight[1]]]


@rule("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")
@rule("_scaled_dot_product_efficient_attention", "_scaled_dot_product_fused_attention_overrideable")
@rule("scaled_dot_product_attention", "_scaled_dot_product_attention_math")
def _attention(call: Call) -> Sequence[Dims]:
    q, k, v = (call.dims(name) for name in ("query", "key", "value"))
    call.channels.tie(q[-1], k[-1])
    call.cross(q[-1])
    mask = call.arguments.get("attn_mask", call.arguments.get("attn_bias"))
    for labels in (*q[:-1], *k[:-1], *v[:-1], *([] if mask is None else call.labels(mask))):
        call.channels.freeze(labels, NO_REASON)  # examples, heads and places
    out: Dims = [*([None] * (len(q) - 1)), v[-1]]
    return [out, *_unlabelled(call.outputs[1:])]


@rule("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d")
@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d")
@rule("max_pool2d", "max_pool1d", "mkldnn_max_pool2d", "avg_pool1d", "adaptive_avg_pool1d")
@rule("upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_linear1d")
@rule("upsample_bicubic2d", "reflection_pad1d", "reflection_pad2d", "replication_pad2d")
@rule("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "replication_pad1d", "replication_pad3d")
@rule("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d")
@rule("upsample_nearest3d", "upsample_trilinear3d", "reflection_pad3d", "grid_sampler_2d")
@rule("grid_sampler_3d", "max_unpool2d", "max_unpool3d", "fractional_max_pool2d")
def _over_space(call: Call) -> Sequence[Dims]:
    x = call.labels(call.tensors()[0])
    spatial = 2 if "2d" in call.name else 3 if "3d" in call.name else 1
    for labels in x[-spatial:]:
        call.channels.freeze(labels)
    if "grid" in call.name:
        _freeze_all(call, call["grid"])
    return [[*x[:-spatial], *([None] * spatial)] for _ in call.outputs]


@rule("constant_pad_nd")
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


@rule("sum", "mean", "var", "std", "var_mean", "std_mean", "linalg_vector_norm", "norm")
@rule("any", "all", "nansum", "count_nonzero", "aminmax")
@rule("amax", "amin", "max", "min", "prod", "logsumexp", "median", "argmax", "argmin")
def _reduce(call: Call) -> Sequence[Dims]:
    """One value of many, whatever their order; the place where it was found depends on it."""
    if len(call.tensors()) > 1:
        return pointwise(call)  # max(a, b) is elementwise
    source = call.tensors()[0]
    x = call.labels(source)
    given = call.arguments.get("dim")
    if given is None or given == []:
        given = range(source.ndim)
    gone = {_axis(d, source.ndim) for d in ([given] if isinstance(given, int) else given)}
    for axis in gone:
        labels = x[axis]
        if call.name in ("argmax", "argmin"):
            call.channels.freeze(labels)
        call.cross(labels)
        if call.name in ("max", "min", "median") and labels is not None:
            call.places.extend((out, labels) for out in call.outputs[1:])
    results: list[Dims] = []
    for out in call.outputs:
        kept = out.ndim == source.ndim
        results.append(
            [None if i in gone else labels for i, labels in enumerate(x) if kept or i not in gone]
        )
    return results


@rule("_softmax", "_log_softmax", "_safe_softmax")
def _softmax(call: Call) -> Sequence[Dims]:
    """Channels that share a softmax are never cut, but still known: they may be the classes."""
    x = call.dims("self")
    call.channels.pin(x[_axis(call["dim"], len(x))] if x else None)
    return [x]


@rule("cumsum", "cumprod", "sort", "topk", "flip", "roll", "logcumsumexp", "cummax", "cummin")
def _along(call: Call) -> Sequence[Dims]:
    source = call.tensors()[0]
    x = call.labels(source)
    given = call.arguments.get("dim", call.arguments.get("dims", -1))
    for d in [given] if isinstance(given, int) else given or range(source.ndim):
        axis = _axis(d, source.ndim)
        call.channels.freeze(x[axis])
        x[axis] = None
    return [x for _ in call.outputs]


@rule("t")
def _t(call: Call) -> Sequence[Dims]:
    return [list(reversed(call.dims("self")))]


@rule("transpose", "swapaxes")
def _transpose(call: Call) -> Sequence[Dims]:
    x = call.dims("self")
    a, b = (_axis(call[name], len(x)) for name in ("dim0", "dim1"))
    x[a], x[b] = x[b], x[a]
    return [x]


@rule("permute")
def _permute(call: Call) -> Sequence[Dims]:
    x = call.dims("self")
    return [[x[_axis(d, len(x))] for d in call["dims"]]]


@rule("unsqueeze")
def _unsqueeze(call: Call) -> Sequence[Dims]:
    x = call.dims("self")
    x.insert(_axis(call["dim"], len(x) + 1), None)
    return [x]


@rule("squeeze")
def _squeeze(call: Call) -> Sequence[Dims]:
    source: Tensor = call["self"]
    given = call.arguments.get("dim", range(source.ndim))
    asked = {_axis(d, source.ndim) for d in ([given] if isinstance(given, int) else given)}
    kept: Dims = []
    for axis, labels in enumerate(call.dims("self")):
        if axis in asked and source.shape[axis] == 1:
            call.channels.freeze(labels)
        else:
            kept.append(labels)
    return [kept]


@rule("expand")
def _expand(call: Call) -> Sequence[Dims]:
    source, out = call["self"], call.outputs[0]
    dims: Dims = [None] * (out.ndim - source.ndim)
    for size, new, labels in zip(
        source.shape, out.shape[len(dims) :], call.dims("self"), strict=True
    ):
        if size != new:
            call.channels.freeze(labels)
        dims.append(labels if size == new else call.channels.fresh(new))
    return [dims]


@rule("repeat", "tile")
def _repeat(call: Call) -> Sequence[Dims]:
    source, out = call["self"], call.outputs[0]
    dims: Dims = [None] * (out.ndim - source.ndim)
    for size, new, labels in zip(
        source.shape, out.shape[len(dims) :], call.dims("self"), strict=True
    ):
        if size == 1 and new > 1:
            call.channels.freeze(labels)
            dims.append(call.channels.fresh(new))  # alike at every position, as from expand
        else:
            dims.append(None if labels is None else np.tile(labels, new // max(size, 1)))
    return [dims]


@rule("cat")
def _cat(call: Call) -> Sequence[Dims]:
    tensors = [t for t in call["tensors"] if t.numel() or t.ndim > 1]
    axis = _axis(call.arguments.get("dim", 0), tensors[0].ndim)
    dims = [call.labels(t) for t in tensors]
    first = list(dims[0])
    for other in dims[1:]:
        for i, labels in enumerate(other):
            if i != axis:
                first[i] = call.channels.tie(first[i], labels)
    first[axis] = join((d[axis], t.shape[axis]) for d, t in zip(dims, tensors, strict=True))
    return [first]


@rule("stack")
def _stack(call: Call) -> Sequence[Dims]:
    first = call.labels(call["tensors"][0])
    for tensor in call["tensors"][1:]:
        first = [call.channels.tie(a, b) for a, b in zip(first, call.labels(tensor), strict=True)]
    first.insert(_axis(call.arguments.get("dim", 0), len(first) + 1), None)
    return [first]


@rule("split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes")
def _split(call: Call) -> Sequence[Dims]:
    source: Tensor = call.tensors()[0]
    x = call.labels(source)
    axis = _axis(call.arguments.get("dim", 0), source.ndim)
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


@rule("unbind")
def _unbind(call: Call) -> Sequence[Dims]:
    source: Tensor = call["self"]
    x = call.dims("self")
    axis = _axis(call.arguments.get("dim", 0), source.ndim)
    call.channels.freeze(x[axis])
    return [[*x[:axis], *x[axis + 1 :]] for _ in call.outputs]


@rule("select")
def _select(call: Call) -> Sequence[Dims]:
    x = call.dims("self")
    axis = _axis(call["dim"], len(x))
    call.channels.freeze(x[axis])
    return [[*x[:axis], *x[axis + 1 :]]]


@rule("slice")
def _slice(call: Call) -> Sequence[Dims]:
    source: Tensor = call["self"]
    x = call.dims("self")
    axis = _axis(call.arguments.get("dim", 0), source.ndim)
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


@rule("glu")
def _glu(call: Call) -> Sequence[Dims]:
    source: Tensor = call["self"]
    x = call.dims("self")
    axis = _axis(call.arguments.get("dim", -1), source.ndim)
    call.channels.fold(x[axis], 2)
    labels = x[axis]
    x[axis] = None if labels is None else labels[: source.shape[axis] // 2]
    return [x]


@rule("index", "_unsafe_index", "index_put", "_index_put_impl")
def _index(call: Call) -> Sequence[Dims]:
    """Rows picked or written by numbers or by masks: the axes that are not indexed pass."""
    dims, values = call.labels(call.tensors()[0]), call.arguments.get("values")
    used: list[int] = []
    axis = rank = 0
    for index in call["indices"]:
        if index is None:
            axis += 1
            continue
        is_mask = index.dtype in (torch.bool, torch.uint8)  # it covers as many axes as it has
        rank = max(rank, 1 if is_mask else index.ndim)
        if not (is_mask and values is not None and values.numel() == 1):
            _freeze_all(call, index)  # else one value wherever the mask says so: elementwise
        for labels in call.labels(index) if is_mask else [None]:
            dims[axis] = call.channels.tie(dims[axis], labels)
            used.append(axis)
            axis += 1
    are_neighbours = bool(used) and used[-1] - used[0] == len(used) - 1
    rows = [labels for axis, labels in enumerate(dims) if axis not in used]
    first = used[0] if are_neighbours else 0
    rows[first:first] = [None] * rank
    if values is None:
        return [rows]
    _write(call, rows, values)
    return [dims]


def _write(call: Call, rows: Dims, values: Tensor) -> None:
    """Values that are written to rows have their channels, where they are not the same for all."""
    for back, labels in enumerate(reversed(call.labels(values)), start=1):
        row = rows[-back]
        is_same = row is not None and values.shape[-back] == len(row)
        call.channels.tie(row, labels) if is_same else call.channels.freeze(labels)


@rule("index_select", "index_add", "index_copy", "index_reduce", "index_fill")
def _rows(call: Call) -> Sequence[Dims]:
    """Rows picked or written on one axis: the other axes pass."""
    source, index = call.tensors()[0], call["index"]
    dims, axis = call.labels(source), _axis(call["dim"], source.ndim)
    _freeze_all(call, index)
    labels, repeats = dims[axis], _repeats(index, source.shape[axis])
    if labels is not None and repeats and call.name == "index_select":
        return [[*dims[:axis], np.repeat(labels, repeats), *dims[axis + 1 :]]]
    call.channels.freeze(labels)
    dims[axis] = None
    if "source" in call.arguments:
        _write(call, dims, call["source"])
    return [dims]


def _repeats(index: Tensor, size: int) -> int:
    """How often an index takes every position, one after the other; 0 if it does not."""
    repeats = index.numel() // max(size, 1)
    every = torch.arange(size, device=index.device).repeat_interleave(repeats)
    return repeats if torch.equal(every, index.flatten().long()) else 0


@rule("gather", "scatter", "scatter_add", "scatter_reduce")
def _gather(call: Call) -> Sequence[Dims]:
    """Picks or writes along one axis; on the others all tensors lie over each other."""
    tensors = call.tensors()
    dims = call.labels(tensors[0])
    along = _axis(call["dim"], len(dims))
    for axis, alike in enumerate(zip(*map(call.labels, tensors), strict=True)):
        if axis == along or len({tensor.shape[axis] for tensor in tensors}) > 1:
            alike = (None, *alike)
        for labels in alike:
            dims[axis] = call.channels.tie(dims[axis], labels)
    return [dims]


@rule("as_strided")
def _lay_out(call: Call) -> Sequence[Dims]:
    """An axis passes if its positions lie in memory as they did, whatever the others do.

    In place it says how memory is laid out: the sizes must be what they were.
    """
    source, out = call["self"], call.outputs[0]
    given = call.labels(source)
    start = out.storage_offset() - source.storage_offset()
    old, new = ([*zip(t.shape, t.stride(), strict=True)] for t in (source, out))
    is_dense = sum((n - 1) * stride for n, stride in old) + 1 == source.numel()
    if not is_dense or [None if x is None else len(x) for x in given] != [
        None if x is None else n for x, n in zip(given, source.shape, strict=False)
    ]:
        return _freezing(call)
    dims: Dims = [None] * out.ndim
    for axis, place in enumerate(new):
        others = [*new[:axis], *new[axis + 1 :]]
        if place in old and place[0] > 1 and _stays(*place, start, others):
            dims[axis] = given[old.index(place)]
    for labels in given:
        if not any(labels is passed for passed in dims):
            call.channels.freeze(labels)
    return [dims]


def _stays(size: int, stride: int, start: int, others: Sequence[tuple[int, int]]) -> bool:
    """Whether a place on an axis stays the same wherever one goes on the others."""
    if stride == 0 or start // stride % size:
        return False
    below = start % stride + sum((n - 1) * step for n, step in others if step < stride)
    above = (step for n, step in others if step >= stride and n > 1)
    return below < stride and all(step % (size * stride) == 0 for step in above)


@rule("masked_select", "masked_scatter")
@rule("nonzero", "one_hot", "bincount", "histc", "take")
@rule("diagonal", "_cdist_forward", "repeat_interleave")
def _freezing(call: Call) -> Sequence[Dims]:
    for tensor in call.tensors():
        _freeze_all(call, tensor)
    return _unlabelled(call.outputs)


@rule("unfold")
def _windows(call: Call) -> Sequence[Dims]:
    """Windows along one axis, each of which becomes the last one."""
    x = call.dims("self")
    axis = _axis(call["dimension"], len(x))
    call.channels.freeze(x[axis])
    x[axis] = None
    return [[*x, None]]


@rule("im2col")
def _patches(call: Call) -> Sequence[Dims]:
    """(batch, channels, height, width) -> (batch, places of a patch for each channel, patches)."""
    x = call.dims("self")
    for labels in x[-2:]:
        call.channels.freeze(labels)
    labels = x[-3]
    return [
        [*x[:-3], None if labels is None else np.repeat(labels, prod(call["kernel_size"])), None]
    ]


@rule("col2im")
def _image(call: Call) -> Sequence[Dims]:
    """The other way; the places of a patch are of one channel."""
    x, size = call.dims("self"), prod(call["kernel_size"])
    call.channels.freeze(x[-1])
    labels = x[-2]
    if labels is not None:
        parts = labels.reshape(-1, size)
        call.channels.fold(parts.T.reshape(-1), size)
        labels = parts[:, 0].copy()
    return [[*x[:-2], labels, None, None]]


@rule("pixel_shuffle")
def _pixel_shuffle(call: Call) -> Sequence[Dims]:
    """Every output channel is made of neighbouring input channels."""
    x = call.dims("self")
    if x[-3] is not None:
        parts = x[-3].reshape(-1, call["upscale_factor"] ** 2)
        call.channels.fold(parts.T.reshape(-1), parts.shape[1])
        x[-3] = parts[:, 0].copy()
    return [[*x[:-2], None, None]]


@rule("pixel_unshuffle")
def _pixel_unshuffle(call: Call) -> Sequence[Dims]:
    x = call.dims("self")
    labels = x[-3]
    x[-3] = None if labels is None else np.repeat(labels, call["downscale_factor"] ** 2)
    return [[*x[:-2], None, None]]


@rule("channel_shuffle", "native_channel_shuffle")
def _channel_shuffle(call: Call) -> Sequence[Dims]:
    x = call.dims("self")
    if x[1] is not None:
        call.channels.fold(x[1], call["groups"])
        x[1] = x[1].reshape(call["groups"], -1).T.reshape(-1)
    return [x]


@rule("view_as_complex")
def _pairs_to_complex(call: Call) -> Sequence[Dims]:
    x = call.dims("self")
    call.channels.freeze(x[-1])
    return [x[:-1]]


@rule("view_as_real")
def _complex_to_pairs(call: Call) -> Sequence[Dims]:
    return [[*call.dims("self"), None]]


@rule("_pack_padded_sequence")
def _pack(call: Call) -> Sequence[Dims]:
    """(batch and time in two axes, features) -> (both in one, features), and the batch sizes."""
    return [[None, *call.dims("input")[2:]], [None]]


@rule("_pad_packed_sequence")
def _unpack(call: Call) -> Sequence[Dims]:
    return [[None, None, *call.dims("data")[1:]], [None]]


for _name in ("copy", "_prelu_kernel", "hardswish", "log_sigmoid_forward", "rrelu_with_noise"):
    RULES[_name] = pointwise  # elementwise, though PyTorch does not tag them so
for _name in ("polar", "complex", "floor_divide", "normal"):
    RULES[_name] = pointwise


RESHAPES = ("view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten", "flatten", "view_as")


@rule(*RESHAPES)
def _view(call: Call) -> Sequence[Dims]:
    source, out = call.tensors()[0], call.outputs[0]
    given = call.labels(source)
    if not any(call.channels.is_cut(labels) for labels in given):
        return [[None] * out.ndim]
    ins = [i for i, size in enumerate(source.shape) if size != 1]
    outs = [i for i, size in enumerate(out.shape) if size != 1]
    for i in set(range(source.ndim)) - set(ins):
        call.channels.freeze(given[i])
    dims: Dims = [None] * out.ndim
    for some_in, some_out in _stretches(source.shape, out.shape, ins, outs):
        flat = _flatten(call, [(given[i], source.shape[i]) for i in some_in])
        for i, labels in zip(
            some_out, _unflatten(call, flat, [out.shape[i] for i in some_out]), strict=True
        ):
            dims[i] = labels
    return [dims]


def _stretches(
    old: Sequence[int], new: Sequence[int], ins: list[int], outs: list[int]
) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of old and new axes that hold the same elements."""
    runs: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(ins) and j < len(outs):
        some_in, some_out = [ins[i]], [outs[j]]
        i, j = i + 1, j + 1
        while (have := prod(old[k] for k in some_in)) != (want := prod(new[k] for k in some_out)):
            if have < want:
                some_in.append(ins[i])
                i += 1
            else:
                some_out.append(outs[j])
                j += 1
        runs.append((some_in, some_out))
    return runs


def _flatten(call: Call, axes: list[tuple[Labels | None, int]]) -> Labels | None:
    """Labels of several axes laid into one; if two of them carry channels, only the last does."""
    cut = [i for i, (labels, _) in enumerate(axes) if call.channels.is_cut(labels)]
    if not cut:
        return None
    for i in cut[:-1]:
        call.channels.freeze(axes[i][0])
    labels, _ = axes[cut[-1]]
    assert labels is not None
    shape = [1] * len(axes)
    shape[cut[-1]] = len(labels)
    return np.broadcast_to(labels.reshape(shape), [size for _, size in axes]).reshape(-1)


def _unflatten(call: Call, flat: Labels | None, sizes: list[int]) -> Dims:
    """Labels of one axis that is split; the part that carries channels is tied over the rest."""
    if flat is None:
        return [None] * len(sizes)
    if len(sizes) == 1:
        return [flat]
    grid = call.channels.roots(flat).reshape(sizes)
    varying = [i for i in range(len(sizes)) if (grid != np.take(grid, [0], axis=i)).any()]
    if not varying:
        call.channels.freeze(flat)
        return [None] * len(sizes)
    if len(varying) > 1:
        call.splits.append((flat, tuple(sizes)))
    carrier = varying[0] if call.split_first else varying[-1]
    rows = np.moveaxis(grid, carrier, -1).reshape(-1, sizes[carrier])
    for row in rows[1:]:
        call.channels.tie(rows[0], row)
    dims: Dims = [None] * len(sizes)
    dims[carrier] = rows[0].copy()
    return dims


def rule_for(func: Any) -> Rule | None:
    """The rule of an ATen overload: by name, or the pointwise one if PyTorch tags it so."""
    name = base_name(func)
    if name in RULES:
        return RULES[name]
    packet = getattr(torch.ops.aten, name, None)  # an in-place form has no tag of its own
    overloads = [] if packet is None else [getattr(packet, o) for o in packet.overloads()]
    tagged = any(torch.Tag.pointwise in f.tags for f in (func, *overloads))
    return pointwise if tagged else None


def base_name(func: Any) -> str:
    """The operation's name without namespace, overload and in-place underscore."""
    name = str(func._schema.name).split("::")[-1]
    return name.removesuffix("_") if not name.endswith("__") else name
