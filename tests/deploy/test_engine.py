"""The same apps and messages as on Flower, in one process: the same bits, whatever goes wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from flwr.app import Array, Error, Message, RecordDict

from fedquilt.deploy import server_app
from fedquilt.deploy.client_app import make_client_app
from fedquilt.deploy.server_app import train_over_grid
from fedquilt.engines.flower.codec import ARRAYS, METRICS, SETTINGS
from fedquilt.engines.local import LocalEngine
from fedquilt.errors import TrainingError
from fedquilt.federation.client import Failure
from fedquilt.runs.accounting import count_subnet_bytes

from .conftest import CLIENTS, Place

METHODS = {
    "fedavg": {},
    "heterofl": {},
    "splitmix": {"method__base": 0.25, "method__stacked": False},
    "nefl": {},
    "apfl": {"data__budgets": "[{params = 2500}, {params = 1500}, {params = 900}]"},
    "adds": {"method__persistent": True},
    "lg-fedavg": {},
    "stc": {"method__sparsity_up": 0.1, "method__sparsity_down": 0.1},
}
FEDAVG = {
    "method__name": "fedavg",
    "model__name": "mlp",
    "model__hidden": "[16]",
    "model__width": None,
    "data__fraction": 0.05,
}
KEEPING = {**FEDAVG, "method__name": "stc", **METHODS["stc"]}  # its clients keep their residuals


def same(one, other) -> bool:
    a, b = one.state.params, other.state.params
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def records(run) -> list[dict]:
    """What a run has recorded about its rounds."""
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "num_clients" in record]


@pytest.mark.parametrize("method", METHODS)
def test_a_run_on_flower_has_the_bits_of_a_local_one(place, method):
    changes = {"method__name": method, **METHODS[method]}
    local, flower = place.local(**changes), place.flower(**changes)
    assert same(local, flower)
    assert local.scores == flower.scores
    assert local.state.chosen_subnets == flower.state.chosen_subnets
    assert records(local) == records(flower)


def test_transformed_images_give_the_bits_of_a_local_run_and_are_part_of_the_model(place):
    chain = '["Resize((7, 6))", "RandomCrop(5)", "Rotation(20)", "ColorJitter(0.3, 0.3)"]'
    changes = {**FEDAVG, "data__transforms": chain, "rounds": 2}
    local, flower = place.local(**changes), place.flower(**changes)
    assert same(local, flower)
    assert local.scores == flower.scores
    known = [(run.info.transforms, run.info.normalization) for run in (local, flower)]
    assert known[0] == known[1]
    assert known[0][0][-1] == "CenterCrop(size=5)"


SELECTING = {
    "method__name": "lg-fedavg",  # its clients keep their own layers
    "data__validation": 0.2,
    "run__evaluate_every": 1,
    "selection__keep": "best",
    "local_training__optimizer": "adam",
    "local_training__keep_optimizer": True,
    "local_training__lr": 0.01,
    "local_training__schedule": "milestones:2:300",
}


def test_adam_that_is_kept_and_selection_have_the_same_bits_on_flower(place, tmp_path):
    (tmp_path / "mine.py").write_text("def factor(i, n):\n    return 1 / (1 + i)\n")
    changes = {**SELECTING, "local_training__step_schedule": f"{tmp_path}/mine.py:factor"}
    local, flower = place.local(**changes), place.flower(**changes)
    assert same(local, flower)
    assert local.scores == flower.scores
    assert local.info.model_round == flower.info.model_round == 2


def test_a_node_runs_no_function_that_its_settings_do_not_name(place, tmp_path):
    (tmp_path / "mine.py").write_text("def factor(i, n):\n    return 1.0\n")
    theirs = {**FEDAVG, "local_training__step_schedule": f"{tmp_path}/mine.py:factor"}
    grid, config = place.grid(**FEDAVG), place.config("flower", **theirs)
    with pytest.raises(TrainingError, match=r"mine.py:factor' is code, and it is not in the setti"):
        train_over_grid(grid, config)


def test_a_new_process_can_handle_every_message(place):
    """A deployed client starts anew each time: what it keeps is on its disk."""

    def anew(message, answer):
        grid._app = make_client_app()
        return [answer(message)]

    grid = place.grid(anew, **KEEPING)
    assert same(place.local(**KEEPING), train_over_grid(grid, place.config("flower", **KEEPING)))


def test_a_run_that_was_interrupted_goes_on_from_its_checkpoint(place):
    changes = {**KEEPING, "run__checkpoint_every": 1}
    whole = place.local(**changes)
    orders = []

    def fail_late(message, answer):
        orders.append(message)
        if len(orders) == 3 * CLIENTS + 2:  # a query to each, and two rounds
            raise KeyboardInterrupt
        return [answer(message)]

    with pytest.raises(KeyboardInterrupt):
        place.flower(fail_late, **changes)
    done = len(list((place.folder / "flower" / "checkpoints").iterdir()))
    assert done >= 1
    again = place.flower(flower__resume=True, **changes)
    assert same(whole, again)
    assert records(whole) == records(again)


class Meddler:
    """Does something to the answer of client 1 in the second round, and to nothing else."""

    def __init__(self, change: Callable[[Message, Message], list[Message]]) -> None:
        self.change, self.rounds = change, 0

    def __call__(self, message, answer):
        reply = answer(message)
        if message.metadata.message_type == "train" and _client(message) == 1:
            self.rounds += 1
            if self.rounds == 2:
                return self.change(message, reply)
        return [reply]


def _client(message: Message) -> int:
    return message.content.config_records[SETTINGS]["client"]


def edited(reply: Message, **changes) -> list[Message]:
    """The reply with other settings."""
    for name, value in changes.items():
        reply.content.config_records[SETTINGS][name] = value
    return [reply]


def with_array(reply: Message, change: Callable[[torch.Tensor], torch.Tensor]) -> list[Message]:
    """The reply whose first array is another."""
    arrays = reply.content.array_records[ARRAYS]
    name = next(iter(arrays))
    arrays[name] = Array(change(torch.from_numpy(arrays[name].numpy().copy())).numpy())
    return [reply]


def huge(reply: Message) -> list[Message]:
    """An array that claims to be larger than memory."""
    arrays = reply.content.array_records[ARRAYS]
    name = next(iter(arrays))
    data = arrays[name].data.replace(b"'shape': (", b"'shape': (9999999999, ", 1)
    arrays[name].data = data
    return [reply]


def poisoned_metric(reply: Message) -> list[Message]:
    reply.content.metric_records[METRICS]["weight"] = float("nan")
    return [reply]


FAULTS = {
    "raises": lambda m, r: [Message(Error(2, "it raised"), reply_to=m)],
    "dies": lambda m, r: [Message(Error(8, "it stopped responding"), reply_to=m)],
    "never answers": lambda m, r: [],
    "NaN": lambda m, r: with_array(r, lambda x: x * float("nan")),
    "another shape": lambda m, r: with_array(r, lambda x: torch.cat([x, x])),
    "another type": lambda m, r: with_array(r, lambda x: x.double()),
    "another run": lambda m, r: edited(r, run="foreign"),
    "another round": lambda m, r: edited(r, token="00000000-3"),
    "another client": lambda m, r: edited(r, client=2),
    "a subnet that does not fit": lambda m, r: edited(r, subnets=b"\0\0\0\x03\x01\x02\x03"),
    "a subnet that is cut off": lambda m, r: edited(r, subnets=b"\0\0\xff\xff\0"),
    "a weight that is none": lambda m, r: poisoned_metric(r),
    "an array that claims too much": lambda m, r: huge(r),
    "too many bytes": lambda m, r: with_array(r, lambda x: torch.zeros(10**6)),
    "nothing": lambda m, r: [Message(RecordDict(), reply_to=m)],
}


class WithoutSecond(LocalEngine):
    """This machine's engine, but for client 1, which fails in the second round."""

    rounds = 0

    def run(self, tasks):
        self.rounds += 1
        for result in super().run(tasks):
            fails = self.rounds == 2 and result.client == 1
            yield Failure(1, "it failed") if fails else result


