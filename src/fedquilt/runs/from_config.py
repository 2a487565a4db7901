"""Runs that settings describe: planned, resumed and opened from their directory alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from fedquilt.customize.bundle import has_bundle, load_bundle
from fedquilt.customize.info import ModelCall, RunInfo
from fedquilt.data import Dataset, load_dataset, make_pipeline
from fedquilt.data.population import Population
from fedquilt.engines.worker import Timeouts
from fedquilt.errors import CheckpointError, ConfigError, CorruptFileError, DataError
from fedquilt.federation.client import SERVER
from fedquilt.federation.state import Setup
from fedquilt.methods import METHOD_CLASSES
from fedquilt.models import make_model
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.engines import EngineFactory, make_local_engine
from fedquilt.runs.open import open_run
from fedquilt.runs.plan import RunPlan, RunSource
from fedquilt.runs.policies import Cadence, FaultPolicy
from fedquilt.runs.records import has_final_evaluation
from fedquilt.runs.run import Run
from fedquilt.runs.selection import Selection
from fedquilt.runs.trackers.catalog import make_trackers
from fedquilt.settings.load import load_config, override_settings
from fedquilt.settings.resolve import (
    build_attack,
    build_method,
    build_model,
    build_population,
    build_privacy,
    build_secure_aggregation,
    build_structure,
    build_task,
    choose_config_sampling,
    load_source,
    make_example,
)
from fedquilt.settings.schema import Config
from fedquilt.settings.toml import dump_toml, read_toml
from fedquilt.training.serialization import from_plain
from fedquilt.user_code import is_function_path


def plan_run(config: Config, source: Dataset, out: str | Path) -> RunPlan:
    """The run that settings describe, on this machine; ``source`` is the data that they name."""
    timeouts = Timeouts(config.run.heartbeat, config.run.deadline)
    run = config.run
    engine = make_local_engine(run.workers, timeouts, run.device, run.clients_per_pass)
    model, example = build_model(config), make_example(source)
    structure = build_structure(config, model, example)
    population = build_population(config, source)
    task = build_task(config)
    population = population if task.has_classes else population.without_labels()
    clients = population.clients
    setup = Setup(model, structure, example, clients, config.rounds, config.seed, task=task)
    return plan_run_over(
        config,
        setup,
        population,
        out,
        engine=engine,
        faults=FaultPolicy(config.flower.quorum),
    )


def plan_run_over(
    config: Config,
    setup: Setup,
    population: Population,
    out: str | Path,
    *,
    engine: EngineFactory,
    faults: FaultPolicy | None = None,
    is_named: bool = True,
    available: Callable[[], Collection[int]] | None = None,
) -> RunPlan:
    """The run that settings describe, over clients and with an engine that are given.

    ``is_named``: the settings name the model, so that the run can be opened by them alone.
    ``available`` returns the clients that can be asked now; None means all.
    """
    flower, run = config.flower, config.run
    return RunPlan(
        replace(setup, sampling=choose_config_sampling(config)),
        build_method(config),
        population,
        RunDirectory(out),
        RunSource(
            config.model_dump(mode="json") if is_named else None,
            dump_toml(config),
            config.model.weights,
            config.model.weights_strict,
        ),
        Cadence(run.evaluate_every, run.checkpoint_every, run.test_locally),
        faults or FaultPolicy(flower.quorum, flower.attempts, flower.oversample),
        engine,
        available,
        build_privacy(config),
        secure=build_secure_aggregation(config),
        selection=Selection(**config.selection.model_dump()),
        attack=build_attack(config),
        callbacks=make_trackers(config.run.trackers),
    )


def read_started_config(directory: RunDirectory) -> Config:
    """The settings that a run was started with."""
    if not directory.config_file.is_file():
        directory.check(resume=True)
        raise CheckpointError(
            f"{directory} was trained from Python, with data that only Python has; resume it there "
            "with fedquilt.train"
        )
    return load_config(read_toml(directory.config_file))


def is_finished(directory: RunDirectory, num_rounds: int) -> bool:
    """Whether a run has its model after these rounds, and its scores; refused if it had more."""
    if not has_bundle(directory.model):
        return False
    try:
        done = load_bundle(directory.model).info.rounds
    except CorruptFileError:
        return False  # it is made again from the last checkpoint
    if done > num_rounds:
        raise ConfigError(
            f"a resumed run has at least the rounds that it has done, and {directory} has done "
            f"{done}, got {num_rounds}; give more rounds"
        )
    return done == num_rounds and has_final_evaluation(directory)


def open_configured_run(
    folder: str | Path, *, model: str | None = None, trust: bool = False
) -> Run:
    """A finished run from its directory alone.

    A directory is data. If it names a Python file as its model, that file is run only with
    ``trust``; a ``model`` that is given here is made instead of the one that the directory names.
    """
    directory = RunDirectory(folder)
    directory.require_run()
    info = load_bundle(directory.model).info
    if info.config is None:
        return _open_python_run(folder, info, model)
    config = load_config(info.config)
    if model is None:
        name = config.model.name
        require_trust({"model.name": name} if is_function_path(name) and not trust else {}, folder)
    else:
        config = load_config(override_settings(config.model_dump(), {"model.name": model}))
    has_code = any(map(is_function_path, (config.task.loss, *config.task.metrics)))
    task = None if has_code and not trust else build_task(config)  # a model needs none to be cut
    return open_run(
        folder,
        build_model(config),
        build_method(config),
        loss=None if task is None else task.loss,
        metrics=None if task is None else task.metrics,
    )


def _open_python_run(folder: str | Path, info: RunInfo, model: str | None) -> Run:
    """A run that ``fedquilt.train`` made, if its model and method can be made of what it stores."""
    call = info.model_call if model is None else ModelCall(model, {})
    if call is None or info.method_settings is None:
        unknown = "model" if call is None else "method"
        remedy = ", or say what makes it: model='FILE.py:FUNCTION'" if call is None else ""
        raise CheckpointError(
            f"{folder} was trained from Python, with a {unknown} that only Python knows; open it "
            f"there with fedquilt.open_run{remedy}"
        )
    if model is None and is_function_path(call.name):
        raise CheckpointError(f"{folder} names code as its model, and runs of Python name none")
    method = from_plain(info.method_settings, METHOD_CLASSES, functions=None)  # it does not train
    return open_run(folder, make_model(call.name, call.options), method)


def load_clients(run: Run, data: str | None = None) -> Population | None:
    """The clients that a run was trained with, made from its settings, or with other data.

    Of a run that was trained from Python they are not known, and ``data`` are the server's only.
    """
    if run.info.config is not None:
        config = load_config(run.info.config)
        changes = {} if data is None else {"data.source": data}
        source = load_source(load_config(override_settings(config.model_dump(), changes)))
        return build_population(config, match_preprocessing(run, source))
    if data is None:
        return None
    return Population(
        run.setup.clients, {}, {SERVER: match_preprocessing(run, load_dataset(data)).test}
    )


def load_run_source(run: Run) -> Dataset | None:
    """The data that a run's settings name; None if the run was trained from Python."""
    return None if run.info.config is None else load_source(load_config(run.info.config))


