"""Scores of a run, for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fedquilt.cli.console import console_for, print_json, say
from fedquilt.evaluation.accuracy import SizeScore
from fedquilt.evaluation.accuracy import cost_of as price_of
from fedquilt.report import tables
from fedquilt.runs.run import Run


def show_scores(run: Run, scores: Sequence[SizeScore], *, as_json: bool) -> None:
    """As a table, or as one JSON document."""
    rows = rows_of(run, scores)
    found = document(run, rows)
    if as_json:
        print_json(found)
    elif rows:
        console = console_for()
        console.print(tables.sizes(rows))
        if any(row["group_accuracy"] for row in rows):
            say(console, "User accuracy in each domain:")
            console.print(tables.domains(rows))
        worst, mean = tables.percent(found["worst"]), tables.percent(found["mean"])
        say(console, f"worst {worst}, mean {mean}, seed {run.seed}")


def rows_of(run: Run, scores: Sequence[SizeScore]) -> list[dict[str, Any]]:
    """Scores with the bytes that a client of that size sends; a loss that is no number is None."""
    setup = run.setup
    rows = []
    for score in scores:
        mix = [s.leaving(*run.method.home) for s in run.method.mix(setup, run.state, score.width)]
        price = price_of(setup, mix, memory=False)
        loss = score.loss if score.loss is not None and math.isfinite(score.loss) else None
        rows.append({**asdict(score), "loss": loss, "bytes": price.bytes})
    return rows


def document(run: Run, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Scores for programs; worst and mean are of local accuracy where there is no other."""
    is_local = all(row["accuracy"] is None for row in rows)
    found = [row["local_accuracy" if is_local else "accuracy"] for row in rows]
    known = [accuracy for accuracy in found if accuracy is not None]
    return {
        "run": str(run.folder),
        "seed": run.seed,
        "rounds": run.setup.rounds,
        "sizes": list(rows),
        "worst": min(known, default=None),
        "mean": sum(known) / len(known) if known else None,
    }
