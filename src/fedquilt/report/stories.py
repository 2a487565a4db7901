"""What there is to tell of a run: from its directory, and from its data where they are at hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedquilt.data.population import Population
from fedquilt.evaluation.accuracy import SizeScore
from fedquilt.evaluation.blocks import mean_weights, step_sizes
from fedquilt.evaluation.clients import trained_shares
from fedquilt.report.page import Story
from fedquilt.report.records import final_scores
from fedquilt.runs.run import Run


def told(
    name: str, run: Run, population: Population | None = None, *, workers: int | None = None
) -> Story:
    """The story of a finished run; with its population, client by client too."""
    assert run.folder is not None
    about = {"method": run.about["method"], "rounds": run.setup.rounds, "seed": run.seed}
    scores = _evaluated(run.folder) or final_scores(run.folder)
    story = Story(
        name,
        about,
        scores,
        list(progress(run.folder)),
        steps=step_sizes(run.setup, run.method, run.state),
        weights=mean_weights(run.setup, run.method, run.state),
    )
    if population is None:
        return story
    return replace(
        story,
        clients=run.by_client(population, workers=workers),
        shares=trained_shares(run.planned(population), run.method, run.state.chosen),
    )


def _evaluated(folder: Path) -> tuple[SizeScore, ...]:
    """The scores of the last ``fedquilt evaluate`` with an attack, if there was one."""
    path = folder / "evaluation.json"
    if not path.is_file():
        return ()
    fields = SizeScore.__dataclass_fields__
    rows: list[dict[str, Any]] = json.loads(path.read_text())["sizes"]
    return tuple(SizeScore(**{k: v for k, v in row.items() if k in fields}) for row in rows)


def progress(folder: Path) -> Iterator[tuple[float, SizeScore]]:
    """Seconds of training so far, and the largest net's score, at every evaluation."""
    seconds, spent = 0.0, {0: 0.0}
    timing = folder / "timing.jsonl"
    for line in timing.read_text().splitlines() if timing.is_file() else ():
        record = json.loads(line)
        if record["event"] == "RoundDone":
            seconds += record["seconds"]
            spent[record["round"]] = seconds
    metrics = folder / "metrics.jsonl"
    for line in metrics.read_text().splitlines() if metrics.is_file() else ():
        record = json.loads(line)
        if record.get("scores"):
            score = max((SizeScore(**s) for s in record["scores"]), key=lambda s: s.width)
            yield spent.get(record["round"], seconds), score
