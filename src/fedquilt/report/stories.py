"""What there is to tell of a run: from its directory, and from its data where they are at hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedquilt.data.population import Population
from fedquilt.evaluation.accuracy import SizeScore
from fedquilt.evaluation.architectures import (
    architectures,
    client_nets,
    compressions,
    correlation,
    distances,
    layer_costs,
    mean_costs,
    mean_shares,
    rates,
)
from fedquilt.evaluation.blocks import mean_weights, step_sizes
from fedquilt.evaluation.clients import label_divergences, trained_shares
from fedquilt.evaluation.targets import Reached, against, reached
from fedquilt.report.page import Story
from fedquilt.report.records import (
    bytes_sent,
    final_scores,
    global_accuracy,
    in_last_phase,
    last_local,
    local_tests,
    milestones,
    traffic,
)
from fedquilt.runs.run import Run


def told(
    name: str, run: Run, population: Population | None = None, *, workers: int | None = None
) -> Story:
    """The story of a finished run; with its population, client by client too."""
    assert run.folder is not None
    about = {"method": run.about["method"], "rounds": run.setup.rounds, "seed": run.seed}
    origins = [" ".join(f"{k} {v}" for k, v in o.items()) for o in run.about.get("origins", ())]
    about |= {"made with": ", then ".join(origins)} if origins else {}
    scores = _evaluated(run.folder) or final_scores(run.folder)
    chosen = run.state.chosen
    budgets = {c.id: c.budget for c in population.clients} if population is not None else {}
    sent = bytes_sent(run.folder)
    clients = [
        replace(score, bytes_per_round=sent.get(score.client, score.bytes_per_round))
        for score in (run.by_client(population, workers=workers) if population is not None else [])
    ]
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
        mean_shares=mean_shares(run.whole or run.setup, nets),
        traffic=traffic(run.folder),
        rates=rates(run.setup.structure, own),
        layers=layer_costs(run.setup, chosen),
        local_tests=local_tests(run.folder),
        local=last_local(run.folder),
    )
    if population is None:
        return story
    labels = label_divergences(run.setup, population.train) if chosen else {}
    small = compressions(run.setup, chosen, labels)
    return replace(
        story,
        shares=trained_shares(run.planned(population), run.method, chosen),
        compressions=small,
        correlation=correlation(small),
    )


def compared(stories: Sequence[Story], targets: Sequence[float]) -> list[Story]:
    """The stories with the rounds that each target took, and how that compares with the first.

    Earlier phases count with their rounds, not with the accuracy of what they train: another net.
    """
    first, *others = [_reached(story, targets) for story in stories]
    found = [first, *(against(first, other) for other in others)]
    return [replace(story, targets=r) for story, r in zip(stories, found, strict=True)]


def _reached(story: Story, targets: Sequence[float]) -> list[Reached]:
    return reached(
        targets,
        [(m.round, global_accuracy(m.score)) for m in in_last_phase(story.progress)],
        [(test.round, test.accuracy) for test in in_last_phase(story.local_tests)],
    )


def _evaluated(folder: Path) -> tuple[SizeScore, ...]:
    """The scores of the last ``fedquilt evaluate`` with an attack, if there was one."""
    path = folder / "evaluation.json"
    if not path.is_file():
        return ()
    fields = SizeScore.__dataclass_fields__
    rows: list[dict[str, Any]] = json.loads(path.read_text())["sizes"]
    return tuple(SizeScore(**{k: v for k, v in row.items() if k in fields}) for row in rows)
