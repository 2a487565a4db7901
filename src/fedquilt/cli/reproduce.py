"""``fedquilt reproduce``: tables and figures of the papers, measured again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedquilt.cli.compare import parse_seeds
from fedquilt.cli.console import make_console, print_json, print_lines
from fedquilt.cli.options import AnyCode, AsJson, RunsAtATime
from fedquilt.cli.program import write_command
from fedquilt.cli.signals import handle_stop_signals
from fedquilt.cli.trial_log import TrialLog
from fedquilt.errors import ConfigError
from fedquilt.report.tables import make_table
from fedquilt.reproduction.contrasts import MEANING, TITLE, list_contrasts
from fedquilt.reproduction.experiment import (
    Experiment,
    choose_experiments,
    choose_rows,
    find_experiments,
    load_experiment,
)
from fedquilt.reproduction.reproduce import reproduce as reproduce_experiment
from fedquilt.reproduction.store import load, store
from fedquilt.reproduction.table import Reproduction, describe, list_departures, make_section

EXAMPLE = "fedquilt reproduce heterofl/table-1-mnist --quick"


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Such as nefl/ablation; nefl: all of that paper."),
    ] = None,
    *,
    list_all: Annotated[
        bool, typer.Option("--list", help="List all experiments, and how long they take.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version of each, of a few minutes.")
    ] = False,
    rows: Annotated[
        list[str] | None,
        typer.Option(metavar="ROW", help="A row, or a pattern such as 'LOW*'; again for more."),
    ] = None,
    done: Annotated[
        bool, typer.Option("--done", help="Only the table of what is done: no run is started.")
    ] = False,
    seeds: Annotated[
        str | None, typer.Option(help="Such as 1, or 0,1,5. Left out: as the experiment says.")
    ] = None,
    experiments: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder of experiments.")
    ] = Path("experiments"),
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to keep runs.")] = Path(
        "reproductions"
    ),
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A folder for the values, a JSON file each, and for pictures.",
        ),
    ] = None,
    workers: RunsAtATime = None,
    any_code: AnyCode = False,
    as_json: AsJson = False,
) -> None:
    """Measure tables and figures of the papers again, and print them beside the papers'.

    Every experiment is a folder of settings. A run is never done twice: call the same command
    again to go on where it stopped. The table has all runs that are done, also of other calls.
    """
    known = find_experiments(experiments)
    if not known:
        raise ConfigError(
            f"there are no experiments in '{experiments}'; give the folder that the source of "
            "fedquilt has: --experiments DIR"
        )
    console = make_console(as_json=as_json)
    if list_all or not names:
        _list(known, console, as_json=as_json)
        return
    if quick and save is not None:
        raise ConfigError(
            "--save stores values beside the paper's, and those of --quick say nothing about it; "
            "leave out one of them"
        )
    chosen = {n: load_experiment(path) for n, path in choose_experiments(names, known).items()}
    chosen_rows = {n: _choose_rows(experiment, rows, done=done) for n, experiment in chosen.items()}
    chosen_seeds = _list_seeds(seeds)
    documents = {}
    try:
        with handle_stop_signals():
            for name, experiment in chosen.items():
                with TrialLog(console) as log:
                    result = reproduce_experiment(
                        name,
                        experiment,
                        out / ("quick" if quick else "full") / name,
                        rows=chosen_rows[name],
                        seeds=chosen_seeds,
                        quick=quick,
                        stored=None if save is None else load(save, name),
                        workers=workers,
                        any_code=any_code,
                        on_event=log,
                    )
                documents[name] = result.to_document()
                _print(experiment, result, console)
                if save is not None:
                    store(experiment, result, save)
    except KeyboardInterrupt:
        again = write_command(sys.argv[1:])
        print(f"fedquilt: stopped; nothing is lost, go on with: {again}", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        print_json(documents)


def _choose_rows(
    experiment: Experiment, rows: list[str] | None, *, done: bool
) -> Sequence[str] | None:
    chosen = None if rows is None else choose_rows(experiment, rows)
    return () if done else chosen


def _list_seeds(text: str | None) -> tuple[int, ...] | None:
    seeds = parse_seeds(text)
    return tuple(range(seeds)) if isinstance(seeds, int) else seeds


def _list(known: dict[str, Path], console: Console, *, as_json: bool) -> None:
    loaded = {name: load_experiment(folder) for name, folder in known.items()}
    if as_json:
        facts = {n: e.model_dump(include={"title", "hours", "seeds"}) for n, e in loaded.items()}
        print_json(facts)
        return
    for name, experiment in loaded.items():
        print_lines(console, f"{name}: {experiment.hours:g} core-hours", f"  {experiment.title}")
    print_lines(console, "", "Next:", f"  fedquilt reproduce {next(iter(known))} --quick")


def _print(experiment: Experiment, done: Reproduction, console: Console) -> None:
    section = make_section(experiment, done)
    print_lines(console, "", f"{section.title}:")
    console.print(make_table(section.header, section.cells))
    print_lines(console, *describe(experiment, done))
    if not done.is_quick:
        print_lines(console, *list_departures(experiment, done))
    contrasts = list_contrasts(experiment, done)
    if contrasts:
        print_lines(console, "", f"{TITLE}:", *contrasts, MEANING)
