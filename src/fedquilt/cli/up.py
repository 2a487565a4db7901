"""``fedquilt up``: a Flower deployment on this machine."""

from __future__ import annotations

import shlex
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from fedquilt.cli.console import make_console, print_lines
from fedquilt.cli.nodes import describe_changes, render_nodes
from fedquilt.cli.signals import handle_stop_signals
from fedquilt.deploy.federation import Federation, NodeStatus
from fedquilt.deploy.launch import write_sample_app
from fedquilt.deploy.node_config import make_node_configs

PAUSE, SETTLED_PAUSE = 0.5, 3.0  # seconds between two looks at nodes, and once all are online


EXAMPLE = (
    "fedquilt up --nodes 3 --budgets 1,0.5,auto, and then in another terminal: "
    "fedquilt train --federation federation"
)


def up(
    nodes: Annotated[int, typer.Option(min=1, help="How many SuperNodes.")] = 3,
    budgets: Annotated[
        str | None,
        typer.Option(
            help="What each node affords, in turn: widths, 'auto' (measured on this device), or "
            "limits such as 'params=100000'. Default: as each run deals them."
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="Where nodes train, in turn: cuda, or cuda:0,cuda:1. Default: as each run says."
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="A node's own data, an .npz file or a folder; once for each node. "
            "Default: its part of the set that a run names.",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="For keys, logs and what clients keep.")
    ] = Path("federation"),
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="The SuperLink's; default a free one.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS, and with nodes that nobody checks.")
    ] = False,
) -> None:
    """Start a Flower deployment on this machine, until Ctrl-C.

    A SuperLink and SuperNodes as processes of their own, over loopback, with TLS; only nodes whose
    keys are registered are let in. Certificates and keys are made where there are none yet.
    """
    console = make_console()
    configs = make_node_configs(nodes, budgets, data or (), devices)
    federation = Federation(out, configs, insecure=insecure, port=port)
    print_lines(console, f"starting a SuperLink and {nodes} nodes in {out}")
    with handle_stop_signals(), suppress(KeyboardInterrupt), federation:
        _describe_federation(federation, console)
        try:
            _watch_nodes(federation, console)
        except KeyboardInterrupt:
            print_lines(console, "stopping")
    print_lines(console, "stopped")


def _describe_federation(federation: Federation, console: Console) -> None:
    """What there is, and what to type in another terminal."""
    folder, connection = federation.folder, federation.connection
    home = shlex.quote(f"FLWR_HOME={connection.flwr_home}")
    app_folder = shlex.quote(str(write_sample_app(federation)))
    print_lines(
        console,
        f"the SuperLink is at {federation.address}, {federation.security}",
        "",
        "In another terminal:",
        f"  fedquilt train --federation {shlex.quote(str(folder))}",
        "or with Flower's own command:",
        f"  env {home} flwr run {app_folder} {connection.name} --stream",
        "Ctrl-C stops everything.",
        "",
    )


def _watch_nodes(federation: Federation, console: Console) -> None:
    """Shows how nodes are until it is interrupted, or the SuperLink dies."""
    is_live = console.is_interactive and console.file.isatty()
    seen: list[NodeStatus] = []
    with Live(console=console, auto_refresh=False) if is_live else nullcontext() as live:
        while True:
            now = federation.status()
            if live is not None:
                live.update(render_nodes(now), refresh=True)
            else:
                print_lines(console, *describe_changes(seen, now))
            is_settled = all(node.is_online for node in now)
            seen = now
            time.sleep(SETTLED_PAUSE if is_settled else PAUSE)
