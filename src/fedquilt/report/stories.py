"""What there is to tell of a run: from its directory, and from its data where they are at hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedquilt.data.population import Population
from fedquilt.evaluation.accuracy import SizeScore
from fedquilt.evaluation.architectures import (
    architectures,
    client_nets,
    distances,
    mean_costs,
)
from fedquilt.evaluation.blocks import mean_weights, step_sizes
from fedquilt.evaluation.clients import trained_shares
from fedquilt.report.page import Story
from fedquilt.report.records import final_scores, milestones
from fedquilt.runs.run import Run


def told(
    name: str, run: Run, population: Population | None = None, *, workers: int | None = None
) -> Story:
    """The story of a finished run; with its population, client by client too."""
    assert run.folder is not None
    about = {"method": run.about["method"], "rounds": run.setup.rounds, "seed": run.seed}
    scores = _evaluated(run.folder) or final_scores(run.folder)
    chosen = run.state.chosen
    budgets = {c.id: c.budget for c in population.clients} if population is not None else {}
    clients = run.by_client(population, workers=workers) if population is not None else []
    own = architectures(run.setup.structure, chosen, budgets)
    nets = client_nets(run.setup, chosen, clients, budgets)
    story = Story(
        name,
        about,
        scores,
        list(milestones(run.folder)),
        clients,
        steps=step_sizes(run.setup, run.method, run.state),
        weights=mean_weights(run.setup, run.method, run.state),
        architectures=own,
        distances=distances(own) if own else None,
        nets=nets,
        mean_costs=mean_costs(nets),
    )
    if population is None:
        return story
    return replace(story, shares=trained_shares(run.planned(population), run.method, chosen))


def _evaluated(folder: Path) -> tuple[SizeScore, ...]:
    """The scores of the last ``fedquilt evaluate`` with an attack, if there was one."""
    path = folder / "evaluation.json"
    if not path.is_file():
        return ()
    fields = SizeScore.__dataclass_fields__
    rows: list[dict[str, Any]] = json.loads(path.read_text())["sizes"]
    return tuple(SizeScore(**{k: v for k, v in row.items() if k in fields}) for row in rows)
