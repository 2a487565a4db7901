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
MOST_COLUMNS = 8  # of a table that has a line for each row
CLEAR = 2.0  # standard errors: what is further from the paper is named


@dataclass(frozen=True)
class RunValues:
    """The values of one run.

    Args:
        seed: Its seed.
        training: A hash of what it was trained with: settings and data.
        content: The same with how it was scored.
        commit: The version of the code that made it.
        rounds: Its rounds.
        seconds: How long it took on one core.
        values: The values by column.
        curves: The values of each curve by round.
    """

    seed: int
    training: str
    content: str
    commit: str
    rounds: int
    seconds: float
    values: Mapping[str, float]
    curves: Mapping[str, Mapping[int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class RowResult:
    """The runs of a row, one for each seed."""

    name: str
    runs: tuple[RunValues, ...]

    def get_values(self, column: str) -> tuple[float, ...]:
        """The values of a column, one for each seed; none if these runs do not have it."""
        return tuple(run.values[column] for run in self.runs if column in run.values)


@dataclass(frozen=True)
class Reproduction:
    """An experiment that was done.

    Args:
        name: The name of the experiment.
        rows: The values of its rows.
        failed: Rows of which a run failed, and why.
        is_quick: Whether it was the small version.
        environment: What it was measured on.
    """

    name: str
    rows: tuple[RowResult, ...]
    failed: Mapping[str, str] = field(default_factory=dict)
    is_quick: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def runs(self) -> Mapping[str, RunValues]:
        """All runs; one that is in two rows, as it is or scored in two ways, counts once."""
        return {run.training: run for row in self.rows for run in row.runs}

    def find(self, row: str, content: str) -> RunValues | None:
        """The run of a row that is made of the same; None if it was not done."""
        runs = (run for own in self.rows if own.name == row for run in own.runs)
        return next((run for run in runs if run.content == content), None)

    def to_document(self) -> dict[str, Any]:
        """The values as JSON."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Reproduction:
        """The reproduction that ``to_document`` wrote."""
        try:
            rows = tuple(
                RowResult(row["name"], tuple(map(_read_run, row["runs"])))
                for row in document["rows"]
            )
            return cls(**{**document, "rows": rows})
        except (KeyError, TypeError, AttributeError, ValueError) as problem:
            raise CorruptFileError(
                f"this is not a result that fedquilt reproduce writes ({problem}); reproduce again"
            ) from problem


def _read_run(document: Mapping[str, Any]) -> RunValues:
    curves = {
        name: {int(round): value for round, value in curve.items()}  # keys are text in JSON
        for name, curve in document["curves"].items()
    }
    training = document.get("training", document["content"])  # which once were the same
    return RunValues(**{**document, "training": training, "curves": curves})


def make_section(experiment: Experiment, done: Reproduction) -> Section:
    """The table: a line for each row, and under it the paper's values where it has some.

    With many columns it is the other way round: a line for each column.
    """
    lines = [("", *(column.name for column in experiment.columns))]
    for row, result in _pair_rows(experiment, done):
        values = (_format(column, result) for column in experiment.columns)
        lines.append((_label(result, done), *values))
        if row.paper and not done.is_quick:
            theirs = (format_value(c, row.paper.get(c.name)) for c in experiment.columns)
            lines.append((PAPER, *theirs))
    if len(experiment.columns) > MOST_COLUMNS:
        lines = list(zip(*lines, strict=True))
    header, *cells = lines
    return Section(experiment.title, header, tuple(cells))


def make_figures(experiment: Experiment, done: Reproduction) -> list[Lines]:
    """The pictures of curves over rounds: means over seeds, a line for each row."""
    figures = []
    for curve in experiment.curves:
        runs = {row.name: [run.curves[curve.name] for run in row.runs] for row in done.rows}
        lines = {name: _average(own) for name, own in runs.items()}
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
            theirs, ours = row.paper.get(column.name), Estimate.of(result.get_values(column.name))
            if theirs is None or ours is None or ours.deviation is None:
                continue
            count = len(result.get_values(column.name))
            error = column.scale * ours.deviation / math.sqrt(count)
            difference = column.scale * ours.mean - theirs
            if abs(difference) > CLEAR * error:
                found.append(f"{column.name} {difference:+.1f}")
        if found:
            reason = row.note or experiment.note
            sentences.append(f"{row.name}: {', '.join(found)} against the paper; {reason}.")
    return sentences


def describe(experiment: Experiment, done: Reproduction) -> list[str]:
    """How it was measured, and what is not as in the paper, a sentence each."""
    lines = [_summarize_runs(done)]
    known = {row.name for row in done.rows} | set(done.failed)
    missing = [row.name for row in experiment.rows if row.name not in known]
    if missing:
        lines.append(f"Not run yet: {'; '.join(missing)}.")
    if done.is_quick:
        lines.append("This is the small version, which the paper's values say nothing about.")
    lines += [f"{row} failed: {problem}" for row, problem in done.failed.items()]
    return [*lines, *experiment.differences]


def _summarize_runs(done: Reproduction) -> str:
    runs = done.runs.values()
    if not runs:
        return "No run is done yet."
    seeds = max(len(row.runs) for row in done.rows)
    rounds = ", ".join(map(str, sorted({run.rounds for run in runs})))
    commits = ", ".join(sorted({run.commit for run in runs}))
    hours = sum(run.seconds for run in runs) / 3600
    return (
        f"{'Mean ± deviation over ' if seeds > 1 else ''}{format_count(seeds, 'seed')}, {rounds} "
        f"rounds, commit {commits}, {hours:.1f} core-hours."
    )


def _pair_rows(
    experiment: Experiment, done: Reproduction
) -> Sequence[tuple[ExperimentRow, RowResult]]:
    results = {row.name: row for row in done.rows}
    return [(row, results[row.name]) for row in experiment.rows if row.name in results]


def _label(result: RowResult, done: Reproduction) -> str:
    """The name of a row, with the number of its seeds where other rows have more."""
    own, most = len(result.runs), max(len(row.runs) for row in done.rows)
    return result.name if own == most else f"{result.name} ({format_count(own, 'seed')})"


def _format(column: Column, result: RowResult) -> str:
    estimate = Estimate.of(result.get_values(column.name))
    if estimate is None:
        return "-"
    text = format_value(column, column.scale * estimate.mean)
    if estimate.deviation is None:
        return text
    return f"{text} ± {format_value(column, column.scale * estimate.deviation)}"


def format_value(column: Column, value: float | None) -> str:
    """A value in the column's unit, as papers write it."""
    if value is None:
        return "-"
    return f"{value:.1f}" if column.unit == "%" else f"{value:.3g}"
