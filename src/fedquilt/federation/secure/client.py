"""A client's side of secure aggregation: four steps, each done once.

    keys      two new key pairs; the public keys go to the server
    share     shares of its secrets, encrypted for other clients
    mask      its vectors, hidden by masks
    reveal    for each other client either shares of its own masks, or of its key; never both

In the third step client u sends, for each ring r that it holds,

    y_u = x_u + PRG(b_ur) + Σ_{v > u} PRG(s_uvr) - Σ_{v < u} PRG(s_uvr)    modulo 2^bits

over its neighbors v in that ring. Masks of two clients cancel in the sum. The server removes the
others: the own masks b_ur of those who have sent y_u, and the common masks s_uvr of those who have
not. What it needs for that, clients reveal in the last step, only for rings that may be opened.
Own masks differ from ring to ring, so a ring that is not opened stays hidden.

Bonawitz et al. "Practical Secure Aggregation for Privacy-Preserving Machine Learning." CCS 2017,
Fig. 4, for honest but curious servers. Departures: an own mask for every ring, and encrypted shares
reach their clients with the last request instead of the one before. Symbols there -> names here:
c^SK, s^SK -> the private keys ``channel_key``, ``mask_key``; b_u -> ``own_secret``, from which the
own masks are derived; U_1 -> the roster; U_2 -> ``sharers``; U_3 -> ``survivors``.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from fedquilt.errors import ProtocolError
from fedquilt.federation.secure.integers import Integers, get_dtype
from fedquilt.federation.secure.keys import (
    agree,
    decrypt,
    derive_key,
    encrypt,
    get_public_key,
    make_private_key,
)
from fedquilt.federation.secure.masks import add_mask, subtract_mask
from fedquilt.federation.secure.session import PublicKeys, Roster, Session
from fedquilt.federation.secure.shamir import SECRET_BYTES, SHARE_BYTES, split_secret

STEPS = ("share", "mask", "reveal", "done")  # what a client does next


@dataclass(frozen=True)
class SecureClient:
    """A client in one session, after one of its steps; each step returns the next one.

    It holds secrets. ``to_json`` is for a file that only the client can read, between two steps.
    Store it before a step's answer is sent: then no step is answered twice.

    Args:
        number: The client's number.
        session: What the round is about.
        channel_key: The private key for encrypted shares.
        mask_key: The private key for masks that it shares with others.
        own_secret: From which its own masks are derived.
        next_step: What comes next.
        keys: The public keys of all clients, once they are known.
        own_shares: Its own shares of its secrets, once they are split.
        sharers: The clients that have shared their secrets, once they are known.
    """

    number: int
    session: Session
    channel_key: bytes = field(default_factory=make_private_key, repr=False)
    mask_key: bytes = field(default_factory=make_private_key, repr=False)
    own_secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)
    next_step: str = "share"
    keys: Mapping[int, PublicKeys] = field(default_factory=dict, repr=False)
    own_shares: bytes = field(default=b"", repr=False)
    sharers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.number not in self.session.clients:
            raise ProtocolError(f"client {self.number} is not part of the session")

    @cached_property
    def public_keys(self) -> PublicKeys:
        """What the server is told in the first step."""
        return PublicKeys(get_public_key(self.channel_key), get_public_key(self.mask_key))

    @cached_property
    def roster(self) -> Roster:
        """The clients of the session and their keys."""
        return Roster(self.session, self.keys)

    def share(self, keys: Mapping[int, PublicKeys]) -> tuple[SecureClient, dict[int, bytes]]:
        """Splits its secrets, and encrypts the shares for each of its neighbors.

        Args:
            keys: The public keys of all clients that have sent them.

        Returns:
            The client before its next step, and the encrypted shares by recipient.
        """
        self._require("share")
        if keys.get(self.number) != self.public_keys:
            raise ProtocolError(f"client {self.number} was told other keys than its own")
        if len({key for pair in keys.values() for key in asdict(pair).values()}) < 2 * len(keys):
            raise ProtocolError("two public keys of a session are the same")
        after = replace(self, keys=dict(keys), next_step="mask")
        holders = after.roster.list_share_holders(self.number)
        threshold = self.session.threshold
        if len(holders) < threshold:
            raise ProtocolError(
                f"{threshold} clients have to take part, and client {self.number} has "
                f"{len(holders) - 1} neighbors"
            )
        rings = self.session.list_rings(self.number)
        own = [self.mask_key, *(after.derive_own_mask(ring) for ring in rings)]
        split = [split_secret(s, threshold, [h + 1 for h in holders]) for s in own]
        shares = {holder: b"".join(part[holder + 1] for part in split) for holder in holders}
        after = replace(after, own_shares=shares.pop(self.number))
        return after, {holder: after._encrypt(holder, text) for holder, text in shares.items()}

    def mask(
        self, sharers: Collection[int], vectors: Mapping[int, Integers]
    ) -> tuple[SecureClient, dict[int, Integers]]:
        """Hides its vectors by masks.

        Args:
            sharers: The clients that have shared their secrets.
            vectors: For each of its rings the integers to be summed.

        Returns:
            The client before its next step, and the hidden vectors by ring.
        """
        self._require("mask")
        unknown = sorted(set(sharers) - set(self.keys))
        if unknown or self.number not in sharers:
            raise ProtocolError(f"those who share secrets are {sorted(sharers)}, which cannot be")
        if len(sharers) < self.session.threshold:
            raise ProtocolError(
                f"{self.session.threshold} clients have to take part, there are {len(sharers)}"
            )
        rings = self.session.list_rings(self.number)
        if tuple(sorted(vectors)) != rings:
            raise ProtocolError(f"client {self.number} holds the rings {rings}")
        after = replace(self, sharers=tuple(sorted(sharers)), next_step="reveal")
        return after, {ring: self._hide(ring, vectors[ring], sharers) for ring in rings}

    def reveal(
        self, survivors: Collection[int], encrypted: Mapping[int, bytes]
    ) -> tuple[SecureClient, dict[int, bytes]]:
        """Reveals what the server needs to open the sums.

        Of a client that has sent its vectors these are shares of its own masks, of the rings that
        may be opened. Of one that has not, a share of its key.

        Args:
            survivors: The clients that have sent their vectors.
            encrypted: The shares that other clients have encrypted for this one.

        Returns:
            The client without its secrets, and what it reveals, by the client it is about.
        """
        self._require("reveal")
        alive = set(survivors)
        if not alive <= set(self.sharers) or self.number not in alive:
            raise ProtocolError(f"those who sent vectors are {sorted(alive)}, which cannot be")
        after = replace(
            self, channel_key=b"", mask_key=b"", own_secret=b"", own_shares=b"", next_step="done"
        )
        wanted = list_revealed(self.roster, self.number, self.sharers, alive)
        if missing := sorted(set(wanted) - set(encrypted) - {self.number}):
            raise ProtocolError(f"the shares of client {missing[0]} were not passed on")
        return after, {
            other: b"".join(self._read_shares(other, encrypted)[place] for place in places)
            for other, places in wanted.items()
        }

    def derive_own_mask(self, ring: int) -> bytes:
        """The key of its own mask for a ring, which says nothing about those of other rings."""
        return derive_key(self.own_secret, self.roster.digest, "own", self.number, ring)

    def to_json(self) -> str:
        """The client as text, with its secrets."""
        plain = asdict(self)
        plain["keys"] = [[c, k.channel.hex(), k.mask.hex()] for c, k in self.keys.items()]
        for name in ("channel_key", "mask_key", "own_secret", "own_shares"):
            plain[name] = plain[name].hex()
        return json.dumps(plain)

    @staticmethod
    def from_json(text: str) -> SecureClient:
        """The client that ``to_json`` wrote."""
        plain: dict[str, Any] = json.loads(text)
        session = plain.pop("session")
        session["rings"] = tuple(map(tuple, session["rings"]))
        session["sizes"] = tuple(session["sizes"])
        keys = {
            client: PublicKeys(bytes.fromhex(channel), bytes.fromhex(mask))
            for client, channel, mask in plain.pop("keys")
        }
        for name in ("channel_key", "mask_key", "own_secret", "own_shares"):
            plain[name] = bytes.fromhex(plain[name])
        plain["sharers"] = tuple(plain["sharers"])
        return SecureClient(session=Session(**session), keys=keys, **plain)

    def _require(self, step: str) -> None:
        if self.next_step != step:
            raise ProtocolError(
                f"client {self.number} was asked to {step}, and its next step is {self.next_step}; "
                "every step is done once"
            )

    def _hide(self, ring: int, vector: Integers, sharers: Collection[int]) -> Integers:
        session, digest = self.session, self.roster.digest
        hidden: Integers = vector.astype(get_dtype(session.bits))  # a copy
        if vector.dtype != hidden.dtype or hidden.shape != (session.sizes[ring],):
            raise ProtocolError(
                f"ring {ring} has {session.sizes[ring]} integers of {session.bits} bits"
            )
        add_mask(hidden, derive_mask(self.derive_own_mask(ring), digest))
        for other in self.roster.list_neighbors(self.number, ring) & set(sharers):
            key = derive_common_mask(self.roster, self.number, self.mask_key, other, ring)
            (add_mask if other > self.number else subtract_mask)(hidden, key)
        return hidden

    def _encrypt(self, recipient: int, message: bytes) -> bytes:
        secret = agree(self.channel_key, self.keys[recipient].channel)
        key = derive_key(secret, self.roster.digest, "shares", self.number, recipient)
        return encrypt(key, message, self.roster.digest)

    def _read_shares(self, sender: int, encrypted: Mapping[int, bytes]) -> list[bytes]:
        """The shares of another client's secrets: of its key, and of each of its own masks."""
        message = self.own_shares
        if sender != self.number:
            secret = agree(self.channel_key, self.keys[sender].channel)
            key = derive_key(secret, self.roster.digest, "shares", sender, self.number)
            message = decrypt(key, encrypted[sender], self.roster.digest)
        return split_shares(message, 1 + len(self.session.list_rings(sender)))


