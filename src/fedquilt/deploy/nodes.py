"""The nodes of a federation: which client each of them is, and which are there now."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from fedquilt.deploy.hello import Hello
from fedquilt.deploy.registry import Registered
from fedquilt.engines.flower import letters
from fedquilt.errors import TrainingError

PAUSE = 0.5  # seconds between two looks at who is there
ANSWER = 120.0  # seconds that a node may take to say who it is


class Nodes:
    """Asks nodes who they are, once each, and knows them from then on.

    The first node that says to be a client is that client, and no other node is: it is known by its
    key, so that it may come back under another number. With ``by_key=False``, where nodes have no
    keys that last, another node may stand in for one that is gone. Whoever comes back must say what
    was said before: a client with other data is another. ``registered`` are those that a resumed
    run knows; ``tell`` hears what is wrong with a node.
    """

    def __init__(
        self,
        grid: Grid,
        run_name: str,
        tell: Callable[[str], None] = lambda line: None,
        *,
        registered: Mapping[int, Registered] | None = None,
        by_key: bool = True,
    ) -> None:
        self._grid, self._run_name, self._tell = grid, run_name, tell
        self._registered = dict(registered or {})
        self._is_closed = bool(registered)  # nobody else may register
        self._by_key = by_key
        self._hellos: dict[int, Hello] = {}  # by node
        self._refused: dict[int, str] = {}  # by node: why
        self._keys: dict[int, str] = {}  # of the nodes that are there

    @property
    def registered(self) -> Mapping[int, Registered]:
        """Clients as they registered, by number."""
        return dict(sorted(self._registered.items()))

    @property
    def seen(self) -> frozenset[int]:
        """Clients that were there at some time, and so may be again at any moment."""
        return frozenset(hello.client.id for hello in self._hellos.values())

    def gathered(self, count: int, wait: float) -> Mapping[int, Hello]:
        """What the clients that are there say, as soon as there are so many.

        After a while those that are there are enough if they are half of so many and the others
        were refused: one node that lies does not keep the others from working.
        """
        until = time.monotonic() + wait
        while True:
            there = self.find()
            others = len(self._refused.keys() & self._keys.keys())
            is_late = time.monotonic() >= until
            are_most = len(there) + others >= count and 2 * len(there) >= count
            if len(there) >= count or (is_late and there and are_most):
                return {client: self._hellos[node] for client, node in sorted(there.items())}
            if is_late:
                why = f" ({next(iter(self._refused.values()))})" if self._refused else ""
                raise TrainingError(
                    f"{len(there)} of {count} clients were there after {wait:g} seconds{why}; "
                    "start more nodes, or ask for fewer with flower.nodes"
                )
            time.sleep(PAUSE)

    def find(self) -> Mapping[int, int]:
        """The clients that are there, and their nodes."""
        found = {
            node.node_id: _key(node.node_id, node.public_key) for node in self._grid.get_nodes()
        }
        self._keys = dict(sorted(found.items()))
        known = self._hellos.keys() | self._refused.keys()
        self._ask([node for node in self._keys if node not in known])
        there = [node for node in self._keys if node in self._hellos]
        return {self._hellos[node].client.id: node for node in there if self._is_holder(node)}

    def leave_out(self, client: int, why: str) -> None:
        """Goes on without a client, before the run begins."""
        self._registered.pop(client, None)
        for node, hello in list(self._hellos.items()):
            if hello.client.id == client:
                del self._hellos[node]
                self._refuse(node, why)

    def close(self) -> None:
        """From now on nobody else may register."""
        self._is_closed = True

    def _is_holder(self, node: int) -> bool:
        """Whether a node is the client that it says to be."""
        client = self._hellos[node].client.id
        holder = self._registered[client]
        is_free = not self._by_key and holder.key not in self._keys.values()
        if is_free:
            self._registered[client] = Registered(holder.hello, self._keys[node])
        return is_free or holder.key == self._keys[node]

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
            if node not in nodes or node in self._hellos:
                continue
            try:
                if reply.has_error():
                    raise TrainingError(reply.error.reason)
                self._welcome(node, Hello.read(reply.content))
            except TrainingError as problem:
                self._refuse(node, str(problem))

    def _welcome(self, node: int, hello: Hello) -> None:
        """Takes a node in as the client that it says to be; refuses it if that is another."""
        client = hello.client.id
        before = self._registered.get(client)
        if before is None:
            if self._is_closed:
                raise TrainingError(f"client {client} is none of the run's clients")
            self._registered[client] = Registered(hello, self._keys[node])
        elif self._by_key and before.key != self._keys[node]:
            raise TrainingError(
                f"it says to be client {client}, which another node's key is; start that node with "
                "its own key, or set flower.keys = false where keys do not last"
            )
        elif before.hello != hello:
            raise TrainingError(
                f"client {client} does not say what it said when the run began: {hello}, then "
                f"{before.hello}"
            )
        self._hellos[node] = hello

    def _refuse(self, node: int, why: str) -> None:
        self._refused[node] = why
        self._tell(f"a node takes no part: {why}")


def _key(node: int, public_key: bytes) -> str:
    """How a node is known: by its key, or else by its number."""
    return hashlib.sha256(public_key).hexdigest() if public_key else f"node {node}"
