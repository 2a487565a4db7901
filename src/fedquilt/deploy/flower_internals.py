"""All that relies on undocumented parts of Flower, in one file.

Written for Flower 1.41 and 1.42. It relies on:

- the HTTP port of a SuperLink: ``GET /health``, and ``POST /v1/control/list-nodes`` and
  ``register-node`` with the protobuf messages of ``flwr.proto.control_pb2``. The documented
  commands (``flwr supernode list`` and ``register``) do the same, but start a process of a second
  or more for every question, and do not tell the keys of nodes;
- the line ``SuperNode ID: ...`` in the log of a SuperNode, the only place where a node without a
  key tells its id;
- the words before an exception in the status of a failed run.

When Flower changes one of them, ``tests/deploy/test_flower_internals.py`` fails: it asks a real
SuperLink.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

from fedquilt.errors import FederationError

TIMEOUT = 30.0  # seconds for a reply
PROTOBUF = "application/protobuf"
ONLINE = "online"
SUPERNODE_ID = re.compile(r"SuperNode ID: (\d+)")
EXCEPTION_PREFIX = re.compile(r"^\w+ failed with exception: ")


@dataclass(frozen=True)
class SuperLinkClient:
    """Asks a SuperLink about its nodes, on its HTTP port.

    Flower's own client is not used: it would go through the proxies of the environment, also to
    this machine.

    Args:
        host: The SuperLink's host.
        port: Its port.
        authority: The certificate authority that it is trusted by; None means without TLS.
    """

    host: str
    port: int
    authority: Path | None

    def is_available(self) -> bool:
        """Whether the SuperLink responds."""
        try:
            self._request("GET", "/health")
            return True
        except FederationError:
            return False

    def list_online_nodes(self) -> set[int]:
        """The ids of the nodes that are online; none if the SuperLink does not respond."""
        try:
            return {node.node_id for node in self._list_nodes() if node.status == ONLINE}
        except FederationError:
            return set()

    def register(self, public_key: Path, name: str) -> None:
        """Registers the node with this public key, if it is not registered yet."""
        key = _read_public_key(public_key)
        if any(node.public_key == key for node in self._list_nodes()):
            return
        from flwr.proto.control_pb2 import RegisterNodeRequest

        request = RegisterNodeRequest(public_key=key, name=name)
        self._request("POST", "/v1/control/register-node", request.SerializeToString())

    def is_online(self, public_key: Path) -> bool:
        """Whether the node with this key is online; a killed node is for another minute."""
        key = _read_public_key(public_key)
        return any(node.public_key == key and node.status == ONLINE for node in self._list_nodes())

    def _list_nodes(self) -> list[Any]:
        from flwr.proto.control_pb2 import ListNodesRequest, ListNodesResponse

        request = ListNodesRequest().SerializeToString()
        reply = self._request("POST", "/v1/control/list-nodes", request)
        return list(ListNodesResponse.FromString(reply).nodes_info)

    def _request(self, verb: str, path: str, body: bytes = b"") -> bytes:
        connection = self._connect()
        try:
            connection.request(verb, path, body, {"Content-Type": PROTOBUF, "Accept": PROTOBUF})
            response = connection.getresponse()
            content = response.read()
        except (OSError, HTTPException) as problem:
            raise FederationError(
                f"the SuperLink at {self.host}:{self.port} does not respond ({problem})"
            ) from problem
        finally:
            connection.close()
        if response.status != 200:
            raise FederationError(
                f"the SuperLink refused {path} with {response.status}: "
                f"{content.decode(errors='replace')}"
            )
        return content

    def _connect(self) -> HTTPConnection:
        if self.authority is None:
            return HTTPConnection(self.host, self.port, timeout=TIMEOUT)
        context = ssl.create_default_context(cafile=self.authority)
        return HTTPSConnection(self.host, self.port, timeout=TIMEOUT, context=context)


def find_node_id(log: str) -> int | None:
    """The id that a SuperNode has logged last; None if it has not connected yet.

    >>> find_node_id("INFO : SuperNode ID: 12\\nINFO : SuperNode ID: 13")
    13
    """
    ids = SUPERNODE_ID.findall(log)
    return int(ids[-1]) if ids else None


def strip_exception_prefix(details: str) -> str:
    """The message of the exception that ended a run, from the details of the run's status.

    >>> strip_exception_prefix("ServerApp failed with exception: no clients")
    'no clients'
    """
    return EXCEPTION_PREFIX.sub("", details)


def _read_public_key(path: Path) -> bytes:
    """A public key in the format of a SuperLink."""
    from cryptography.hazmat.primitives import serialization

    return serialization.load_ssh_public_key(path.read_bytes()).public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def is_simulated(grid: object) -> bool:
    """Whether a grid is that of a simulation: it holds all messages in the memory of one process.

    Args:
        grid: Flower's grid.
    """
    return type(grid).__name__ == "InMemoryGrid"