@pytest.fixture(scope="module")
def without_second(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("expected")).local(make=WithoutSecond, **FEDAVG)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_goes_wrong_with_one_client_is_its_failure_alone(place, fault, without_second):
    """The round counts without it, exactly as if it had failed on this machine."""
    meddler = Meddler(FAULTS[fault])
    run = place.flower(meddler, **FEDAVG, flower__timeout=1.0)
    assert [record["num_clients"] for record in records(run)] == [3, 2, 3]
    (failure,) = records(run)[1]["failures"]
    assert failure["client"] == 1
    assert failure["reason"]
    assert same(run, without_second)


class SilentAt:
    """Loses what some clients say in one round, the first so many times that it is asked."""

    def __init__(self, clients, round, times=1) -> None:
        self.clients, self.round, self.times, self.seen = clients, round, times, {}

    def __call__(self, message, answer):
        if message.metadata.message_type == "train":
            client = _client(message)
            self.seen[client] = self.seen.get(client, 0) + 1
            if client in self.clients and 0 <= self.seen[client] - self.round < self.times:
                return []
        return [answer(message)]


def test_a_round_with_too_few_replies_changes_nothing_and_is_repeated(place):
    """Also what clients keep is that of before."""
    changes = {**KEEPING, "flower__quorum": CLIENTS, "flower__timeout": 1.0}
    silent = SilentAt((1, 2), round=2)
    run = place.flower(silent, **changes)
    assert silent.seen == {0: 4, 1: 4, 2: 4}
    local = place.local(**KEEPING)
    assert same(run, local)
    assert records(run) == records(local)


