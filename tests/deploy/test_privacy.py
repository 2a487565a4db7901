"""Private runs over nodes: the bits of a local run, and nothing about data in any message."""

from __future__ import annotations

import stat

import pytest

from fedquilt.deploy.node_info import NodeInfo
from fedquilt.engines.flower.codec import METRICS

from .test_engine import records, same

PRIVATE = {
    "method__name": "heterofl",
    "method__fraction": 1.0,
    "model__name": "mlp",
    "model__hidden": "[16]",
    "model__width": None,
    "data__fraction": 0.05,
    "privacy__noise_multiplier": 0.5,
    "rounds": 2,
}


@pytest.fixture(autouse=True)
def _same_secret(monkeypatch):
    monkeypatch.setattr("fedquilt.runs.plan.make_secret", lambda: b"k" * 32)


@pytest.mark.parametrize("method", ["heterofl", "fjord"])
def test_a_private_run_on_flower_has_the_bits_of_a_local_one(place, method):
    changes = {**PRIVATE, "method__name": method}
    local, flower = place.local(**changes), place.flower(**changes)
    assert same(local, flower)
    assert local.scores == flower.scores
    assert records(local) == records(flower)


def test_messages_of_nodes_tell_nothing_of_their_data(place):
    infos, replies = [], []

    def listen(message, answer):
        reply = answer(message)
        if message.metadata.message_type == "query":
            infos.append(NodeInfo.from_message(reply.content))
        elif message.metadata.message_type == "train":
            replies.append(dict(reply.content.metric_records[METRICS]))
        return [reply]

    place.flower(listen, **PRIVATE)
    told = {(info.client.num_examples, info.client.labels, info.has_tests) for info in infos}
    assert told == {(1, (), False)}
    assert replies
    assert all(reply == {"weight": 1.0} for reply in replies)


def test_noise_of_nodes_comes_from_a_secret_that_only_they_have(place, tmp_path):
    changes = {**PRIVATE, "privacy__mechanism": "local"}
    local, flower = place.local(**changes), place.flower(**changes)
    assert not same(local, flower)
    secrets = list((tmp_path / "state").rglob("secret.key"))
    assert len({path.read_text() for path in secrets}) == len(secrets) > 1
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
