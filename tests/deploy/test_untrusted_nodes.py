"""Nodes that send false information, false replies and false evaluations."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fedquilt.deploy import node_manager
from fedquilt.deploy.node_info import NodeInfo
from fedquilt.deploy.server_app import train_over_grid
from fedquilt.engines.flower import codec
from fedquilt.engines.flower.codec import ARRAYS, METRICS, SETTINGS, MessageHeader
from fedquilt.engines.local import LocalEngine
from fedquilt.errors import DataError, TrainingError, UpdateError
from fedquilt.federation.client import Failure
from fedquilt.federation.validation import MAX_REASON_LENGTH
from fedquilt.structure.budget import Budget
from fedquilt.structure.create import trace_structure
from fedquilt.training.evaluate import Evaluate
from fedquilt.training.serialization import to_plain

from .conftest import CLIENTS, Place
from .test_engine import FEDAVG, Meddler, _client, edited, records, same, with_array


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(node_manager, "POLL_INTERVAL", 0.01)


MUCH = 2**20  # bytes, beyond what any answer here may have


def reported(**changes: Any) -> Callable[[Message, Message], list[Message]]:
    """Replies with other metrics; None: without."""

    def change(_: Message, reply: Message) -> list[Message]:
        metrics = reply.content.metric_records[METRICS]
        for name, value in changes.items():
            metrics.pop(name, None)
            if value is not None:
                metrics[name] = value
        return [reply]

    return change


def with_record(name: str, record: Any) -> Callable[[Message, Message], list[Message]]:
    def change(_: Message, reply: Message) -> list[Message]:
        reply.content[name] = record
        return [reply]

    return change


def without(name: str) -> Callable[[Message, Message], list[Message]]:
    def change(_: Message, reply: Message) -> list[Message]:
        del reply.content[name]
        return [reply]

    return change


def of_type(dtype: str) -> Callable[[Message, Message], list[Message]]:
    """The first array says that it is of another type, in its header and beside it."""

    def change(_: Message, reply: Message) -> list[Message]:
        arrays = reply.content.array_records[ARRAYS]
        name = next(iter(arrays))
        arrays[name].dtype = dtype
        arrays[name].data = arrays[name].data.replace(b"<f4", dtype.encode()[:3], 1)
        return [reply]

    return change


REPLIES = {
    "an unknown type": of_type("foo"),
    "another type of four bytes": of_type("<i4"),
    "objects": of_type("|O8"),
    "a long setting": lambda m, r: edited(r, token="x" * MUCH),
    "a setting too much": lambda m, r: edited(r, more=b"x"),
    "long bytes in a setting too much": lambda m, r: edited(r, more=b"x" * MUCH),
    "a list of settings": lambda m, r: edited(r, run=[1] * MUCH),
    "a long reason": lambda m, r: [Message(codec.encode_error("no" * MUCH), reply_to=m)],
    "a record too much": with_record("more", ConfigRecord({"x": 1})),
    "an array record too much": with_record(
        "more", ArrayRecord({"x": Array(torch.zeros(MUCH // 4).numpy())})
    ),
    "no arrays": without(ARRAYS),
    "no metrics": without(METRICS),
    "no settings": without(SETTINGS),
    "a name of an array without a number": lambda m, r: named(r, "weight"),
    "a name of an array of the tenth subnet": lambda m, r: named(r, "9/weight"),
    "subnets that are text": lambda m, r: edited(r, subnets="whole"),
    "no subnets": lambda m, r: edited(r, subnets=b""),
    "a client that is no number": lambda m, r: edited(r, client="one"),
    "a client that is not finite": lambda m, r: edited(r, client=float("inf")),
    "weight 1e39": reported(weight=1e39),
    "weight -1": reported(weight=-1.0),
    "no weight": reported(weight=None),
    "a list of weights": reported(weight=[1.0, 2.0]),
    "no examples": reported(examples=None),
    "examples -5": reported(examples=-5.0),
    "examples NaN": reported(examples=float("nan")),
    "examples beyond those registered": reported(examples=1e6),
    "loss -1": reported(loss=-1.0),
    "a list of losses": reported(loss=[1.0] * 10),
    "metrics that nobody asked for": reported(bonus=1.0),
    "thousands of metrics": reported(**{f"m{i}": 0.0 for i in range(5000)}),
    "much of a metric": reported(loss=[1.0] * MUCH),
    "finite numbers that overflow": lambda m, r: with_array(r, lambda x: x * 0 + 3e38),
}


def named(reply: Message, name: str) -> list[Message]:
    arrays = reply.content.array_records[ARRAYS]
    arrays[name] = arrays.pop(next(iter(arrays)))
    return [reply]


class WithoutSecond(LocalEngine):
    """This machine's engine, but for client 1, which fails in the second round."""

    rounds = 0

    def run(self, tasks, **_):
        self.rounds += 1
        for result in super().run(tasks):
            fails = self.rounds == 2 and result.client == 1
            yield Failure(1, "it failed") if fails else result


