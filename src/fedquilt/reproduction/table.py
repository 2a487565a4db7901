"""What came of an experiment: values by seed, as a table beside the paper's, and as a document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from fedquilt.comparison.render import Section
from fedquilt.comparison.table import Estimate
from fedquilt.errors import CorruptFileError
from fedquilt.figures.figure import Lines
from fedquilt.formatting import format_count
from fedquilt.reproduction.experiment import Column, Experiment, ExperimentRow

PAPER = "in the paper"
CLEAR = 2.0  # standard errors: what is further from the paper is named


@dataclass(frozen=True)
class RowResult:
    """The values of a row: by column, one for each seed; of curves, by round."""

    name: str
    values: Mapping[str, tuple[float, ...]]
    seeds: tuple[int, ...]
    curves: Mapping[str, tuple[Mapping[int, float], ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Reproduction:
    """An experiment that was done.

    Args:
        name: The name of the experiment.
        rows: The values of its rows.
        failed: Rows of which a run failed, and why.
        is_quick: Whether it was the small version.
        rounds: The rounds of its runs.
        commits: The versions of the code that made them.
        hours: How long all runs took together, of one core.
        environment: What it was measured on.
    """

    name: str
    rows: tuple[RowResult, ...]
    failed: Mapping[str, str] = field(default_factory=dict)
    is_quick: bool = False
    rounds: tuple[int, ...] = ()
    commits: tuple[str, ...] = ()
    hours: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)

    def to_document(self) -> dict[str, Any]:
        """The values as JSON."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Reproduction:
        """The reproduction that ``to_document`` wrote."""
        try:
            values = dict(document)
            values["rows"] = tuple(
                RowResult(
                    row["name"],
                    {name: tuple(numbers) for name, numbers in row["values"].items()},
                    tuple(row["seeds"]),
                    {
                        name: tuple({int(r): v for r, v in run.items()} for run in runs)
                        for name, runs in row.get("curves", {}).items()
                    },
                )
                for row in values["rows"]
            )
            for name in ("rounds", "commits"):
                values[name] = tuple(values[name])
            return cls(**values)
        except (KeyError, TypeError, AttributeError) as problem:
            raise CorruptFileError(
                f"this is not a result that fedquilt reproduce writes ({problem}); reproduce again"
            ) from problem


def make_section(experiment: Experiment, done: Reproduction) -> Section:
    """The table: a line for each row, and under it the paper's values where it has some."""
    cells = []
    for row, result in _pair_rows(experiment, done):
        cells.append(
            (
                _label(experiment, result),
                *(_format(column, result) for column in experiment.columns),
            )
        )
        if row.paper and not done.is_quick:
            theirs = (_format_value(c, row.paper.get(c.name)) for c in experiment.columns)
            cells.append((PAPER, *theirs))
    header = ("", *(column.name for column in experiment.columns))
    return Section(experiment.title, header, tuple(cells))


def make_figures(experiment: Experiment, done: Reproduction) -> list[Lines]:
    """The pictures of curves over rounds: means over seeds, a line for each row."""
    figures = []
    for curve in experiment.curves:
        runs = {row.name: row.curves.get(curve.name, ()) for row in done.rows}
        lines = {name: _average(own) for name, own in runs.items() if own}
        label = f"{curve.score.replace('_', ' ')}, %"
        figures.append(Lines(curve.name, "round", label, lines, is_linear=True))
    return figures


def _average(runs: Sequence[Mapping[int, float]]) -> list[tuple[float, float]]:
    """The mean over seeds, at rounds that all of them evaluated."""
    rounds = sorted(set.intersection(*(set(run) for run in runs)))
    return [(round, 100 * fmean(run[round] for run in runs)) for round in rounds]


def list_departures(experiment: Experiment, done: Reproduction) -> list[str]:
    """Sentences on values that are further from the paper than noise explains, and why.

    The deviation over our seeds is taken for the paper's, too, which mostly has none.
    """
    sentences = []
    for row, result in _pair_rows(experiment, done):
        found = []
        for column in experiment.columns:
            theirs, ours = row.paper.get(column.name), Estimate.of(result.values[column.name])
            if theirs is None or ours is None or ours.deviation is None:
                continue
            scale = 100 if column.unit == "%" else 1
            error = scale * ours.deviation / math.sqrt(len(result.seeds))
            difference = scale * ours.mean - theirs
            if abs(difference) > CLEAR * error:
                found.append(f"{column.name} {difference:+.1f}")
        if found:
            reason = row.note or "why is not known"
            sentences.append(f"{row.name}: {', '.join(found)} against the paper; {reason}.")
    return sentences


def describe(experiment: Experiment, done: Reproduction) -> list[str]:
    """How it was measured, and what is not as in the paper, a sentence each."""
    seeds = max((len(row.seeds) for row in done.rows), default=0)
    rounds = ", ".join(map(str, done.rounds))
    noun, commits = format_count(seeds, "seed"), ", ".join(done.commits)
    lines = [
        f"{'Mean ± deviation over ' if seeds > 1 else ''}{noun}, {rounds} rounds, commit "
        f"{commits}, {done.hours:.1f} core-hours."
    ]
    known = {row.name for row in done.rows} | set(done.failed)
    missing = [row.name for row in experiment.rows if row.name not in known]
    if missing:
        lines.append(f"Not run yet: {', '.join(missing)}.")
    if done.is_quick:
        lines.append("This is the small version, which the paper's values say nothing about.")
    lines += [f"{row} failed: {problem}" for row, problem in done.failed.items()]
    return [*lines, *experiment.differences]


def _pair_rows(
    experiment: Experiment, done: Reproduction
) -> Sequence[tuple[ExperimentRow, RowResult]]:
    results = {row.name: row for row in done.rows}
    return [(row, results[row.name]) for row in experiment.rows if row.name in results]


def _label(experiment: Experiment, result: RowResult) -> str:
    """The name of a row, with the number of its seeds where some were not run."""
    own = len(result.seeds)
    return (
        result.name
        if own >= len(experiment.seeds)
        else f"{result.name} ({format_count(own, 'seed')})"
    )


def _format(column: Column, result: RowResult) -> str:
    estimate = Estimate.of(result.values.get(column.name, ()))
    if estimate is None:
        return "-"
    scale = 100 if column.unit == "%" else 1
    text = _format_value(column, scale * estimate.mean)
    if estimate.deviation is None:
        return text
    return f"{text} ± {_format_value(column, scale * estimate.deviation)}"


def _format_value(column: Column, value: float | None) -> str:
    """A value in the column's unit, as papers write it."""
    if value is None:
        return "-"
    return f"{value:.1f}" if column.unit == "%" else f"{value:.3g}"
