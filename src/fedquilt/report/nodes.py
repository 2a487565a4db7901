"""The nodes of a federation as they come and go: a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from fedquilt.deploy.federation import NodeStatus


def picture(nodes: Sequence[NodeStatus]) -> Table:
    """One line for each node."""
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("node", "process", "is", "budget", "data"):
        table.add_column(title)
    for node in nodes:
        budget = "as the run deals it" if node.budget is None else f"{node.budget}"
        data = str(node.config.get("data", "of the run"))
        table.add_row(str(node.number), str(node.pid), state(node), budget, data)
    return table


def state(node: NodeStatus) -> str:
    """How a node is, in a word."""
    if not node.is_running:
        return f"ended with exit code {node.exit_code}"
    return "online" if node.is_online else "connecting"


def changes(before: Sequence[NodeStatus], after: Sequence[NodeStatus]) -> list[str]:
    """What a line says about every node that is not as it was."""
    old = {node.number: state(node) for node in before}
    return [
        f"node {node.number} (process {node.pid}): {state(node)}"
        for node in after
        if old.get(node.number) != state(node)
    ]
