"""Pictures of one run, for notebooks."""

from __future__ import annotations

from collections.abc import Sequence

from fedquilt.evaluation.scores import SizeScore
from fedquilt.evaluation.summary import find_common_score, name_score
from fedquilt.figures.figure import Lines
from fedquilt.runs.history import History


def plot_run(scores: Sequence[SizeScore], history: History) -> list[Lines]:
    """The loss by round, the metric by round, and the metric against parameters, if known."""
    figures = []
    if loss := history.get_curve("train/loss"):
        figures.append(
            Lines("Training loss", "round", "mean loss of clients", {"loss": loss}, is_linear=True)
        )
    shown = [score for score in scores if not score.robustness]
    field = find_common_score(shown)
    if field is None:
        return figures
    metric = shown[0].metric
    name, factor = name_score(field, metric), 100 if metric.is_fraction else 1
    label = f"{name} (%)" if metric.is_fraction else name
    curves = {}
    for score in shown:
        dial = "" if score.robustness is None else f"-robustness-{score.robustness:g}"
        curve = history.get_curve(f"{name.replace(' ', '_')}/{score.width:g}{dial}")
        curves[f"size {score.width:g}"] = [(round, factor * value) for round, value in curve]
    if any(len(curve) > 1 for curve in curves.values()):
        figures.append(Lines("Every size by round", "round", label, curves, is_linear=True))
    points = sorted((float(s.params), factor * getattr(s, field)) for s in shown)
    figures.append(Lines("Every size", "parameters", label, {name: points}))
    return figures
