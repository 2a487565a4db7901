"""Laws of private runs, for every method that can be private."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.federation.client import Task, Update
from fedquilt.federation.privacy.mechanism import MEMORY, find_public_rings
from fedquilt.federation.privacy.settings import hide_data
from fedquilt.federation.validation import get_reply_spec
from fedquilt.runs.privacy import PrivateRounds
from fedquilt.training.private import PrivateReply

CLIP = 0.05
REFUSED = {"adds", "apfl", "centralised", "depthfl feddyn", "stc"}
KEEPS_TENSORS = {"feduniform", "lg-fedavg", "splitmix local", "standalone"}


@pytest.fixture(scope="module")
def private(case):
    """The case as a private run has it; methods that cannot be private have a test of their own."""
    if case.method.reveals_data is not None or "*" in case.method.local_params:
        pytest.skip("cannot be private, or shares nothing")
    method = case.method.make_private()
    given = replace(
        case.given, clients=tuple(map(hide_data, case.given.clients)), sampling="poisson"
    )
    return replace(case, method=method, given=given, setup=method.prepare_model(given), answers={})


def make_rounds(case, secret: bytes = b"s" * 32, **settings) -> PrivateRounds:
    privacy = fq.Privacy(noise_multiplier=1.0, clip=CLIP, **settings)
    return PrivateRounds(privacy, case.setup, case.method, secret)


def start(case, rounds: PrivateRounds):
    memory = {"clip": CLIP, "noise_multiplier": 1.0}
    state = case.start()
    return replace(state, method_state={**state.method_state, MEMORY: memory})


def ask(case, tasks: list[Task]) -> list[Update]:
    return case.done(tasks)


def test_a_method_that_tells_of_data_says_so_and_cannot_be_private(case):
    reason = case.method.reveals_data
    if reason is None:
        assert case.method.make_private().reveals_data is None
        return
    with pytest.raises(ConfigError, match="cannot be private: ") as problem:
        case.method.make_private()
    assert reason in str(problem.value)


def test_a_reply_holds_what_is_accounted_for_and_nothing_else(private):
    rounds = make_rounds(private)
    state = start(private, rounds)
    tasks = rounds.plan(state, [client.id for client in private.setup.clients])
    others = [  # the same clients with other data, of other labels and in another number
        replace(task, client=(task.client + 1) % len(private.setup.clients)) for task in tasks
    ]
    replies = zip(ask(private, tasks), ask(private, others), strict=True)
    for task, other, (one, two) in zip(tasks, others, replies, strict=True):
        assert isinstance(task.recipe, PrivateReply)
        assert task.recipe.reply_spec(task, private.setup.clients[0]).metrics == {}
        assert get_reply_spec(task, private.setup.clients[0]).weight == 1.0
        for update in (one, two):
            assert update.subnets == task.subnets == other.subnets
            assert update.weight == 1.0
            assert update.metrics == {}
        received = [
            fq.copy_subnet_tensors(task.params, private.setup.structure, s) for s in task.subnets
        ]
        for old, part, same in zip(received, one.params, two.params, strict=True):
            assert old.keys() == part.keys() == same.keys()
            for name, tensor in part.items():
                if not tensor.is_floating_point():
                    assert torch.equal(tensor, old[name])


def test_one_client_moves_the_sum_by_at_most_the_clipping_norm(private):
    rounds = make_rounds(private)
    state = start(private, rounds)
    everyone = rounds._plan(state, np.arange(len(private.setup.clients)))
    updates = ask(private, [replace(t, recipe=PrivateReply(t.recipe)) for t in everyone])
    rings = find_public_rings(private.setup, rounds.count_holdings(private.setup, state))
    for settings in ({}, {"clipping": "rings"}):
        mean = make_rounds(private, **settings).make_pipeline(private.aggregation(state)).aggregator
        whole = mean.sum_changes(rings, state, updates, CLIP)
        for left_out in range(len(updates)):
            rest = [u for number, u in enumerate(updates) if number != left_out]
            without = mean.sum_changes(rings, state, rest, CLIP)
            moved = torch.cat([whole[ring] - without[ring] for ring in whole]).norm()
            assert moved <= CLIP * (1 + 1e-9)


def test_what_a_client_gets_does_not_depend_on_who_else_takes_part(private):
    seen: dict[int, tuple] = {}
    for number in range(12):
        rounds = make_rounds(private, secret=bytes([number]) * 32)
        for task in rounds.plan(start(private, rounds), range(5)):
            assert seen.setdefault(task.client, task.subnets) == task.subnets
    assert len(seen) > 1


def test_holdings_are_those_of_all_clients_and_follow_from_budgets_where_a_method_says_so(private):
    """A plan that depends on who takes part, or on more than the budget, is one for everyone."""
    method, setup = private.method, private.setup
    for round in range(3):
        state = replace(start(private, make_rounds(private)), round=round)
        planned = replace(state, phase=method.phases(setup)[0].name)
        everyone = method.plan(setup, planned, setup.registry)
        held = Counter(tuple(task.subnets) for task in everyone)
        assert make_rounds(private).count_holdings(setup, state) == held
        if method.plans_by_budget:
            for client, task in zip(setup.registry, everyone, strict=True):
                (alone,) = method.plan(setup, planned, [client])
                assert alone.subnets == task.subnets
                assert alone.seed == task.seed


def test_methods_with_tensors_on_clients_are_refused_and_others_start(case, request):
    name = request.node.callspec.params["case"]
    if name.split()[0] in REFUSED or name in REFUSED:
        assert case.method.reveals_data is not None
        return
    method = case.method.make_private()
    given = replace(case.given, clients=tuple(map(hide_data, case.given.clients)))
    mine = replace(case, method=method, given=given, setup=method.prepare_model(given))
    rounds = make_rounds(mine)
    if name in KEEPS_TENSORS:
        with pytest.raises(ConfigError, match=r"on its clients|nothing to make private"):
            rounds.start(method.start(mine.setup))
    else:
        state = rounds.start(method.start(mine.setup))
        assert state.method_state[MEMORY]["noise_multiplier"] == 1.0
        assert not rounds.phase.is_closing
