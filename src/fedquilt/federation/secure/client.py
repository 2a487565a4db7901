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
c^SK -> ``channel_key``; s^SK -> derived from ``mask_seed``; b_u -> own masks, derived from
``own_secret``; U_1 -> the roster; U_2 -> ``sharers``; U_3 -> ``survivors``.

Shares of an own mask go to neighbors in its ring, shares of the seed to all neighbors. Messages are
bytes without a header: both sides know from the roster what they hold.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedquilt.errors import ProtocolError
from fedquilt.federation.secure.integers import Integers, get_dtype
from fedquilt.federation.secure.keys import (
    TAG_BYTES,
    agree,
    decrypt,
    derive_key,
    encrypt,
    get_public_key,
    load_key,
    make_private_key,
)
from fedquilt.federation.secure.masks import add_mask, subtract_mask
from fedquilt.federation.secure.session import PublicKeys, Roster, Session
from fedquilt.federation.secure.shamir import SECRET_BYTES, SHARE_BYTES, split_secret

KEY = -1  # stands for the seed of a key where rings are numbers
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
        mask_seed: From which the private key for masks that it shares with others is derived.
        own_secret: From which its own masks are derived.
        next_step: What comes next.
        keys: The public keys of all clients, once they are known.
        own_shares: Its own shares of its secrets, once they are split.
        sharers: The clients that have shared their secrets, once they are known.
    """

    number: int
    session: Session
    channel_key: bytes = field(default_factory=make_private_key, repr=False)
    mask_seed: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)
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
        mask_key = derive_mask_key(self.session, self.number, self.mask_seed)
        return PublicKeys(get_public_key(self.channel_key), get_public_key(mask_key))

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
        shares = after._split_secrets(holders)
        after = replace(after, own_shares=shares.pop(self.number))
        return after, {holder: after._encrypt(holder, text) for holder, text in shares.items()}

    def _split_secrets(self, holders: Sequence[int]) -> dict[int, bytes]:
        """What each holder gets: a share of the seed, and of own masks of rings that both hold."""
        threshold = self.session.threshold
        pieces = {(KEY, h): s for h, s in _split(self.mask_seed, threshold, holders).items()}
        by_ring: dict[int, list[int]] = {}
        for holder in holders:
            for ring in self.roster.list_shared_rings(self.number, holder):
                by_ring.setdefault(ring, []).append(holder)
        for ring, some in by_ring.items():
            split = _split(self.derive_own_mask(ring), threshold, some)
            pieces |= {(ring, holder): share for holder, share in split.items()}
        names = {holder: list_shared(self.roster, self.number, holder) for holder in holders}
        return {h: b"".join(pieces[name, h] for name in names[h]) for h in holders}

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
        near = {other for ring in rings for other in self.roster.list_neighbors(self.number, ring)}
        common = {  # one agreement for each pair, whatever the number of rings
            other: agree(self._mask_key, self.keys[other].mask) for other in near & set(sharers)
        }
        return after, {ring: self._hide(ring, vectors[ring], common) for ring in rings}

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
            self, channel_key=b"", mask_seed=b"", own_secret=b"", own_shares=b"", next_step="done"
        )
        wanted = list_revealed(self.roster, self.number, self.sharers, alive)
        if missing := sorted(set(wanted) - set(encrypted) - {self.number}):
            raise ProtocolError(f"the shares of client {missing[0]} were not passed on")
        revealed = {}
        for other, names in wanted.items():
            shares = self._read_shares(other, encrypted)
            revealed[other] = b"".join(shares[name] for name in names)
        return after, revealed

    def derive_own_mask(self, ring: int) -> bytes:
        """The key of its own mask for a ring, which says nothing about those of other rings."""
        key = derive_key(self.own_secret, self.roster.digest, "own", self.number, ring)
        return key[:SECRET_BYTES]

    def to_json(self) -> str:
        """The client as text, with its secrets."""
        plain = asdict(self)
        plain["keys"] = [[c, k.channel.hex(), k.mask.hex()] for c, k in self.keys.items()]
        for name in ("channel_key", "mask_seed", "own_secret", "own_shares"):
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
        for name in ("channel_key", "mask_seed", "own_secret", "own_shares"):
            plain[name] = bytes.fromhex(plain[name])
        plain["sharers"] = tuple(plain["sharers"])
        return SecureClient(session=Session(**session), keys=keys, **plain)

    def _require(self, step: str) -> None:
        if self.next_step != step:
            raise ProtocolError(
                f"client {self.number} was asked to {step}, and its next step is {self.next_step}; "
                "every step is done once"
            )

    @cached_property
    def _mask_key(self) -> X25519PrivateKey:
        return load_key(derive_mask_key(self.session, self.number, self.mask_seed))

    @cached_property
    def _channel_key(self) -> X25519PrivateKey:
        return load_key(self.channel_key)

    def _hide(self, ring: int, vector: Integers, common: Mapping[int, bytes]) -> Integers:
        session, digest = self.session, self.roster.digest
        hidden: Integers = vector.astype(get_dtype(session.bits))  # a copy
        if vector.dtype != hidden.dtype or hidden.shape != (session.sizes[ring],):
            raise ProtocolError(
                f"ring {ring} has {session.sizes[ring]} integers of {session.bits} bits"
            )
        add_mask(hidden, derive_mask(self.derive_own_mask(ring), digest))
        for other in self.roster.list_neighbors(self.number, ring) & common.keys():
            key = derive_common_mask(common[other], self.roster, self.number, other, ring)
            (add_mask if other > self.number else subtract_mask)(hidden, key)
        return hidden

    def _encrypt(self, recipient: int, message: bytes) -> bytes:
        secret = agree(self._channel_key, self.keys[recipient].channel)
        key = derive_key(secret, self.roster.digest, "shares", self.number, recipient)
        return encrypt(key, message, self.roster.digest)

    def _read_shares(self, sender: int, encrypted: Mapping[int, bytes]) -> dict[int, bytes]:
        """The shares of another client's secrets that it has, by what they are of."""
        message = self.own_shares
        if sender != self.number:
            secret = agree(self._channel_key, self.keys[sender].channel)
            key = derive_key(secret, self.roster.digest, "shares", sender, self.number)
            message = decrypt(key, encrypted[sender], self.roster.digest)
        return split_shares(message, list_shared(self.roster, sender, self.number))


