"""Module attributes that hold a width, such as ``head_dim``, and must follow it.

An attribute that equals a width may be one, or a length, a count of steps, a temperature. The model
is run again with another value (see ``replay``). The first operation whose arguments then differ
shows what the attribute is for: it is a width if it sets the size of an axis of channels there, or
scales values that were computed across channels. All other attributes stay as they are.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from fedquilt.errors import StructureError
from fedquilt.structure.dispatch import is_shape
from fedquilt.structure.groups import Axis, SizeAttribute, has_group
from fedquilt.structure.layers import may_hold_sizes
from fedquilt.structure.structure import Structure
from fedquilt.structure.tensors import copy_model
from fedquilt.structure.trace.channels import Labels
from fedquilt.structure.trace.grouping import find_axis, map_owners
from fedquilt.structure.trace.record import Trace, TracedCall
from fedquilt.structure.trace.replay import Effect, Outcome, observe_effect
from fedquilt.structure.trace.tracer import LAYOUT

# what an attribute may be, the likely first; None: it stays as it is
Options = list[SizeAttribute | None]


def find_size_attributes(
    structure: Structure, trace: Trace, model: nn.Module, kept: Sequence[str] = ()
) -> Iterator[Structure]:
    """Yields the structure with attributes that follow a width, likely readings first.

    An attribute means the same in all modules of a class. Patterns in ``kept`` name attributes
    that stay as they are.
    """
    alike: dict[tuple[type, str, int | None], list[list[SizeAttribute]]] = {}
    axes = AxisLookup(structure, trace)
    for readings in _list_readings(trace, model, axes):
        size = readings[0]
        if not any(fnmatch.fnmatchcase(size.name, pattern) for pattern in kept):
            kind = type(model.get_submodule(size.module))
            alike.setdefault((kind, size.attribute, size.item), []).append(readings)
    options = _list_options(list(alike.values()), trace, model, axes)
    for picks in _order_picks([max(map(len, every)) for every in options]):
        chosen = [
            listed[min(pick, len(listed) - 1)]
            for pick, every in zip(picks, options, strict=True)
            for listed in every
        ]
        yield replace(structure, size_attributes=tuple(s for s in chosen if s is not None))


def validate_patterns(model: nn.Module, patterns: Sequence[str]) -> None:
    """Raises for a pattern that names no numeric attribute of any module."""
    known = {
        f"{name}.{attribute}".lstrip(".")
        for name, module in model.named_modules()
        for attribute, _, _ in _list_numbers(module)
    }
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise StructureError(
                f"keep_numbers names '{pattern}', which is no number of a module; write the name "
                "of the module and that of the number, such as 'encoder.max_len' or '*.scale'"
            )


class AxisLookup:
    """Finds the axes of a structure that labels of its trace stand for."""

    def __init__(self, structure: Structure, trace: Trace) -> None:
        self._trace, self._owner = trace, map_owners(trace, structure)
        self._groups = structure.cut_groups()

    def of(self, labels: Labels | None) -> Axis | None:
        """The axis of channels that a width cuts, if it is one."""
        axis = None if labels is None else find_axis(labels, self._trace, self._owner)
        return axis if any(has_group(axis, group) for group in self._groups) else None

    def lengths(self, several: Iterable[Labels | None]) -> set[int]:
        """The lengths of those axes that a width cuts."""
        return {len(labels) for labels in several if labels is not None and self.of(labels)}


def _list_readings(
    trace: Trace, model: nn.Module, axes: AxisLookup
) -> Iterator[list[SizeAttribute]]:
    """For each attribute that matches an axis the module met: the axes it may be the size of."""

    def distinct(seen: Iterable[Labels]) -> list[Axis]:
        every = {id(labels): labels for labels in seen}.values()
        return [axis for axis in dict.fromkeys(map(axes.of, every)) if axis is not None]

    for name, seen in trace.sizes.items():
        module = model.get_submodule(name)
        numbers = list(_list_numbers(module)) if may_hold_sizes(module) else []
        if not numbers:
            continue
        met = distinct(labels for _, labels in seen)
        crossed = distinct(trace.across.get(name, []))
        for attribute, item, value in numbers:
            readings = [
                SizeAttribute(name, attribute, item, axis, power)
                for power, candidates in ((1.0, met), (-0.5, crossed), (0.5, met))
                for axis in candidates
                if _is_power(value, _count_positions(axis), power)
            ]
            if readings:
                yield readings


def _list_numbers(module: nn.Module) -> Iterator[tuple[str, int | None, float]]:
    for attribute, value in vars(module).items():
        if attribute.startswith("_") or isinstance(value, bool):
            continue
        if isinstance(value, (int, float)) and value not in (0, 1):
            yield attribute, None, value
        elif isinstance(value, (tuple, list)):
            for i, item in enumerate(value):
                if isinstance(item, int) and not isinstance(item, bool) and item > 1:
                    yield attribute, i, item


def _is_power(value: float, count: int, power: float) -> bool:
    if power == 1.0:
        return isinstance(value, int) and value == count
    return isinstance(value, float) and _is_near(value, count**power)


def _is_near(left: float, right: float) -> bool:
    return abs(left - right) < 1e-9


def _count_positions(axis: Axis) -> int:
    return sum(len(span.channels) for span in axis)


def _order_picks(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All picks of one option each: first options everywhere, then all but one, and so on.

    >>> list(_order_picks([2, 3]))
    [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (1, 2)]
    """
    for changed in range(len(counts) + 1):
        for which in itertools.combinations(range(len(counts)), changed):
            yield from itertools.product(
                *(range(1, n) if i in which else (0,) for i, n in enumerate(counts))
            )


