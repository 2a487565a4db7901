"""Rules of operations that lay several axes into one, or split one into several."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from fedquilt.structure.trace.channels import Labels
from fedquilt.structure.trace.rules.indexing import freeze_call
from fedquilt.structure.trace.rules.registry import Call, Dims, register_rule


@register_rule("as_strided")
def _as_strided(call: Call) -> Sequence[Dims]:
    """An axis keeps its labels if its positions have the same memory layout as before."""
    source, out = call["self"], call.outputs[0]
    given = call.labels(source)
    start = out.storage_offset() - source.storage_offset()
    old, new = ([*zip(t.shape, t.stride(), strict=True)] for t in (source, out))
    is_dense = sum((n - 1) * stride for n, stride in old) + 1 == source.numel()
    if not is_dense or [None if x is None else len(x) for x in given] != [
        None if x is None else n for x, n in zip(given, source.shape, strict=False)
    ]:
        return freeze_call(call)
    dims: Dims = [None] * out.ndim
    for axis, place in enumerate(new):
        others = [*new[:axis], *new[axis + 1 :]]
        if place in old and place[0] > 1 and _is_axis_kept(*place, start, others):
            dims[axis] = given[old.index(place)]
    for labels in given:
        if not any(labels is passed for passed in dims):
            call.channels.freeze(labels)
    return [dims]


def _is_axis_kept(size: int, stride: int, start: int, others: Sequence[tuple[int, int]]) -> bool:
    """Whether the position on an axis does not depend on the positions on the others."""
    if stride == 0 or start // stride % size:
        return False
    below = start % stride + sum((n - 1) * step for n, step in others if step < stride)
    above = (step for n, step in others if step >= stride and n > 1)
    return below < stride and all(step % (size * stride) == 0 for step in above)


@register_rule("view_as_complex")
def _view_as_complex(call: Call) -> Sequence[Dims]:
    x = call.dims("self")
    call.channels.freeze(x[-1])
    return [x[:-1]]


@register_rule("view_as_real")
def _view_as_real(call: Call) -> Sequence[Dims]:
    return [[*call.dims("self"), None]]


RESHAPES = ("view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten", "flatten", "view_as")


@register_rule(*RESHAPES)
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
    for old_run, new_run in _match_runs(source.shape, out.shape, ins, outs):
        flat = _flatten(call, [(given[i], source.shape[i]) for i in old_run])
        for i, labels in zip(
            new_run, _unflatten(call, flat, [out.shape[i] for i in new_run]), strict=True
        ):
            dims[i] = labels
    return [dims]


def _match_runs(
    old: Sequence[int], new: Sequence[int], ins: list[int], outs: list[int]
) -> list[tuple[list[int], list[int]]]:
    """Pairs the smallest runs of old and new axes with the same elements."""
    runs: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(ins) and j < len(outs):
        old_run, new_run = [ins[i]], [outs[j]]
        i, j = i + 1, j + 1
        while (have := prod(old[k] for k in old_run)) != (want := prod(new[k] for k in new_run)):
            if have < want:
                old_run.append(ins[i])
                i += 1
            else:
                new_run.append(outs[j])
                j += 1
        runs.append((old_run, new_run))
    return runs


def _flatten(call: Call, axes: list[tuple[Labels | None, int]]) -> Labels | None:
    """Labels of several axes flattened into one; of two with channels only the last keeps them."""
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
    """Labels of one axis that is split; one part keeps the channels, tied over the others."""
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
