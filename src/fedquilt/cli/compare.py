"""``fedquilt compare``: which method for these data and devices."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedquilt.cli.console import make_console, print_json, print_lines
from fedquilt.cli.options import AsJson, Settings, drop_unset, parse_assignments
from fedquilt.cli.setting_options import COMPARE_OPTIONS, takes_settings
from fedquilt.cli.signals import handle_stop_signals
from fedquilt.comparison.comparison import Comparison
from fedquilt.comparison.from_settings import compare_settings
from fedquilt.comparison.progress import (
    ComparisonEvent,
    TrialDone,
    TrialFailed,
    TrialProgress,
    TrialsQueued,
    VariantLeftOut,
)
from fedquilt.comparison.render import make_sections
from fedquilt.errors import ConfigError
from fedquilt.formatting import format_count, format_duration
from fedquilt.report.tables import make_table
from fedquilt.settings.compare import CompareSection
from fedquilt.settings.load import override_settings
from fedquilt.settings.schema import list_settings
from fedquilt.settings.toml import read_toml

EXAMPLE = "fedquilt compare --data my.npz --methods all,fedavg --budgets 1,0.5,0.25 --seeds 3"


def describe(name: str) -> str:
    """What the schema says of a setting of comparisons."""
    return " ".join((CompareSection.model_fields[name].description or "").split())


@takes_settings(COMPARE_OPTIONS)
def compare(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG.toml", help="Settings, in which lists are lists of values."),
    ] = None,
    *,
    options: Mapping[str, Any],
    methods: Annotated[
        str | None, typer.Option(help="Such as heterofl,fedavg. " + describe("methods"))
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Such as 3, or 0,1,5. " + describe("seeds"))
    ] = None,
    bytes_limit: Annotated[float | None, typer.Option("--bytes", help=describe("bytes"))] = None,
    macs_limit: Annotated[float | None, typer.Option("--macs", help=describe("macs"))] = None,
    seconds_limit: Annotated[
        float | None, typer.Option("--seconds", help=describe("seconds"))
    ] = None,
    metric: Annotated[str | None, typer.Option(help=describe("metric"))] = None,
    target: Annotated[float | None, typer.Option(help=describe("target"))] = None,
    budgets_as: Annotated[str | None, typer.Option(help=describe("budgets_as"))] = None,
    search_lr: Annotated[bool, typer.Option("--search-lr", help=describe("search_lr"))] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to keep runs and the table.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Runs at a time; 0: one, in this process. Left out: one per core."),
    ] = None,
    any_code: Annotated[
        bool,
        typer.Option("--any-code", help="Take results that another version of the code made, too."),
    ] = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Compare methods on the same clients, batches and initial weights.

    Ends with a table: the score of every size, with deviations over seeds, what each method costs,
    whether differences are more than noise, and one sentence of advice. The table is also written
    into the directory, as Markdown, CSV, JSON and a picture. A run is never done twice: call the
    same command again to go on where it stopped.
    """
    given = {
        "methods": methods,
        "seeds": _parse_seeds(seeds),
        "bytes": bytes_limit,
        "macs": macs_limit,
        "seconds": seconds_limit,
        "metric": metric,
        "target": target,
        "budgets_as": budgets_as,
        "search_lr": search_lr or None,
    }
    document = override_settings({} if config is None else read_toml(config), options)
    document = override_settings(document, parse_assignments(settings))
    document["compare"] = {**document.get("compare", {}), **drop_unset(given)}
    folder = out or Path("comparisons") / _name_folder(config, document)
    console = make_console(as_json=as_json)
    log = _ProgressLog(console)
    try:
        with handle_stop_signals(), log:
            comparison = compare_settings(
                document, folder, workers=workers, any_code=any_code, on_event=log
            )
    except KeyboardInterrupt:
        again = shlex.join(["fedquilt", *sys.argv[1:]])
        print(f"fedquilt: stopped; nothing is lost, go on with: {again}", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        print_json({**comparison.to_document(), "table": comparison.to_dicts()})
    else:
        _print_comparison(comparison, console)


def _name_folder(config: Path | None, document: Mapping[str, Any]) -> str:
    """The name of the settings' file, or of the data."""
    source = document.get("data", {}).get("source", list_settings()["data.source"].default)
    return (Path(str(source)) if config is None else config).stem


def _parse_seeds(text: str | None) -> int | tuple[int, ...] | None:
    """A number of seeds, or the seeds themselves."""
    try:
        if text is None or text.isdigit():
            return None if text is None else int(text)
        return tuple(int(word) for word in text.rstrip(",").split(","))
    except ValueError:
        raise ConfigError(
            f"--seeds takes a number like 3, or seeds like 0,1,5, got '{text}'"
        ) from None


def _print_comparison(comparison: Comparison, console: Console) -> None:
    for section in make_sections(comparison.analysis, comparison.metric):
        print_lines(console, "", f"{section.title.capitalize()}:")
        console.print(make_table(section.header, section.cells))
    print_lines(console, *comparison.notes)
    if comparison.left_out:
        print_lines(console, "", "Left out:")
        print_lines(console, *(f"  {name}: {why}" for name, why in comparison.left_out.items()))
    files = "table.md, table.csv, comparison.json, pareto.png and pareto.svg"
    print_lines(console, "", comparison.advice, "", f"wrote {files} into {comparison.folder}")
    if comparison.best_run is not None:
        best = str(comparison.folder / "best") if comparison.folder else ""
        print_lines(console, "", "Next:", f"  {shlex.join(['fedquilt', 'evaluate', best])}")


class _ProgressLog:
    """A line for every run that is done, and on a terminal what is under way."""

    def __init__(self, console: Console) -> None:
        self._console, self._started = console, time.monotonic()
        self._status = console.status("") if console.is_terminal else None
        self._under_way: dict[str, str] = {}
        self._total = 0

    def __enter__(self) -> _ProgressLog:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, event: ComparisonEvent) -> None:
        match event:
            case TrialsQueued():
                self._total = event.num_trials
                done = f", {event.num_done} of them done before" if event.num_done else ""
                self._print(f"{event.purpose}: {format_count(event.num_trials, 'run')}{done}")
            case TrialProgress():
                name = f"{event.trial.variant}, seed {event.trial.seed}"
                self._under_way[name] = f"{name}: round {event.round} of {event.total}"
            case TrialDone():
                self._end(event, f"{event.result.wall_seconds:.0f} s")
            case TrialFailed():
                self._end(event, f"failed: {event.problem}")
            case VariantLeftOut():
                self._print(f"left out {event.variant}: {event.reason}")
        if self._status is not None:
            self._status.update("; ".join(self._under_way.values()))

    def _end(self, event: TrialDone | TrialFailed, what: str) -> None:
        name = f"{event.trial.variant}, seed {event.trial.seed}"
        self._under_way.pop(name, None)
        spent = format_duration(time.monotonic() - self._started)
        done = self._total - event.num_left
        self._print(f"[{done}/{self._total}, {spent}] {name}: {what}")

    def _print(self, line: str) -> None:
        print_lines(self._console, line)