def _list_options(
    alike: Sequence[list[list[SizeAttribute]]], trace: Trace, model: nn.Module, axes: AxisLookup
) -> list[list[Options]]:
    """Options for the attributes of each kind, by what another value changes."""
    if not alike:
        return []
    trial = copy_model(model)
    options: list[list[Options]] = []
    for every in alike:
        numbers = [readings[0] for readings in every]
        kind = type(trial.get_submodule(numbers[0].module))
        is_own = kind.__module__.startswith("torch.nn.modules.")
        effect = observe_effect(numbers, trace.passes, trial)
        options.append([_rank_readings(one, effect, axes, is_own=is_own) for one in every])
    return options


def _rank_readings(
    readings: list[SizeAttribute], effect: Effect, axes: AxisLookup, *, is_own: bool
) -> Options:
    """Orders the readings of an attribute by how well its effect fits them.

    An attribute whose effect is not that of a width stays as it is. If the effect is unknown, the
    attributes of PyTorch's own layers are taken for widths first, and all others for constants.
    """
    if effect.outcome is not Outcome.CHANGED:
        return [*readings, None] if is_own else [None, *readings]
    fits = [_rate_reading(size, effect, axes) for size in readings]
    if not any(fits):
        return [None]
    best_first = sorted(range(len(readings)), key=lambda i: -fits[i])
    return [*(readings[i] for i in best_first), None]


def _rate_reading(size: SizeAttribute, effect: Effect, axes: AxisLookup) -> int:
    """How well an effect agrees with a reading: 0 if not at all."""
    called, after = effect.called, effect.arguments
    assert called is not None
    assert after is not None
    sized = [
        axis
        for name in _list_differences(called, after)
        for axis in _find_sized_axes(called, name, after) or ()
    ]
    literal = [axis for axis in sized if (axis.before, axis.now) == effect.values]
    for axis in literal or sized:
        if (meant := axes.of(axis.labels)) is not None:
            return 2 if meant == size.axis else 1
    return int(_is_scale(called, after, _count_positions(size.axis), axes))


def _list_differences(called: TracedCall, after: Mapping[str, Any]) -> list[str]:
    return [name for name, value in called.arguments.items() if value != after[name]]


