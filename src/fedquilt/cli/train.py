"""``fedquilt train``: a run from its start, or from where it stopped, on any engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedquilt.cli.console import make_console, print_lines
from fedquilt.cli.options import AsJson, Settings, Trust, parse_assignments
from fedquilt.cli.program import write_command
from fedquilt.cli.scores import show_scores
from fedquilt.cli.setting_options import TRAIN_OPTIONS, takes_settings
from fedquilt.cli.signals import handle_stop_signals
from fedquilt.data import Dataset
from fedquilt.deploy.launch import ENGINES, find_federation, resolve_for_nodes, train_on_flower
from fedquilt.errors import ConfigError, describe_unknown
from fedquilt.federation.budgets import assign_budgets
from fedquilt.federation.state import Phase
from fedquilt.formatting import format_count
from fedquilt.methods.method import shares_weights
from fedquilt.report.progress import ProgressBar
from fedquilt.runs.checkpoint import count_saved_rounds
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.events import Event
from fedquilt.runs.from_config import (
    is_finished,
    open_configured_run,
    plan_run,
    read_started_config,
    require_trust,
)
from fedquilt.runs.plan import resume_run, start_run
from fedquilt.runs.run import Run
from fedquilt.settings.load import flatten_settings, load_config, override_settings
from fedquilt.settings.resolve import build_method, list_code, load_source, resolve_config
from fedquilt.settings.schema import Config
from fedquilt.settings.toml import format_value, read_toml
from fedquilt.training.function_path import FunctionPath
from fedquilt.training.settings import LocalTraining
from fedquilt.training.torch_optimizers import TorchOptimizer
from fedquilt.user_code import is_function_path

EXAMPLE = "fedquilt train --data mnist --clients 100 --fraction 0.1 --budgets a1-e9"


@takes_settings(TRAIN_OPTIONS)
def train(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.toml", help="Settings; options override them.")
    ] = None,
    *,
    options: Mapping[str, Any],
    out: Annotated[
        Path | None, typer.Option(help="Where to keep the run; default runs/DATA-METHOD-NUMBER.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with the run in this directory.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="local; flower: over SuperNodes; flower-simulation: over simulated ones. "
            "Default local."
        ),
    ] = None,
    federation: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="A federation that runs: the directory of `fedquilt up`, or a SuperLink's name in "
            "your Flower configuration. Without it --engine flower starts one for this run.",
        ),
    ] = None,
    trust: Trust = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Train a model over clients of many sizes.

    Without arguments: HeteroFL on the digits of scikit-learn, over ten clients of five sizes. What
    is left out has the method's own default, as in Python; what was chosen is printed and kept.
    """
    changes = {
        **flatten_settings({} if config is None else read_toml(config)),
        **options,
        **parse_assignments(settings),
    }
    console = make_console(as_json=as_json)
    if resume is not None and out is not None:
        raise ConfigError(f"a resumed run stays in its directory; leave out --out {out}")
    engine = _choose_engine(engine, federation)
    run: Run | None
    if engine != "local":
        run = _train_on_flower(changes, out, resume, engine, federation, console, trust=trust)
    elif resume is not None:
        run = _resume_stopped(changes, resume, console, trust=trust)
    else:
        run = _start_new(changes, out, console)
    if run is not None:
        _finish(run, as_json=as_json)


def _choose_engine(engine: str | None, federation: str | None) -> str:
    """Finds the engine: a federation is always Flower's."""
    engine = engine or ("local" if federation is None else "flower")
    if engine not in ENGINES:
        raise ConfigError(describe_unknown("engine", engine, ENGINES))
    if federation is not None and engine != "flower":
        raise ConfigError(f"--federation is for --engine flower, got --engine {engine}")
    return engine


