"""``fedquilt compare``: which method for these data and devices."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedquilt.cli.console import make_console, print_json, print_lines
from fedquilt.cli.options import (
    AnyCode,
    AsJson,
    RunsAtATime,
    Settings,
    drop_unset,
    parse_assignments,
)
from fedquilt.cli.program import write_command
from fedquilt.cli.setting_options import COMPARE_OPTIONS, takes_settings
from fedquilt.cli.signals import handle_stop_signals
from fedquilt.cli.trial_log import TrialLog
from fedquilt.comparison.comparison import Comparison
from fedquilt.comparison.from_settings import compare_settings
from fedquilt.comparison.render import make_sections
from fedquilt.errors import ConfigError
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
    workers: RunsAtATime = None,
    any_code: AnyCode = False,
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
        "seeds": parse_seeds(seeds),
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
    log = TrialLog(console)
    try:
        with handle_stop_signals(), log:
            comparison = compare_settings(
                document, folder, workers=workers, any_code=any_code, on_event=log
            )
    except KeyboardInterrupt:
        again = write_command(sys.argv[1:])
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


def parse_seeds(text: str | None) -> int | tuple[int, ...] | None:
    """A number of seeds, or the seeds themselves.

    >>> parse_seeds("3"), parse_seeds("0,"), parse_seeds("1,5")
    (3, (0,), (1, 5))
    """
    if text == "0":
        raise ConfigError("--seeds 0 is no run at all; write 1 for one seed, or 0, for the seed 0")
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
        print_lines(console, "", "Next:", f"  {write_command(['evaluate', best])}")
