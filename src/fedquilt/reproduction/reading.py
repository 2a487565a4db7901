"""Reads the value of a column from a finished run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from fedquilt.comparison.results import TrialResult
from fedquilt.errors import ConfigError, describe_unknown
from fedquilt.reproduction.experiment import Column, Curve


def read_columns(columns: Sequence[Column], result: TrialResult) -> dict[str, float]:
    """The values of all columns; without those that are optional and that the run does not have."""
    values = {}
    for column in columns:
        try:
            values[column.name] = read_column(column, result)
        except ConfigError:
            if not column.is_optional:
                raise
    return values


def read_column(column: Column, result: TrialResult) -> float:
    """The value of a column; an error says what the run has instead."""
    if column.round is None:
        spent = asdict(result.spent)
        sizes: dict[float, Mapping[str, Any]] = {}
        for size in result.sizes:
            if column.robustness in (None, size.robustness):
                scores = {**asdict(size), **size.scores, "scores": None}
                sizes.setdefault(size.size, scores)  # of several robustnesses, the first one
    else:
        known = {point.round: point for point in result.curve}
        if column.round not in known:
            raise ConfigError(
                f"column '{column.name}' reads round {column.round}, and evaluations were after "
                f"rounds {', '.join(map(str, known))}; set run.evaluate_every"
            )
        point = known[column.round]
        spent = asdict(point.spent)
        sizes = {float(size): dict(scores) for size, scores in point.scores.items()}
    if column.score in spent and column.size is None:
        return float(spent[column.score])
    return _read_sizes(column, sizes)


def read_curve(curve: Curve, result: TrialResult) -> dict[int, float]:
    """The values of a score after each round that was evaluated."""
    column = Column(name=curve.name, score=curve.score, size=curve.size)
    points = {
        point.round: {float(size): scores for size, scores in point.scores.items()}
        for point in result.curve
    }
    return {round: _read_sizes(column, sizes) for round, sizes in points.items()}


def _read_sizes(column: Column, sizes: Mapping[float, Mapping[str, Any]]) -> float:
    if not sizes:
        raise ConfigError(
            f"column '{column.name}' reads robustness {column.robustness}, which was not scored; "
            "add it to scoring.robustness"
        )
    if column.size is not None:
        size = next((size for size in sizes if abs(size - column.size) < 1e-6), None)
        if size is None:
            raise ConfigError(
                f"column '{column.name}' reads size {column.size:g}, and the run has "
                f"{', '.join(f'{size:g}' for size in sizes)}; change the column, or the settings"
            )
        return _get(column, sizes[size])
    if column.over == "largest":
        return _get(column, sizes[max(sizes)])
    values = [_get(column, scores) for scores in sizes.values()]
    return min(values) if column.over == "worst" else fmean(values)


def _get(column: Column, scores: Mapping[str, Any]) -> float:
    value = scores.get(column.score)
    if value is None:
        known = [name for name, value in scores.items() if value is not None]
        raise ConfigError(
            f"column '{column.name}': {describe_unknown('score', column.score, known)}"
        )
    return float(value)
