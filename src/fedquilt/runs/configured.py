"""Runs that settings describe: started, resumed and opened from their directory alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fedquilt.config import (
    Config,
    as_toml,
    checked,
    example_of,
    method_of,
    model_of,
    override,
    population_of,
    source_of,
    structure_of,
)
from fedquilt.customize import bundle
from fedquilt.data.examples import Normalise
from fedquilt.data.load import load
from fedquilt.data.population import Population
from fedquilt.data.source import Source
from fedquilt.engines.worker import Timeouts
from fedquilt.errors import CheckpointError, ConfigError, DamageError, DataError
from fedquilt.federation.client import SERVER
from fedquilt.federation.state import Setup
from fedquilt.files import locked, write_text
from fedquilt.methods import METHOD_CLASSES
from fedquilt.methods.method import Method
from fedquilt.models import is_code, make
from fedquilt.models.pretrained import Matched, load_pretrained
from fedquilt.runs import checkpoint
from fedquilt.runs.loop import Pace, Tolerance, Watch, refuse_other_rounds
from fedquilt.runs.preflight import check_start
from fedquilt.runs.run import (
    MakeEngine,
    Run,
    fingerprint,
    last_checkpoint,
    local_engine,
    missing,
    open_run,
    prepared,
    removed_if_refused,
    train,
)
from fedquilt.training.plain import from_plain


def ready(
    config: Config,
    source: Source,
    folder: Path,
    *,
    resume: bool,
    tell: Callable[[Matched], None] = lambda matched: None,
) -> Callable[[Watch], Run]:
    """What the settings describe, checked and with its directory; called, it trains to the end.

    ``tell`` hears what the model has taken from a file of weights.
    """
    model, example = model_of(config), example_of(source)
    structure = structure_of(config, model, example)
    population = population_of(config, source)
    whole = Setup(model, structure, example, population.clients, config.rounds, config.seed)
    scale = source.scale
    return begun(config, whole, population, folder, resume=resume, scale=scale, tell=tell)


def begun(
    config: Config,
    whole: Setup,
    population: Population,
    folder: Path,
    *,
    resume: bool,
    scale: Normalise | None = None,
    tell: Callable[[Matched], None] = lambda matched: None,
    engine: MakeEngine | None = None,
    named: bool = True,
    present: Callable[[], Collection[int]] | None = None,
) -> Callable[[Watch], Run]:
    """The same for clients that are known already, and with an engine of one's own.

    ``named``: the settings name the model, so that the run can be opened by them alone.
    ``present`` says which of the clients can be asked now; None: all.
    """
    described = {"config": config.model_dump(mode="json")} if named else {}
    model, method = whole.model, method_of(config)
    check_start(model, whole.example, population, config.rounds)  # before anything is written
    if config.model.weights is not None and not resume:  # a resumed run has its initial values
        tell(_pretrained(model, method, config))
    setup = method.prepared(whole)  # which refuses what it cannot do with these clients
    if resume:  # refused before anything is written
        done = checkpoint.load_newest(folder / "checkpoints", fingerprint(setup, method))
        if done is not None:
            refuse_other_rounds(done.state, method, setup)
    new = missing(folder)
    _remember(config, folder, resume=resume)
    timeouts = Timeouts(config.run.heartbeat, config.run.deadline)
    train_it = partial(
        train,
        model,
        whole.example,
        method,
        population,
        config.rounds,
        seed=config.seed,
        out=folder,
        resume=resume,
        structure=whole.structure,
        pace=Pace(config.run.evaluate_every, config.run.checkpoint_every, config.run.test_locally),
        tolerance=Tolerance(config.flower.quorum, config.flower.tries, config.flower.spare)
        if engine is not None
        else Tolerance(config.flower.quorum),
        engine=engine or local_engine(config.run.workers, timeouts),
        about={**described, "scale": scale and asdict(scale)},
        present=present,
    )

    def to_the_end(watch: Watch) -> Run:
        with removed_if_refused(new):
            return train_it(watch=watch)

    return to_the_end


def _pretrained(model: nn.Module, method: Method, config: Config) -> Matched:
    """Weights of a file, written into the model that the method starts from."""
    path = config.model.weights
    assert path is not None
    if method.starts_anew:
        raise ConfigError(
            f"{config.method.name} draws the initial values anew, so that it would not use "
            f"model.weights = '{path}'; leave it out, or choose a method such as heterofl"
        )
    return load_pretrained(model, path, strict=config.model.weights_strict)


def _remember(config: Config, folder: Path, *, resume: bool) -> None:
    """Writes the settings into the run's directory."""
    try:
        prepared(folder, resume=resume)
        with locked(folder):
            write_text(folder / "config.toml", as_toml(config))
    except OSError as problem:
        raise CheckpointError(f"{folder} cannot hold a run ({problem})") from problem


