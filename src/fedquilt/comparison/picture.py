"""The picture of a comparison: the mean against what it costs, and the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedquilt.comparison.table import Analysis, Row
from fedquilt.figures.drawing import draw_figure
from fedquilt.figures.figure import Point, Scatter
from fedquilt.learning.metric import MetricInfo

COSTS = {"bytes": "bytes, both ways", "macs": "MACs of all clients"}


def draw_pareto(analysis: Analysis, metric: MetricInfo, path: Path) -> Path:
    """Draws the figure into a file, .png or .svg."""
    draw_figure(make_figure(analysis, metric), path)
    return path


def make_figure(analysis: Analysis, metric: MetricInfo) -> Scatter:
    """The mean of each variant against bytes and against MACs."""
    scale = 100 if metric.is_fraction else 1
    panels: dict[str, Mapping[str, Point]] = {}
    for cost, label in COSTS.items():
        points = {
            row.variant: _make_point(row, cost, scale)
            for row in analysis.rows
            if row.mean is not None and row.serves_all and getattr(row, cost)
        }
        panels[label] = points
    unit = " in %" if metric.is_fraction else ""
    return Scatter(
        "Mean over budgets against cost",
        f"mean {metric.label}{unit}",
        panels,
        fronts={label: find_front(points, metric.sign) for label, points in panels.items()},
    )


def _make_point(row: Row, cost: str, scale: float) -> Point:
    assert row.mean is not None
    return (getattr(row, cost), scale * row.mean.mean, scale * (row.mean.deviation or 0.0))


def find_front(points: Mapping[str, Point], sign: int = 1) -> tuple[str, ...]:
    """The names of points that none beats in both cost and score, the cheapest first.

    >>> find_front({"a": (1, 0.5, 0), "b": (2, 0.7, 0), "c": (3, 0.6, 0)})
    ('a', 'b')
    """
    front: list[str] = []
    best = float("-inf")
    for name, (_, value, _) in sorted(points.items(), key=lambda p: (p[1][0], -sign * p[1][1])):
        if sign * value > best:
            front.append(name)
            best = sign * value
    return tuple(front)