@pytest.fixture(scope="module")
def without_second(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("expected")).local(make=WithoutSecond, **FEDAVG)


@pytest.mark.parametrize("lie", REPLIES)
def test_a_false_reply_is_that_clients_failure(place, lie, without_second):
    run = place.flower(Meddler(REPLIES[lie]), **FEDAVG)
    assert [record["num_clients"] for record in records(run)] == [3, 2, 3]
    (failure,) = records(run)[1]["failures"]
    assert failure["client"] == 1
    assert 0 < len(failure["reason"]) <= MAX_REASON_LENGTH
    assert same(run, without_second)
    assert run.scores == without_second.scores


@pytest.mark.parametrize("method", ["adds", "apfl", "stc"])
def test_a_reply_without_subnets_is_a_failure_where_clients_choose_them_too(place, method):
    """The client's own part of an answer is gone; nobody else's work is."""

    def change(_: Message, reply: Message) -> list[Message]:
        reply.content[ARRAYS] = ArrayRecord({})
        return edited(reply, subnets=b"")

    run = place.flower(
        Meddler(change), **{**FEDAVG, "method__name": method, "method__fraction": 1.0}
    )
    failures = [failure for record in records(run) for failure in record["failures"]]
    assert [failure["client"] for failure in failures] == [1]


TESTS = {
    "no examples": {"examples": 0.0},
    "NaN": {"examples": float("nan")},
    "missing": {"examples": None},
    "more hits than examples": {"hits:0": 1e9},
    "more examples than there are": {"examples": 1e9, "hits:0": 1e9},
    "half a hit": {"hits:0": 0.5},
    "a negative loss": {"loss:0": -4e27},
    "no hits": {"hits:0": None},
    "a list": {"hits:0": [1.0]},
}


class Untested(LocalEngine):
    """This machine's engine, but for client 1, which does not test."""

    def run(self, tasks, **_):
        for task, result in zip(tasks, super().run(tasks), strict=True):
            fails = isinstance(task.recipe, Evaluate) and task.client == 1
            yield Failure(1, "it failed") if fails else result


@pytest.fixture(scope="module")
def untested(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("untested")).local(make=Untested, **FEDAVG)


@pytest.mark.parametrize("lie", TESTS)
def test_a_false_evaluation_is_left_out(place, lie, untested):
    def meddle(message, answer):
        reply = answer(message)
        is_test = message.metadata.message_type == "evaluate" and _client(message) == 1
        return reported(**TESTS[lie])(message, reply) if is_test else [reply]

    run = place.flower(meddle, **FEDAVG)
    assert run.scores == untested.scores
    assert same(run, untested)
    assert (run.folder / "model" / "bundle.json").exists()


def plain(value: Any) -> str:
    return json.dumps(to_plain(value))


INFOS: dict[str, dict[str, Any]] = {
    "ten million classes": {"classes": 10**7},
    "twice the classes": {"classes": 20},
    "no classes": {"classes": 0},
    "classes that are text": {"classes": "ten"},
    "labels beyond the classes": {"labels": "[0, 1, 99]"},
    "labels of another kind": {"labels": '["a"]'},
    "nested labels": {"labels": "[" * 10**5},
    "a billion billion examples": {"examples": 10**18},
    "no examples": {"examples": 0},
    "minus five examples": {"examples": -5},
    "minus five tests": {"tests": -5},
    "a huge input": {"shape": "[100000, 100000, 100000]"},
    "an input of no size": {"shape": "[0, 8, 8]"},
    "another input": {"shape": "[3, 32, 32]"},
    "an input of many axes": {"shape": json.dumps([1] * 100)},
    "an unknown type": {"dtype": "foo"},
    "a quantised type": {"dtype": "qint8"},
    "a budget that is none": {"budget": "{}"},
    "a recipe for a budget": {
        "budget": '{"is": "fedquilt.training.statistics:Statistics", "batch_size": 1}'
    },
    "a budget that nothing meets": {"budget": plain(Budget(params=1))},
    "a budget of nothing": {"budget": plain(Budget(0.5)).replace("0.5", "0.0")},
    "a budget that is no number": {"budget": plain(Budget(params=1)).replace("1,", "NaN,", 2)},
    "a number below all": {"client": -1},
    "a number that is huge": {"client": 10**12},
    "a long group": {"group": "g" * 10**4},
    "much": {"group": "g" * 2**23},
    "a word too much": {"more": 1},
    "another client's number": {"client": 0},
}