def rounds_done(folder: Path) -> int:
    """Rounds that are safe on disk."""
    last = last_checkpoint(folder)
    return 0 if last is None else int(last.name.removeprefix("round-"))


def is_finished(folder: Path, num_rounds: int) -> bool:
    """Whether a run has its model after so many rounds, and its scores; refused if it had more."""
    if not (folder / "model" / "bundle.json").exists():
        return False
    try:
        done = int(bundle.load(folder / "model").about["rounds"])
    except DamageError:
        return False  # it is made again from the last checkpoint
    if done > num_rounds:
        raise ConfigError(f"{folder} has done {done} rounds, and {num_rounds} are less")
    return done == num_rounds and _is_evaluated(folder)


def _is_evaluated(folder: Path) -> bool:
    """Whether the last evaluation was recorded: the model is written before it."""
    path = folder / "metrics.jsonl"
    return not path.exists() or '"is_final": true' in path.read_text(errors="replace")


def opened(folder: Path, *, model: str | None = None, trust: bool = False) -> Run:
    """A finished run from its directory alone.

    A directory is data. If it names a Python file as its model, that file is run only with
    ``trust``; a ``model`` that is given here is made instead of the one that the directory names.
    """
    about = bundle.load(folder / "model").about
    if "config" not in about:
        return _opened_from_python(folder, about, model)
    config = config_of(about)
    if model is None:
        refuse_code(config, folder, trust=trust)
    else:
        config = checked(override(config.model_dump(), {"model.name": model}))
    return open_run(folder, model_of(config), method_of(config), exclude=config.model.exclude)


def _opened_from_python(folder: Path, about: Mapping[str, Any], model: str | None) -> Run:
    """A run that ``fedquilt.train`` made, if its model and method can be made of what it stores."""
    made: Any = about.get("model") if model is None else {"name": model, "options": {}}
    settings = about.get("settings")
    is_known = isinstance(made, dict) and made.keys() == {"name", "options"}
    if not is_known or not isinstance(settings, dict):
        more = "" if is_known else ", or say what makes it: --model FILE.py:FUNCTION"
        raise CheckpointError(
            f"{folder} was trained from Python, with a {'method' if is_known else 'model'} that "
            f"only Python knows; open it there with fedquilt.open_run{more}"
        )
    if model is None and is_code(made["name"]):
        raise CheckpointError(f"{folder} names code as its model, and runs of Python name none")
    method = from_plain(settings, METHOD_CLASSES)
    return open_run(folder, make(made["name"], made["options"]), method)


def clients_of(run: Run, data: str | None = None) -> Population | None:
    """The clients that a run was trained with, made from its settings, or with other data.

    Of a run that was trained from Python they are not known, and ``data`` are the server's only.
    """
    if "config" in run.about:
        config = config_of(run.about)
        changes = {} if data is None else {"data.source": data}
        source = source_of(checked(override(config.model_dump(), changes)))
        return population_of(config, as_trained(run, source))
    if data is None:
        return None
    return Population(run.setup.clients, {}, {SERVER: as_trained(run, load(data)).test})


def refuse_code(config: Config, folder: Path, *, trust: bool) -> None:
    """Refuses settings of a directory that would run a file of somebody's choice."""
    name = config.model.name
    if is_code(name) and not trust:
        raise ConfigError(
            f"{folder} names code as its model, '{name}', and a directory may come from anybody; "
            "if you trust that file add --trust, or name it yourself: --model FILE.py:FUNCTION"
        )


def config_of(about: Mapping[str, Any]) -> Config:
    """The settings that a bundle was trained with."""
    return checked(about["config"])


def as_trained(run: Run, source: Source) -> Source:
    """The data as the run's model knows it: of its shape, normalised as it was in training."""
    expected = tuple(run.setup.example.shape[1:])  # type: ignore[union-attr]
    if source.shape != expected:
        raise DataError(
            f"'{source.name}' has inputs of shape {source.shape}, the run's have {expected}"
        )
    scale = run.about.get("scale")
    if not scale or source.scale is None:
        return source
    return source.scaled(Normalise(tuple(scale["mean"]), tuple(scale["std"])))
