"""Does the runs of an experiment that are not done yet, and reads its table from them."""

from __future__ import annotations

from pathlib import Path

from fedquilt.comparison.progress import ComparisonCallback, ignore_events
from fedquilt.comparison.queue import FailedTrial, run_trials
from fedquilt.comparison.results import TrialResult
from fedquilt.comparison.sources import LoadedSources
from fedquilt.comparison.store import TrialStore
from fedquilt.comparison.trial import ConfiguredTrial
from fedquilt.errors import FedquiltError, TrainingError
from fedquilt.reproduction.experiment import Experiment, ExperimentRow
from fedquilt.reproduction.reading import read_column
from fedquilt.reproduction.table import Reproduction, RowResult
from fedquilt.runs.environment import read_environment
from fedquilt.settings.load import load_config, override_settings
from fedquilt.settings.resolve import resolve_config


def reproduce(
    name: str,
    experiment: Experiment,
    out: Path,
    *,
    seeds: tuple[int, ...] | None = None,
    quick: bool = False,
    workers: int | None = None,
    any_code: bool = False,
    on_event: ComparisonCallback = ignore_events,
) -> Reproduction:
    """The table of an experiment; runs that are done are not done again.

    Args:
        name: The name of the experiment.
        experiment: Its rows and columns.
        out: The folder of its runs.
        seeds: The seeds of each row; None: those of the experiment.
        quick: Whether the small version is done.
        workers: How many runs are done at a time; None: one per core, 0: one in this process.
        any_code: Whether results that other code made count.
        on_event: Is called with what happens.
    """
    chosen = experiment.seeds if seeds is None else seeds
    sources = LoadedSources()
    pairs = [(row, seed) for row in experiment.rows for seed in chosen]
    store = TrialStore(out, any_code=any_code)
    with store.hold():
        trials = [make_trial(experiment, row, seed, sources, quick=quick) for row, seed in pairs]
        outcomes = run_trials(trials, store, workers=workers, on_event=on_event)
    done: dict[str, list[TrialResult]] = {row.name: [] for row in experiment.rows}
    failed: dict[str, str] = {}
    for (row, _), outcome in zip(pairs, outcomes, strict=True):
        if isinstance(outcome, FailedTrial):
            failed[row.name] = outcome.problem
        else:
            done[row.name].append(outcome)
    if len(failed) == len(done):
        raise TrainingError(f"{name}: runs of every row failed; {next(iter(failed.values()))}")
    finished = {row: results for row, results in done.items() if row not in failed}
    results = [result for own in finished.values() for result in own]
    return Reproduction(
        name,
        tuple(_read_row(experiment, row, own) for row, own in finished.items()),
        failed=failed,
        is_quick=quick,
        rounds=tuple(sorted({result.rounds for result in results})),
        commits=tuple(sorted({result.made_by["commit"] for result in results})),
        hours=round(sum({r.key: r.wall_seconds for r in results}.values()) / 3600, 3),
        environment=read_environment(),
    )


def _read_row(experiment: Experiment, row: str, results: list[TrialResult]) -> RowResult:
    columns = experiment.columns
    values = {c.name: tuple(read_column(c, result) for result in results) for c in columns}
    return RowResult(row, values, tuple(result.seed for result in results))


def make_trial(
    experiment: Experiment, row: ExperimentRow, seed: int, sources: LoadedSources, *, quick: bool
) -> ConfiguredTrial:
    """A run of a row, with its settings alone."""
    flat = experiment.list_settings(row, seed, quick=quick)
    try:
        config = load_config(override_settings({}, flat))
        data = sources.load(config)
        return ConfiguredTrial(row.name, resolve_config(config, data.load()), data)
    except FedquiltError as problem:
        raise type(problem)(f"row '{row.name}': {problem}") from None