@pytest.mark.parametrize("lie", INFOS)
def test_a_node_with_false_information_is_excluded(place, lie):
    """The others begin without it, once it is clear that nobody else comes."""

    def meddle(message, answer):
        reply = answer(message)
        is_query = message.metadata.message_type == "query"
        if is_query and message.metadata.dst_node_id == 101:
            return edited(reply, **INFOS[lie])
        return [reply]

    changes = {**FEDAVG, "rounds": 1, "method__name": "heterofl", "flower__wait": 0.01}
    run = place.flower(meddle, **changes)
    assert [client.id for client in run.setup.clients] == [0, 2]
    assert [record["num_clients"] for record in records(run)] == [2]


def test_if_clients_do_not_agree_nobody_decides(place):
    def meddle(message, answer):
        reply, node = answer(message), message.metadata.dst_node_id
        is_query = message.metadata.message_type == "query"
        return edited(reply, classes=10 + node % 100) if is_query else [reply]

    with pytest.raises(DataError, match=r"10 classes, most have|most have .*10 classes"):
        place.flower(meddle, **FEDAVG)


def test_the_classes_that_the_settings_name_are_all_that_there_are(place):
    def meddle(message, answer):
        reply, node = answer(message), message.metadata.dst_node_id
        is_query = message.metadata.message_type == "query"
        changes = {"classes": 9 + node % 100, "labels": "[0, 1]"}  # 9, 10, 11
        return edited(reply, **changes) if is_query else [reply]

    changes = {**FEDAVG, "rounds": 1, "flower__wait": 0.01}
    run = place.flower(meddle, **changes, model__num_classes=10)
    assert [client.id for client in run.setup.clients] == [0, 1]


def test_a_run_does_not_begin_without_half_of_its_clients(place):
    def meddle(message, answer):
        reply, node = answer(message), message.metadata.dst_node_id
        is_query = message.metadata.message_type == "query"
        return edited(reply, examples=0) if is_query and node > 100 else [reply]

    with pytest.raises(TrainingError, match=r"1 of 3 clients .* \(a client's examples are from 1"):
        place.flower(meddle, **FEDAVG, flower__wait=0.01)


