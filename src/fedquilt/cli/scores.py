"""Scores of a run, for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from fedquilt.cli.console import console_for, print_json, say
from fedquilt.evaluation.accuracy import SizeScore
from fedquilt.evaluation.accuracy import cost_of as price_of
from fedquilt.evaluation.summary import describe_accuracy, summarize
from fedquilt.report import tables
from fedquilt.report.progress import said
from fedquilt.report.records import traffic
from fedquilt.runs.run import Run

BATCH_STATISTICS = (
    "Every batch of test data was normalised by itself: these are not the scores of a model that "
    "answers one example at a time."
)


def show_scores(run: Run, scores: Sequence[SizeScore], *, as_json: bool) -> None:
    """As a table, or as one JSON document."""
    if as_json:
        print_json(document(run, scores))
    elif scores:
        _print_scores(run, scores, console_for())


def _print_scores(run: Run, scores: Sequence[SizeScore], console: Console) -> None:
    rows = rows_of(run, scores)
    console.print(tables.sizes(rows))
    columns, kind = tables.shown_columns(rows), run.method.size_kind
    say(console, *tables.legend(columns, kind, describe_accuracy(run.setup, run.method)))
    if any(score.batch_statistics for score in scores):
        say(console, BATCH_STATISTICS)
    if any(row["group_accuracy"] for row in rows):
        say(console, "User accuracy in each domain:")
        console.print(tables.domains(rows))
    if exceeding := run.about.get("exceeds_budgets"):
        say(console, exceeding)
    summary, seed = summarize(scores), f"seed {run.seed}"
    if summary is None:
        say(console, seed)
    else:
        worst, mean = tables.percent(summary.worst), tables.percent(summary.mean)
        say(console, f"worst {worst}, mean {mean}: {summary.name} over sizes; {seed}")
    if run.findings:
        say(console, *map(said, run.findings))


def rows_of(run: Run, scores: Sequence[SizeScore]) -> list[dict[str, Any]]:
    """Scores with the bytes that a client of that size sends; a loss that is no number is None.

    Where there is one size for all, what clients really sent: it may be a code, or a part that each
    chose for itself.
    """
    setup, sizes = run.setup, run.method.sizes(run.setup)
    sent = traffic(run.folder).get("up") if run.folder is not None and len(sizes) == 1 else None
    rows = []
    for score in scores:
        mix = [s.leaving(*run.method.home) for s in run.method.mix(setup, run.state, score.width)]
        price = price_of(setup, mix, memory=False)
        loss = score.loss if score.loss is not None and math.isfinite(score.loss) else None
        count = price.bytes if sent is None or score.width not in sizes else round(sent)
        row = {"kind": run.method.size_kind, **asdict(score), "loss": loss, "bytes": count}
        rows.append(row)
    return rows


def document(run: Run, scores: Sequence[SizeScore]) -> dict[str, Any]:
    """Scores for programs; ``score`` says what worst and mean are of."""
    summary = summarize(scores)
    return {
        "run": str(run.folder),
        "seed": run.seed,
        "rounds": run.setup.rounds,
        "sizes": rows_of(run, scores),
        "score": summary and summary.score,
        "worst": summary and summary.worst,
        "mean": summary and summary.mean,
        "exceeds_budgets": run.about.get("exceeds_budgets"),
        "findings": [asdict(finding) for finding in run.findings],
    }
