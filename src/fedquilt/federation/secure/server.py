"""The server's side of secure aggregation: collects messages, passes them on, opens sums.

The server is honest but curious: it follows the protocol, and learns what it can. A message that is
not what it should be raises a ProtocolError, and its sender counts as dropped out. Clients may drop
out before any step. Memory does not depend on the number of clients but for short secrets: hidden
vectors are added up as they come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedquilt.errors import ProtocolError
from fedquilt.federation.secure.client import (
    KEY,
    derive_common_mask,
    derive_mask,
    derive_mask_key,
    list_revealed,
    measure_shares,
    split_shares,
)
from fedquilt.federation.secure.integers import Integers, get_dtype
from fedquilt.federation.secure.keys import KEY_BYTES, agree, get_public_key, load_key
from fedquilt.federation.secure.masks import add_mask, subtract_mask
from fedquilt.federation.secure.session import PublicKeys, Roster, Session
from fedquilt.federation.secure.shamir import recover_secret

STEPS = ("keys", "shares", "vectors", "secrets")


@dataclass(frozen=True, eq=False)
class OpenedSums:
    """What the server has learned in a round.

    Args:
        sums: The sum over clients, for each ring that was opened.
        clients: The clients that are part of each ring's sum, opened or not.
        closed: Why the other rings were not opened.
    """

    sums: Mapping[int, Integers]
    clients: Mapping[int, tuple[int, ...]]
    closed: Mapping[int, str]


class SecureServer:
    """A server in one session.

    Call ``add_keys`` for every answer to the first request, then ``add_shares``, ``add_vectors``
    and ``add_secrets`` for those to the next ones, and ``open_sums`` in the end. What a client has
    to be told is in ``roster``, ``sharers``, and ``survivors`` with ``list_encrypted``. These are
    fixed when they are first read.

    Args:
        session: What the round is about.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._step = 0
        self._keys: dict[int, PublicKeys] = {}
        self._encrypted: dict[int, Mapping[int, bytes]] = {}  # by sender, by recipient
        self._totals: dict[int, Integers] = {}  # by ring
        self._sent: set[int] = set()
        self._common: dict[tuple[int, int], bytes] = {}  # what pairs have agreed on
        self._recovered: dict[int, X25519PrivateKey] = {}  # keys of clients that were lost
        self._revealed: dict[int, dict[tuple[int, int], bytes]] = {}  # (whose, of what), by sender

    def add_keys(self, client: int, keys: PublicKeys) -> None:
        """Takes the public keys of a client."""
        self._expect(0, client, self.session.clients, self._keys)
        if any(len(key) != KEY_BYTES for key in (keys.channel, keys.mask)):
            raise ProtocolError(f"client {client} sent keys that are not of {KEY_BYTES} bytes")
        self._keys[client] = keys

    @cached_property
    def roster(self) -> Roster:
        """The clients that have sent keys; who comes later is not part of the round."""
        self._advance(1)
        return Roster(self.session, self._keys)

    def add_shares(self, client: int, encrypted: Mapping[int, bytes]) -> None:
        """Takes the encrypted shares of a client's secrets, by recipient."""
        self._expect(1, client, self.roster.keys, self._encrypted)
        sizes = {recipient: len(data) for recipient, data in encrypted.items()}
        if sizes != measure_shares(self.roster, client):
            raise ProtocolError(f"client {client} did not send a share to each of its neighbors")
        self._encrypted[client] = dict(encrypted)

    @cached_property
    def sharers(self) -> tuple[int, ...]:
        """The clients that have shared their secrets."""
        _ = self.roster
        self._advance(2)
        return tuple(sorted(self._encrypted))

    def add_vectors(self, client: int, hidden: Mapping[int, Integers]) -> None:
        """Takes the hidden vectors of a client, by ring, and adds them up."""
        self._expect(2, client, self.sharers, self._sent)
        self.check_vectors(client, hidden)
        for ring, vector in hidden.items():
            total = self._totals.get(ring)
            if total is None:
                self._totals[ring] = vector.copy()
            else:
                np.add(total, vector, out=total)
        self._sent.add(client)

    def check_vectors(self, client: int, hidden: Mapping[int, Integers]) -> None:
        """Raises a ProtocolError unless there is a vector for each of the client's rings."""
        session = self.session
        shapes = {ring: vector.shape for ring, vector in hidden.items()}
        if shapes != {ring: (session.sizes[ring],) for ring in session.list_rings(client)} or any(
            vector.dtype != get_dtype(session.bits) for vector in hidden.values()
        ):
            raise ProtocolError(f"client {client} sent other vectors than the rings that it holds")

    @cached_property
    def survivors(self) -> tuple[int, ...]:
        """The clients that have sent their vectors."""
        _ = self.sharers
        self._advance(3)
        return tuple(sorted(self._sent))

    def list_encrypted(self, client: int) -> dict[int, bytes]:
        """The shares that were encrypted for a client, as far as it needs them now."""
        wanted = list_revealed(self.roster, client, self.sharers, self.survivors)
        return {other: self._encrypted[other][client] for other in wanted if other != client}

    def add_secrets(self, client: int, revealed: Mapping[int, bytes]) -> None:
        """Takes what a client reveals about others, by the client it is about."""
        self._expect(3, client, self.survivors, self._revealed)
        wanted = list_revealed(self.roster, client, self.sharers, self.survivors)
        if set(revealed) != set(wanted):
            raise ProtocolError(f"client {client} did not reveal what it was asked for")
        self._revealed[client] = {
            (other, name): share
            for other, names in wanted.items()
            for name, share in split_shares(revealed[other], names).items()
        }

    def open_sums(self) -> OpenedSums:
        """Opens the sum of every ring that may be opened, if enough clients have revealed."""
        _ = self.survivors
        self._advance(4)
        sums: dict[int, Integers] = {}
        closed: dict[int, str] = {}
        alive = set(self.survivors)
        for ring in range(len(self.session.rings)):
            try:
                if not self.roster.can_open(ring, alive):
                    raise ProtocolError(self._describe_closed(ring))
                sums[ring] = self._open(ring)
            except ProtocolError as problem:
                closed[ring] = str(problem)
        clients = {
            ring: tuple(client for client in holders if client in alive)
            for ring, holders in enumerate(self.session.rings)
        }
        return OpenedSums(sums, clients, closed)

    def _describe_closed(self, ring: int) -> str:
        count = len(set(self.session.rings[ring]) & set(self.survivors))
        if count < self.session.threshold:
            return f"{count} clients sent it, and {self.session.threshold} are needed"
        return "too many neighbors have dropped out"

    def _open(self, ring: int) -> Integers:
        """Removes all masks of a ring from its total."""
        masks = list(self._list_masks(ring))  # before the total is changed
        total = self._totals[ring].copy()
        for key, is_added in masks:
            (subtract_mask if is_added else add_mask)(total, key)
        return total

    def _list_masks(self, ring: int) -> Iterator[tuple[bytes, bool]]:
        """The keys of the masks in a total, and whether each was added or subtracted."""
        alive = set(self.session.rings[ring]) & set(self.survivors)
        for client in sorted(alive):
            yield derive_mask(self._recover(client, ring), self.roster.digest), True
        for lost in sorted(
            (set(self.sharers) - set(self.survivors)) & set(self.session.rings[ring])
        ):
            near = self.roster.list_neighbors(lost, ring) & alive
            for client in sorted(near):
                common = self._agree(lost, client)
                key = derive_common_mask(common, self.roster, lost, client, ring)
                yield key, lost > client  # as the client has done

    def _agree(self, lost: int, client: int) -> bytes:
        """What a client that was lost has agreed on with another; found once for all rings."""
        if (lost, client) not in self._common:
            own = self._recover_key(lost)
            self._common[lost, client] = agree(own, self.roster.keys[client].mask)
        return self._common[lost, client]

    def _recover_key(self, client: int) -> X25519PrivateKey:
        if client not in self._recovered:
            mask_key = derive_mask_key(self.session, client, self._recover(client, KEY))
            if get_public_key(mask_key) != self.roster.keys[client].mask:
                raise ProtocolError(f"the shares of client {client} do not give its key")
            self._recovered[client] = load_key(mask_key)
        return self._recovered[client]

    def _recover(self, client: int, name: int) -> bytes:
        """A secret of a client, from the shares that others have revealed."""
        shares = {
            holder + 1: self._revealed[holder][client, name]
            for holder in self.roster.list_share_holders(client)
            if (client, name) in self._revealed.get(holder, {})
        }
        try:
            return recover_secret(shares, self.session.threshold)
        except ValueError as problem:
            raise ProtocolError(f"masks of client {client} cannot be removed: {problem}") from None

    def _advance(self, step: int) -> None:
        self._step = max(self._step, step)

    def _expect(self, step: int, client: int, allowed: object, seen: object) -> None:
        if self._step != step:
            raise ProtocolError(f"client {client} sent {STEPS[step]} out of turn")
        if client not in allowed:  # type: ignore[operator]
            raise ProtocolError(f"client {client} sent {STEPS[step]}, and is no part of this step")
        if client in seen:  # type: ignore[operator]
            raise ProtocolError(f"client {client} sent {STEPS[step]} twice")
