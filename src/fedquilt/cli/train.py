"""``fedquilt train``: a run from its start, or from where it stopped, on any engine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedquilt.cli.console import console_for, say
from fedquilt.cli.options import AsJson, Settings, Trust, Workers, assignments, given
from fedquilt.cli.scores import show_scores
from fedquilt.cli.stopping import signals_as_ctrl_c
from fedquilt.config import (
    Config,
    as_value,
    checked,
    dotted,
    method_of,
    override,
    read,
    resolved,
    source_of,
)
from fedquilt.data.source import Source
from fedquilt.deploy.launch import ENGINES, place_of, spelled_out, trained
from fedquilt.errors import CheckpointError, ConfigError, unknown
from fedquilt.federation.mix import deal
from fedquilt.federation.state import Phase
from fedquilt.methods.method import shares_weights
from fedquilt.models import is_code
from fedquilt.models.pretrained import Matched
from fedquilt.report.progress import Watch
from fedquilt.runs.configured import is_finished, opened, ready, refuse_code, rounds_done
from fedquilt.runs.run import Run

EXAMPLE = "fedquilt train --data mnist --clients 100 --fraction 0.1 --budgets a1-e9"


def train(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.toml", help="Settings; options override them.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A known set, an .npz file or a folder; default digits.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="The method; default heterofl.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A known model or file.py:function; default heterofl-cnn.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training; default 20.")] = None,
    clients: Annotated[int | None, typer.Option(help="How many clients; default 10.")] = None,
    partition: Annotated[
        str | None,
        typer.Option(help="iid, classes:2, dirichlet:0.5, domain or natural; default iid."),
    ] = None,
    budgets: Annotated[
        str | None,
        typer.Option(
            help="Widths 1,0.5,0.25, levels a1-e9, divisors 8-4-2-1, log-normal ln0.5_0.4, "
            "high-capacity or low-capacity; default the method's usual sizes."
        ),
    ] = None,
    fraction: Annotated[
        float | None, typer.Option(help="The share of clients in a round; default the method's.")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="The learning rate; default the method's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Repeats a run to the bit; default 0.")] = None,
    workers: Workers = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to keep the run; default runs/DATA-METHOD-NUMBER.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with the run in this directory.")
    ] = None,
    evaluate_every: Annotated[
        int | None, typer.Option(help="Rounds between evaluations; 0: at the end; default 10.")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Rounds between checkpoints; 0: at the end; default 10.")
    ] = None,
    test_locally: Annotated[
        bool | None,
        typer.Option(
            "--test-locally",
            help="Clients test their own models in every round, before these are merged.",
        ),
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
    options = {
        "data.source": data,
        "method.name": method,
        "model.name": model,
        "rounds": rounds,
        "data.clients": clients,
        "data.partition": partition,
        "data.budgets": budgets,
        "method.fraction": fraction,
        "optimiser.lr": lr,
        "seed": seed,
        "run.workers": workers,
        "run.evaluate_every": evaluate_every,
        "run.checkpoint_every": checkpoint_every,
        "run.test_locally": test_locally,
    }
    changes = {
        **dotted({} if config is None else read(config)),
        **given(options),
        **assignments(settings),
    }
    console = console_for(as_json=as_json)
    if resume is not None and out is not None:
        raise ConfigError(f"a resumed run stays in its directory; leave out --out {out}")
    engine = _engine(engine, federation)
    run: Run | None
    if engine != "local":
        run = _on_flower(changes, out, resume, engine, federation, console, trust=trust)
    elif resume is not None:
        run = _resumed(changes, resume, console, trust=trust)
    else:
        run = _started(changes, out, console)
    if run is not None:
        _finish(run, as_json=as_json)


def _engine(engine: str | None, federation: str | None) -> str:
    """The engine that was asked for: a federation is Flower's."""
    engine = engine or ("local" if federation is None else "flower")
    if engine not in ENGINES:
        raise ConfigError(unknown("engine", engine, ENGINES))
    if federation is not None and engine != "flower":
        raise ConfigError(f"--federation is for --engine flower, got --engine {engine}")
    return engine


def _started(changes: Mapping[str, Any], out: Path | None, console: Console) -> Run:
    """A new run, trained to its end."""
    config = checked(override({}, changes))
    source = source_of(config)
    config = resolved(config, source)
    return _watched(config, source, out or _next_free(config), console, resume=False)


