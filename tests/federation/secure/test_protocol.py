"""Both sides of the protocol: sums are exact with every pattern of dropouts, and nothing else."""

from __future__ import annotations

import itertools
import secrets
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedquilt.errors import ProtocolError
from fedquilt.federation.secure.client import KEY, SecureClient, derive_common_mask, derive_mask
from fedquilt.federation.secure.integers import get_dtype
from fedquilt.federation.secure.keys import agree
from fedquilt.federation.secure.masks import subtract_mask
from fedquilt.federation.secure.server import SecureServer
from fedquilt.federation.secure.session import PublicKeys, Roster, check_floor
from fedquilt.federation.secure.shamir import SHARE_BYTES, recover_secret

from .protocol import NEVER, draw_vectors, make_session, run_session

NESTED = ((0, 1, 2, 3, 4, 5), (0, 1, 2, 3), (0, 1))  # three tiers of two clients


@st.composite
def sessions(draw):
    """A session with any holdings, and a step before which each client drops out."""
    count = draw(st.integers(2, 7))
    numbers = sorted(draw(st.sets(st.integers(0, 99), min_size=count, max_size=count)))
    some = st.sets(st.sampled_from(numbers), min_size=1).map(sorted)
    rings = draw(st.lists(some, min_size=1, max_size=4))
    threshold = draw(st.integers(2, count))
    neighbors = draw(st.none() | st.integers(threshold, count))
    session = make_session(rings, threshold, neighbors, bits=draw(st.sampled_from([32, 64])))
    steps = st.sampled_from([NEVER, NEVER, NEVER, 0, 1, 2, 3])
    return session, {client: draw(steps) for client in session.clients}


def plain_sum(session, vectors, ring, clients):
    total = np.zeros(session.sizes[ring], get_dtype(session.bits))
    for client in clients:
        total = total + vectors[client][ring]
    return total


@settings(max_examples=120, deadline=None)
@given(drawn=sessions())
def test_opened_sums_are_the_plain_sums_with_every_pattern_of_dropouts(drawn):
    session, drops = drawn
    vectors = draw_vectors(session)
    log = run_session(session, vectors, drops)
    opened = log.opened
    assert set(opened.sums) | set(opened.closed) == set(range(len(session.rings)))
    assert not set(opened.sums) & set(opened.closed)
    for ring, total in opened.sums.items():
        senders = [client for client in session.rings[ring] if client in log.hidden]
        assert list(opened.clients[ring]) == senders
        assert len(senders) >= session.threshold
        np.testing.assert_array_equal(total, plain_sum(session, vectors, ring, senders))


@settings(max_examples=60, deadline=None)
@given(drawn=sessions())
def test_a_ring_that_may_be_opened_is_opened_if_enough_clients_reveal(drawn):
    """With all as neighbors: down to the threshold, whoever it is that is left."""
    session, drops = drawn
    session = replace(session, neighbors=None)
    log = run_session(session, draw_vectors(session), drops)
    senders, sharers = set(log.hidden), set(log.server.sharers)
    for ring, holders in enumerate(map(set, session.rings)):
        mates = {  # who reveals a share of a client's seed: all that hold a ring together with it
            client: {
                other
                for both in map(set, session.rings)
                if client in both
                for other in both & set(log.revealed)
            }
            for client in (holders & sharers) - senders
        }
        enough = all(len(others) >= session.threshold for others in mates.values())
        enough &= len(holders & set(log.revealed)) >= session.threshold  # for own masks
        expected = len(holders & senders) >= session.threshold and enough
        assert (ring in log.opened.sums) == expected


def test_clients_that_drop_out_at_every_step_are_recovered_down_to_the_threshold():
    session = make_session([range(7)], threshold=3, sizes=[50])
    vectors = draw_vectors(session)
    log = run_session(session, vectors, {0: 0, 1: 1, 2: 2, 3: 3})
    expected = plain_sum(session, vectors, 0, [3, 4, 5, 6])
    np.testing.assert_array_equal(log.opened.sums[0], expected)
    lost = run_session(session, vectors, {0: 0, 1: 1, 2: 2, 3: 3, 4: 3})
    assert "masks of client 3 cannot be removed" in lost.opened.closed[0]


def test_rings_with_fewer_senders_than_the_threshold_stay_closed():
    session = make_session(NESTED, threshold=3, sizes=[40, 40, 40])
    vectors = draw_vectors(session)
    log = run_session(session, vectors, {2: 2})
    np.testing.assert_array_equal(
        log.opened.sums[0], plain_sum(session, vectors, 0, [0, 1, 3, 4, 5])
    )
    np.testing.assert_array_equal(log.opened.sums[1], plain_sum(session, vectors, 1, [0, 1, 3]))
    assert log.opened.closed == {2: "2 clients sent it, and 3 are needed"}


