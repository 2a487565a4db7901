"""The nodes of a federation: which client each of them is, and which are there now."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from fedquilt.deploy.hello import Hello
from fedquilt.engines.flower import letters
from fedquilt.errors import TrainingError

PAUSE = 0.5  # seconds between two looks at who is there
ANSWER = 120.0  # seconds that a node may take to say who it is


class Nodes:
    """Asks nodes who they are, once each, and knows them from then on.

    A node that was restarted may come back under another number; the client it is stays the same.
    ``tell`` hears what is wrong with a node.
    """

    def __init__(
        self, grid: Grid, run_name: str, tell: Callable[[str], None] = lambda line: None
    ) -> None:
        self._grid, self._run_name, self._tell = grid, run_name, tell
        self._hellos: dict[int, Hello] = {}  # by node
        self._refused: set[int] = set()

    def gathered(self, count: int, wait: float) -> dict[int, Hello]:
        """What the clients say, by number, as soon as there are so many; refused after a while."""
        until = time.monotonic() + wait
        while True:
            there = self.find()
            if len(there) >= count:
                return {client: self._hellos[node] for client, node in sorted(there.items())}
            if time.monotonic() >= until:
                raise TrainingError(
                    f"{len(there)} of {count} clients were there after {wait:g} seconds; start "
                    "more nodes, or ask for fewer with flower.nodes"
                )
            time.sleep(PAUSE)

    def find(self) -> Mapping[int, int]:
        """The clients that are there, and their nodes; of two nodes of a client the later one."""
        there = sorted(self._grid.get_node_ids())
        self._ask(
            [node for node in there if node not in self._hellos and node not in self._refused]
        )
        return {self._hellos[n].client.id: n for n in there if n in self._hellos}

    def _ask(self, nodes: Sequence[int]) -> None:
        """Asks nodes who they are; who does not say is asked again the next time."""
        messages = [
            Message(
                letters.question(self._run_name), dst_node_id=n, message_type="query", ttl=ANSWER
            )
            for n in nodes
        ]
        if not messages:
            return
        for reply in self._grid.send_and_receive(messages, timeout=ANSWER):
            node = reply.metadata.src_node_id
            try:
                if reply.has_error():
                    raise TrainingError(reply.error.reason)
                self._hellos[node] = Hello.read(reply.content)
            except TrainingError as problem:
                self._refused.add(node)
                self._tell(f"a node takes no part: {problem}")
