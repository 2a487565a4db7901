"""Figures as JSON, for the script that draws them; what is long is summed up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from fedquilt.figures.density import estimate_density
from fedquilt.figures.figure import Bars, Boxes, Densities, Figure, Grid, Lines

MAX_POINTS = 2000  # of a curve
MAX_COLUMNS = 200  # of a grid


def encode_figure(figure: Figure) -> dict[str, Any]:
    """The figure as JSON; its size is bounded, however many clients there are."""
    match figure:
        case Lines():
            curves = {name: _thin(curve, MAX_POINTS) for name, curve in figure.curves.items()}
            rest = {"is_linear": figure.is_linear, "is_joined": figure.is_joined}
            return _encode(figure, "lines", x=figure.x, y=figure.y, curves=curves, **rest)
        case Densities():
            curves = {n: _encode_density(values) for n, values in figure.values.items()}
            y = "density of clients"
            rest = {"is_linear": True, "is_joined": True}
            return _encode(figure, "lines", x=figure.x, y=y, curves=curves, **rest)
        case Boxes():
            panels = {
                label: {name: _encode_box(values) for name, values in boxes.items()}
                for label, boxes in figure.panels.items()
            }
            return _encode(figure, "boxes", panels=panels)
        case Grid():
            kept = range(len(figure.columns))[:: -(-len(figure.columns) // MAX_COLUMNS) or 1]
            is_whole = len(kept) == len(figure.columns)
            return _encode(
                figure,
                "grid",
                x=figure.x,
                unit=figure.unit,
                rows=list(figure.rows),
                columns=[figure.columns[i] for i in kept],
                values=[[_shorten(row[i]) for i in kept] for row in figure.values],
                bands=[list(band) for band in figure.bands] if is_whole else [],
            )
        case Bars():
            fields = asdict(figure)
            return _encode(
                figure, "bars", **{n: fields[n] for n in ("y", "labels", "series", "spread")}
            )
    raise AssertionError(figure)


def _encode(figure: Figure, kind: str, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "title": figure.title, "caption": figure.caption, **fields}


def _thin(curve: Sequence[tuple[float, float]], limit: int) -> list[list[float]]:
    """Every k-th point of a long curve, with its last one."""
    step = -(-len(curve) // limit) or 1
    kept = [*curve[::step], *([curve[-1]] if curve and (len(curve) - 1) % step else [])]
    return [[_shorten(x), _shorten(y)] for x, y in kept]


def _shorten(value: float) -> float:
    return float(f"{value:.6g}")


def _encode_density(values: Sequence[float]) -> list[list[float]]:
    return [[_shorten(x), _shorten(y)] for x, y in zip(*estimate_density(values), strict=True)]


def _encode_box(values: Sequence[float]) -> Mapping[str, float] | None:
    """The five numbers of a box plot; None without values."""
    if not values:
        return None
    names = ("low", "lower", "median", "upper", "high")
    cuts = np.percentile(np.asarray(values, dtype=np.float64), [0, 25, 50, 75, 100])
    return {"count": len(values), **{n: _shorten(v) for n, v in zip(names, cuts, strict=True)}}
