"""What there is to tell of a run: from its directory, and from its data where they are at hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from fedquilt.data.population import Population
from fedquilt.errors import CorruptFileError
from fedquilt.evaluation.architectures import (
    compute_client_nets,
    compute_compressions,
    compute_correlation,
    compute_distances,
    compute_keep_rates,
    compute_layer_costs,
    compute_mean_costs,
    compute_mean_fractions,
    describe_architectures,
)
from fedquilt.evaluation.blocks import compute_mean_weights, read_step_sizes
from fedquilt.evaluation.clients import (
    ClientRecord,
    compute_label_divergences,
    compute_trained_fractions,
)
from fedquilt.evaluation.scores import SizeScore
from fedquilt.evaluation.summary import describe_value, get_main_value
from fedquilt.evaluation.targets import TargetResult, compute_speed_ups, find_reached_targets
from fedquilt.methods.method import Method
from fedquilt.report.coverage import compute_coverage
from fedquilt.report.page import MAX_LISTED, RunReport
from fedquilt.report.records import (
    filter_last_phase,
    read_client_summaries,
    read_evaluations,
    read_last_local_tests,
    read_local_tests,
    read_milestones,
    read_rounds,
    read_traffic,
)
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.event_lines import describe_attack_line, describe_finding, describe_privacy
from fedquilt.runs.identity import describe_settings
from fedquilt.runs.run import Run

MAX_CLIENTS = 20  # in the table of clients


def build_report(
    name: str, run: Run, population: Population | None = None, *, workers: int | None = None
) -> RunReport:
    """The story of a finished run; with its population, client by client too."""
    about = _describe_run(run)
    recorded = {} if run.directory is None else read_recorded(run.directory)
    scores = recorded.pop("scores", ()) or run.scores
    records = run.read_clients()
    shown = _choose_shown(run, population, records)
    chosen = {c: run.state.chosen_subnets[c] for c in shown if c in run.state.chosen_subnets}
    everyone = population
    if population is not None and len(population) > MAX_LISTED:
        population = population.restrict_to(shown)
        about["clients"] = f"{len(shown):,} of {len(everyone or ()):,} are shown"
    budgets = {c.id: c.budget for c in population.clients} if population is not None else {}
    clients = [] if population is None else run.by_client(population, workers=workers)
    own = describe_architectures(run.setup.structure, chosen, budgets)
    nets = compute_client_nets(run.setup, chosen, clients, budgets)
    story = RunReport(
        name,
        about,
        scores,
        attack=run.info.attack,
        size_kind=run.method.size_kind,
        value_is=describe_value(run.setup, run.method),
        exceeds_budgets=run.info.exceeds_budgets,
        clients=clients,
        steps=read_step_sizes(run.setup, run.method, run.state),
        weights=compute_mean_weights(run.setup, run.method, run.state),
        architectures=own,
        distances=compute_distances(own) if own else None,
        nets=nets,
        mean_costs=compute_mean_costs(nets),
        mean_shares=compute_mean_fractions(run.user_setup, nets),
        rates=compute_keep_rates(run.setup.structure, own),
        layers=compute_layer_costs(run.setup, chosen),
        coverage=compute_coverage(run.setup.structure, records),
        **recorded,
    )
    if population is None or everyone is None:
        return story
    data = {c: population.train[c] for c in chosen if c in population.train}
    labels = compute_label_divergences(run.setup, data)
    small = compute_compressions(run.setup, chosen, labels)
    return replace(
        story,
        shares=compute_trained_fractions(
            replace(run.setup, clients=everyone.clients), chain.from_iterable(records)
        ),
        compressions=small,
        correlation=compute_correlation(small),
    )


def _choose_shown(
    run: Run, population: Population | None, records: Sequence[Sequence[ClientRecord]]
) -> Sequence[int]:
    """The clients that a report shows one by one: all, or some of those that took part."""
    known = run.state.chosen_subnets if population is None else population.registry.numbers
    if len(known) <= MAX_LISTED:
        return list(known)
    took_part = sorted(
        client
        for client in {record.client for round in records for record in round}
        if client in known
    )
    return took_part[:: -(-len(took_part) // MAX_LISTED) or 1]


def _describe_run(run: Run) -> dict[str, Any]:
    """What the page says about a run in a line."""
    about: dict[str, Any] = {
        "method": describe_method(run.method),
        "rounds": run.setup.rounds,
        "seed": run.seed,
    }
    about |= {"privacy": describe_privacy(run.info.privacy)} if run.info.privacy else {}
    about |= {"with": describe_attack_line(run.info.attack)} if run.info.attack else {}
    environments = [
        " ".join(f"{k} {v}" for k, v in sorted(e.items())) for e in run.info.environments
    ]
    about |= {"selected": run.info.selected} if run.info.selected else {}
    about |= {"made with": ", then ".join(environments)} if environments else {}
    about |= {"health": "; ".join(map(describe_finding, run.findings))} if run.findings else {}
    return about


def describe_method(method: Method) -> str:
    """The name of a method, and its settings that differ from their defaults.

    >>> from fedquilt import FedAvg, LocalTraining
    >>> describe_method(FedAvg(LocalTraining(lr=0.5), fraction=0.25))
    'FedAvg (local_training.lr 0.5, fraction 0.25)'
    >>> describe_method(FedAvg())
    'FedAvg'
    """
    settings = describe_settings(method)
    changes = ", ".join(_list_settings(settings))
    return f"{settings['class']} ({changes})" if changes else str(settings["class"])


def _list_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, dict) and set(value) != {"class"}:
            yield from _list_settings(value, f"{prefix}{name}.")
        elif isinstance(value, dict):
            yield f"{prefix}{name} {value['class']}"
        elif isinstance(value, list):
            yield f"{prefix}{name} {'/'.join(map(str, value))}"
        elif name != "class":
            yield f"{prefix}{name} {value}"


def read_recorded(directory: RunDirectory) -> dict[str, Any]:
    """What a run's directory tells of its rounds."""
    return {
        "scores": _read_evaluated(directory),
        "progress": list(read_milestones(directory)),
        "traffic": read_traffic(directory),
        "local_tests": read_local_tests(directory),
        "local": read_last_local_tests(directory),
        "rounds": read_rounds(directory),
        "evaluations": read_evaluations(directory),
        "client_summaries": read_client_summaries(directory, MAX_CLIENTS),
    }