def test_own_masks_of_closed_rings_are_not_revealed():
    """All that everybody reveals does not remove the mask of a ring with too few senders."""
    session = make_session(NESTED, threshold=3, sizes=[40, 40, 4000])
    log = run_session(session, draw_vectors(session))
    shares = {  # of own masks of client 0, from those who hold the ring as well
        ring: {
            holder + 1: log.revealed[holder][0][SHARE_BYTES * ring :][:SHARE_BYTES]
            for holder in session.rings[ring]
        }
        for ring in (0, 1)
    }
    assert len(log.revealed[1][0]) == 2 * SHARE_BYTES  # of the third ring nobody has shares
    assert len(log.revealed[5][0]) == SHARE_BYTES
    known = [recover_secret(shares[ring], 3) for ring in (0, 1)]
    assert known == [log.clients[0].derive_own_mask(ring) for ring in (0, 1)]
    for own in known:  # neither opens the third ring
        guess = log.hidden[0][2].copy()
        subtract_mask(guess, derive_mask(own, log.server.roster.digest))
        assert is_uniform(guess)


def is_uniform(vector: np.ndarray) -> bool:
    """A chi-squared test on the values of all bytes; wrong once in a million."""
    counts = np.bincount(vector.view(np.uint8), minlength=256)
    return bool(stats.chisquare(counts).pvalue > 1e-6)


@pytest.mark.parametrize("bits", [32, 64])
def test_a_hidden_vector_is_uniform_whatever_it_hides(bits):
    session = make_session([range(4), range(3)], threshold=3, sizes=[20_000, 20_000], bits=bits)
    zeros = {
        client: {r: np.zeros(20_000, get_dtype(bits)) for r in session.list_rings(client)}
        for client in session.clients
    }
    log = run_session(session, zeros)
    assert not is_uniform(zeros[0][0])
    for hidden in log.hidden.values():
        for vector in hidden.values():
            assert is_uniform(vector)
            halves = np.concatenate([vector[0::2] + vector[1::2], vector[0::2] - vector[1::2]])
            assert is_uniform(halves)
    together = log.hidden[0][0] - log.hidden[1][0]
    assert is_uniform(together)


@pytest.mark.parametrize("neighbors", [None, 4])
def test_the_server_and_one_client_less_than_the_threshold_cannot_open(neighbors):
    """They know everything that they were sent, and their own keys; a vector stays uniform."""
    session = make_session([range(9)], threshold=4, neighbors=neighbors, sizes=[20_000])
    zeros = {client: {0: np.zeros(20_000, get_dtype(32))} for client in session.clients}
    log = run_session(session, zeros, dict.fromkeys(session.clients, 3))  # nobody reveals
    roster, target = log.server.roster, 0
    near = sorted(roster.list_neighbors(target, 0))
    bad = near[: session.threshold - 1]
    shares = {colluder + 1: read_share(log, colluder, target) for colluder in bad}
    for name in (KEY, 0):  # of the seed of its key, and of the own mask
        with pytest.raises(ValueError, match="4 shares give a secret, there are 3"):
            recover_secret({x: own[name] for x, own in shares.items()}, session.threshold)
    left = log.hidden[target][0].copy()
    for colluder in bad:  # masks that they share with the target
        key = common_mask(log, colluder, target)
        mask = np.zeros_like(left)
        subtract_mask(mask, key)
        left = left + mask if colluder > target else left - mask
    assert is_uniform(left)
    honest = [client for client in near if client not in bad]
    for client in honest:  # with the others' masks only its own one is left, which hides as well
        key = common_mask(log, client, target)
        mask = np.zeros_like(left)
        subtract_mask(mask, key)
        left = left + mask if client > target else left - mask
    assert is_uniform(left)
    subtract_mask(left, derive_mask(log.clients[target].derive_own_mask(0), roster.digest))
    assert not left.any()  # so these were all masks that it had


def common_mask(log, client, other):
    """The key of a mask in the first ring, as one of the two clients finds it."""
    common = agree(log.clients[client]._mask_key, log.server.roster.keys[other].mask)
    return derive_common_mask(common, log.server.roster, client, other, 0)


