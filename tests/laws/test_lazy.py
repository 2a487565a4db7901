"""Laws of clients that are made when they are asked for: they are the same as a list of them."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from fedquilt.data.client_sets import LazyData
from fedquilt.data.population import Population
from fedquilt.federation.chosen import ChosenSubnets
from fedquilt.federation.client import SERVER, Client
from fedquilt.federation.columns import (
    ClientNumbers,
    CodedColumn,
    ComputedColumn,
    LabelColumn,
    RaggedColumn,
)
from fedquilt.federation.registry import ClientRegistry
from fedquilt.federation.state import sample_cohort
from fedquilt.runs.policies import Cadence
from fedquilt.structure.budget import Budget
from fedquilt.structure.subnet import Subnet

RUN = ("apfl", "heterofl", "pfedme", "splitmix local")  # the others are compared in their plans


def make_lazy(people: Population) -> Population:
    """The same clients as columns, and their data as functions."""
    clients = tuple(people.clients)
    every = ClientNumbers(range(len(clients)))
    registry = ClientRegistry(
        range(len(clients)),
        np.array([client.num_examples for client in clients]),
        LabelColumn(RaggedColumn.of(np.array(client.labels) for client in clients)),
        CodedColumn.of(client.budget for client in clients),
        CodedColumn.repeat("", len(clients)),
        ComputedColumn(lambda row: clients[row].num_tests, len(clients)),
    )
    train, test, validation = people.train, people.test, people.validation
    return Population(
        registry,
        LazyData(train.__getitem__, every),
        LazyData(test.__getitem__, every, test[SERVER]),
        LazyData(validation.__getitem__, every),
    )


@pytest.fixture
def lazy_case(case):
    people = make_lazy(case.people)
    given = replace(case.given, clients=people.clients)
    return replace(
        case, people=people, given=given, setup=case.method.prepare_model(given), answers={}
    )


def test_lazy_clients_are_planned_for_as_listed_ones(case, lazy_case):
    method, (listed, lazy) = case.method, (case.setup, lazy_case.setup)
    assert list(lazy.clients) == list(listed.clients)
    assert method.sizes(lazy) == method.sizes(listed)
    assert method.exceeds_budgets(lazy) == method.exceeds_budgets(listed)
    states = [method.start(setup) for setup in (listed, lazy)]
    assert dict(states[0].chosen_subnets) == dict(states[1].chosen_subnets)
    for phases in zip(method.phases(listed), method.phases(lazy), strict=True):
        described = []
        for setup, state, phase in zip((listed, lazy), states, phases, strict=True):
            cohort = sample_cohort(setup.clients, phase, seed=3)
            tasks = method.plan(setup, replace(state, phase=phase.name), cohort)
            described.append([(t.client, t.subnets, t.recipe, t.seed) for t in tasks])
        assert described[0] == described[1]


def test_a_run_over_lazy_clients_has_the_bits_of_one_over_a_list_also_when_it_is_killed(
    case, lazy_case, request, tmp_path
):
    if request.node.callspec.params["case"] not in RUN:
        pytest.skip("its plans are compared")
    pace = Cadence(evaluate_every=2, checkpoint_every=1)
    for name in ("listed", "lazy"):
        (tmp_path / name).mkdir()
    with case.engine(folder=tmp_path / "listed" / "clients") as engine:
        expected, scores, events = case.run(engine, tmp_path / "listed", cadence=pace)
    stop_at = random.Random(0).randrange(len(events) // 3, 2 * len(events) // 3)

    class StopNow(KeyboardInterrupt):
        pass

    left = iter(range(stop_at))

    def stop(event) -> None:
        if next(left, None) is None:
            raise StopNow

    folder = tmp_path / "lazy"
    with lazy_case.engine(folder=folder / "clients") as engine, pytest.raises(StopNow):
        lazy_case.run(engine, folder, stop, pace)
    again = lazy_case.anew()
    with again.engine(folder=folder / "clients") as engine:
        state, found, _ = again.run(engine, folder, None, pace, resume=True)
    assert case.bits(state.params) == case.bits(expected.params)
    assert found == scores
    records = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("listed", "lazy")]
    assert records[0] == records[1]


def test_clients_of_a_registry_are_those_it_was_made_of():
    clients = [Client(3, 5, (1,), Budget(0.5), "a"), Client(7, 2, (0, 1), group="b", num_tests=4)]
    registry = ClientRegistry.of(clients)
    assert list(registry) == clients
    assert registry.by_id[7] == clients[1]
    assert 4 not in registry.by_id
    assert registry.label_set == {0, 1}
    assert list(registry.find_with(lambda budget: budget.width < 1)) == [3]
    assert [client.id for client in registry.select((7, 9))] == [7]


def test_chosen_subnets_are_the_same_after_they_are_written_and_read():
    whole, half, own = Subnet(), Subnet((("hidden", 2),)), Subnet((("hidden", 1),))
    by_budget = {Budget(): whole, Budget(0.5): half}
    for ids in (range(5), [2, 3, 5, 7, 11]):
        clients = [Client(id, 3, budget=Budget((1.0, 0.5)[i // 2 % 2])) for i, id in enumerate(ids)]
        registry = replace(ClientRegistry.of(clients), ids=ids)
        chosen = ChosenSubnets(registry, by_budget, {ids[1]: own})
        document = json.loads(json.dumps(chosen.encode()))
        assert dict(ChosenSubnets.decode(document)) == dict(chosen)
        assert list(dict(chosen).values()) == [whole, own, half, half, whole]
    many = ClientRegistry.of_numbers(range(10**6))
    assert len(json.dumps(ChosenSubnets(many, {Budget(): whole}).encode())) < 1000
