"""What clients can afford is kept, or it is said that it is not: for every method."""

from __future__ import annotations

from dataclasses import replace

import fedquilt as fq
from fedquilt.evaluation.accuracy import compute_ensemble_cost
from fedquilt.federation.client import EVERYONE
from fedquilt.structure.budget import Budget

ROUNDS = 12  # in which dynamic tiers and widths are drawn


def planned(case):
    """Every client, and a task that it is given, in all phases."""
    state = case.start()
    for phase in case.method.phases(case.setup):
        for round in range(ROUNDS):
            now = replace(state, phase=phase.name, round=round)
            for task in case.method.plan(case.setup, now, phase.eligible(case.setup.clients)):
                yield from (
                    (c, task) for c in case.setup.clients if task.client in (c.id, EVERYONE)
                )


def is_beyond(case, client, task):
    """Whether one of the nets has more parameters than that of the client's budget."""
    own = case.method.ensemble(case.setup, case.start(), client.budget.width)
    allowed = compute_ensemble_cost(case.setup, own, memory=False).params
    nets = (
        compute_ensemble_cost(case.setup, [subnet], memory=False).params for subnet in task.subnets
    )
    return max(nets) > allowed


def test_whoever_trains_more_than_it_can_afford_is_told_of(case):
    said = case.method.exceeds_budgets(case.setup)
    if getattr(case.method, "conditional", False):  # its net cannot be cut: no smaller one exists
        beyond = any(c.budget.width < case.method.width for c in case.setup.clients)
    else:
        beyond = any(is_beyond(case, client, task) for client, task in planned(case))
    assert (said is not None) == beyond
    assert said is None or said.startswith(("ignores budgets: ", "exceeds budgets: "))


def test_nothing_is_said_where_everybody_can_afford_the_whole(case):
    whole = tuple(replace(c, budget=Budget()) for c in case.given.clients)
    setup = case.method.prepare_model(replace(case.given, clients=whole))
    assert case.method.exceeds_budgets(setup) is None


def test_usual_budgets_are_sizes_that_a_method_can_do(case):
    usual = case.method.default_budgets(case.given.model)
    assert max(usual) == 1
    assert list(usual) == sorted(usual, reverse=True)
    if isinstance(case.method, fq.NeFL):
        return  # which submodels there are depends on the net
    clients = tuple(
        replace(case.given.clients[0], id=i, budget=Budget(w)) for i, w in enumerate(usual)
    )
    setup = case.method.prepare_model(replace(case.given, clients=clients))
    phase = next(p for p in case.method.phases(setup) if p.name == "train")
    state = replace(case.method.start(setup), phase=phase.name, round=0)
    assert case.method.plan(setup, state, clients)
