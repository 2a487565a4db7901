"""Pictures of runs, from plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedquilt.errors import ConfigError
from fedquilt.evaluation.accuracy import SizeScore
from fedquilt.evaluation.clients import ClientScore

Curve = Sequence[tuple[float, float]]  # x and y of each point


@dataclass(frozen=True)
class Lines:
    """A picture of curves, by name."""

    title: str
    x: str
    y: str
    curves: Mapping[str, Curve]


@dataclass(frozen=True)
class Bars:
    """A picture of bars: for each series, a value for each place."""

    title: str
    y: str
    places: tuple[str, ...]
    series: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Boxes:
    """A picture of how values spread over clients: one box for each name, panels side by side."""

    title: str
    panels: Mapping[str, Mapping[str, Sequence[float]]]


Figure = Lines | Bars | Boxes


def by_width(runs: Mapping[str, Sequence[SizeScore]]) -> list[Figure]:
    """Accuracy against width, parameters and MACs (Split-Mix, Table 1)."""
    against = {"width": "width", "params": "parameters", "macs": "MACs, one example"}
    return [
        Lines(
            f"Accuracy against {label}",
            label,
            "accuracy (%)",
            {name: _points(scores, attribute) for name, scores in runs.items()},
        )
        for attribute, label in against.items()
    ]


def _points(scores: Sequence[SizeScore], attribute: str) -> list[tuple[float, float]]:
    return sorted(
        (float(getattr(score, attribute)), 100 * accuracy)
        for score in scores
        if not score.robustness and (accuracy := accuracy_of(score)) is not None
    )


def accuracy_of(score: SizeScore) -> float | None:
    """The accuracy to show: the mean over users where it is known."""
    return score.accuracy if score.user_accuracy is None else score.user_accuracy


def trade_off(runs: Mapping[str, Sequence[SizeScore]]) -> list[Figure]:
    """Robust against standard accuracy, one curve for each width (Split-Mix, Fig. 7)."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, scores in runs.items():
        for score in scores:
            if score.robust_accuracy is not None and (clean := accuracy_of(score)) is not None:
                curves.setdefault(f"{name} x{score.width:g}", []).append(
                    (100 * clean, 100 * score.robust_accuracy)
                )
    if not curves:
        return []
    return [
        Lines(
            "Robust against standard accuracy",
            "standard accuracy (%)",
            "robust accuracy (%)",
            curves,
        )
    ]


def by_clock(runs: Mapping[str, Sequence[tuple[float, SizeScore]]]) -> Figure:
    """Accuracy of the widest net against seconds of training (Split-Mix, Fig. 9)."""
    return Lines(
        "Accuracy of the largest net against wall-clock time",
        "seconds",
        "accuracy (%)",
        {
            name: [
                (seconds, 100 * accuracy)
                for seconds, score in scores
                if (accuracy := accuracy_of(score)) is not None
            ]
            for name, scores in runs.items()
        },
    )


def by_client(runs: Mapping[str, Sequence[ClientScore]]) -> Figure:
    """How accuracy, MACs and parameters sent spread over clients (Split-Mix, Fig. 5)."""
    return Boxes(
        "Clients",
        {
            "accuracy (%)": {
                n: [100 * c.accuracy for c in clients if c.accuracy is not None]
                for n, clients in runs.items()
            },
            "MACs, one example (M)": {n: [c.macs / 1e6 for c in cs] for n, cs in runs.items()},
            "parameters a round (M)": {
                n: [c.params_per_round / 1e6 for c in cs] for n, cs in runs.items()
            },
        },
    )


def by_group(runs: Mapping[str, Mapping[str, float]]) -> Figure:
    """The share of parameters ever trained by the clients of each group (Split-Mix, Fig. 6)."""
    places = tuple(dict.fromkeys(group for shares in runs.values() for group in shares))
    return Bars(
        "Share of parameters ever trained",
        "share (%)",
        places,
        {n: [100 * shares.get(g, 0.0) for g in places] for n, shares in runs.items()},
    )


def by_block(title: str, y: str, sizes: Mapping[str, Mapping[str, float]]) -> list[Figure]:
    """A value of every block, one series for each size; nothing for blocks that it skips."""
    places = tuple(dict.fromkeys(block for blocks in sizes.values() for block in blocks))
    if not places:
        return []
    series = {f"x{s}": [blocks.get(b, 0.0) for b in places] for s, blocks in sizes.items()}
    return [Bars(title, y, places, series)]


def draw(figure: Figure, path: Path) -> None:
    """Writes the picture."""
    with _axes(figure, path) as panels:
        if isinstance(figure, Lines):
            for name, curve in figure.curves.items():
                panels[0].plot(*zip(*curve, strict=True), marker="o", label=name) if curve else None
            panels[0].set(xlabel=figure.x, ylabel=figure.y, title=figure.title)
            if all(x > 0 for c in figure.curves.values() for x, _ in c) and figure.x != "seconds":
                panels[0].set_xscale("log") if _is_wide(figure) else None
            panels[0].legend(fontsize="small")
        elif isinstance(figure, Bars):
            _draw_bars(panels[0], figure)
        else:
            for panel, (label, boxes) in zip(panels, figure.panels.items(), strict=True):
                kept = {n: values for n, values in boxes.items() if values}
                if kept:
                    panel.boxplot(list(kept.values()), tick_labels=list(kept))
                panel.set(ylabel=label)
                panel.tick_params(axis="x", rotation=30)


def _is_wide(figure: Lines) -> bool:
    xs = [x for curve in figure.curves.values() for x, _ in curve]
    return max(xs) > 20 * min(xs)


def _draw_bars(panel: Any, figure: Bars) -> None:
    thickness = 0.8 / max(len(figure.series), 1)
    for number, (name, values) in enumerate(figure.series.items()):
        places = [i + number * thickness for i in range(len(values))]
        panel.bar(places, values, thickness, label=name)
    middle = thickness * (len(figure.series) - 1) / 2
    panel.set_xticks([i + middle for i in range(len(figure.places))], figure.places)
    panel.tick_params(axis="x", rotation=20)
    panel.set(ylabel=figure.y, title=figure.title)
    panel.legend(fontsize="small")


@contextmanager
def _axes(figure: Figure, path: Path) -> Iterator[list[Any]]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise ConfigError(
            "pictures need matplotlib; install it with: pip install 'fedquilt[report]'"
        ) from None
    count = len(figure.panels) if isinstance(figure, Boxes) else 1
    canvas = Canvas(figsize=(4.2 * count + 1.5, 4), layout="constrained")
    FigureCanvasAgg(canvas)
    yield [canvas.add_subplot(1, count, i + 1) for i in range(count)]
    canvas.savefig(path, dpi=120)
