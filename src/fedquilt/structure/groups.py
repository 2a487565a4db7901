"""Width groups of a model, and which group every axis of every tensor follows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedquilt.errors import StructureError

MAX_NAMES = 4  # of tensors, in a sentence


@dataclass(frozen=True)
class Group:
    """Channels that are cut together, wherever they appear."""

    name: str
    size: int
    is_cut: bool = True  # False: classes or tokens, which no width removes


@dataclass(frozen=True)
class Span:
    """Neighbouring positions of an axis that follow one group (or none: always kept)."""

    group: str | None
    channels: tuple[int, ...]  # the channel of each position

    @cached_property
    def channel_array(self) -> npt.NDArray[np.int64]:
        """The same channels as an array."""
        return np.asarray(self.channels, np.int64)


Axis = tuple[Span, ...]  # spans laid end to end; one span unless tensors are concatenated


@dataclass(frozen=True)
class SizeAttribute:
    """A module attribute that is the size of an axis, or a power of it such as 1/√n."""

    module: str
    attribute: str
    item: int | None  # position in a tuple, None for a plain number
    axis: Axis
    power: float = 1.0

    @property
    def name(self) -> str:
        """The name of the attribute, with that of its module."""
        return f"{self.module}.{self.attribute}" if self.module else self.attribute

    def __str__(self) -> str:
        """The attribute and the groups whose size it is.

        >>> str(SizeAttribute("attention", "scale", None, (Span("qkv", (0, 1, 2, 3)),), -0.5))
        'attention.scale (4^-0.5 of qkv)'
        """
        item = "" if self.item is None else f"[{self.item}]"
        count = sum(len(span.channels) for span in self.axis)
        power = "" if self.power == 1 else f"^{self.power:g}"
        groups = dict.fromkeys(span.group for span in self.axis if span.group is not None)
        return f"{self.name}{item} ({count}{power} of {', '.join(groups)})"


@dataclass(frozen=True)
class UncutAxes:
    """Axes that stay whole at every width, and the operation that is the reason."""

    operation: str  # through which channels could not be followed; "": the example runs none
    module: str  # that runs the operation
    axes: tuple[tuple[str, int], ...]  # tensors and their dimensions

    @property
    def reason(self) -> str:
        """The reason as text."""
        if not self.operation:
            return "not run on the example"
        where = f"module '{self.module}'" if self.module else "the model itself"
        return f"not followed through {self.operation} in {where}"

    def __str__(self) -> str:
        """The tensors and the reason.

        >>> str(UncutAxes("cumsum", "mixer", (("hidden.weight", 0), ("hidden.bias", 0))))
        "hidden.weight, hidden.bias (not followed through cumsum in module 'mixer')"
        """
        names = list(dict.fromkeys(name for name, _ in self.axes))
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        return f"{', '.join(names[:MAX_NAMES])}{more} ({self.reason})"


def count_leading(size: int, width: float) -> int:
    """How many channels a width keeps: ⌈width · size⌉, at least one.

    >>> count_leading(64, 0.0625), count_leading(10, 0.3), count_leading(7, 1.0)
    (4, 3, 7)
    """
    if not 0 < width <= 1:
        raise StructureError(
            f"widths are fractions in (0, 1], got {width}; write 1/8 as 0.125, and 1 for the whole"
        )
    return max(1, math.ceil(round(width * size, 9)))  # 0.3 · 10 is a little more than 3


def has_group(axis: Axis | None, group: str) -> bool:
    """Whether any position of an axis is a channel of the group."""
    return axis is not None and any(span.group == group for span in axis)