def derive_mask(own: bytes, digest: bytes) -> bytes:
    """The key that an own mask is expanded from."""
    return derive_key(own, digest, "own mask")


def derive_common_mask(
    roster: Roster, client: int, mask_key: bytes, other: int, ring: int
) -> bytes:
    """The key of the mask that two clients share in a ring, from the private key of one."""
    low, high = sorted((client, other))
    secret = agree(mask_key, roster.keys[other].mask)
    return derive_key(secret, roster.digest, "common mask", low, high, ring)


def list_revealed(
    roster: Roster, client: int, sharers: Collection[int], survivors: Collection[int]
) -> dict[int, list[int]]:
    """Which of the shares that a client has are revealed, by the client whose secrets they are.

    The share at place 0 is of the key, those at 1, 2, ... of its own masks for its rings. It is
    either the first of them or some of the others, and nothing where no ring is opened.
    """
    is_open = set(roster.list_open(survivors))
    wanted: dict[int, list[int]] = {}
    for other in roster.list_share_holders(client):
        rings = roster.session.list_rings(other)
        if other not in sharers or is_open.isdisjoint(rings):
            continue
        own = [place for place, ring in enumerate(rings, 1) if ring in is_open]
        wanted[other] = own if other in survivors else [0]
    return wanted


def split_shares(message: bytes, count: int) -> list[bytes]:
    """The shares that a message holds, one behind the other."""
    if len(message) != count * SHARE_BYTES:
        raise ProtocolError(f"a message holds {count} shares, got {len(message)} bytes")
    return [message[i * SHARE_BYTES : (i + 1) * SHARE_BYTES] for i in range(count)]