class _SizedAxis(NamedTuple):
    """An axis whose size is an argument of an operation."""

    labels: Labels | None
    before: Any
    now: Any


def _find_sized_axes(
    called: TracedCall, name: str, after: Mapping[str, Any]
) -> list[_SizedAxis] | None:
    """The axes whose size an argument sets, where it has changed; None if it is no size."""
    before, now = called.arguments[name], after[name]
    if name in ("size", "shape", "normalized_shape") and len(before) == len(now):
        dims = called.given[0] if name == "normalized_shape" else called.made[0]
        every = map(_SizedAxis, dims[-len(before) :], before, now)
        return [axis for axis in every if axis.before != axis.now]
    if name in ("split_size", "split_sizes", "start", "end") and "dim" in called.arguments:
        return [_SizedAxis(called.given[0][called.arguments["dim"]], before, now)]
    if name in ("groups", "group", "C"):  # they follow the channels if there are as many
        labels = called.given[0][1]
        is_count = labels is not None and len(labels) == before
        return [_SizedAxis(labels if is_count else None, before, now)]
    return None


FACTORS = {"mul": "other", "div": "other", "baddbmm": "alpha", "addmm": "alpha"}


def _get_factor(called: TracedCall) -> float | None:
    """The factor that an operation multiplies values by."""
    value = called.arguments.get(FACTORS.get(called.name, "scale"))
    if not isinstance(value, (int, float)) or not value:
        return None
    return 1 / value if called.name == "div" else float(value)


def _is_scale(called: TracedCall, after: Mapping[str, Any], count: int, axes: AxisLookup) -> bool:
    """Whether an operation scales values by a function of the number of channels.

    Values with the channels on an axis are scaled by √n or 1/√n (embeddings, queries). Values
    computed across them are scaled by 1/√n (attention scores), or by 1/n or n (means and sums).
    """
    factor = _get_factor(called)
    if factor is None or factor == _get_factor(replace(called, arguments=after)):
        return False
    root = math.sqrt(count)
    fitting: list[float] = []
    if count in axes.lengths(_list_labels(called)):
        fitting += [root, 1 / root]
    if count in axes.lengths(called.across):
        fitting += [1 / root, 1 / count, count]
    return any(_is_near(factor, fit) for fit in fitting)


def _list_labels(called: TracedCall) -> list[Labels | None]:
    """The labels of all axes of an operation's tensors."""
    return [labels for dims in (*called.given, *called.made) for labels in dims]


def find_mismatch(structure: Structure, whole: Trace, small: Trace) -> str | None:
    """Finds an operation of a subnet with an argument that its width does not explain.

    Such as a length, a count of steps or a temperature. ``small`` is the trace of the subnet.
    """
    axes = AxisLookup(structure, whole)
    calls, others = (trace.passes[0].calls for trace in (whole, small))
    if [c.name for c in calls] != [c.name for c in others]:  # narrower tensors may need other views
        calls, others = ([c for c in listed if c.name not in LAYOUT] for listed in (calls, others))
    for called, other in itertools.zip_longest(calls, others):
        if called is None or other is None or called.name != other.name:
            return str((called or other).name)
        for name in _list_differences(called, other.arguments):
            if not _is_explained_by_width(called, name, other.arguments, axes):
                return str(called.name)
    return None


def _is_explained_by_width(
    called: TracedCall, name: str, after: Mapping[str, Any], axes: AxisLookup
) -> bool:
    """Whether an argument may differ: a tensor, the size of an axis of channels, a scale."""
    value = called.arguments[name]
    if is_shape(value) or (isinstance(value, list) and any(map(is_shape, value))):
        return True
    if called.name == "as_strided" and name in ("stride", "storage_offset"):
        return True
    sized = _find_sized_axes(called, name, after)
    if sized is not None:
        return all(axes.of(axis.labels) is not None for axis in sized)
    is_factor = name == FACTORS.get(called.name, "scale")
    return is_factor and bool(axes.lengths((*_list_labels(called), *called.across)))
