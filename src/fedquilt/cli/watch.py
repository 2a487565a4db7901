"""``fedquilt watch``: a page that follows runs while they go."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedquilt.cli.console import make_console, print_json, print_lines
from fedquilt.cli.options import AsJson, Host, Port, Token
from fedquilt.web.access import choose_access
from fedquilt.web.listen import require_server, run_server

EXAMPLE = "fedquilt watch runs"


def watch(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR...]", help="Runs, or folders that hold runs; runs/ if none."),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Watch runs in a browser while they go, and finished ones beside them.

    Loss, the metric of every size, clients, bytes, time, coverage and spent privacy, round by
    round. It reads the runs' directories and changes nothing.

    It listens on this machine only. With --host elsewhere users need a token, which is printed.
    """
    require_server("fedquilt watch")
    from fedquilt.watch import RunWatcher, create_app

    access = choose_access(host, token)
    watcher = RunWatcher(folders or [Path("runs")])

    def announce(address: str) -> None:
        if as_json:
            print_json({"url": address})
        else:
            lines = (f"watch:  {address}", "press Ctrl-C to stop")
            print_lines(make_console(), *lines)

    run_server(create_app(watcher), access, port, announce)
