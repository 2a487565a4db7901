"""Questions to a SuperLink on its HTTP port: is it there, who is online; and to let nodes in.

Flower's command line asks the same, in a process of a second or more for every question.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from flwr.proto.control_pb2 import ListNodesRequest, ListNodesResponse, RegisterNodeRequest

from fedquilt.errors import FederationError

SECONDS = 30.0  # for an answer
PROTOBUF = "application/protobuf"
ONLINE = "online"


@dataclass(frozen=True)
class Control:
    """A SuperLink, by its host and port, and the authority that it is known by; None: no TLS."""

    host: str
    port: int
    authority: Path | None

    def is_there(self) -> bool:
        """Whether it answers."""
        try:
            self._asked("GET", "/health")
            return True
        except FederationError:
            return False

    def online(self) -> set[int]:
        """The nodes that are there, by Flower's number; none if the SuperLink is not."""
        try:
            return {node.node_id for node in self._nodes() if node.status == ONLINE}
        except FederationError:
            return set()

    def register(self, public: Path, name: str) -> None:
        """Lets the node with this public key in, if it is not known yet."""
        key = _read(public)
        if all(node.public_key != key for node in self._nodes()):
            request = RegisterNodeRequest(public_key=key, name=name)
            self._asked("POST", "/v1/control/register-node", request.SerializeToString())

    def is_online(self, public: Path) -> bool:
        """Whether the node with this key counts as there: a minute longer, if it was killed."""
        key = _read(public)
        return any(node.public_key == key and node.status == ONLINE for node in self._nodes())

    def _nodes(self) -> list[Any]:
        question = ListNodesRequest().SerializeToString()
        answer = self._asked("POST", "/v1/control/list-nodes", question)
        return list(ListNodesResponse.FromString(answer).nodes_info)

    def _asked(self, verb: str, path: str, body: bytes = b"") -> bytes:
        connection = self._connection()
        try:
            connection.request(verb, path, body, {"Content-Type": PROTOBUF, "Accept": PROTOBUF})
            response = connection.getresponse()
            content = response.read()
            if response.status != 200:
                raise FederationError(
                    f"the SuperLink refused {path} with {response.status}: "
                    f"{content.decode(errors='replace')}"
                )
            return content
        except (OSError, HTTPException) as problem:
            raise FederationError(
                f"the SuperLink at {self.host}:{self.port} gives no answer ({problem})"
            ) from problem
        finally:
            connection.close()

    def _connection(self) -> HTTPConnection:
        if self.authority is None:
            return HTTPConnection(self.host, self.port, timeout=SECONDS)
        trusted = ssl.create_default_context(cafile=self.authority)
        return HTTPSConnection(self.host, self.port, timeout=SECONDS, context=trusted)


def _read(public: Path) -> bytes:
    """A public key as SuperLinks know it."""
    return serialization.load_ssh_public_key(public.read_bytes()).public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