def _split(secret: bytes, threshold: int, holders: Sequence[int]) -> dict[int, bytes]:
    shares = split_secret(secret, threshold, [holder + 1 for holder in holders])
    return {point - 1: share for point, share in shares.items()}


def derive_mask_key(session: Session, client: int, seed: bytes) -> bytes:
    """The private key for masks that a client shares with others."""
    return derive_key(seed, bytes.fromhex(session.id), "mask key", client)


def derive_mask(own: bytes, digest: bytes) -> bytes:
    """The key that an own mask is expanded from."""
    return derive_key(own, digest, "own mask")


def derive_common_mask(common: bytes, roster: Roster, client: int, other: int, ring: int) -> bytes:
    """The key of the mask that two clients share in a ring, from what they have agreed on."""
    low, high = sorted((client, other))
    return derive_key(common, roster.digest, "common mask", low, high, ring)


def list_shared(roster: Roster, client: int, holder: int) -> list[int]:
    """What a holder gets shares of: a client's seed (``KEY``), and own masks by ring."""
    return [KEY, *roster.list_shared_rings(client, holder)]


def list_revealed(
    roster: Roster, client: int, sharers: Collection[int], survivors: Collection[int]
) -> dict[int, list[int]]:
    """Which of the shares that a client has are revealed, by the client whose secrets they are.

    These are of its seed (``KEY``), or of its own masks of rings that are opened: never of both,
    and of none where no ring is opened.
    """
    is_open = set(roster.list_open(survivors))
    wanted: dict[int, list[int]] = {}
    for other in roster.list_share_holders(client):
        if other not in sharers or is_open.isdisjoint(roster.session.list_rings(other)):
            continue
        shared = [ring for ring in roster.list_shared_rings(other, client) if ring in is_open]
        names = shared if other in survivors else [KEY]
        if names:
            wanted[other] = names
    return wanted


def split_shares(message: bytes, names: Sequence[int]) -> dict[int, bytes]:
    """The shares that a message holds, one behind the other, by what they are of."""
    if len(message) != len(names) * SHARE_BYTES:
        raise ProtocolError(f"a message holds {len(names)} shares, got {len(message)} bytes")
    return {
        name: message[place * SHARE_BYTES : (place + 1) * SHARE_BYTES]
        for place, name in enumerate(names)
    }


def join_messages(messages: Mapping[int, bytes]) -> bytes:
    """Messages by client as one, in the order of the clients."""
    return b"".join(messages[client] for client in sorted(messages))


def split_messages(data: bytes, sizes: Mapping[int, int]) -> dict[int, bytes]:
    """The messages that ``join_messages`` was given, of known sizes.

    Raises:
        ProtocolError: They have other sizes.
    """
    if len(data) != sum(sizes.values()):
        raise ProtocolError(f"a message has {sum(sizes.values())} bytes, got {len(data)}")
    messages, start = {}, 0
    for client in sorted(sizes):
        messages[client] = data[start : start + sizes[client]]
        start += sizes[client]
    return messages


def measure_shares(roster: Roster, client: int) -> dict[int, int]:
    """The sizes of the encrypted shares that a client sends, by recipient."""
    return {
        holder: measure_share(roster, client, holder)
        for holder in roster.list_share_holders(client)
        if holder != client
    }


def measure_received(
    roster: Roster, client: int, sharers: Collection[int], survivors: Collection[int]
) -> dict[int, int]:
    """The sizes of the encrypted shares that a client gets with the last request, by sender."""
    wanted = list_revealed(roster, client, sharers, survivors)
    return {other: measure_share(roster, other, client) for other in wanted if other != client}


def measure_revealed(
    roster: Roster, client: int, sharers: Collection[int], survivors: Collection[int]
) -> dict[int, int]:
    """The sizes of what a client reveals, by the client it is about."""
    wanted = list_revealed(roster, client, sharers, survivors)
    return {other: len(names) * SHARE_BYTES for other, names in wanted.items()}


def measure_share(roster: Roster, client: int, holder: int) -> int:
    """The size of the encrypted shares from one client to another."""
    return len(list_shared(roster, client, holder)) * SHARE_BYTES + TAG_BYTES
