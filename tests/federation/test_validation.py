"""Whatever a client sends costs at most its own update."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedquilt as fq
from fedquilt import training
from fedquilt.engines.local import LocalEngine
from fedquilt.federation.client import Failure, Task, Update
from fedquilt.federation.state import Setup, State
from fedquilt.federation.validation import MAX_EXAMPLES, MAX_REASON_LENGTH, validate_reply
from fedquilt.methods.method import Method
from fedquilt.runs.events import Evaluated, RoundDone
from fedquilt.runs.loop import TrainingLoop
from fedquilt.structure.cut import copy_subnet_tensors
from fedquilt.structure.subnet import Subnet
from fedquilt.training.local_sgd import LocalSGD

CLIENTS, EXAMPLES, TESTS, LIAR = 4, 6, 3, 2
OPTIMISER = fq.LocalTraining(lr=0.05, epochs=1, batch_size=3)


def population() -> fq.Population:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(EXAMPLES) % 3
    sets = [(torch.randn(EXAMPLES, 4, generator=generator), y) for _ in range(CLIENTS)]
    return fq.make_clients(sets, test=[(x[:TESTS], y[:TESTS]) for x, y in sets], budgets=[1, 0.5])


PEOPLE = population()
torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
STRUCTURE = fq.trace_structure(NET, torch.zeros(2, 4))
SETUP = Setup(NET, STRUCTURE, torch.zeros(2, 4), PEOPLE.clients, rounds=2, seed=3)
METHODS: dict[str, Method] = {
    "fedavg": fq.FedAvg(OPTIMISER, fraction=1.0),
    "heterofl": fq.HeteroFL(OPTIMISER, fraction=1.0),
    "adds": fq.ADDS(OPTIMISER, fraction=1.0),
    "apfl": fq.APFL(OPTIMISER, fraction=1.0, warm_up=0.5, ratio=0.3, nets=2),
    "stc": fq.STC(OPTIMISER, fraction=1.0, sparsity_up=0.1, sparsity_down=0.1),
    "splitmix": fq.SplitMix(OPTIMISER, base=0.5, sort_bases=True, stacked=False),
}
Change = Callable[[Update], "Update | Failure"]


class Lying:
    """This machine's engine, but for one client's answers, to which something is done."""

    def __init__(self, setup: Setup, change: Change) -> None:
        self._engine = LocalEngine(setup.model, setup.structure, PEOPLE.data, workers=0)
        self._change, self.num_lies = change, 0
        self.client_versions, self.restore = self._engine.client_versions, self._engine.restore
        self.remove_unused, self.close = self._engine.remove_unused, self._engine.close

    def run(self, tasks: Sequence[Task], **_: Any) -> Any:
        for task, result in zip(tasks, self._engine.run(tasks), strict=True):
            self.num_lies += task.client == LIAR
            yield self._change(result) if task.client == LIAR else result


def trained(name: str, change: Change) -> tuple[State, Sequence[fq.SizeScore], list[Any], int]:
    method, events = METHODS[name], []
    setup = method.prepare_model(SETUP)
    engine = Lying(setup, change)
    try:
        loop = TrainingLoop(
            setup, method, engine, PEOPLE.has_server_test, PEOPLE.testers, callbacks=[events.append]
        )
        return (*loop.run(), events, engine.num_lies)
    finally:
        engine.close()


def rounds_of(events: list[Any]) -> list[RoundDone]:
    return [event for event in events if isinstance(event, RoundDone)]


def lost(update: Update) -> Failure:
    return Failure(update.client, "lost")


@cache
def trained_without(name: str) -> tuple[State, Sequence[fq.SizeScore], list[Any], int]:
    return trained(name, lost)


def bits(params: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in params.items()}


NUMBERS = st.one_of(
    st.floats(),
    st.sampled_from([0.0, 1.0, -5.0, 1e39, float(EXAMPLES), EXAMPLES + 1.0, 10**400, 0.5]),
    st.sampled_from([None, "many", True, [1.0], {}]),
)
NAMES = st.sampled_from(["loss", "examples", "hits:0", "loss:0", "right", "tested", "x" * 10**6])
SUBNETS = st.sampled_from(
    [
        Subnet(),
        Subnet(excluded=("*",)),
        Subnet((("no such group", 1),)),
        Subnet().without_blocks("no such block"),
        Subnet().with_private("0", "*"),
        Subnet().with_private("stranger", "*"),
        STRUCTURE.subnet(0.5),
        STRUCTURE.subnet(0.5).excluding("[", "!*"),
        "no subnet",
        None,
    ]
)
TENSORS = st.sampled_from(
    [
        torch.full((6, 4), math.nan),
        torch.full((6, 4), 3e38),
        torch.zeros(6, 4, dtype=torch.float16),
        torch.zeros(10**4),
        torch.zeros(()),
        torch.zeros(8, dtype=torch.uint8),
        "no tensor",
        None,
    ]
)


@st.composite
def lies(draw: Any) -> Change:
    """Something that a client could say instead of the truth, or beside it."""
    what = draw(st.sets(st.sampled_from(["weight", "metrics", "subnets", "tensors", "client"])))
    weight, client = draw(NUMBERS), draw(st.integers(-3, CLIENTS + 1))
    metrics = draw(st.dictionaries(NAMES, NUMBERS, max_size=3))
    drop = draw(st.booleans())
    subnets = draw(st.lists(SUBNETS, max_size=3))
    names = draw(st.lists(st.sampled_from(["0.weight", "3.bias", "code", "stranger"]), max_size=2))
    tensors = dict.fromkeys(names, draw(TENSORS))

    def change(update: Update) -> Update:
        if "weight" in what:
            update = replace(update, weight=weight)
        if "metrics" in what:
            update = replace(update, metrics={**({} if drop else update.metrics), **metrics})
        if "subnets" in what:
            parts = (update.params or ({},))[0]
            update = replace(update, subnets=tuple(subnets), params=(parts,) * len(subnets))
        if "tensors" in what and update.params:
            parts = {} if drop else update.params[0]
            update = replace(update, params=({**parts, **tensors}, *update.params[1:]))
        return replace(update, client=client) if "client" in what else update

    return change


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(change=lies())
def test_no_lie_ends_a_run_or_changes_more_than_the_liars_own_update(name, change):
    state, scores, events, num_lies = trained(name, change)
    without = trained_without(name)
    rounds = rounds_of(events)
    (final,) = (event for event in events if isinstance(event, Evaluated) and event.is_final)
    assert all({f.client for f in done.failures} <= {LIAR} for done in rounds)
    num_failures = sum(len(done.failures) for done in rounds) + len(final.failures)
    if num_failures == num_lies:  # what is a lie in training may be none in the closing query
        assert bits(state.params) == bits(without[0].params)
    assert all(tensor.isfinite().all() for tensor in state.params.values())
    assert all(done.loss is None or 0 <= done.loss < 1e6 for done in rounds)
    for score in scores:
        found = (score.accuracy, score.user_accuracy, score.local_accuracy, score.personal_accuracy)
        assert all(value is None or 0 <= value <= 1 for value in found)
    assert {failure.client for failure in final.failures} <= {LIAR}


def answered(name: str, phase: str, **changes: Any) -> Update | Failure:
    """What becomes of an honest answer with something else in it."""
    method = METHODS[name]
    setup = method.prepare_model(SETUP)
    state = replace(method.start(setup), phase=phase)
    (task,) = method.plan(setup, state, [setup.clients[LIAR]])
    with LocalEngine(setup.model, setup.structure, PEOPLE.data, workers=0) as engine:
        (update,) = engine.run([task])
    made = {key: value(update) if callable(value) else value for key, value in changes.items()}
    bad = replace(update, **made)
    return method.aggregation(setup, state.phase).accept(setup, state, task, bad)


def metrics(**changes: Any) -> Callable[[Update], dict[str, float]]:
    return lambda update: {
        name: value for name, value in {**update.metrics, **changes}.items() if value is not None
    }


def twice(update: Update) -> tuple[Any, ...]:
    return update.subnets * 2


LIES = {
    "weight 1e+39; its task allows 6": ("fedavg", {"weight": 1e39}),
    "weight 6.5; its task allows 6": ("fedavg", {"weight": 6.5}),
    "weight 3; its task allows 1": ("heterofl", {"weight": 3.0}),
    "did not report 'examples'": ("fedavg", {"metrics": metrics(examples=None)}),
    "did not report 'loss'": ("fedavg", {"metrics": metrics(loss=None)}),
    "-5 as 'examples', which is a whole number from 0 to 6": (
        "fedavg",
        {"metrics": metrics(examples=-5)},
    ),
    "7 as 'examples'": ("fedavg", {"metrics": metrics(examples=7)}),
    "2.5 as 'examples'": ("fedavg", {"metrics": metrics(examples=2.5)}),
    "-1 as 'loss'": ("fedavg", {"metrics": metrics(loss=-1.0)}),
    "'bonus', which its task does not ask for": ("fedavg", {"metrics": metrics(bonus=1.0)}),
    "which is no number": ("fedavg", {"metrics": metrics(loss="low")}),
    "2 subnets, asked for were 1": (
        "fedavg",
        {"subnets": twice, "params": lambda update: update.params * 2},
    ),
    "0 subnets, asked for were 1": ("adds", {"subnets": (), "params": ()}),
    "another subnet than it was asked for": (
        "heterofl",
        {"subnets": (Subnet(),), "params": lambda _: (take_all(),)},
    ),
    "answered for by client 3": ("fedavg", {"client": 3}),
}


def take_all() -> dict[str, torch.Tensor]:
    return copy_subnet_tensors(dict(NET.state_dict()), STRUCTURE, Subnet())


@pytest.mark.parametrize("said", LIES)
def test_every_lie_is_refused_in_a_sentence(said):
    name, changes = LIES[said]
    assert isinstance(answered(name, "train"), Update)
    failure = answered(name, "train", **changes)
    assert isinstance(failure, Failure)
    assert failure.client == LIAR
    assert f"client {LIAR} " in failure.reason
    assert said in failure.reason


def test_an_architecture_beyond_the_clients_budget_is_refused():
    assert isinstance(answered("apfl", "search"), Update)
    failure = answered("apfl", "search", subnets=(Subnet().excluding("*"),))
    assert isinstance(failure, Failure)
    assert "beyond its Budget(width=0.5)" in failure.reason


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1e30])
def test_a_loss_that_is_no_number_is_left_out_of_the_mean_and_the_update_counts(loss):
    def diverged(update: Update) -> Update:
        return replace(update, metrics=metrics(loss=loss)(update) if update.subnets else {})

    state, _, events, _ = trained("fedavg", diverged)
    honest, _, others, _ = trained("fedavg", lambda update: update)
    assert bits(state.params) == bits(honest.params)
    for done, whole in zip(rounds_of(events), rounds_of(others), strict=True):
        assert done.num_clients == CLIENTS
        assert 0 < done.loss < 10
        assert done.loss != whole.loss


@pytest.mark.parametrize(
    "lie",
    [
        {"hits:0": 10.0**9},
        {"hits:0": TESTS + 1.0, "examples": TESTS + 1.0},
        {"examples": 0.0},
        {"examples": math.nan},
        {"examples": None},
        {"hits:0": -1.0},
        {"loss:0": -4e27},
    ],
)
def test_a_test_result_that_cannot_be_is_left_out(lie):
    def lying(update: Update) -> Update:
        return update if update.subnets else replace(update, metrics=metrics(**lie)(update))

    def missing(update: Update) -> Update | Failure:
        return update if update.subnets else Failure(LIAR, "it did not test")

    _, scores, events, _ = trained("fedavg", lying)
    assert scores == trained("fedavg", missing)[1]
    (final,) = (event for event in events if isinstance(event, Evaluated))
    assert [failure.client for failure in final.failures] == [LIAR]


def test_a_sentence_from_elsewhere_has_a_length_that_can_be_shown():
    task = Task(LIAR, (), {}, LocalSGD(OPTIMISER, lr=0.1), 0)
    failure = validate_reply(SETUP, task, Failure(LIAR, "no\n" * 10**6), {})
    assert isinstance(failure, Failure)
    assert len(failure.reason) <= MAX_REASON_LENGTH
    assert "\n" not in failure.reason


def test_a_recipe_that_says_nothing_weighs_at_most_the_clients_examples():
    class Silent:
        """A recipe of one's own."""

    task = Task(LIAR, (Subnet(),), {}, Silent(), 0)
    params = take_all()
    update = Update(LIAR, (Subnet(),), (params,), float(EXAMPLES), {"anything": -3.0})
    assert validate_reply(SETUP, task, update, params) is update
    for bad in (
        replace(update, weight=EXAMPLES + 1.0),
        replace(update, metrics={"loss": 1.0}),
        replace(update, metrics={"loss": 1.0, "examples": MAX_EXAMPLES + 1}),
    ):
        assert isinstance(validate_reply(SETUP, task, bad, params), Failure)


def test_every_recipe_of_the_library_says_what_its_answer_may_be():
    found = {}
    for module in pkgutil.iter_modules(training.__path__, f"{training.__name__}."):
        for name, kind in vars(importlib.import_module(module.name)).items():
            if isinstance(kind, type) and is_dataclass(kind) and hasattr(kind, "run"):
                found[name] = hasattr(kind, "reply_spec")
    assert found.keys() >= {"LocalSGD", "Evaluate", "QueryStatistics", "Search", "TernarySGD"}
    assert all(found.values()), found
