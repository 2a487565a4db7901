"""``fedquilt list``: what can be named in settings, and which runs there are."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedquilt.cli.console import make_console, print_json, print_lines
from fedquilt.cli.options import AsJson
from fedquilt.cli.setting_options import complete_names
from fedquilt.data.load import DATASETS, find_dataset
from fedquilt.errors import ConfigError, CorruptFileError, FedquiltError, describe_unknown
from fedquilt.evaluation.scores import SizeScore
from fedquilt.evaluation.summary import summarize
from fedquilt.federation.aggregation import AGGREGATORS, SERVER_OPTIMIZERS
from fedquilt.methods import METHODS
from fedquilt.models import MODELS
from fedquilt.report.tables import make_table
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.find import FoundRun, find_runs, require_folder
from fedquilt.runs.records import read_records
from fedquilt.runs.status import read_status
from fedquilt.runs.trackers.catalog import TRACKERS
from fedquilt.settings.toml import read_toml
from fedquilt.training.poisoning import ATTACKS

EXAMPLE = "fedquilt list methods"

Row = dict[str, Any]


def list_names(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="methods, models, datasets, runs, aggregators, server-optimizers, attacks or "
            "trackers.",
            autocompletion=lambda incomplete: complete_names(KINDS)(incomplete),
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="Of runs: the folder that holds them; runs/ if none."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List what can be named in settings, or the runs in a folder.

    Of datasets it also says which are on this machine; of runs how far they are.
    """
    if kind not in KINDS:
        raise ConfigError(describe_unknown("kind", kind, KINDS))
    if folder is not None and kind != "runs":
        raise ConfigError(f"a folder is for runs, got {kind} {folder}; leave it out")
    rows = list_runs(folder or Path("runs")) if kind == "runs" else KINDS[kind]()
    if as_json:
        print_json({kind: rows})
    elif kind != "runs":
        width = max((len(row["name"]) for row in rows), default=0)
        print_lines(make_console(), *(_format_row(row, width) for row in rows))
    elif rows:
        cells = [["" if value is None else str(value) for value in row.values()] for row in rows]
        make_console().print(make_table(list(rows[0]), cells))
    else:
        print_lines(make_console(), f"there are no runs in {folder or 'runs'}")


def _format_row(row: Row, width: int) -> str:
    line = f"{row['name']:<{width}}  {row['description']}"
    if "place" not in row:
        return line
    return f"{line} ({'not here' if row['place'] is None else 'here'})"


def _describe_all(factories: Mapping[str, Any]) -> list[Row]:
    return [{"name": name, "description": describe_name(name, f)} for name, f in factories.items()]


def describe_name(name: str, factory: Any) -> str:
    """What a class or function says about itself in a sentence, or what its module says about it.

    >>> describe_name("heterofl", METHODS["heterofl"])
    'every client trains the leading channels that it can afford'
    """
    owner = factory.func if isinstance(factory, partial) else factory
    module = sys.modules[owner.__module__]
    title, _, about = (module.__doc__ or "").partition("\n")[0].partition(": ")
    if not about or _simplify(title) != _simplify(name):
        about = (inspect.getdoc(owner) or "").partition("\n")[0]
    word = about.partition(" ")[0]
    about = about if word[1:] != word[1:].lower() else f"{about[:1].lower()}{about[1:]}"
    return about.removesuffix(".").replace("``", "")


def _simplify(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def list_datasets() -> list[Row]:
    """The named datasets, and where they are on this machine."""
    return [
        {"name": name, "description": about, "place": find_dataset(name)}
        for name, about in DATASETS.items()
    ]


def list_runs(folder: Path) -> list[Row]:
    """The runs in a folder, those that go and the newest first."""
    return [_describe_run(run) for run in find_runs([require_folder(folder)])]


def _describe_run(run: FoundRun) -> Row:
    settings = _read_settings(run.directory)
    status, summary = read_status(run.directory), None
    try:
        records = read_records(run.directory)
    except CorruptFileError:
        records = []
    evaluations = [record for record in records if record.get("scores")]
    if evaluations:
        summary = summarize([SizeScore.from_json(score) for score in evaluations[-1]["scores"]])
    state = "running" if run.is_alive else "stopped"
    if evaluations and evaluations[-1]["is_final"] and not run.is_alive:
        state = "finished"
    done = max((record["round"] for record in records if "scores" not in record), default=0)
    total = settings.get("rounds") or (status.total if status is not None else None)
    return {
        "run": run.name,
        "method": settings.get("method", {}).get("name"),
        "data": _shorten(settings.get("data", {}).get("source")),
        "state": state,
        "rounds": f"{done}/{total or '?'}",
        "score": None if summary is None else summary.name,
        "worst": None if summary is None else summary.metric.format(summary.worst),
        "mean": None if summary is None else summary.metric.format(summary.mean),
    }


def _shorten(source: str | None) -> str | None:
    return None if source is None else Path(source).name


def _read_settings(directory: RunDirectory) -> dict[str, Any]:
    try:
        return read_toml(directory.config_file) if directory.config_file.is_file() else {}
    except FedquiltError:
        return {}


KINDS: Mapping[str, Callable[[], list[Row]]] = {
    "methods": partial(_describe_all, METHODS),
    "models": partial(_describe_all, MODELS),
    "datasets": list_datasets,
    "runs": list,  # which are in a folder
    "aggregators": partial(_describe_all, AGGREGATORS),
    "server-optimizers": partial(_describe_all, SERVER_OPTIMIZERS),
    "attacks": partial(_describe_all, ATTACKS),
    "trackers": partial(_describe_all, TRACKERS),
}
