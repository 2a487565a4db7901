"""Does one run of a comparison: starts or resumes it, and keeps its result."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fedquilt.comparison.code_version import read_commit
from fedquilt.comparison.results import TrialResult, summarize_run
from fedquilt.comparison.spending import Device, SpendingMeter
from fedquilt.comparison.store import TrialStore
from fedquilt.comparison.trial import Address, Trial, describe_result
from fedquilt.data.population import Population
from fedquilt.engines.counting import CountingEngine, MacCounts
from fedquilt.errors import CheckpointError
from fedquilt.federation.state import Setup
from fedquilt.files import write_text
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.engines import make_local_engine
from fedquilt.runs.environment import read_environment
from fedquilt.runs.events import Event, RoundDone, RoundStarted
from fedquilt.runs.plan import resume_run, start_run
from fedquilt.runs.records import read_times

OnRound = Callable[[int, int], None]  # the round that is done, and how many there are


def execute_trial(
    trial: Trial,
    address: Address,
    store: TrialStore,
    device: Device,
    *,
    on_round: OnRound = lambda round, total: None,
) -> TrialResult:
    """Trains a run to its end, from where it stopped if it was started before, and scores it.

    Args:
        trial: The run.
        address: Its address.
        store: Where it is kept.
        device: How fast the simulated devices are.
        on_round: Is called after each round.
    """
    directory = store.get_run(address)
    counts = _load_counts(directory)

    def make_engine(setup: Setup, population: Population, folder: Path | None) -> CountingEngine:
        make_local = make_local_engine(
            0, device=trial.device, clients_per_pass=trial.clients_per_pass
        )
        return CountingEngine(make_local(setup, population, folder), counts)

    def follow(event: Event) -> None:
        if isinstance(event, RoundStarted):
            counts.phase = event.phase
            follow.total = event.total  # type: ignore[attr-defined]
        elif isinstance(event, RoundDone):
            on_round(event.round, follow.total)  # type: ignore[attr-defined]

    plan = replace(trial.plan(directory.path), directory=directory, engine=make_engine)
    run = (resume_run if directory.has_run else start_run)(plan).train([follow])
    meter = SpendingMeter(run.setup, run.user_setup, counts, device)
    result = summarize_run(
        run,
        str(address),
        meter,
        scores=run.scores if trial.scoring is None else trial.scoring.evaluate(run),
        wall_seconds=round(sum(times["seconds"] for times in read_times(directory)), 3),
        made_by={**read_environment(), "code": address.code, "commit": read_commit() or "unknown"},
        settings=describe_result(trial),
    )
    store.add_result(address, result)
    return result


def _load_counts(directory: RunDirectory) -> MacCounts:
    """The MACs that were counted before, of a run that was stopped."""
    path = directory.path / "macs.json"

    def save(counts: MacCounts) -> None:
        try:
            write_text(path, json.dumps(counts.counts, indent=1))
        except OSError as problem:
            raise CheckpointError(f"{path} could not be written ({problem})") from problem

    known = json.loads(path.read_text()) if path.is_file() and directory.has_run else {}
    return MacCounts(known, save)