def _next_free(config: Config) -> Path:
    name = f"{Path(config.data.source).stem}-{config.method.name}"
    number = 1
    while (folder := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return folder


def _resumed(changes: Mapping[str, Any], folder: Path, console: Console, *, trust: bool) -> Run:
    """A run that was stopped, trained to its end; or a finished one, as it is."""
    config = _resumable(changes, folder, on_flower=False, trust=trust)
    if is_finished(folder, config.rounds):
        return _as_it_is(folder, config, console)
    return _watched(config, source_of(config), folder, console, resume=True)


def _resumable(changes: Mapping[str, Any], folder: Path, *, on_flower: bool, trust: bool) -> Config:
    """The settings of a run that was stopped, with what may change."""
    if not (folder / "config.toml").is_file():
        raise CheckpointError(f"{folder} holds no run to resume; start one with --out {folder}")
    before = checked(read(folder / "config.toml"))
    config = checked(override(before.model_dump(), changes))
    _refuse_other_settings(before, config, folder)
    refuse_code(before, folder, trust=trust or "model.name" in changes)
    if on_flower != (before.flower.name is not None):
        other = "leave out --engine" if on_flower else "add --engine flower"
        raise ConfigError(f"a resumed run keeps its engine, and so its clients; {other}")
    return config


def _refuse_other_settings(before: Config, config: Config, folder: Path) -> None:
    old = dotted(before.model_dump())
    for name, value in dotted(config.model_dump()).items():
        if old.get(name) != value and name != "rounds" and not name.startswith(("run.", "flower.")):
            raise ConfigError(
                "a resumed run keeps its settings, only rounds, run.* and flower.* may change; "
                f"{folder} has {name} = {old.get(name)}, got {value}"
            )


def _as_it_is(folder: Path, config: Config, console: Console) -> Run:
    say(console, f"{folder} is finished: all of its {config.rounds} rounds are done")
    return opened(folder, model=config.model.name)


def _watched(
    config: Config, source: Source, folder: Path, console: Console, *, resume: bool
) -> Run:
    """A run trained to its end, with its progress on the console."""
    watch = Watch(console, config.rounds)
    with _stoppable(folder, lambda: watch.num_rounds, _trusting(config.model.name)):
        matched: list[Matched] = []
        train_it = ready(config, source, folder, resume=resume, tell=matched.append)
        say(console, f"{config.method.name} on {source.name}, seed {config.seed}, in {folder}")
        say(console, _chosen(config), *map(str, matched))
        with watch:
            return train_it(watch)


def _chosen(config: Config) -> str:
    """What a run does, whoever has chosen it: the user, the method or the data."""
    method, budgets = method_of(config), config.data.budgets
    optimiser = method.optimiser  # type: ignore[attr-defined]
    sizes = as_value(budgets).strip("[]") if isinstance(budgets, tuple) else budgets
    clients = "natural clients"
    if config.data.clients is not None:
        num_dealt = len(set(deal(budgets, config.data.clients))) if budgets is not None else 0
        if isinstance(budgets, tuple) and num_dealt < len(set(map(as_value, budgets))):
            sizes = f"{sizes} (of which {config.data.clients} clients have {num_dealt})"
        share = method.fraction  # type: ignore[attr-defined]
        cohort = Phase("train", config.rounds, share).cohort_size(config.data.clients)
        clients = f"{cohort} of {config.data.clients} clients"
    return (
        f"{config.rounds} rounds of {clients} with budgets {sizes}; {optimiser.epochs} epochs of "
        f"batches of {optimiser.batch_size}, learning rate {optimiser.lr:g}"
    )


def _on_flower(
    changes: Mapping[str, Any],
    out: Path | None,
    resume: Path | None,
    engine: str,
    federation: str | None,
    console: Console,
    *,
    trust: bool,
) -> Run | None:
    """A run on Flower, trained to its end; None if its directory is on another machine."""
    place = None if federation is None else place_of(federation)
    if resume is not None:
        folder, config = resume, _resumable(changes, resume, on_flower=True, trust=trust)
        if is_finished(folder, config.rounds):
            return _as_it_is(folder, config, console)
    else:
        config = spelled_out(checked(override({}, changes)), place)
        folder = out or _next_free(config)
    again = ["--engine", engine, *([] if federation is None else ["--federation", federation])]
    again += _trusting(config.model.name)
    with _stoppable(folder, lambda: config.rounds, again):
        say(console, f"{config.method.name} on Flower, seed {config.seed}, in {folder}")
        run = trained(
            config,
            folder,
            partial(say, console),
            place=place,
            simulation=engine == "flower-simulation",
            resume=resume is not None,
        )
    if run is None:
        say(console, f"the run is in {folder.resolve()}, where its SuperLink is")
    return run


@contextmanager
def _stoppable(
    folder: Path, num_rounds: Callable[[], int], more: Sequence[str] = ()
) -> Iterator[None]:
    """Lets Ctrl-C, SIGTERM and SIGHUP stop a run, which saves itself, and says how to go on."""
    try:
        with signals_as_ctrl_c():
            yield
    except KeyboardInterrupt:
        again = shlex.join(["fedquilt", "train", "--resume", str(folder), *more])
        where = f"stopped after round {rounds_done(folder)} of {num_rounds()}"
        print(f"fedquilt: {where}; go on with: {again}", file=sys.stderr)
        raise typer.Exit(130) from None


def _trusting(model: str) -> list[str]:
    """What a command about the run needs if its model is code."""
    return ["--trust"] if is_code(model) else []


def _finish(run: Run, *, as_json: bool) -> None:
    """The end of a training: its table, and what to type next."""
    show_scores(run, run.scores, as_json=as_json)
    if not as_json:
        say(console_for(), "", "Next:", *(f"  {command}" for command in _next_commands(run)))


def _next_commands(run: Run) -> list[str]:
    """What can be typed after a training: a model is taken away only if it is not the clients'."""
    folder = str(run.folder)
    found = [["evaluate", folder]]
    if shares_weights(run.setup, run.method):
        small = min((score.width for score in run.scores), default=1.0)
        found.append(["customize", folder, "--width", str(small), "--out", "small.onnx"])
    found.append(["report", folder, "--out", "report"])
    more = _trusting(run.about["config"]["model"]["name"])
    return [shlex.join(["fedquilt", *words, *more]) for words in found]
