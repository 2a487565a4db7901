"""Keeps track of a federation's nodes: which client each node is, and which are online."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from fedquilt.deploy.node_info import NodeInfo
from fedquilt.deploy.registry import RegistryEntry
from fedquilt.engines.flower import codec
from fedquilt.errors import TrainingError

POLL_INTERVAL = 0.5  # seconds
QUERY_TIMEOUT = 120.0  # seconds for a node to tell about itself


class NodeManager:
    """Queries every node once, and registers its client.

    The first node that claims a client is that client's node. It is recognized by its key, so it
    may return under another node id. A client that returns must tell the same about itself: with
    other data it would be another client.

    Args:
        grid: Flower's grid.
        run_name: The name of the run.
        on_output: Called with a line for every node that is rejected.
        registered: The clients of a resumed run; no others may register then.
        by_key: False where nodes have no lasting keys: another node may then replace one that is
            offline.
    """

    def __init__(
        self,
        grid: Grid,
        run_name: str,
        on_output: Callable[[str], None] = lambda line: None,
        *,
        registered: Mapping[int, RegistryEntry] | None = None,
        by_key: bool = True,
    ) -> None:
        self._grid, self._run_name, self._on_output = grid, run_name, on_output
        self._registered = dict(registered or {})
        self._is_closed = bool(registered)
        self._by_key = by_key
        self._infos: dict[int, NodeInfo] = {}  # by node
        self._rejected: dict[int, str] = {}  # by node: why
        self._keys: dict[int, str] = {}  # of nodes that are online

    @property
    def registered(self) -> Mapping[int, RegistryEntry]:
        """The registered clients, by number."""
        return dict(sorted(self._registered.items()))

    @property
    def infos(self) -> Mapping[int, NodeInfo]:
        """The information of the registered clients, by number."""
        return {client: entry.info for client, entry in self.registered.items()}

    @property
    def is_closed(self) -> bool:
        """Whether no further client may register."""
        return self._is_closed

    @property
    def seen_clients(self) -> frozenset[int]:
        """The clients that were online at some time, and may be again at any moment."""
        return frozenset(info.client.id for info in self._infos.values())

    def wait_for_nodes(self, count: int, timeout: float) -> Mapping[int, NodeInfo]:
        """Waits until ``count`` clients are online, and returns their information.

        After the timeout, half of them are enough if the others were rejected: one node that sends
        nonsense does not keep the others from training.
        """
        end = time.monotonic() + timeout
        while True:
            online = self.find_online_nodes()
            num_rejected = len(self._rejected.keys() & self._keys.keys())
            is_late = time.monotonic() >= end
            is_majority = len(online) + num_rejected >= count and 2 * len(online) >= count
            if len(online) >= count or (is_late and online and is_majority):
                return {client: self._infos[node] for client, node in sorted(online.items())}
            if is_late:
                reason = f" ({next(iter(self._rejected.values()))})" if self._rejected else ""
                raise TrainingError(
                    f"{len(online)} of {count} clients were online after {timeout:g} seconds"
                    f"{reason}; start more nodes, or set flower.nodes to fewer"
                )
            time.sleep(POLL_INTERVAL)

    def find_online_nodes(self) -> Mapping[int, int]:
        """The nodes that are online, by client."""
        nodes = sorted(self._grid.get_nodes(), key=lambda node: node.node_id)
        self._keys = {node.node_id: _get_node_key(node.node_id, node.public_key) for node in nodes}
        known = self._infos.keys() | self._rejected.keys()
        self._query([node for node in self._keys if node not in known])
        online = [node for node in self._keys if node in self._infos]
        return {self._infos[node].client.id: node for node in online if self._is_holder(node)}

    def exclude(self, client: int, reason: str) -> None:
        """Excludes a client before the run begins."""
        self._registered.pop(client, None)
        for node, info in list(self._infos.items()):
            if info.client.id == client:
                del self._infos[node]
                self._reject(node, reason)

    def close_registration(self) -> None:
        """Lets no further client register."""
        self._is_closed = True

    def _is_holder(self, node: int) -> bool:
        """Whether a node is the registered node of its client."""
        client = self._infos[node].client.id
        entry = self._registered[client]
        is_free = not self._by_key and entry.key not in self._keys.values()
        if is_free:
            self._registered[client] = RegistryEntry(entry.info, self._keys[node])
        return is_free or entry.key == self._keys[node]

    def _query(self, nodes: Sequence[int]) -> None:
        """Queries nodes; a node that does not reply is queried again the next time."""
        if not nodes:
            return
        content = codec.encode_query(self._run_name)
        messages = [
            Message(content, dst_node_id=node, message_type="query", ttl=QUERY_TIMEOUT)
            for node in nodes
        ]
        for reply in self._grid.send_and_receive(messages, timeout=QUERY_TIMEOUT):
            node = reply.metadata.src_node_id
            if node not in nodes or node in self._infos:
                continue
            try:
                if reply.has_error():
                    raise TrainingError(reply.error.reason)
                self._register(node, NodeInfo.from_message(reply.content))
            except TrainingError as problem:
                self._reject(node, str(problem))

    def _register(self, node: int, info: NodeInfo) -> None:
        """Registers a node as its client; raises a TrainingError if it is not that client."""
        client = info.client.id
        entry = self._registered.get(client)
        if entry is None:
            if self._is_closed:
                raise TrainingError(f"client {client} is not one of the run's clients")
            self._registered[client] = RegistryEntry(info, self._keys[node])
        elif self._by_key and entry.key != self._keys[node]:
            raise TrainingError(
                f"client {client} is registered with another node's key; start the node with its "
                "own key, or set flower.keys = false where keys do not last"
            )
        elif entry.info != info:
            raise TrainingError(
                f"client {client} registered with other information: {entry.info}, got {info}"
            )
        self._infos[node] = info

    def _reject(self, node: int, reason: str) -> None:
        self._rejected[node] = reason
        self._on_output(f"a node was rejected: {reason}")


def _get_node_key(node: int, public_key: bytes) -> str:
    """What a node is recognized by: its key, or else its id."""
    return hashlib.sha256(public_key).hexdigest() if public_key else f"node {node}"