def read_share(log, colluder, target):
    encrypted = {target: log.server._encrypted[target][colluder]}
    return log.clients[colluder]._read_shares(target, encrypted)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_coalition_below_the_threshold_splits_the_clients_of_a_ring_that_may_be_opened(data):
    count = data.draw(st.integers(3, 9))
    threshold = data.draw(st.integers(2, 4))
    neighbors = data.draw(st.integers(threshold, max(threshold, count - 1)))
    session = make_session([range(count)], threshold, neighbors)
    keys = {c: PublicKeys(secrets.token_bytes(32), secrets.token_bytes(32)) for c in range(count)}
    roster = Roster(session, keys)
    survivors = data.draw(st.sets(st.sampled_from(range(count)), min_size=1))
    if not roster.can_open(0, survivors):
        return
    assert len(survivors) >= threshold
    for bad in itertools.combinations(sorted(survivors), threshold - 1):
        honest = survivors - set(bad)
        reached, todo = set(), [min(honest)]
        while todo:
            client = todo.pop()
            reached.add(client)
            todo += (roster.list_neighbors(client, 0) & honest) - reached
        assert reached == honest


def test_neighbors_are_mutual_and_as_many_as_asked_for():
    session = make_session([range(30), range(12), range(3)], threshold=3, neighbors=6)
    keys = {c: PublicKeys(secrets.token_bytes(32), secrets.token_bytes(32)) for c in range(30)}
    roster = Roster(session, keys)
    for ring, holders in enumerate(session.rings):
        for client in holders:
            near = roster.list_neighbors(client, ring)
            assert len(near) == min(6, len(holders) - 1)
            assert near <= set(holders) - {client}
            assert all(client in roster.list_neighbors(other, ring) for other in near)
    assert roster.can_open(0, range(30))
    assert not roster.can_open(0, [c for c in range(30) if c % 2])  # of half, some stand alone


@pytest.fixture
def log():
    session = make_session([range(4), range(2)], threshold=3)
    return run_session(session, draw_vectors(session), dict.fromkeys(range(4), 3))


def test_every_step_is_done_once(log):
    client = log.clients[0]
    with pytest.raises(ProtocolError, match="asked to share, and its next step is reveal"):
        client.share(log.server.roster.keys)
    with pytest.raises(ProtocolError, match="asked to mask, and its next step is reveal"):
        client.mask(log.server.sharers, draw_vectors(log.session)[0])
    after, _ = client.reveal(log.server.survivors, log.server.list_encrypted(0))
    with pytest.raises(ProtocolError, match="asked to reveal, and its next step is done"):
        after.reveal([0, 1, 2], log.server.list_encrypted(0))
    stored = after.to_json()
    for secret in (client.channel_key, client.mask_seed, client.own_secret, client.own_shares):
        assert secret.hex() in client.to_json()
        assert secret.hex() not in stored


def test_a_client_never_reveals_both_secrets_of_another(log):
    survivors, encrypted = log.server.survivors, log.server.list_encrypted(0)
    _, when_alive = log.clients[0].reveal(survivors, encrypted)
    _, when_lost = log.clients[0].reveal([0, 1, 2], encrypted)
    own = read_share(log, 0, 3)
    assert when_alive[3] == own[0]
    assert when_lost[3] == own[KEY]


def test_changed_or_replayed_shares_are_refused(log):
    encrypted = log.server.list_encrypted(0)
    changed = {**encrypted, 1: encrypted[1][:-1] + bytes([encrypted[1][-1] ^ 1])}
    with pytest.raises(ProtocolError, match="changed, or are of another round"):
        log.clients[0].reveal(log.server.survivors, changed)
    with pytest.raises(ProtocolError, match="changed, or are of another round"):
        log.clients[0].reveal(log.server.survivors, {**encrypted, 1: encrypted[2]})
    other = run_session(log.session, draw_vectors(log.session), dict.fromkeys(range(4), 3))
    with pytest.raises(ProtocolError, match="changed, or are of another round"):
        log.clients[0].reveal(log.server.survivors, other.server.list_encrypted(0))


def test_clients_refuse_lists_that_cannot_be(log):
    encrypted = log.server.list_encrypted(0)
    with pytest.raises(ProtocolError, match="those who sent vectors"):
        log.clients[0].reveal([1, 2, 3], encrypted)  # it has itself sent one
    with pytest.raises(ProtocolError, match="those who sent vectors"):
        log.clients[0].reveal([0, 1, 2, 9], encrypted)
    with pytest.raises(ProtocolError, match="shares of client 2 were not passed on"):
        log.clients[0].reveal([0, 1, 2, 3], {1: encrypted[1], 3: encrypted[3]})
    assert log.clients[0].reveal([0, 1], {})[1] == {}  # too few for any ring: nothing
    fresh = SecureClient(0, log.session)
    with pytest.raises(ProtocolError, match="other keys than its own"):
        fresh.share(log.server.roster.keys)
    keys = {**log.server.roster.keys, 0: fresh.public_keys}
    with pytest.raises(ProtocolError, match="are the same"):
        fresh.share({**keys, 2: keys[1]})
    with pytest.raises(ProtocolError, match="3 clients have to take part"):
        fresh.share({0: keys[0], 1: keys[1]})
    ready, _ = fresh.share(keys)
    vectors = draw_vectors(log.session)[0]
    with pytest.raises(ProtocolError, match="3 clients have to take part, there are 2"):
        ready.mask([0, 1], vectors)
    with pytest.raises(ProtocolError, match="which cannot be"):
        ready.mask([1, 2, 3], vectors)
    with pytest.raises(ProtocolError, match="holds the rings"):
        ready.mask([0, 1, 2, 3], {0: vectors[0]})
    with pytest.raises(ProtocolError, match="integers of 32 bits"):
        ready.mask([0, 1, 2, 3], {**vectors, 1: vectors[1].astype(np.uint64)})
    with pytest.raises(ProtocolError, match="not part of the session"):
        SecureClient(7, log.session)