def test_a_round_that_never_has_enough_ends_the_run_with_what_was_learned(place):
    changes = {**FEDAVG, "flower__quorum": 2, "flower__timeout": 0.2, "run__checkpoint_every": 0}
    with pytest.raises(TrainingError, match=r"1 of 2 .* round 2; client 1: .*did not reply"):
        place.flower(SilentAt((1, 2), round=2, times=9), **changes)
    again = place.flower(flower__resume=True, **changes)
    assert same(again, place.local(**FEDAVG))


def test_oversampled_clients_are_not_waited_for(place):
    changes = {**FEDAVG, "method__fraction": 0.6, "flower__oversample": 0.5, "flower__timeout": 60}
    run = place.flower(SilentAt((2,), round=1, times=9), **changes)
    assert [record["num_clients"] for record in records(run)] == [2, 2, 2]
    reasons = {f["reason"] for record in records(run) for f in record["failures"]}
    assert reasons == {"it was not waited for: enough others had answered"}


def test_a_second_reply_is_ignored(place):
    twice = Meddler(lambda m, r: [r, r])
    assert same(place.flower(twice, **FEDAVG), place.local(**FEDAVG))


def test_a_late_reply_to_an_earlier_message_is_rejected(place):
    """What came too late in one round is sent again in the next, before the right answer."""
    late = []

    def delay(message, answer):
        reply = answer(message)
        if message.metadata.message_type == "train" and _client(message) == 1:
            late.append(reply)
            if len(late) == 2:
                return []
            if len(late) == 3:
                old = Message(late[1].content, reply_to=message)  # in the guise of a new one
                return [old]
        return [reply]

    run = place.flower(delay, **FEDAVG, flower__timeout=1.0)
    assert [record["num_clients"] for record in records(run)] == [3, 2, 2]
    assert "another message" in records(run)[2]["failures"][0]["reason"]


def test_a_node_that_is_gone_is_missed_and_one_that_comes_back_is_found(place):
    """It may come back under another number: the client it is stays the same."""
    seen = []

    def restart(message, answer):
        seen.append(message)
        if message.metadata.message_type == "train" and len(seen) == 3 + CLIENTS:
            grid.move(101, 200)
        return [answer(message)]

    grid = place.grid(restart, **FEDAVG)
    run = train_over_grid(grid, place.config("flower", **FEDAVG))
    assert same(run, place.local(**FEDAVG))
    asked = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "query"]
    assert asked == [100, 101, 102, 200]


def test_a_message_has_one_record_of_each_kind_and_only_the_cells_of_the_subnet(place):
    grid = place.grid(method__name="heterofl")
    run = train_over_grid(grid, place.config("flower", method__name="heterofl"))
    sizes = {}
    for message in grid.sent:
        if message.metadata.message_type == "train":
            content = message.content
            assert len(content.array_records) == len(content.config_records) == 1
            assert len(content.metric_records) == 1
            arrays = content.array_records[ARRAYS].values()
            sizes.setdefault(_client(message), sum(a.numpy().nbytes for a in arrays))
    tasks = run.method.plan(
        run.setup, replace(run.state, round=0, phase="train"), run.setup.clients
    )
    assert sizes == {task.client: count_subnet_bytes(run.setup, *task.subnets) for task in tasks}


def test_bytes_on_the_wire_are_counted_and_hardly_more_than_the_subnets(place):
    changes = {**FEDAVG, "model__hidden": "[256, 256]"}
    run = place.flower(**changes)
    found = json.loads((run.folder / "traffic.json").read_text())
    up = sum(record["bytes_up"] for record in records(run))
    down = sum(record["bytes_down"] for record in records(run))
    evaluated = down // len(records(run))  # the model once more, to every client
    assert (found["tensors_up"], found["tensors_down"]) == (up, down + evaluated)
    assert found["num_messages"] == found["num_replies"] == CLIENTS * (len(records(run)) + 1)
    assert up < found["bytes_up"] < 1.02 * up
    assert found["tensors_down"] < found["bytes_down"] < 1.02 * found["tensors_down"]


def test_a_simulation_sends_a_window_of_messages_with_arrays_that_are_made_once(place, monkeypatch):
    """All messages of a simulation are in the memory of one process."""
    local = place.local(**FEDAVG)
    monkeypatch.setattr(server_app, "is_simulated", lambda grid: True)
    monkeypatch.setattr(server_app, "count_cores", lambda: 1)
    monkeypatch.setattr(server_app, "TASKS_PER_WORKER", 2)
    waiting = []

    def meddle(message: Message, answer: Callable[[Message], Message]) -> list[Message]:
        if message.metadata.message_type == "train":
            waiting.append(1 + len(grid._waiting))
        return [answer(message)]

    grid = place.grid(meddle, **FEDAVG)
    flower = train_over_grid(grid, place.config("flower", **FEDAVG))
    assert same(local, flower)
    assert max(waiting) == 2
    arrays = [
        next(iter(message.content.array_records[ARRAYS].values()))
        for message in grid.sent
        if message.metadata.message_type == "train" and message.content.array_records[ARRAYS]
    ]
    rounds = {hash(array.data) for array in arrays}
    assert len({id(array.data) for array in arrays}) == len(rounds) < len(arrays)
