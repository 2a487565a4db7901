"""Rules of operations that reduce, sort or accumulate along an axis."""

from __future__ import annotations

from collections.abc import Sequence

from fedquilt.structure.trace.rules.pointwise import tie_pointwise
from fedquilt.structure.trace.rules.registry import Call, Dims, normalize_dim, register_rule


@register_rule("sum", "mean", "var", "std", "var_mean", "std_mean", "linalg_vector_norm", "norm")
@register_rule("any", "all", "nansum", "count_nonzero", "aminmax")
@register_rule("amax", "amin", "max", "min", "prod", "logsumexp", "median", "argmax", "argmin")
def _reduce(call: Call) -> Sequence[Dims]:
    """Reduces an axis. The result does not depend on the order of channels; an index does."""
    if len(call.tensors()) > 1:
        return tie_pointwise(call)  # max(a, b) is elementwise
    source = call.tensors()[0]
    x = call.labels(source)
    given = call.arguments.get("dim")
    if given is None or given == []:
        given = range(source.ndim)
    reduced = {
        normalize_dim(d, source.ndim) for d in ([given] if isinstance(given, int) else given)
    }
    for axis in reduced:
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
            [
                None if i in reduced else labels
                for i, labels in enumerate(x)
                if kept or i not in reduced
            ]
        )
    return results


@register_rule(
    "cumsum", "cumprod", "sort", "topk", "flip", "roll", "logcumsumexp", "cummax", "cummin"
)
def _freeze_along(call: Call) -> Sequence[Dims]:
    source = call.tensors()[0]
    x = call.labels(source)
    given = call.arguments.get("dim", call.arguments.get("dims", -1))
    for d in [given] if isinstance(given, int) else given or range(source.ndim):
        axis = normalize_dim(d, source.ndim)
        call.channels.freeze(x[axis])
        x[axis] = None
    return [x for _ in call.outputs]
