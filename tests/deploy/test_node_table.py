"""How nodes are shown on a console."""

import io

from rich.console import Console

from fedquilt.cli.nodes import describe_changes, render_nodes
from fedquilt.deploy.federation import NodeStatus

ONLINE = NodeStatus(0, 11, None, True, {"partition-id": 0, "budget": 0.5, "data": "/data"})
CONNECTING = NodeStatus(1, 12, None, False, {"partition-id": 1})
ENDED = NodeStatus(1, 12, -9, False, {"partition-id": 1})


def test_only_changes_have_a_line():
    assert describe_changes([], [ONLINE, CONNECTING]) == [
        "node 0 (process 11): online",
        "node 1 (process 12): connecting",
    ]
    assert describe_changes([ONLINE, CONNECTING], [ONLINE, CONNECTING]) == []
    assert describe_changes([ONLINE, CONNECTING], [ONLINE, ENDED]) == [
        "node 1 (process 12): ended with exit code -9"
    ]


def test_the_table_has_status_budget_and_data_of_every_node():
    console = Console(file=io.StringIO(), width=80)
    console.print(render_nodes([ONLINE, ENDED]))
    lines = [line.split() for line in console.file.getvalue().splitlines() if line.strip()]
    assert lines[0] == ["node", "process", "status", "budget", "data"]
    assert lines[2] == ["0", "11", "online", "0.5", "/data"]
    assert lines[3][:6] == ["1", "12", "ended", "with", "exit", "code"]