def _start_new(changes: Mapping[str, Any], out: Path | None, console: Console) -> Run:
    """Trains a new run to its end."""
    config = load_config(override_settings({}, changes))
    source = load_source(config)
    config = resolve_config(config, source)
    return _train_with_progress(
        config, source, out or _find_free_folder(config), console, resume=False
    )


def _find_free_folder(config: Config) -> Path:
    name = f"{Path(config.data.source).stem}-{config.method.name}"
    number = 1
    while (folder := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return folder


def _resume_stopped(
    changes: Mapping[str, Any], folder: Path, console: Console, *, trust: bool
) -> Run:
    """Trains a stopped run to its end, or opens a finished one."""
    config = _load_resumable(changes, folder, on_flower=False, trust=trust)
    if is_finished(RunDirectory(folder), config.rounds):
        return _open_finished(folder, config, console)
    return _train_with_progress(config, load_source(config), folder, console, resume=True)


def _load_resumable(
    changes: Mapping[str, Any], folder: Path, *, on_flower: bool, trust: bool
) -> Config:
    """Loads the settings of a stopped run, with the changes that are allowed."""
    before = read_started_config(RunDirectory(folder))
    method = changes.get("method.name", before.method.name)
    if str(method).lower() != before.method.name:  # before its settings are taken for the other's
        raise ConfigError(
            f"{folder} was trained with {before.method.name}; a resumed run keeps its method, got "
            f"{method}"
        )
    config = load_config(override_settings(before.model_dump(), changes))
    _refuse_other_settings(before, config, folder)
    code = {} if trust else list_code(before)
    require_trust({name: path for name, path in code.items() if name not in changes}, folder)
    if on_flower != (before.flower.name is not None):
        other = "leave out --engine" if on_flower else "add --engine flower"
        raise ConfigError(f"a resumed run keeps its engine, and so its clients; {other}")
    return config


def _refuse_other_settings(before: Config, config: Config, folder: Path) -> None:
    old = flatten_settings(before.model_dump())
    for name, value in flatten_settings(config.model_dump()).items():
        if old.get(name) != value and name != "rounds" and not name.startswith(("run.", "flower.")):
            raise ConfigError(
                "a resumed run keeps its settings, only rounds, run.* and flower.* may change; "
                f"{folder} has {name} = {old.get(name)}, got {value}"
            )


def _open_finished(folder: Path, config: Config, console: Console) -> Run:
    print_lines(console, f"{folder} is finished after {format_count(config.rounds, 'round')}")
    return open_configured_run(folder, model=config.model.name)


def _train_with_progress(
    config: Config, source: Dataset, folder: Path, console: Console, *, resume: bool
) -> Run:
    """Trains a run to its end, with its progress on the console."""
    watch = ProgressBar(console, config.rounds)
    with _handle_stop(folder, lambda: watch.num_rounds, _list_trust_options(list_code(config))):
        plan = plan_run(config, source, folder)
        run = resume_run(plan) if resume else start_run(plan)
        head = [
            f"{config.method.name} on {source.name}, seed {config.seed}, in {folder}",
            _describe_run(config),
        ]
        head += [] if run.load_report is None else [str(run.load_report)]

        def announce(event: Event) -> None:
            """Prints the head with the first event: a refused run prints nothing."""
            print_lines(console, *head)
            head.clear()

        return run.train([announce, watch])


def _describe_run(config: Config) -> str:
    """One line about what a run does, whether set by the user or by default."""
    method, budgets = build_method(config), config.data.budgets
    local_training = method.local_training  # type: ignore[attr-defined]
    sizes = format_value(budgets).strip("[]") if isinstance(budgets, tuple) else budgets
    clients = "natural clients"
    if config.data.clients is not None:
        num_dealt = (
            len(assign_budgets(budgets, config.data.clients).counts) if budgets is not None else 0
        )
        if isinstance(budgets, tuple) and num_dealt < len(set(map(format_value, budgets))):
            sizes = f"{sizes} (of which {config.data.clients} clients have {num_dealt})"
        share = method.fraction  # type: ignore[attr-defined]
        cohort = Phase("train", config.rounds, share).cohort_size(config.data.clients)
        clients = f"{cohort} of {config.data.clients} clients"
    return (
        f"{format_count(config.rounds, 'round')} of {clients} with budgets {sizes}; "
        f"{format_count(local_training.epochs, 'epoch')} of "
        f"batches of {local_training.batch_size}, {_describe_optimizer(local_training)}"
    )


def _describe_optimizer(local_training: LocalTraining) -> str:
    """The optimizer, unless it is SGD, and its learning rate."""
    optimizer = local_training.optimizer
    if isinstance(optimizer, FunctionPath):
        return f"optimizer {optimizer.path}"
    name = f"{optimizer.name}, " if isinstance(optimizer, TorchOptimizer) else ""
    return f"{name}learning rate {local_training.lr:g}"


def _train_on_flower(
    changes: Mapping[str, Any],
    out: Path | None,
    resume: Path | None,
    engine: str,
    federation: str | None,
    console: Console,
    *,
    trust: bool,
) -> Run | None:
    """Trains a run on Flower to its end; None if its directory is on another machine."""
    place = None if federation is None else find_federation(federation)
    if resume is not None:
        folder, config = resume, _load_resumable(changes, resume, on_flower=True, trust=trust)
        if is_finished(RunDirectory(folder), config.rounds):
            return _open_finished(folder, config, console)
    else:
        config = resolve_for_nodes(load_config(override_settings({}, changes)), place)
        folder = out or _find_free_folder(config)
    again = ["--engine", engine, *([] if federation is None else ["--federation", federation])]
    again += _list_trust_options(list_code(config))
    with _handle_stop(folder, lambda: config.rounds, again):
        print_lines(console, f"{config.method.name} on Flower, seed {config.seed}, in {folder}")
        run = train_on_flower(
            config,
            folder,
            partial(print_lines, console),
            federation=place,
            simulation=engine == "flower-simulation",
            resume=resume is not None,
        )
    if run is None:
        print_lines(console, f"the run is in {folder.resolve()}, where its SuperLink is")
    return run


@contextmanager
def _handle_stop(
    folder: Path, num_rounds: Callable[[], int], more: Sequence[str] = ()
) -> Iterator[None]:
    """Lets Ctrl-C, SIGTERM and SIGHUP stop a run, which saves itself, and says how to go on."""
    try:
        with handle_stop_signals():
            yield
    except KeyboardInterrupt:
        again = write_command(["train", "--resume", str(folder), *more])
        saved = count_saved_rounds(RunDirectory(folder).checkpoints)
        where = f"stopped after round {saved} of {num_rounds()}"
        print(f"fedquilt: {where}; go on with: {again}", file=sys.stderr)
        raise typer.Exit(130) from None


def _list_trust_options(code: Collection[str]) -> list[str]:
    """What a command about the run needs if that runs code."""
    return ["--trust"] if code else []


def _finish(run: Run, *, as_json: bool) -> None:
    """The end of a training: its table, and what to type next."""
    show_scores(run, run.scores, as_json=as_json)
    if not as_json:
        print_lines(
            make_console(), "", "Next:", *(f"  {command}" for command in _next_commands(run))
        )


def _next_commands(run: Run) -> list[str]:
    """What can be typed after a training: a model is taken away only if it is not the clients'."""
    folder = str(run.folder)
    found = [["evaluate", folder]]
    if shares_weights(run.setup, run.method):
        small = min((score.width for score in run.scores), default=1.0)
        found.append(["customize", folder, "--width", str(small), "--out", "small.onnx"])
    found.append(["report", folder, "--out", "report"])
    model = run.info.config["model"]["name"] if run.info.config else ""
    more = _list_trust_options([model] if is_function_path(model) else [])
    return [write_command([*words, *more]) for words in found]
