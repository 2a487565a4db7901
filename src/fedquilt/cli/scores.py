"""Scores of a run, for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from fedquilt.cli.console import make_console, print_json, print_lines
from fedquilt.evaluation.accuracy import compute_ensemble_cost as price_of
from fedquilt.evaluation.scores import SizeScore
from fedquilt.evaluation.summary import describe_value, summarize
from fedquilt.report import tables
from fedquilt.report.records import read_traffic
from fedquilt.runs.event_lines import describe_attack_line, describe_finding, describe_privacy
from fedquilt.runs.run import Run

BATCH_STATISTICS = (
    "Every batch of test data was normalised by itself: these are not the scores of a model that "
    "answers one example at a time."
)


def show_scores(run: Run, scores: Sequence[SizeScore], *, as_json: bool) -> None:
    """As a table, or as one JSON document."""
    if as_json:
        print_json(make_score_document(run, scores))
    elif scores:
        _print_scores(run, scores, make_console())


def _print_scores(run: Run, scores: Sequence[SizeScore], console: Console) -> None:
    rows = make_score_rows(run, scores)
    console.print(tables.make_size_table(rows))
    columns, kind = tables.select_columns(rows), run.method.size_kind
    print_lines(
        console, *tables.make_legend(rows, columns, kind, describe_value(run.setup, run.method))
    )
    if any(score.batch_statistics for score in scores):
        print_lines(console, BATCH_STATISTICS)
    if any(score.group_values for score in scores):
        print_lines(console, f"User {scores[0].metric.name} in each domain:")
        console.print(tables.make_domain_table(rows))
    if run.info.privacy is not None:
        print_lines(console, describe_privacy(run.info.privacy))
    if run.info.attack is not None:
        print_lines(console, describe_attack_line(run.info.attack))
    if exceeding := run.info.exceeds_budgets:
        print_lines(console, exceeding)
    if run.info.selected:
        print_lines(console, run.info.selected)
    summary, seed = summarize(scores), f"seed {run.seed}"
    if summary is None:
        print_lines(console, seed)
    else:
        worst, mean = map(summary.metric.format, (summary.worst, summary.mean))
        print_lines(console, f"worst {worst}, mean {mean}: {summary.name} over sizes; {seed}")
    if run.findings:
        print_lines(console, *map(describe_finding, run.findings))


def make_score_rows(run: Run, scores: Sequence[SizeScore]) -> list[dict[str, Any]]:
    """Scores with the bytes that a client of that size sends; a loss that is no number is None.

    Where there is one size for all, what clients really sent: it may be a code, or a part that each
    chose for itself.
    """
    setup, sizes = run.setup, run.method.sizes(run.setup)
    sent = (
        read_traffic(run.directory).get("up")
        if run.directory is not None and len(sizes) == 1
        else None
    )
    rows = []
    for score in scores:
        ensemble = [
            s.excluding(*run.method.local_params)
            for s in run.method.ensemble(setup, run.state, score.width)
        ]
        price = price_of(setup, ensemble, memory=False)
        loss = score.loss if score.loss is not None and math.isfinite(score.loss) else None
        count = price.bytes if sent is None or score.width not in sizes else round(sent)
        row = {"kind": run.method.size_kind, **score.to_json(), "loss": loss, "bytes": count}
        rows.append(row)
    return rows


def make_score_document(run: Run, scores: Sequence[SizeScore]) -> dict[str, Any]:
    """Scores for programs; ``score`` says what worst and mean are of."""
    summary = summarize(scores)
    return {
        "run": str(run.folder),
        "seed": run.seed,
        "rounds": run.setup.rounds,
        "model_round": run.info.model_round,
        "trained_rounds": run.info.trained_rounds,
        "sizes": make_score_rows(run, scores),
        "score": summary and summary.score,
        "worst": summary and summary.worst,
        "mean": summary and summary.mean,
        "exceeds_budgets": run.info.exceeds_budgets,
        "privacy": run.info.privacy,
        "attack": run.info.attack,
        "findings": [asdict(finding) for finding in run.findings],
    }
