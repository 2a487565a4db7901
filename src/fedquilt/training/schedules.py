"""Schedules of the learning rate: factors by round, or by step within a round.

A schedule is one part, or several in sequence such as a warm-up and then half a cosine. Each part
is written as text, so that it can stand in a file of settings and be sent to clients:

    constant:n          1; n positions long, or to the end
    warmup:n            (i + 1) / (n + 1) at position i, for n positions
    cosine:f            from 1 down to f along half a cosine, f + (1 - f) (1 + cos(π i / total)) / 2
    linear:f            from 1 down to f along a line, 1 - (1 - f) i / total
    milestones:a,b:d    1, multiplied by d (0.1) at each of the positions
    decay:d             d to the power of the position
    file.py:function    what the function returns for (position, total)

Positions are rounds of the run, or steps of the client's optimizer in one round, from 0. A part in
a sequence counts its positions, and their total, from where the part before ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedquilt.errors import ConfigError, TrainingError, describe_unknown
from fedquilt.training.function_path import FunctionPath
from fedquilt.user_code import is_function_path

Parts = tuple[str | Callable[[int, int], float], ...]
FORMS = {
    "constant": "constant or constant:LENGTH",
    "warmup": "warmup:LENGTH",
    "cosine": "cosine or cosine:LAST",
    "linear": "linear or linear:LAST",
    "milestones": "milestones:POSITION,POSITION or milestones:POSITION,POSITION:FACTOR",
    "decay": "decay:FACTOR",
}


@dataclass(frozen=True)
class Schedule:
    """Factors of the learning rate, by position.

    Args:
        parts: What comes one after another, from ``read_parts``. A part may be a function.
        unit: What a position is. Errors name it.

    >>> schedule = Schedule(("warmup:3", "cosine"), "round")
    >>> [round(schedule.factor_at(position, 7), 3) for position in range(7)]
    [0.25, 0.5, 0.75, 1.0, 0.854, 0.5, 0.146]
    """

    parts: Parts
    unit: str

    def __post_init__(self) -> None:
        """Checks every part, and that only the last may be without an end."""
        for number, part in enumerate(self.parts):
            if _parse(part).length is None and number < len(self.parts) - 1:
                raise ConfigError(
                    f"only the last part of a schedule goes on to the end, got {part!r} before "
                    f"{self.parts[number + 1]!r}; put it last"
                )

    def factor_at(self, position: int, total: int | None) -> float:
        """The factor at a position of ``total``; 1 after the end of the last part."""
        for text in self.parts:
            part = _parse(text)
            if part.length is None or position < part.length:
                end = total if part.length is None else part.length
                return self._compute(text, part, position, end)
            position -= part.length
            total = None if total is None else total - part.length
        return 1.0

    def _compute(self, text: Any, part: _Part, position: int, total: int | None) -> float:
        if total is None and part.needs_total:
            raise ConfigError(
                f"a schedule of {text!r} needs the number of {self.unit}s; pass {self.unit}s"
            )
        value = part.factor(position, total)
        if not isinstance(value, (int, float)) or not (math.isfinite(value) and value >= 0):
            raise TrainingError(
                f"a schedule gives factors of 0 or more, got {value!r} from {text!r} for "
                f"{self.unit} {position} of {total}"
            )
        return float(value)


class _Part(NamedTuple):
    factor: Callable[..., float]  # of a position and the total
    length: int | None = None  # None: to the end
    needs_total: bool = True


def read_parts(given: Any) -> tuple[Any, ...]:
    """The parts of a schedule, of which one may be given alone; paths of functions as such.

    >>> read_parts(["warmup:5", "mine.py:factor"])
    ('warmup:5', FunctionPath(path='mine.py:factor', noun='schedule'))
    """
    parts = given if isinstance(given, (tuple, list)) else (given,)
    return tuple(
        FunctionPath(part, "schedule")
        if isinstance(part, str) and is_function_path(part) and part.partition(":")[0] not in FORMS
        else part
        for part in parts
    )


def _parse(part: Any) -> _Part:
    if callable(part):
        return _Part(part)
    if not isinstance(part, str):
        raise ConfigError(
            "a schedule is text such as 'cosine' or file.py:function, or in Python a function, got "
            f"{part!r}"
        )
    name, _, rest = part.partition(":")
    if name in FORMS:
        try:
            return _make_part(name, rest)
        except ValueError:
            raise ConfigError(f"a schedule of {name} is {FORMS[name]}, got '{part}'") from None
    raise ConfigError(describe_unknown("schedule", part, FORMS) + ", or give file.py:function")


def _make_part(name: str, rest: str) -> _Part:
    """A known part, or a ValueError if it is not written as it should be."""
    if name == "constant":
        length = _read_length(rest) if rest else None
        return _Part(lambda i, n: 1.0, length, needs_total=False)
    if name == "warmup":
        return _Part(lambda i, n: (i + 1) / (n + 1), _read_length(rest))
    if name == "decay":
        factor = _read_factor(rest)
        return _Part(lambda i, n: factor**i, needs_total=False)
    if name == "milestones":
        positions, _, decay = rest.partition(":")
        marks = [int(word) for word in positions.split(",")]
        factor = _read_factor(decay) if decay else 0.1
        return _Part(lambda i, n: factor ** sum(i >= mark for mark in marks), needs_total=False)
    last = _read_factor(rest) if rest else 0.0
    if name == "linear":
        return _Part(lambda i, n: 1 - (1 - last) * i / n)
    return _Part(lambda i, n: last + (1 - last) * (1 + math.cos(math.pi * i / n)) / 2)


def _read_length(text: str) -> int:
    length = int(text)
    if length < 1:
        raise ValueError
    return length


def _read_factor(text: str) -> float:
    factor = float(text)
    if not (math.isfinite(factor) and factor >= 0):
        raise ValueError
    return factor
