"""What changes in a model's operations when one of its attributes has another value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from torch import nn

from fedquilt.structure.cut import set_attribute
from fedquilt.structure.dispatch import (
    Interceptor,
    bind_arguments,
    describe_arguments,
    get_base_name,
    tracing_mode,
)
from fedquilt.structure.groups import SizeAttribute
from fedquilt.structure.trace.record import TracedCall, TracedPass


class Outcome(Enum):
    """What another value of an attribute did."""

    CHANGED = "an operation was called with other arguments"
    RAISED = "the model did not run"
    OTHER_CODE = "another operation was called"
    NOTHING = "every operation was called as before"


@dataclass(frozen=True)
class Effect:
    """The first operation that was called differently, and how."""

    outcome: Outcome
    called: TracedCall | None = None
    arguments: Mapping[str, Any] | None = None  # what it was called with instead
    values: tuple[float, float] = (0, 0)  # of the attribute, before and in the replay


class _Stop(BaseException):
    """Ends a replay early. A BaseException, so that no model catches it."""


class _Replay(Interceptor):
    """Stops a pass at the first operation that is called differently than before."""

    def __init__(self, calls: Sequence[TracedCall]) -> None:
        super().__init__()
        self._calls = iter(calls)
        self.effect: Effect | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        called, name = next(self._calls, None), get_base_name(func)
        arguments = describe_arguments(bind_arguments(func, args, kwargs or {}))
        if called is None or called.name != name or called.arguments.keys() != arguments.keys():
            self.effect = Effect(Outcome.OTHER_CODE)
            raise _Stop
        if called.arguments != arguments:
            self.effect = Effect(Outcome.CHANGED, called, arguments)
            raise _Stop
        return func(*args, **(kwargs or {}))


def observe_effect(
    sizes: Sequence[SizeAttribute], passes: Sequence[TracedPass], model: nn.Module
) -> Effect:
    """Replays the passes with another value: twice the old one, or if that fails a divisor."""
    value = read_attribute(model, sizes[0])
    part = next((value // n for n in (2, 3, 5) if value % n == 0), value - 1)
    effect = _find_first_difference(sizes, 2 * value, passes, model)
    if effect.outcome is Outcome.RAISED and part > 0:
        effect = _find_first_difference(sizes, part, passes, model)
    return effect


def _find_first_difference(
    sizes: Sequence[SizeAttribute], number: float, passes: Sequence[TracedPass], model: nn.Module
) -> Effect:
    """Replays until an operation differs, or the first module with the attribute is done."""
    before = read_attribute(model, sizes[0])
    for traced in passes:
        replay = _Replay(traced.calls)
        with ExitStack() as stack:
            for size in sizes:
                module = model.get_submodule(size.module)
                stack.callback(
                    set_attribute, module, size.attribute, size.item, read_attribute(model, size)
                )
                set_attribute(module, size.attribute, size.item, number)
                stack.callback(module.register_forward_hook(_raise_stop).remove)
            try:
                with tracing_mode(), replay:
                    model.train(traced.training)(*traced.inputs)
            except _Stop:
                pass
            except Exception:
                if replay.effect is None:
                    return Effect(Outcome.RAISED)
        if replay.effect is not None:
            return replace(replay.effect, values=(before, number))
    return Effect(Outcome.NOTHING)


def _raise_stop(module: nn.Module, inputs: Any, output: Any) -> None:
    raise _Stop


def read_attribute(model: nn.Module, size: SizeAttribute) -> float:
    """The value of a module's attribute, or of one item of it."""
    value = getattr(model.get_submodule(size.module), size.attribute)
    number: float = value if size.item is None else value[size.item]
    return number
