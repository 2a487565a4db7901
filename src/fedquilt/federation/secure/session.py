"""What everybody knows about a round of secure aggregation: who takes part, and who holds what.

A *session* is one attempt at a round. Its *roster* adds the public keys of the clients that have
answered. All keys are derived with a digest of the roster, so clients that were told different
things share no keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedquilt.errors import ProtocolError
from fedquilt.federation.secure.integers import Bits

ID_BYTES = 16


@dataclass(frozen=True)
class Session:
    """What one round is about.

    Args:
        id: Random and new for every attempt at a round, in hexadecimal digits.
        threshold: Clients without whom nothing is opened.
        neighbors: Clients with whom each client shares masks in every ring; None: all.
        rings: For each ring the numbers of the clients that hold it, ascending.
        sizes: For each ring the number of integers that its holders send.
        bits: The integers are summed modulo 2 to this power.

    >>> session = Session("00" * 16, 2, None, rings=((0, 1, 2), (0, 1)), sizes=(10, 4))
    >>> session.list_rings(2)
    (0,)
    """

    id: str
    threshold: int
    neighbors: int | None
    rings: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    bits: Bits = 32

    def __post_init__(self) -> None:
        """Refuses what no honest server says."""
        if len(bytes.fromhex(self.id)) != ID_BYTES or self.bits not in (32, 64):
            raise ProtocolError("a session has an id of 16 bytes, and integers of 32 or 64 bits")
        if self.threshold < 2 or len(self.rings) != len(self.sizes):
            raise ProtocolError("a session has a threshold of 2 at least, and a size for each ring")
        if self.neighbors is not None and self.neighbors < self.threshold:
            raise ProtocolError(
                f"a client shares its secrets with {self.threshold} neighbors at least, as many as "
                f"the threshold, got {self.neighbors}"
            )
        if any(list(ring) != sorted(set(ring)) or min(ring, default=0) < 0 for ring in self.rings):
            raise ProtocolError("the clients of a ring are different numbers, ascending")

    @cached_property
    def clients(self) -> tuple[int, ...]:
        """All clients that hold a ring, ascending."""
        return tuple(sorted({client for ring in self.rings for client in ring}))

    def list_rings(self, client: int) -> tuple[int, ...]:
        """The rings that a client holds."""
        return self._rings_by_client.get(client, ())

    @cached_property
    def _rings_by_client(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for number, ring in enumerate(self.rings):
            for client in ring:
                found[client] = (*found.get(client, ()), number)
        return found


def check_floor(session: Session, floor: int) -> None:
    """Refuses a session that hides less than a client asks for, whatever the server says.

    Args:
        session: What the server proposes.
        floor: The lowest threshold that the client accepts.

    Raises:
        ProtocolError: The threshold is lower.
    """
    if session.threshold < floor:
        raise ProtocolError(
            f"this client takes part in secure sums with a threshold of {floor} or more, got "
            f"{session.threshold}; raise secure_aggregation.threshold"
        )


@dataclass(frozen=True)
class PublicKeys:
    """A client's public keys of one session.

    Args:
        channel: For the encryption of shares.
        mask: For masks that it shares with others.
    """

    channel: bytes
    mask: bytes


class Roster:
    """The clients that have sent their keys, and who of them shares masks with whom.

    Args:
        session: What the round is about.
        keys: The public keys of each client.

    In each ring a client shares a mask with its neighbors. These are all other clients of the ring,
    or, with ``session.neighbors`` = k, the k nearest on a circle of all of them in random order
    (a circulant graph, as in SecAgg+, Bell et al. 2020). The circle is drawn for every ring, so
    that the clients of each ring are connected with each other.
    """

    def __init__(self, session: Session, keys: Mapping[int, PublicKeys]) -> None:
        unknown = sorted(set(keys) - set(session.clients))
        if unknown:
            raise ProtocolError(f"client {unknown[0]} has keys, and is not part of the session")
        self.session = session
        self.keys = dict(sorted(keys.items()))
        self._circles = [self._draw_circle(ring) for ring in range(len(session.rings))]

    @cached_property
    def digest(self) -> bytes:
        """A digest of everything that is known."""
        facts = json.dumps(asdict(self.session), sort_keys=True).encode()
        parts = [
            client.to_bytes(8, "big") + keys.channel + keys.mask
            for client, keys in self.keys.items()
        ]
        return hashlib.sha256(hashlib.sha256(facts).digest() + b"".join(parts)).digest()

    def list_neighbors(self, client: int, ring: int) -> frozenset[int]:
        """The clients with whom a client shares masks in a ring."""
        return self._circles[ring].list_neighbors(client)

    def list_share_holders(self, client: int) -> tuple[int, ...]:
        """The clients that get shares of a client's secrets, itself included."""
        near = (circle.list_neighbors(client) for circle in self._circles)
        return tuple(sorted({client}.union(*near)))

    def list_shared_rings(self, client: int, holder: int) -> tuple[int, ...]:
        """The rings for which a holder gets a share of a client's own mask.

        These are the rings that both hold, as neighbors. In a ring with fewer neighbors than shares
        that are needed nobody gets one: it can never be opened.
        """
        rings = []
        for ring in self.session.list_rings(client):
            near = self.list_neighbors(client, ring)
            is_enough = len(near) + 1 >= self.session.threshold
            if is_enough and (holder in near or holder == client):
                rings.append(ring)
        return tuple(rings)

    def can_open(self, ring: int, survivors: Collection[int]) -> bool:
        """Whether the sum of a ring may be opened.

        It must have ``threshold`` clients that have sent their vectors. And the server with
        threshold - 1 clients must not be able to split the others into two parts without common
        masks, because it would learn the sum of each. Where all are neighbors this is so; on a
        circle it takes two stretches of ``reach`` places without an honest client.
        """
        circle, threshold = self._circles[ring], self.session.threshold
        there = np.isin(circle.order, list(survivors))
        if there.sum() < threshold:
            return False
        return circle.is_complete or 2 * circle.count_fewest(there) >= threshold

    def list_open(self, survivors: Collection[int]) -> tuple[int, ...]:
        """The rings whose sums may be opened."""
        return tuple(
            ring for ring in range(len(self.session.rings)) if self.can_open(ring, survivors)
        )

    def _draw_circle(self, ring: int) -> _Circle:
        members = [client for client in self.session.rings[ring] if client in self.keys]
        neighbors = self.session.neighbors
        if neighbors is None or neighbors >= len(members) - 1:
            return _Circle(tuple(members), len(members))

        def rank(client: int) -> bytes:  # which nobody can choose, as it depends on all keys
            numbers = ring.to_bytes(8, "big") + client.to_bytes(8, "big")
            return hashlib.sha256(self.digest + numbers).digest()

        return _Circle(tuple(sorted(members, key=rank)), -(-neighbors // 2))


@dataclass(frozen=True)
class _Circle:
    """The clients of a ring in their order; neighbors are at most ``reach`` places apart."""

    order: tuple[int, ...]
    reach: int

    @property
    def is_complete(self) -> bool:
        return 2 * self.reach + 1 >= len(self.order)

    def list_neighbors(self, client: int) -> frozenset[int]:
        if client not in self._known:
            self._known[client] = self._find_neighbors(client)
        return self._known[client]

    def _find_neighbors(self, client: int) -> frozenset[int]:
        if client not in self._places:
            return frozenset()
        if self.is_complete:
            return frozenset(self.order) - {client}
        place, count = self._places[client], len(self.order)
        steps = (step for step in range(-self.reach, self.reach + 1) if step)
        return frozenset(self.order[(place + step) % count] for step in steps)

    @cached_property
    def _known(self) -> dict[int, frozenset[int]]:
        return {}

    def count_fewest(self, there: NDArray[np.bool_]) -> int:
        """The fewest clients that are there in a stretch of ``reach`` places."""
        wrapped = np.concatenate([there, there[: self.reach - 1]]).astype(int)
        return int(np.convolve(wrapped, np.ones(self.reach, int), mode="valid").min())

    @cached_property
    def _places(self) -> dict[int, int]:
        return {client: place for place, client in enumerate(self.order)}