def test_clients_refuse_sessions_that_hide_less_than_they_ask_for():
    session = make_session(((0, 1, 2, 3),), 3)
    check_floor(session, 3)
    with pytest.raises(ProtocolError, match="threshold of 4 or more, got 3"):
        check_floor(session, 4)
    with pytest.raises(ProtocolError, match=r"3 neighbors at least.*got 2"):
        replace(session, neighbors=2)


def test_the_server_refuses_messages_out_of_turn_twice_or_of_another_form(log):
    session, server = log.session, SecureServer(log.session)
    clients = {number: SecureClient(number, session) for number in range(4)}
    with pytest.raises(ProtocolError, match="not of 32 bytes"):
        server.add_keys(0, PublicKeys(b"short", bytes(32)))
    with pytest.raises(ProtocolError, match="no part of this step"):
        server.add_keys(9, clients[0].public_keys)
    for number, client in clients.items():
        server.add_keys(number, client.public_keys)
    with pytest.raises(ProtocolError, match="sent keys twice"):
        server.add_keys(0, clients[0].public_keys)
    shares = {}
    for number, client in clients.items():
        clients[number], shares[number] = client.share(server.roster.keys)
    with pytest.raises(ProtocolError, match="sent keys out of turn"):
        server.add_keys(0, clients[0].public_keys)
    with pytest.raises(ProtocolError, match="a share to each of its neighbors"):
        server.add_shares(0, {1: shares[0][1]})
    with pytest.raises(ProtocolError, match="a share to each of its neighbors"):
        server.add_shares(0, {**shares[0], 1: b"x"})
    for number in range(4):
        server.add_shares(number, shares[number])
    vectors = draw_vectors(session)
    _, hidden = clients[0].mask(server.sharers, vectors[0])
    for wrong in (
        {0: hidden[0]},
        {**hidden, 1: hidden[1][1:]},
        {**hidden, 1: hidden[1].view("i4")},
    ):
        with pytest.raises(ProtocolError, match="other vectors than the rings"):
            server.add_vectors(0, wrong)
    server.add_vectors(0, hidden)
    with pytest.raises(ProtocolError, match="sent vectors twice"):
        server.add_vectors(0, hidden)
    for number in (1, 2, 3):
        server.add_vectors(number, clients[number].mask(server.sharers, vectors[number])[1])
    assert server.survivors == (0, 1, 2, 3)
    with pytest.raises(ProtocolError, match="did not reveal what it was asked for"):
        server.add_secrets(0, {})
    with pytest.raises(ProtocolError, match="holds 1 shares, got 1 bytes"):
        server.add_secrets(0, dict.fromkeys(range(4), b"x"))


def test_a_wrong_share_of_a_key_is_noticed():
    session = make_session([range(4)], threshold=3)
    log = run_session(session, draw_vectors(session), {3: 2, 0: 3, 1: 3, 2: 3})
    for number in range(3):
        _, revealed = log.clients[number].reveal([0, 1, 2], log.server.list_encrypted(number))
        if number == 0:
            revealed[3] = bytes(SHARE_BYTES - 1) + b"\x07"
        server = log.server
        server._step = 3
        server.add_secrets(number, revealed)
    assert "client 3" in log.server.open_sums().closed[0]


def test_clients_that_were_told_different_things_share_no_keys():
    """A server that tells one client of another threshold does not get its masks removed."""
    session = make_session([range(3)], threshold=3)
    clients = {number: SecureClient(number, session) for number in range(3)}
    clients[2] = replace(clients[2], session=replace(session, threshold=2))
    keys = {number: client.public_keys for number, client in clients.items()}
    told = {number: client.share(keys) for number, client in clients.items()}
    ready, _ = told[0][0].mask([0, 1, 2], draw_vectors(session)[0])
    with pytest.raises(ProtocolError, match="changed, or are of another round"):
        ready.reveal([0, 1, 2], {1: told[1][1][0], 2: told[2][1][0]})
