"""Numbers that modules keep beside their tensors: which of them are widths, and so are cut.

A number that equals a width may be one, or a length, a count of steps, a temperature. The model is
run again with another number in its place, and the first operation that is then called otherwise
shows what the number is for: it is a width if it is the size of an axis of channels there, or
scales values that were computed across channels. All other numbers stay as they are.
"""

from __future__ import annotations

import copy
import fnmatch
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

from torch import nn

from fedquilt.errors import StructureError
from fedquilt.structure.channels import Labels
from fedquilt.structure.cut import set_number
from fedquilt.structure.groups import Axis, Size, Structure, axis_of, follows, owner_of
from fedquilt.structure.layers import may_hold_sizes
from fedquilt.structure.operations import base_name
from fedquilt.structure.trace import (
    LAYOUT,
    Called,
    Interceptor,
    Pass,
    Trace,
    as_followed,
    bound_arguments,
    is_shape,
    plain_arguments,
)

Options = list[Size | None]  # what a number may be, the likely first; None: it stays as it is


def with_numbers(
    structure: Structure, trace: Trace, model: nn.Module, kept: Sequence[str] = ()
) -> Iterator[Structure]:
    """The structure with the numbers that follow a width, likely readings first.

    A number means the same in all modules of a class. Those that ``kept`` names, by patterns, stay
    as they are.
    """
    alike: dict[tuple[type, str, int | None], list[list[Size]]] = {}
    axes = _Axes(structure, trace)
    for readings in _readings(trace, model, axes):
        size = readings[0]
        if not any(fnmatch.fnmatchcase(size.name, pattern) for pattern in kept):
            kind = type(model.get_submodule(size.module))
            alike.setdefault((kind, size.attribute, size.item), []).append(readings)
    options = _options(list(alike.values()), trace, model, axes)
    for picks in _nearest_first([max(map(len, every)) for every in options]):
        chosen = [
            some[min(pick, len(some) - 1)]
            for pick, every in zip(picks, options, strict=True)
            for some in every
        ]
        yield replace(structure, sizes=tuple(s for s in chosen if s is not None))


def require_numbers(model: nn.Module, patterns: Sequence[str]) -> None:
    """Refuses patterns that name no number of any module."""
    known = {
        f"{name}.{attribute}".lstrip(".")
        for name, module in model.named_modules()
        for attribute, _, _ in _numbers(module)
    }
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise StructureError(
                f"keep_numbers names '{pattern}', which is no number of a module; write the name "
                "of the module and that of the number, such as 'encoder.max_len' or '*.scale'"
            )


class _Axes:
    """What labels of a trace mean in its structure."""

    def __init__(self, structure: Structure, trace: Trace) -> None:
        self._trace, self._owner = trace, owner_of(trace, structure)
        self._groups = structure.cut_groups()

    def of(self, labels: Labels | None) -> Axis | None:
        """The axis of channels that a width cuts, if it is one."""
        axis = None if labels is None else axis_of(labels, self._trace, self._owner)
        return axis if any(follows(axis, group) for group in self._groups) else None

    def lengths(self, several: Iterable[Labels | None]) -> set[int]:
        """How many positions those have that a width cuts."""
        return {len(labels) for labels in several if labels is not None and self.of(labels)}


def _readings(trace: Trace, model: nn.Module, axes: _Axes) -> Iterator[list[Size]]:
    """For each number of a module that matches an axis it met: which axes it may be the size of."""

    def distinct(seen: Iterable[Labels]) -> list[Axis]:
        every = {id(labels): labels for labels in seen}.values()
        return [axis for axis in dict.fromkeys(map(axes.of, every)) if axis is not None]

    for name, seen in trace.sizes.items():
        module = model.get_submodule(name)
        numbers = list(_numbers(module)) if may_hold_sizes(module) else []
        if not numbers:
            continue
        met = distinct(labels for _, labels in seen)
        crossed = distinct(trace.across.get(name, []))
        for attribute, item, value in numbers:
            readings = [
                Size(name, attribute, item, axis, power)
                for power, some in ((1.0, met), (-0.5, crossed), (0.5, met))
                for axis in some
                if _is_power(value, _length(axis), power)
            ]
            if readings:
                yield readings


def _numbers(module: nn.Module) -> Iterator[tuple[str, int | None, float]]:
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


def _length(axis: Axis) -> int:
    return sum(len(span.channels) for span in axis)