class At:
    """Does something when the first round's last order is answered."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.then, self.count = then, 0

    def __call__(self, message, answer):
        replies = [answer(message)]
        self.count += message.metadata.message_type == "train"
        if self.count == CLIENTS:
            self.count += 1
            self.then()
        return replies


def impostor(grid, node: int, client: int) -> None:
    grid.contexts[node] = grid.contexts[100 + client]
    grid.keys[node] = b"another"


@pytest.mark.parametrize("keys", [True, False])
def test_a_client_is_the_first_node_that_said_so(place, keys):
    grid = place.grid(At(lambda: impostor(grid, 300, 1)), **FEDAVG)
    run = train_over_grid(grid, place.config("flower", **FEDAVG, flower__keys=keys))
    assert same(run, place.local(**FEDAVG))
    orders = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type != "query"]
    assert 300 not in orders


@pytest.mark.parametrize("keys", [True, False])
def test_nobody_stands_in_for_a_client_whose_key_is_known(place, keys):
    """Where keys do not last there is nothing else to know a node by."""
    grid = place.grid(At(lambda: grid.move(101, 300, key=b"another")), **FEDAVG)
    run = train_over_grid(grid, place.config("flower", **FEDAVG, flower__keys=keys))
    assert [r["num_clients"] for r in records(run)] == ([3, 2, 2] if keys else [3, 3, 3])
    assert same(run, place.local(**FEDAVG)) != keys


GOING_ON = {**FEDAVG, "run__checkpoint_every": 1, "flower__resume": True}


def resumed(place, change: Callable[[Any], None], **changes):
    starting = {**FEDAVG, "run__checkpoint_every": 1}

    def stop(message, answer):
        count[0] += message.metadata.message_type == "train"
        if count[0] > CLIENTS:
            raise KeyboardInterrupt
        return [answer(message)]

    count = [0]
    with pytest.raises(KeyboardInterrupt):
        place.flower(stop, **starting)
    grid = place.grid(**{**GOING_ON, **changes})
    change(grid)
    return train_over_grid(grid, place.config("flower", **{**GOING_ON, **changes}))


def test_a_run_goes_on_with_the_nodes_that_are_there(place):
    run = resumed(place, lambda grid: grid.contexts.pop(102), flower__nodes=2)
    assert [client.id for client in run.setup.clients] == [0, 1, 2]
    assert [record["num_clients"] for record in records(run)] == [3, 2, 2]
    assert not any(record["failures"] for record in records(run))


def test_a_run_goes_on_as_if_nothing_had_been_when_all_are_there(place):
    run = resumed(place, lambda grid: grid.move(101, 200))
    local = place.local(**FEDAVG)
    assert same(run, local)
    assert records(run) == records(local)


@pytest.mark.parametrize("keys", [True, False])
def test_keys_are_known_after_a_run_was_resumed(place, keys):
    changes = {"flower__nodes": 2, "flower__keys": keys, "flower__wait": 0.01}
    run = resumed(place, lambda grid: grid.move(101, 200, key=b"another"), **changes)
    assert [r["num_clients"] for r in records(run)] == ([3, 2, 2] if keys else [3, 3, 3])


def test_a_client_with_other_data_is_not_the_one_that_the_run_knows(place):
    """Budgets and numbers of examples change results: whoever has others takes no part."""

    def change(grid) -> None:
        grid.contexts[101].node_config["budget"] = 0.125

    run = resumed(place, change, flower__nodes=2, flower__wait=0.01)
    assert [record["num_clients"] for record in records(run)] == [3, 2, 2]


def test_a_stranger_does_not_join_a_run_that_was_resumed(place):
    def change(grid) -> None:
        grid.contexts[102].node_config["partition-id"] = 0
        grid.contexts[102].node_config["state"] = str(place.folder / "elsewhere")

    run = resumed(place, change, flower__nodes=2, flower__wait=0.01)
    assert [record["num_clients"] for record in records(run)] == [3, 2, 2]


WORDS = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.booleans(),
    st.lists(st.integers(0, 9), max_size=3),
)
INFO_NAMES = ("client", "examples", "labels", "budget", "group", "tests", "classes", "tokens")
NAMES = st.sampled_from(
    [*INFO_NAMES, "shape", "dtype", "own", "error", "run", "token", "saved_state"]
)


def outcome(read: Callable[[], Any]) -> Any:
    """What is read, or the sentence that refuses it; anything else is a mistake."""
    try:
        return read()
    except (TrainingError, UpdateError) as problem:
        return str(problem)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.dictionaries(NAMES, WORDS), st.booleans())
def test_information_of_any_content_is_read_or_rejected(words, is_changed):
    honest = {
        "client": 1,
        "examples": 9,
        "labels": "[0, 1]",
        "budget": plain(Budget(0.5)),
        "group": "",
        "tests": 2,
        "classes": 2,
        "tokens": 0,
        "shape": "[1, 8, 8]",
        "dtype": "float32",
        "own": True,
    }
    said = {**honest, **words} if is_changed else words
    info = outcome(lambda: NodeInfo.from_message(RecordDict({SETTINGS: ConfigRecord(said)})))
    if isinstance(info, str):
        assert 0 < len(info) <= MAX_REASON_LENGTH
    else:
        assert info.client.id >= 0
        assert info.example.numel() <= 10**8


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.dictionaries(NAMES | st.just("subnets"), WORDS),
    st.dictionaries(st.text(max_size=5), st.binary(max_size=200), max_size=2),
    st.dictionaries(st.text(max_size=5), st.floats() | st.integers(0, 9), max_size=3),
)
def test_a_reply_of_any_content_is_read_or_rejected(structure, words, arrays, metrics):
    sent = MessageHeader("run", "token", 0, 1, (), 0.0, "digest")
    honest = {"run": "run", "token": "token", "client": 1, "saved_state": False, "subnets": b""}
    content = RecordDict(
        {
            ARRAYS: ArrayRecord(
                {
                    name: Array("float32", (1,), "numpy.ndarray", data)
                    for name, data in arrays.items()
                }
            ),
            SETTINGS: ConfigRecord({**honest, **words}),
            METRICS: MetricRecord({"weight": 1.0, **metrics}),
        }
    )
    found = outcome(lambda: codec.decode_update(content, structure, sent, 1, MUCH))
    if isinstance(found, str):
        assert 0 < len(found) <= MAX_REASON_LENGTH
    else:
        assert found[0].client == 1


@pytest.fixture(scope="module")
def structure():
    return trace_structure(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.zeros(1, 3))