def require_trust(code: Mapping[str, str], folder: str | Path) -> None:
    """Refuses to run code that a directory names and the user does not.

    Args:
        code: What would be run and is not trusted, by the settings that name it.
        folder: The directory.
    """
    for setting, path in code.items():
        noun, remedy = "model", ", or name it yourself: model='FILE.py:FUNCTION'"
        if setting != "model.name":
            noun, remedy = setting.rpartition(".")[2].replace("_", " "), ""
        raise ConfigError(
            f"{folder} names code as its {noun}, '{path}', and a directory may come from anybody; "
            f"if you trust that file give trust=True{remedy}"
        )


def match_preprocessing(run: Run, source: Dataset) -> Dataset:
    """The data as the run's model knows it: of its shape, normalized as it was in training.

    Data of a run from settings went through their transforms already.
    """
    if run.info.config is None and run.info.transforms:
        source = source.with_transforms(make_pipeline((), run.info.transforms))
    expected = tuple(run.setup.example.shape[1:])  # type: ignore[union-attr]
    if source.shape != expected:
        raise DataError(
            f"'{source.name}' has inputs of shape {source.shape}, the run's have {expected}"
        )
    normalization = run.info.normalization
    if normalization is None or source.normalization is None:
        return source
    return source.with_normalization(normalization)
