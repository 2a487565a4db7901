"""Figures as data: what is drawn, without how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Curve = Sequence[tuple[float, float]]  # x and y of each point


@dataclass(frozen=True)
class Lines:
    """Curves, by name."""

    title: str
    x: str
    y: str
    curves: Mapping[str, Curve]
    is_linear: bool = False  # False: the x axis may be logarithmic
    is_joined: bool = True  # False: points without lines
    caption: str = ""


@dataclass(frozen=True)
class Bars:
    """Bars: one series for each name, with a bar for each label."""

    title: str
    y: str
    labels: tuple[str, ...]
    series: Mapping[str, Sequence[float]]
    spread: Mapping[str, Sequence[float]] = field(default_factory=dict)  # of error bars
    caption: str = ""


@dataclass(frozen=True)
class Boxes:
    """Box plots over clients: one box for each name, in panels side by side."""

    title: str
    panels: Mapping[str, Mapping[str, Sequence[float]]]
    caption: str = ""


@dataclass(frozen=True)
class Grid:
    """Percentages as colors, in rows and columns.

    ``bands`` are neighboring columns that belong together: their name, and their number.
    """

    title: str
    x: str
    unit: str  # of the values
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: Sequence[Sequence[float]]  # one sequence per row
    bands: Sequence[tuple[str, int]] = ()
    caption: str = ""


@dataclass(frozen=True)
class Densities:
    """Distributions of percentages: a histogram, a density, and a stroke for every value."""

    title: str
    x: str
    values: Mapping[str, Sequence[float]]
    caption: str = ""


Point = tuple[float, float, float]  # x, y, and the deviation of y


@dataclass(frozen=True)
class Scatter:
    """Named points, in panels side by side, of which some are joined to a front."""

    title: str
    y: str
    panels: Mapping[str, Mapping[str, Point]]  # by the label of x
    fronts: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by the label of x
    caption: str = ""


Figure = Lines | Bars | Boxes | Grid | Densities | Scatter
