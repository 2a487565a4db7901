"""Differences between rows, seed by seed: what a table claims, whatever the level of its values.

Runs of one seed have the same data, clients and initial values. So the difference of two rows
varies less than either, and a smaller experiment can show it.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedquilt.comparison.significance import compare_paired
from fedquilt.comparison.table import Estimate
from fedquilt.formatting import format_count
from fedquilt.reproduction.experiment import Column, Experiment
from fedquilt.reproduction.table import Reproduction, RowResult, format_value

TITLE = "Differences, seed by seed"
MEANING = "± is the deviation over seeds. Noise is what a paired t-test at 5 % cannot tell from 0."

Values = Mapping[str, float]  # by column


def list_contrasts(experiment: Experiment, done: Reproduction) -> list[str]:
    """A sentence for each difference that the experiment names, of rows that were done."""
    results = {row.name: row for row in done.rows}
    papers = {row.name: {} if done.is_quick else row.paper for row in experiment.rows}
    sentences = []
    for contrast in experiment.contrasts:
        names = contrast.row, contrast.than
        pairs = _pair_seeds(*(results[n] for n in names)) if results.keys() >= set(names) else []
        parts = [
            _describe(column, pairs, *(papers[name].get(column.name) for name in names))
            for column in experiment.columns
        ]
        if any(parts):
            seeds = format_count(len(pairs), "seed")
            sentences.append(f"{' − '.join(names)} ({seeds}): {', '.join(filter(None, parts))}.")
    return sentences


def _pair_seeds(first: RowResult, second: RowResult) -> list[tuple[Values, Values]]:
    """The values of both rows, for each seed that both have."""
    others = {run.seed: run.values for run in second.runs}
    return [(run.values, others[run.seed]) for run in first.runs if run.seed in others]


def _describe(
    column: Column, pairs: list[tuple[Values, Values]], first: float | None, second: float | None
) -> str:
    """The difference in a column, and that of the paper's values; empty if rows lack it."""
    name = column.name
    by_seed = [one[name] - other[name] for one, other in pairs if name in one and name in other]
    estimate = Estimate.of(by_seed)
    if estimate is None:
        return ""
    text, remarks = f"{name} {_sign(column, column.scale * estimate.mean)}", []
    if estimate.deviation is not None:
        text += f" ± {format_value(column, column.scale * estimate.deviation)}"
        if abs(estimate.mean) <= (compare_paired(by_seed).interval or 0.0):
            remarks.append("noise")
    if first is not None and second is not None:
        remarks.append(f"in the paper {_sign(column, first - second)}")
    return f"{text} ({'; '.join(remarks)})" if remarks else text


def _sign(column: Column, value: float) -> str:
    """A difference with its sign.

    >>> _sign(Column(name="accuracy"), 0.26), _sign(Column(name="accuracy"), -1.0)
    ('+0.3', '-1.0')
    """
    text = format_value(column, value)
    return text if text.startswith("-") else f"+{text}"
