"""The nodes of a federation on a console: a table, or one line for every change."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from fedquilt.deploy.federation import NodeStatus


def render_nodes(nodes: Sequence[NodeStatus]) -> Table:
    """A table with one row for each node."""
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("node", "process", "status", "budget", "data"):
        table.add_column(title)
    for node in nodes:
        budget = "set by the run" if node.budget is None else f"{node.budget}"
        data = str(node.config.get("data", "set by the run"))
        table.add_row(str(node.number), str(node.pid), describe_status(node), budget, data)
    return table


def describe_status(node: NodeStatus) -> str:
    """The status of a node in a few words."""
    if not node.is_running:
        return f"ended with exit code {node.exit_code}"
    return "online" if node.is_online else "connecting"


def describe_changes(before: Sequence[NodeStatus], after: Sequence[NodeStatus]) -> list[str]:
    """One line for every node whose status has changed."""
    old = {node.number: describe_status(node) for node in before}
    return [
        f"node {node.number} (process {node.pid}): {describe_status(node)}"
        for node in after
        if old.get(node.number) != describe_status(node)
    ]
