"""Draws figures with matplotlib."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from fedquilt.figures.density import estimate_density
from fedquilt.figures.figure import Bars, Boxes, Densities, Figure, Grid, Lines, Scatter

AnyFigure = TypeVar("AnyFigure", bound=Figure)

MAX_LEVEL_LABELS = 8  # names below bars that are nearly level; more of them stand upright
NUM_BINS = 20  # of a histogram
MIN_SCATTER_RATIO = 3  # the same where points are few
MIN_LOG_RATIO = 20  # of the largest to the smallest x, for a logarithmic axis


def draw_figure(figure: Figure, path: Path) -> None:
    """Draws a figure into a file; its name says of which kind, such as .png or .svg."""
    figure = _escape_figure(figure)
    with _open_panels(figure, path) as panels:
        match figure:
            case Lines():
                _draw_lines(panels[0], figure)
            case Bars():
                _draw_bars(panels[0], figure)
            case Grid():
                _draw_grid(panels[0], figure)
            case Densities():
                _draw_densities(panels[0], figure)
            case Boxes():
                _draw_boxes(panels, figure)
            case Scatter():
                _draw_scatter(panels, figure)


def _escape_figure(figure: AnyFigure) -> AnyFigure:
    return replace(figure, **{f.name: escape_math(getattr(figure, f.name)) for f in fields(figure)})


def escape_math(value: Any) -> Any:
    """Escapes all texts of a value, so that matplotlib draws them as they are.

    It would read formulas between two dollars, and leave out of legends what starts with an
    underscore.

    >>> escape_math({"$a$": [1.0], "_b": "c"})
    {'\\\\$a\\\\$': [1.0], ' _b': 'c'}
    """
    if isinstance(value, str):
        return (" " if value.startswith("_") else "") + value.replace("$", r"\$")
    if isinstance(value, Mapping):
        return {escape_math(name): escape_math(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(escape_math(inner) for inner in value)
    return value


def _draw_lines(panel: Any, figure: Lines) -> None:
    style = {"marker": "o", "linestyle": "-" if figure.is_joined else "none"}
    for name, curve in figure.curves.items():
        if curve:
            panel.plot(*zip(*curve, strict=True), label=name, **style)
    panel.set(xlabel=figure.x, ylabel=figure.y, title=figure.title)
    xs = [x for curve in figure.curves.values() for x, _ in curve]
    if not figure.is_linear and xs and min(xs) > 0 and max(xs) > MIN_LOG_RATIO * min(xs):
        panel.set_xscale("log")
    panel.legend(fontsize="small", loc="lower right")


def _draw_boxes(panels: list[Any], figure: Boxes) -> None:
    for panel, (label, boxes) in zip(panels, figure.panels.items(), strict=True):
        drawn = {name: values for name, values in boxes.items() if values}
        if drawn:
            panel.boxplot(list(drawn.values()), tick_labels=list(drawn))
        panel.set(ylabel=label)
        panel.tick_params(axis="x", rotation=30)


def _draw_scatter(panels: list[Any], figure: Scatter) -> None:
    for panel, (label, points) in zip(panels, figure.panels.items(), strict=True):
        for number, (name, (x, y, deviation)) in enumerate(points.items()):
            style = {"fmt": "o", "capsize": 3, "color": f"C{number % 10}"}
            panel.errorbar(x, y, yerr=deviation or None, **style)
            panel.annotate(name, (x, y), (6, 4), textcoords="offset points", fontsize=8)
        front = [points[name][:2] for name in figure.fronts.get(label, ())]
        if len(front) > 1:
            panel.plot(*zip(*front, strict=True), "--", color="gray", zorder=0)
        xs = [x for x, _, _ in points.values()]
        if xs and max(xs) > MIN_SCATTER_RATIO * min(xs) > 0:
            panel.set_xscale("log")
        panel.set(xlabel=label, ylabel=figure.y)
        panel.margins(x=0.2, y=0.1)  # room for names
    panels[0].figure.suptitle(figure.title, fontsize="medium")


def _draw_bars(panel: Any, figure: Bars) -> None:
    width = 0.8 / max(len(figure.series), 1)
    for number, (name, values) in enumerate(figure.series.items()):
        positions = [i + number * width for i in range(len(values))]
        panel.bar(positions, values, width, label=name, yerr=figure.spread.get(name))
    middle = width * (len(figure.series) - 1) / 2
    panel.set_xticks([i + middle for i in range(len(figure.labels))], figure.labels)
    panel.tick_params(axis="x", rotation=20 if len(figure.labels) <= MAX_LEVEL_LABELS else 90)
    panel.set(ylabel=figure.y, title=figure.title)
    panel.legend(fontsize="small", loc="lower right")


def _draw_densities(panel: Any, figure: Densities) -> None:
    for number, (name, values) in enumerate(figure.values.items()):
        style = {"color": f"C{number}"}
        panel.hist(values, bins=NUM_BINS, range=(0, 100), density=True, alpha=0.25, **style)
        panel.plot(*estimate_density(values), label=name, **style)
        panel.plot(values, [0.0] * len(values), "|", markersize=14, clip_on=False, **style)
    panel.set(xlabel=figure.x, ylabel="density of clients", title=figure.title, xlim=(0, 100))
    panel.legend(fontsize="small", loc="lower right")


def _draw_grid(panel: Any, figure: Grid) -> None:
    image = panel.imshow(figure.values, vmin=0, vmax=100, aspect="auto", cmap="viridis")
    is_crowded = any(len(label) > 2 for label in figure.columns)
    panel.set_xticks(range(len(figure.columns)), figure.columns, rotation=90 * is_crowded)
    panel.set_yticks(range(len(figure.rows)), figure.rows)
    panel.tick_params(labelsize=7)
    panel.set(xlabel=figure.x)
    lines = max((name.count("\n") + 1 for name, _ in figure.bands), default=0)
    panel.set_title(figure.title, pad=8 + 9 * lines)
    start = 0
    for name, count in figure.bands:
        panel.annotate(
            name,
            (start + (count - 1) / 2, 1),
            (0, 4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )
        start += count
        if start < len(figure.columns):
            panel.axvline(start - 0.5, color="white", linewidth=2.5)
    panel.figure.colorbar(image, ax=panel, label=figure.unit, pad=0.01)


def draw_side_by_side(figures: Sequence[Lines]) -> Any:
    """Draws figures into one of matplotlib, which notebooks show and ``savefig`` writes."""
    canvas = _make_canvas((4.6 * len(figures) + 0.6, 3.6))
    for number, figure in enumerate(figures):
        _draw_lines(canvas.add_subplot(1, len(figures), number + 1), _escape_figure(figure))
    return canvas


def _make_canvas(size: tuple[float, float]) -> Any:
    """An empty figure of matplotlib, without its global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure as Canvas

    class Picture(Canvas):
        """A figure that notebooks show, also if they have not loaded matplotlib's own support."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=120)
            return file.getvalue()

    canvas = Picture(figsize=size, layout="constrained")
    FigureCanvasAgg(canvas)
    return canvas


@contextmanager
def _open_panels(figure: Figure, path: Path) -> Iterator[list[Any]]:
    """Makes the panels of a figure, and writes the file at the end."""
    count = len(figure.panels) if isinstance(figure, (Boxes, Scatter)) else 1
    size = (4.2 * count + 1.5, 4.0)
    if isinstance(figure, Grid):  # large enough for the label of every cell
        rows, columns = len(figure.rows), len(figure.columns)
        size = (max(5.7, 3 + 0.16 * columns), max(3.0, 1.5 + 0.16 * rows))
    elif isinstance(figure, Bars):
        size = (max(5.7, 1.5 + 0.24 * len(figure.labels)), 4.0)
    canvas = _make_canvas(size)
    yield [canvas.add_subplot(1, count, i + 1) for i in range(count)]
    canvas.savefig(path, dpi=120)
