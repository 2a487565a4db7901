"""``fedquilt report``: one page about finished runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fedquilt.cli.console import make_console, print_json, print_lines
from fedquilt.cli.options import AsJson, RunModel, Trust, Workers
from fedquilt.evaluation.targets import validate_target
from fedquilt.report.runs import write_report as write_report
from fedquilt.runs.from_config import load_clients, open_configured_run

EXAMPLE = "fedquilt report runs/fedavg runs/adds --target 0.4 --target 0.5 --out report"


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of finished runs.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write.")] = Path("report"),
    clients: Annotated[
        bool,
        typer.Option(
            help="Also client by client, which needs the runs' data; not of runs from Python."
        ),
    ] = True,
    target: Annotated[
        list[float] | None,
        typer.Option(help="An accuracy, such as 0.4: the rounds to reach it. Repeatable."),
    ] = None,
    model: RunModel = None,
    trust: Trust = False,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Write one page about runs: tables, pictures, and the data behind them.

    Accuracy against width, parameters, MACs, time, bytes and rounds; robust against standard
    accuracy, if `evaluate --attack` has measured it; clients' work and accuracy; what each domain
    trained; what clients' nets cost, in the mean and by budget; steps and weights of blocks.

    Where clients choose their nets: what these keep of every layer, client by client and in the
    mean; parameters and MACs by layer; compression against the divergence of labels.

    If the runs were trained with --test-locally: accuracy of clients' own models by round, and how
    it is distributed. With --target: rounds to an accuracy, and how many times as fast as the first
    run.
    """
    targets = [validate_target(accuracy) for accuracy in target or ()]  # before a run is read
    runs = [open_configured_run(folder, model=model, trust=trust) for folder in folders]
    if clients:
        runs = [replace(run, population=load_clients(run)) for run in runs]
    page = write_report(runs, out, targets=targets, clients=clients, workers=workers)
    if as_json:
        print_json({"page": str(page), "data": str(page.parent / "report.json")})
    else:
        print_lines(make_console(), f"wrote {page}")
