"""What there is to tell of a run: from its directory, and from its data where they are at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedquilt.data.population import Population
from fedquilt.errors import DamageError
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
from fedquilt.evaluation.summary import describe_accuracy, main_accuracy
from fedquilt.evaluation.targets import Reached, against, reached
from fedquilt.files import read_document
from fedquilt.report.page import Story
from fedquilt.report.progress import said
from fedquilt.report.records import (
    bytes_sent,
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
    about = {"method": run.about["method"], "rounds": run.setup.rounds, "seed": run.seed}
    places = [sorted(origin.items()) for origin in run.about.get("origins", ())]
    origins = [" ".join(f"{k} {v}" for k, v in place) for place in places]
    about |= {"made with": ", then ".join(origins)} if origins else {}
    about |= {"health": "; ".join(map(said, run.findings))} if run.findings else {}
    recorded = {} if run.folder is None else _recorded(run.folder)
    scores = recorded.pop("scores", ()) or run.scores
    chosen = run.state.chosen
    budgets = {c.id: c.budget for c in population.clients} if population is not None else {}
    sent = recorded.pop("sent", {})
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
        size_kind=run.method.size_kind,
        accuracy_is=describe_accuracy(run.setup, run.method),
        exceeds_budgets=run.about.get("exceeds_budgets"),
        clients=clients,
        steps=step_sizes(run.setup, run.method, run.state),
        weights=mean_weights(run.setup, run.method, run.state),
        architectures=own,
        distances=distances(own) if own else None,
        nets=nets,
        mean_costs=mean_costs(nets),
        mean_shares=mean_shares(run.whole or run.setup, nets),
        rates=rates(run.setup.structure, own),
        layers=layer_costs(run.setup, chosen),
        **recorded,
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


def _recorded(folder: Path) -> dict[str, Any]:
    """What a run's directory tells of its rounds."""
    return {
        "scores": _evaluated(folder),
        "sent": bytes_sent(folder),
        "progress": list(milestones(folder)),
        "traffic": traffic(folder),
        "local_tests": local_tests(folder),
        "local": last_local(folder),
    }


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
        [(m.round, main_accuracy(m.score)) for m in in_last_phase(story.progress)],
        [(test.round, test.accuracy) for test in in_last_phase(story.local_tests)],
    )


def _evaluated(folder: Path) -> tuple[SizeScore, ...]:
    """The scores of the last ``fedquilt evaluate`` with an attack, if there was one."""
    path = folder / "evaluation.json"
    if not path.is_file():
        return ()
    fields = SizeScore.__dataclass_fields__
    try:
        rows: list[dict[str, Any]] = read_document(path, sealed_since=1)["sizes"]
        return tuple(SizeScore(**{k: v for k, v in row.items() if k in fields}) for row in rows)
    except (AttributeError, KeyError, TypeError) as problem:
        raise DamageError(f"{path} is damaged: it holds no scores; evaluate again") from problem
