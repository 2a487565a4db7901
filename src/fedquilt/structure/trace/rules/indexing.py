"""Rules of operations that pick or write positions by index or mask."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedquilt.structure.trace.channels import NO_REASON
from fedquilt.structure.trace.rules.registry import (
    Call,
    Dims,
    freeze_tensor,
    normalize_dim,
    register_rule,
    unlabelled_dims,
)


@register_rule("embedding", "_embedding_bag")
def _embedding(call: Call) -> Sequence[Dims]:
    weight = call.dims("weight")
    call.channels.pin(weight[0], NO_REASON)  # words
    return [[*call.dims("indices"), weight[1]]]


@register_rule("index", "_unsafe_index", "index_put", "_index_put_impl")
def _index(call: Call) -> Sequence[Dims]:
    """Rows picked or written by indices or masks; axes that are not indexed keep their labels."""
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
            freeze_tensor(call, index)  # else one value wherever the mask says so: elementwise
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
    _tie_written(call, rows, values)
    return [dims]


def _tie_written(call: Call, rows: Dims, values: Tensor) -> None:
    """Ties values that are written to rows with them, unless they are broadcast."""
    for back, labels in enumerate(reversed(call.labels(values)), start=1):
        row = rows[-back]
        is_same = row is not None and values.shape[-back] == len(row)
        call.channels.tie(row, labels) if is_same else call.channels.freeze(labels)


@register_rule("index_select", "index_add", "index_copy", "index_reduce", "index_fill")
def _index_rows(call: Call) -> Sequence[Dims]:
    """Rows picked or written on one axis; the other axes keep their labels."""
    source, index = call.tensors()[0], call["index"]
    dims, axis = call.labels(source), normalize_dim(call["dim"], source.ndim)
    freeze_tensor(call, index)
    labels, repeats = dims[axis], _count_repeats(index, source.shape[axis])
    if labels is not None and repeats and call.name == "index_select":
        return [[*dims[:axis], np.repeat(labels, repeats), *dims[axis + 1 :]]]
    call.channels.freeze(labels)
    dims[axis] = None
    if "source" in call.arguments:
        _tie_written(call, dims, call["source"])
    return [dims]


def _count_repeats(index: Tensor, size: int) -> int:
    """How often an index takes every position, one after the other; 0 if it does not."""
    repeats = index.numel() // max(size, 1)
    every = torch.arange(size, device=index.device).repeat_interleave(repeats)
    return repeats if torch.equal(every, index.flatten().long()) else 0


@register_rule("gather", "scatter", "scatter_add", "scatter_reduce")
def _gather(call: Call) -> Sequence[Dims]:
    """Picks or writes along one axis; on the others all tensors are aligned."""
    tensors = call.tensors()
    dims = call.labels(tensors[0])
    along = normalize_dim(call["dim"], len(dims))
    for axis, alike in enumerate(zip(*map(call.labels, tensors), strict=True)):
        if axis == along or len({tensor.shape[axis] for tensor in tensors}) > 1:
            alike = (None, *alike)
        for labels in alike:
            dims[axis] = call.channels.tie(dims[axis], labels)
    return [dims]


@register_rule("masked_select", "masked_scatter")
@register_rule("nonzero", "one_hot", "bincount", "histc", "take")
@register_rule("diagonal", "_cdist_forward", "repeat_interleave")
def freeze_call(call: Call) -> Sequence[Dims]:
    """Freezes every axis of every tensor of the call."""
    for tensor in call.tensors():
        freeze_tensor(call, tensor)
    return unlabelled_dims(call.outputs)


@register_rule("_pack_padded_sequence")
def _pack_sequence(call: Call) -> Sequence[Dims]:
    """(batch and time in two axes, features) -> (both in one, features), and the batch sizes."""
    return [[None, *call.dims("input")[2:]], [None]]


@register_rule("_pad_packed_sequence")
def _unpack_sequence(call: Call) -> Sequence[Dims]:
    return [[None, None, *call.dims("data")[1:]], [None]]
