"""Secure sums over Flower's messages: the same bits as locally, and messages that were changed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flwr.app import Array

from fedquilt.deploy import node_manager
from fedquilt.deploy.client_app import make_client_app
from fedquilt.deploy.node_config import find_secure_threshold
from fedquilt.deploy.server_app import train_over_grid
from fedquilt.engines.flower.codec import ARRAYS, SETTINGS
from fedquilt.errors import ConfigError

from .conftest import CLIENTS
from .test_engine import _client, records, same

SECURE = {
    "method__name": "fedavg",
    "model__name": "mlp",
    "model__hidden": "[16]",
    "model__width": None,
    "data__fraction": 0.05,
    "rounds": 2,
    "secure_aggregation__threshold": 2,
}
STEPS = ("StartSession", "ShareSecrets", "MaskedReply", "RevealSecrets")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(node_manager, "POLL_INTERVAL", 0.01)


def step_of(message) -> str:
    """The recipe of a task, without its module; empty for a query."""
    settings = message.content.config_records[SETTINGS]
    return json.loads(settings["recipe"])["is"].rpartition(":")[2] if "recipe" in settings else ""


def test_a_secure_run_on_flower_has_the_bits_of_a_local_one(place):
    """Every message is handled by a new process, as in a deployment."""
    seen = []

    def anew(message, answer):
        seen.append(step_of(message))
        grid._app = make_client_app()
        return [answer(message)]

    once = {**SECURE, "rounds": 1}
    local = place.local(**once)
    grid = place.grid(anew, **once)
    flower = train_over_grid(grid, place.config("flower", **once))
    assert same(local, flower)
    assert records(local) == records(flower)
    assert records(local)[0]["secure"]["threshold"] == 2
    assert [seen.count(step) for step in STEPS] == [CLIENTS] * 4
    stored = [path for path in (place.folder / "state").rglob("secrets/*.json")]
    assert len(stored) == CLIENTS
    assert all(json.loads(path.read_text())["mask_seed"] == "" for path in stored)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", ["lost", "changed", "twice"])
def test_messages_that_are_lost_changed_or_repeated_cost_one_client_at_most(place, step, kind):
    """What client 1 does in one step of the first round; the second round is as ever."""
    done = []

    def meddle(message, answer):
        if step_of(message) != step or _client(message) != 1 or done:
            return [answer(message)]
        done.append(step)
        reply = answer(message)
        if kind == "twice":  # the server's message comes again: no step is answered twice
            settings = answer(message).content.config_records[SETTINGS]
            expected = "start a session twice" if step == STEPS[0] else "its next step is"
            assert expected in str(settings.get("error"))
        if kind == "lost":
            reply.content.config_records[SETTINGS]["token"] = "another"
        if kind == "changed":
            arrays = reply.content.array_records[ARRAYS]
            name = sorted(arrays)[-1]
            values = arrays[name].numpy()
            arrays[name] = Array(np.zeros_like(values)[..., :-1])
        return [reply]

    run = place.flower(meddle, **SECURE)
    first, second = records(run)
    is_lost = kind != "twice" and step != "RevealSecrets"
    assert [f["client"] for f in first["failures"]] == ([1] if is_lost else [])
    assert not first["secure"]["closed"]
    assert not second["failures"]


def test_a_node_with_a_threshold_of_its_own_sends_masked_updates_only(place):
    """Client 1 asks for more than the server gives; in a plain run it does nothing at all."""
    nodes = {100 + i: {"partition-id": i} for i in range(CLIENTS)}
    nodes[101]["secure-threshold"] = 3
    replies = []

    def listen(message, answer):
        reply = answer(message)
        if message.metadata.message_type != "query" and _client(message) == 1:
            replies.append((step_of(message), reply.content))
        return [reply]

    def train(name, **changes):
        replies.clear()
        grid = place.grid(listen, name, nodes, **changes)
        return train_over_grid(grid, place.config(name, **changes))

    once = {**SECURE, "rounds": 1}
    low = train("low", **once)
    (failure,) = records(low)[0]["failures"]
    assert failure["client"] == 1
    assert "threshold of 3 or more, got 2" in failure["reason"]
    train("high", **{**once, "secure_aggregation__threshold": 3})
    assert [step for step, _ in replies] == list(STEPS)
    plain = train("plain", **{**once, "secure_aggregation__threshold": None})
    (failure,) = records(plain)[0]["failures"]
    assert "sends masked updates only (secure-threshold=3)" in failure["reason"]
    assert replies
    for _, reply in replies:
        assert not any([*reply.array_records.values(), *reply.metric_records.values()])


@pytest.mark.parametrize("value", [1, "many", True])
def test_the_threshold_of_a_node_is_a_number_of_clients(value):
    with pytest.raises(ConfigError, match="2 or more"):
        find_secure_threshold({"secure-threshold": value})


@pytest.mark.parametrize("mechanism", ["central", "local"])
def test_a_private_secure_run_has_the_same_bits_on_flower_and_when_it_goes_on(
    place, monkeypatch, mechanism
):
    """Secrets are the same in all runs, and nodes have none of their own."""
    monkeypatch.setattr("fedquilt.runs.plan.make_secret", lambda: b"k" * 32)
    monkeypatch.setattr("fedquilt.deploy.client_app.read_or_make_secret", lambda path: b"")
    changes = {
        **SECURE,
        "method__fraction": 1.0,
        "sampling": "fixed",
        "privacy__noise_multiplier": 0.3,
        "privacy__mechanism": mechanism,
        "run__checkpoint_every": 1,
    }
    whole = place.local(**changes)
    seen = []

    def fail_late(message, answer):
        seen.append(step_of(message))
        if seen.count("MaskedReply") == CLIENTS + 2:  # in the second round
            raise KeyboardInterrupt
        return [answer(message)]

    with pytest.raises(KeyboardInterrupt):
        place.flower(fail_late, **changes)
    again = place.flower(flower__resume=True, **changes)
    assert same(whole, again)
    assert records(whole) == records(again)


def test_the_settings_name_what_is_missing(place):
    with pytest.raises(ConfigError, match="needs a threshold"):
        place.local(**{**SECURE, "secure_aggregation__threshold": None}, secure_aggregation__clip=2)
