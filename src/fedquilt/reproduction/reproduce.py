"""Does the runs of an experiment that are not done yet, and reads its table from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from fedquilt.comparison.progress import ComparisonCallback, ignore_events
from fedquilt.comparison.queue import FailedTrial, run_trials
from fedquilt.comparison.results import TrialResult
from fedquilt.comparison.sources import LoadedSources
from fedquilt.comparison.store import TrialStore
from fedquilt.comparison.trial import ConfiguredTrial, compute_address
from fedquilt.errors import FedquiltError, TrainingError
from fedquilt.reproduction.experiment import Experiment, ExperimentRow
from fedquilt.reproduction.reading import read_column, read_curve
from fedquilt.reproduction.table import Reproduction, RowResult
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
        workers: How many runs are done at a time; None: one per core, 0: one in this process.
        any_code: Whether results that other code made count.
        on_event: Is called with what happens.
    """
    chosen = experiment.seeds if seeds is None else seeds
    known = dict.fromkeys((*experiment.seeds, *chosen))
    sources = LoadedSources()
    store = TrialStore(out, any_code=any_code)
    done: dict[str, dict[int, TrialResult]] = {row.name: {} for row in experiment.rows}
    failed: dict[str, str] = {}
    with store.hold():
        trials = {
            (row.name, seed): make_trial(experiment, row, seed, sources, quick=quick)
            for row in experiment.rows
            for seed in known
        }
        asked = [key for key in trials if key[1] in chosen and (rows is None or key[0] in rows)]
        outcomes = run_trials(
            [trials[key] for key in asked], store, workers=workers, on_event=on_event
        )
        for (row, _), outcome in zip(asked, outcomes, strict=True):
            if isinstance(outcome, FailedTrial):
                failed[row] = outcome.problem
        for (row, seed), trial in trials.items():
            result = store.find_result(compute_address(trial))
            if result is not None:
                done[row][seed] = result
    if failed and len(failed) == len({row for row, _ in asked}):
        raise TrainingError(f"{name}: runs of every row failed; {next(iter(failed.values()))}")
    finished = {row: own for row, own in done.items() if own and row not in failed}
    results = [result for own in finished.values() for result in own.values()]
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


def _read_row(experiment: Experiment, row: str, results: Mapping[int, TrialResult]) -> RowResult:
    runs = results.values()
    values = {c.name: tuple(read_column(c, run) for run in runs) for c in experiment.columns}
    curves = {c.name: tuple(read_curve(c, run) for run in runs) for c in experiment.curves}
    return RowResult(row, values, tuple(results), curves)


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
