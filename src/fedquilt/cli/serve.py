"""``fedquilt serve``: a finished model behind HTTP, and a page to try it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from fedquilt.cli.console import make_console, print_json, print_lines
from fedquilt.cli.options import AsJson, Host, Port, RunFolder, RunModel, Token, Trust, parse_widths
from fedquilt.errors import ConfigError
from fedquilt.runs.from_config import open_configured_run
from fedquilt.web.access import choose_access
from fedquilt.web.listen import require_server, run_server

EXAMPLE = "fedquilt serve runs/digits-heterofl-1 --port 8000"


def serve(
    folder: RunFolder,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token: Token = None,
    sizes: Annotated[
        list[str] | None,
        typer.Option(help="The sizes to offer, such as 1,0.5; those that were trained by default."),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The names of the classes, one per line."),
    ] = None,
    max_body: Annotated[float, typer.Option(help="The size of a request, in megabytes.")] = 8.0,
    timeout: Annotated[
        float, typer.Option(help="Seconds in which a request must arrive, and be answered.")
    ] = 10.0,
    window: Annotated[
        float, typer.Option(help="Milliseconds that a batch waits for requests on their way.")
    ] = 2.0,
    max_batch: Annotated[int, typer.Option(help="Examples that are computed at once.")] = 64,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the model.")] = 1,
    model: RunModel = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Serve a finished model over HTTP, with a page to try it.

    POST /predict takes JSON, images, .npy files and texts, and `size=`, `robustness=`, `latency=`,
    `params=` or `macs=` in the address. /docs describes it, / is a page to try it.

    It listens on this machine only. With --host elsewhere users need a token, which is printed.
    """
    require_server("fedquilt serve")
    from fedquilt.serve import Limits, ServedModel, create_app

    access = choose_access(host, token)
    limits = Limits(
        body_bytes=round(max_body * 1e6), seconds=timeout, batch=max_batch, window=window / 1000
    )
    widths = None if sizes is None else parse_widths(sizes)
    names = () if labels is None else _read_labels(labels)
    run = open_configured_run(folder, model=model, trust=trust)
    torch.set_num_threads(threads)
    served = ServedModel.from_run(run, widths, names)

    def announce(address: str) -> None:
        if as_json:
            print_json({"url": address, **served.describe()})
        else:
            offered = ", ".join(f"{sized.size:g}" for sized in served.sizes)
            print_lines(
                make_console(),
                f"serving {served.name} at {served.size_name} {offered}",
                f"try it:  {address}",
                "press Ctrl-C to stop",
            )

    run_server(create_app(served, limits), access, port, announce)


def _read_labels(path: Path) -> tuple[str, ...]:
    try:
        return tuple(path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(
            f"labels are a text file with one name per line, {path} cannot be read ({problem})"
        ) from problem
