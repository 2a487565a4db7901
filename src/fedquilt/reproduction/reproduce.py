"""Does the runs of an experiment that are not done yet, and reads its table from them."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path

from fedquilt.comparison.progress import ComparisonCallback, ignore_events
from fedquilt.comparison.queue import FailedTrial, run_trials
from fedquilt.comparison.results import TrialResult
from fedquilt.comparison.sources import LoadedSources
from fedquilt.comparison.store import TrialStore
from fedquilt.comparison.trial import Address, ConfiguredTrial, compute_address
from fedquilt.errors import FedquiltError, TrainingError
from fedquilt.reproduction.experiment import Experiment, ExperimentRow
from fedquilt.reproduction.reading import read_columns, read_curve
from fedquilt.reproduction.table import Reproduction, RowResult, RunValues
from fedquilt.runs.environment import read_environment
from fedquilt.settings.load import load_config, override_settings
from fedquilt.settings.resolve import resolve_config


def reproduce(
    name: str,
    experiment: Experiment,
    out: Path,
    *,
    rows: Collection[str] | None = None,
    seeds: tuple[int, ...] | None = None,
    quick: bool = False,
    stored: Reproduction | None = None,
    workers: int | None = None,
    any_code: bool = False,
    on_event: ComparisonCallback = ignore_events,
) -> Reproduction:
    """The table of an experiment, with all of its runs that are done; none is done again.

    Args:
        name: The name of the experiment.
        experiment: Its rows and columns.
        out: The folder of its runs.
        rows: The rows that are run; None: all. Others are in the table if they were run before.
        seeds: The seeds of each of these rows; None: those of the experiment.
        quick: Whether the small version is done.
        stored: Values that were stored before, of runs that may be gone.
        workers: How many runs are done at a time; None: one per core, 0: one in this process.
        any_code: Whether runs that other code made, also stored ones, count as done.
        on_event: Is called with what happens.
    """
    chosen = experiment.seeds if seeds is None else seeds
    before = Reproduction(name, ()) if stored is None else stored
    known = dict.fromkeys((*experiment.seeds, *chosen, *(r.seed for r in before.runs.values())))
    sources = LoadedSources()
    store = TrialStore(out, any_code=any_code)
    failed: dict[str, str] = {}
    done: dict[str, list[RunValues]] = {row.name: [] for row in experiment.rows}
    trials = {
        (row.name, seed): make_trial(experiment, row, seed, sources, quick=quick)
        for row in experiment.rows
        for seed in known
    }
    kept = {key: _find_stored(experiment, before, key[0], trial) for key, trial in trials.items()}
    asked = [
        (row, seed)
        for row, seed in trials
        if seed in chosen
        and (rows is None or row in rows)
        and not (any_code and kept[row, seed] is not None)
    ]
    with store.hold() if asked else nullcontext():
        outcomes = run_trials(
            [trials[key] for key in asked], store, workers=workers, on_event=on_event
        )
    for (row, _), outcome in zip(asked, outcomes, strict=True):
        if isinstance(outcome, FailedTrial):
            failed[row] = outcome.problem
    for key, trial in trials.items():
        address = compute_address(trial)
        result = store.find_result(address)
        values = kept[key] if result is None else _read_run(experiment, address, result)
        if values is not None:
            done[key[0]].append(values)
    if failed and len(failed) == len({row for row, _ in asked}):
        raise TrainingError(f"{name}: runs of every row failed; {next(iter(failed.values()))}")
    finished = [RowResult(row, tuple(runs)) for row, runs in done.items() if runs]
    return Reproduction(
        name, tuple(finished), failed=failed, is_quick=quick, environment=read_environment()
    )


def _find_stored(
    experiment: Experiment, stored: Reproduction, row: str, trial: ConfiguredTrial
) -> RunValues | None:
    """Values that were stored of this run, if none is missing."""
    run = stored.find(row, compute_address(trial).content)
    is_whole = run is not None and (
        all(column.name in run.values or column.is_optional for column in experiment.columns)
        and all(curve.name in run.curves for curve in experiment.curves)
    )
    return run if is_whole else None


def _read_run(experiment: Experiment, address: Address, result: TrialResult) -> RunValues:
    return RunValues(
        result.seed,
        address.training,
        address.content,
        result.made_by["commit"],
        result.rounds,
        round(result.wall_seconds, 1),
        read_columns(experiment.columns, result),
        {curve.name: read_curve(curve, result) for curve in experiment.curves},
    )


def make_trial(
    experiment: Experiment, row: ExperimentRow, seed: int, sources: LoadedSources, *, quick: bool
) -> ConfiguredTrial:
    """A run of a row, with its settings alone."""
    flat = experiment.list_settings(row, seed, quick=quick)
    try:
        config = load_config(override_settings({}, flat))
        data = sources.load(config)
        return ConfiguredTrial(
            row.name, resolve_config(config, data.load()), data, row.scoring or experiment.scoring
        )
    except FedquiltError as problem:
        raise type(problem)(f"row '{row.name}': {problem}") from None
