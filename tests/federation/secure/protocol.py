"""A whole session in one process, with clients that drop out wherever a test says."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedquilt.federation.secure.client import SecureClient
from fedquilt.federation.secure.integers import get_dtype
from fedquilt.federation.secure.server import OpenedSums, SecureServer
from fedquilt.federation.secure.session import Session

NEVER = 4  # the step before which a client drops out: 0 keys, 1 shares, 2 vectors, 3 secrets


@dataclass
class Transcript:
    """Everything that was said and known."""

    session: Session
    server: SecureServer
    clients: dict[int, SecureClient]  # before their last step, with all secrets
    hidden: dict[int, dict[int, np.ndarray]]
    revealed: dict[int, dict[int, bytes]]
    opened: OpenedSums | None = None


def make_session(
    rings: Sequence[Sequence[int]], threshold: int, neighbors: int | None = None, **options
) -> Session:
    sizes = options.pop("sizes", [3 + ring for ring in range(len(rings))])
    return Session(
        secrets.token_hex(16),
        threshold,
        neighbors,
        tuple(tuple(ring) for ring in rings),
        tuple(sizes),
        **options,
    )


def draw_vectors(session: Session, seed: int = 0) -> dict[int, dict[int, np.ndarray]]:
    """Random integers for each ring of each client."""
    generator, kind = np.random.default_rng(seed), get_dtype(session.bits)
    high = 2**session.bits - 1
    return {
        client: {
            ring: generator.integers(0, high, session.sizes[ring], kind, endpoint=True)
            for ring in session.list_rings(client)
        }
        for client in session.clients
    }


def restored(client: SecureClient) -> SecureClient:
    """The client as another process finds it."""
    return SecureClient.from_json(client.to_json())


def run_session(
    session: Session,
    vectors: Mapping[int, Mapping[int, np.ndarray]],
    drops: Mapping[int, int] | None = None,
) -> Transcript:
    """Runs all steps; ``drops`` says before which step a client drops out."""
    drops = drops or {}
    server = SecureServer(session)
    clients = {number: SecureClient(number, session) for number in session.clients}
    log = Transcript(session, server, clients, {}, {})

    def there(step: int) -> list[int]:
        return [client for client in session.clients if drops.get(client, NEVER) > step]

    for number in there(0):
        server.add_keys(number, clients[number].public_keys)
    keys = server.roster.keys
    for number in there(1):
        if len(server.roster.list_share_holders(number)) >= session.threshold:
            clients[number], shares = restored(clients[number]).share(keys)
            server.add_shares(number, shares)
    sharers = server.sharers
    for number in there(2):
        if number in sharers and len(sharers) >= session.threshold:
            clients[number], hidden = restored(clients[number]).mask(sharers, vectors[number])
            log.hidden[number] = hidden
            server.add_vectors(number, hidden)
    survivors = server.survivors
    for number in there(3):
        if number in survivors:
            received = server.list_encrypted(number)
            _, revealed = restored(clients[number]).reveal(survivors, received)
            log.revealed[number] = revealed
            server.add_secrets(number, revealed)
    log.opened = server.open_sums()
    return log
