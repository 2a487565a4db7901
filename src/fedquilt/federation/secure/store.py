"""A client's secrets between the steps of a session, in files that only it can read.

They are no part of the client's state: the server could ask for an older version of that, and so
have a step answered twice.
"""

from __future__ import annotations

import os
from pathlib import Path

from fedquilt.errors import ProtocolError
from fedquilt.federation.secure.client import SecureClient

OWNER_ONLY = 0o600


class SecretStore:
    """One file for each client, with its latest session.

    Args:
        folder: Where the files are; it is created when the first is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self, client: SecureClient) -> None:
        """Stores a client in a new session, in place of its last one.

        Raises:
            ProtocolError: The session is not new.
        """
        path = self._path(client.number)
        if path.exists() and SecureClient.from_json(path.read_text()).session.id == (
            client.session.id
        ):
            raise ProtocolError(f"client {client.number} was asked to start a session twice")
        self.write(client)

    def read(self, number: int, session: str) -> SecureClient:
        """Returns a client in a session.

        Raises:
            ProtocolError: The client is not in this session.
        """
        path = self._path(number)
        client = SecureClient.from_json(path.read_text()) if path.exists() else None
        if client is None or client.session.id != session:
            raise ProtocolError(f"client {number} has not started session {session[:8]}")
        return client

    def write(self, client: SecureClient) -> None:
        """Stores a client after a step; call it before the step's answer is sent."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._path(client.number)
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)
        with os.fdopen(
            os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY), "w"
        ) as file:
            file.write(client.to_json())
        part.replace(path)

    def _path(self, number: int) -> Path:
        return self._folder / f"client-{number}.json"