def compare_reports(stories: Sequence[RunReport], targets: Sequence[float]) -> list[RunReport]:
    """The stories with the rounds that each target took, and how that compares with the first.

    Earlier phases count with their rounds, not with the values of what they train: another net.
    """
    first, *others = [_find_reached(story, targets) for story in stories]
    found = [first, *(compute_speed_ups(first, other) for other in others)]
    return [replace(story, targets=r) for story, r in zip(stories, found, strict=True)]


def _find_reached(story: RunReport, targets: Sequence[float]) -> list[TargetResult]:
    return find_reached_targets(
        targets,
        [(m.round, get_main_value(m.score)) for m in filter_last_phase(story.progress)],
        [(test.round, test.accuracy) for test in filter_last_phase(story.local_tests)],
        story.metric,
    )


def _read_evaluated(directory: RunDirectory) -> tuple[SizeScore, ...]:
    """The scores of the last ``fedquilt evaluate`` with an attack, if there was one."""
    document = directory.read_evaluation()
    if document is None:
        return ()
    try:
        rows: list[dict[str, Any]] = document["sizes"]
        return tuple(map(SizeScore.from_json, rows))
    except (AttributeError, KeyError, TypeError) as problem:
        raise CorruptFileError(
            f"{directory.evaluation_file} is damaged: it holds no scores; evaluate again"
        ) from problem