def _nearest_first(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All picks of one option each: first options everywhere, then all but one, and so on.

    >>> list(_nearest_first([2, 3]))
    [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (1, 2)]
    """
    for changed in range(len(counts) + 1):
        for which in itertools.combinations(range(len(counts)), changed):
            yield from itertools.product(
                *(range(1, n) if i in which else (0,) for i, n in enumerate(counts))
            )


def _options(
    alike: Sequence[list[list[Size]]], trace: Trace, model: nn.Module, axes: _Axes
) -> list[list[Options]]:
    """What the numbers of each kind may be, by what changes when they do."""
    if not alike:
        return []
    trial = copy.deepcopy(model)
    found: list[list[Options]] = []
    for every in alike:
        numbers = [readings[0] for readings in every]
        kind = type(trial.get_submodule(numbers[0].module))
        is_own = kind.__module__.startswith("torch.nn.modules.")
        change = _change(numbers, trace.passes, trial)
        found.append([_in_order(some, change, axes, is_own=is_own) for some in every])
    return found


class Outcome(Enum):
    """What another number in a module's place did."""

    CHANGED = "an operation was called otherwise"
    RAISED = "the model did not run"
    OTHER_CODE = "another operation was called"
    NOTHING = "every operation was called as before"


@dataclass(frozen=True)
class _Change:
    """The first operation that was called otherwise, and how."""

    outcome: Outcome
    called: Called | None = None
    arguments: Mapping[str, Any] | None = None  # what it was called with instead
    numbers: tuple[float, float] = (0, 0)  # as it was, and instead


def _in_order(readings: list[Size], change: _Change, axes: _Axes, *, is_own: bool) -> Options:
    """Only a number whose effect is that of a width is one.

    Where its effect cannot be told it stays as it is, if the checks pass so; in PyTorch's own
    layers it is a width.
    """
    if change.outcome is not Outcome.CHANGED:
        return [*readings, None] if is_own else [None, *readings]
    fits = [_fit(size, change, axes) for size in readings]
    if not any(fits):
        return [None]
    best_first = sorted(range(len(readings)), key=lambda i: -fits[i])
    return [*(readings[i] for i in best_first), None]


def _fit(size: Size, change: _Change, axes: _Axes) -> int:
    """How well what has changed agrees with a reading: 0 if not at all."""
    called, after = change.called, change.arguments
    assert called is not None
    assert after is not None
    sized = [
        axis
        for name in _differing(called, after)
        for axis in _axes_sized(called, name, after) or ()
    ]
    spelled_out = [axis for axis in sized if (axis.before, axis.now) == change.numbers]
    for axis in spelled_out or sized:
        if (meant := axes.of(axis.labels)) is not None:
            return 2 if meant == size.axis else 1
    return int(_is_scale(called, after, _length(size.axis), axes))


def _differing(called: Called, after: Mapping[str, Any]) -> list[str]:
    return [name for name, value in called.arguments.items() if value != after[name]]


class _SizedAxis(NamedTuple):
    """An axis whose size an operation is told."""

    labels: Labels | None
    before: Any
    now: Any


def _axes_sized(called: Called, name: str, after: Mapping[str, Any]) -> list[_SizedAxis] | None:
    """The axes of which an argument tells the size, where it has changed; None if it is no size."""
    before, now = called.arguments[name], after[name]
    if name in ("size", "shape", "normalized_shape") and len(before) == len(now):
        dims = called.given[0] if name == "normalized_shape" else called.made[0]
        every = map(_SizedAxis, dims[-len(before) :], before, now)
        return [axis for axis in every if axis.before != axis.now]
    if name in ("split_size", "split_sizes", "start", "end") and "dim" in called.arguments:
        return [_SizedAxis(called.given[0][called.arguments["dim"]], before, now)]
    if name in ("groups", "group", "C"):  # as many as channels, if they are to follow them
        labels = called.given[0][1]
        is_count = labels is not None and len(labels) == before
        return [_SizedAxis(labels if is_count else None, before, now)]
    return None


FACTORS = {"mul": "other", "div": "other", "baddbmm": "alpha", "addmm": "alpha"}


def _factor(called: Called) -> float | None:
    """The number that an operation multiplies values by."""
    value = called.arguments.get(FACTORS.get(called.name, "scale"))
    if not isinstance(value, (int, float)) or not value:
        return None
    return 1 / value if called.name == "div" else float(value)


def _is_scale(called: Called, after: Mapping[str, Any], count: int, axes: _Axes) -> bool:
    """Whether values are multiplied as fits a width of so many channels.

    Values that have the channels on an axis by their root or its inverse (embedded words, queries);
    values computed across them by the root's inverse (scores), or as a sum becomes a mean.
    """
    factor = _factor(called)
    if factor is None or factor == _factor(replace(called, arguments=after)):
        return False
    root = math.sqrt(count)
    fitting: list[float] = []
    if count in axes.lengths(_carried(called)):
        fitting += [root, 1 / root]
    if count in axes.lengths(called.across):
        fitting += [1 / root, 1 / count, count]
    return any(_is_near(factor, fit) for fit in fitting)


def _carried(called: Called) -> list[Labels | None]:
    """The labels of all axes of an operation's tensors."""
    return [labels for dims in (*called.given, *called.made) for labels in dims]


def unlike(structure: Structure, whole: Trace, small: Trace) -> str | None:
    """An operation that a subnet calls with other numbers than its width explains, if there is one.

    Such as a length, a count of steps or a temperature. ``small`` is the trace of the subnet.
    """
    axes = _Axes(structure, whole)
    calls, others = (trace.passes[0].calls for trace in (whole, small))
    if [c.name for c in calls] != [c.name for c in others]:  # narrower tensors may lie otherwise
        calls, others = ([c for c in some if c.name not in LAYOUT] for some in (calls, others))
    for called, other in itertools.zip_longest(calls, others):
        if called is None or other is None or called.name != other.name:
            return str((called or other).name)
        for name in _differing(called, other.arguments):
            if not _is_narrower(called, name, other.arguments, axes):
                return str(called.name)
    return None


def _is_narrower(called: Called, name: str, after: Mapping[str, Any], axes: _Axes) -> bool:
    """Whether an argument differs as it may: a tensor, the size of an axis of channels, a scale."""
    value = called.arguments[name]
    if is_shape(value) or (isinstance(value, list) and any(map(is_shape, value))):
        return True
    if called.name == "as_strided" and name in ("stride", "storage_offset"):
        return True
    sized = _axes_sized(called, name, after)
    if sized is not None:
        return all(axes.of(axis.labels) is not None for axis in sized)
    is_factor = name == FACTORS.get(called.name, "scale")
    return is_factor and bool(axes.lengths((*_carried(called), *called.across)))


class _Stop(BaseException):
    """Enough has been seen; no model catches it."""


class _Replay(Interceptor):
    """Stops a pass at the first operation that is called otherwise than before."""

    def __init__(self, calls: Sequence[Called]) -> None:
        super().__init__()
        self._calls = iter(calls)
        self.change: _Change | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        called, name = next(self._calls, None), base_name(func)
        arguments = plain_arguments(bound_arguments(func, args, kwargs or {}))
        if called is None or called.name != name or called.arguments.keys() != arguments.keys():
            self.change = _Change(Outcome.OTHER_CODE)
            raise _Stop
        if called.arguments != arguments:
            self.change = _Change(Outcome.CHANGED, called, arguments)
            raise _Stop
        return func(*args, **(kwargs or {}))


def _change(sizes: Sequence[Size], passes: Sequence[Pass], model: nn.Module) -> _Change:
    """What other numbers do in all modules of a kind: twice as much, or a part that divides it."""
    value = _value(model, sizes[0])
    part = next((value // n for n in (2, 3, 5) if value % n == 0), value - 1)
    change = _first_change(sizes, 2 * value, passes, model)
    if change.outcome is Outcome.RAISED and part > 0:
        change = _first_change(sizes, part, passes, model)
    return change


def _first_change(
    sizes: Sequence[Size], number: float, passes: Sequence[Pass], model: nn.Module
) -> _Change:
    """The first that is called otherwise, until the first module with the number is through."""
    before = _value(model, sizes[0])
    for once in passes:
        replay = _Replay(once.calls)
        with ExitStack() as stack:
            for size in sizes:
                module = model.get_submodule(size.module)
                stack.callback(set_number, module, size.attribute, size.item, _value(model, size))
                set_number(module, size.attribute, size.item, number)
                stack.callback(module.register_forward_hook(_stop).remove)
            try:
                with as_followed(), replay:
                    model.train(once.training)(*once.inputs)
            except _Stop:
                pass
            except Exception:
                if replay.change is None:
                    return _Change(Outcome.RAISED)
        if replay.change is not None:
            return replace(replay.change, numbers=(before, number))
    return _Change(Outcome.NOTHING)


def _stop(module: nn.Module, inputs: Any, output: Any) -> None:
    raise _Stop


def _value(model: nn.Module, size: Size) -> float:
    value = getattr(model.get_submodule(size.module), size.attribute)
    number: float = value if size.item is None else value[size.item]
    return number
