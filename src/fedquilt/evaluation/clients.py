"""Client by client: what each one trained and sent, and which part of the model each group saw.

Plans are pure functions of the state, and what a round learns does not change who is asked for
what, but for the subnets that clients choose. So a run's plans can be made again without training
anything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedquilt.evaluation.accuracy import cost_of
from fedquilt.federation.client import Task, seed_of
from fedquilt.federation.state import Setup, sample
from fedquilt.methods.method import Method
from fedquilt.structure.cut import cells, put, shapes, source_name
from fedquilt.structure.subnet import Subnet


@dataclass(frozen=True)
class ClientScore:
    """What a client's part in a run was, and what it got from it."""

    client: int
    group: str  # where its data come from; empty if nobody said
    budget: float  # the width that it can afford
    rounds: int  # in which it took part
    params_per_round: float  # sent up, and as many received
    bytes_per_round: float  # the same, with all that is no parameter
    macs: float  # forward, of one example, over all it trains
    accuracy: float | None  # of the largest model on its own test data


def history(
    setup: Setup, method: Method, chosen: Mapping[int, Subnet] | None = None
) -> Iterator[list[Task]]:
    """The tasks of every training round, as they were planned; with what clients had chosen."""
    state = method.start(setup)
    state = replace(state, chosen={**state.chosen, **(chosen or {})})
    for phase in method.phases(setup):
        for _ in range(0 if phase.is_closing else phase.rounds):
            state = replace(state, phase=phase.name)
            cohort = sample(setup.clients, phase, seed_of(setup.seed, state.round))
            yield method.plan(setup, state, cohort)
            state = replace(method.merge(setup, state, ()), round=state.round + 1)


def client_scores(
    setup: Setup,
    method: Method,
    accuracy: Mapping[int, float] | None = None,
    chosen: Mapping[int, Subnet] | None = None,
) -> list[ClientScore]:
    """One line per client; ``accuracy`` is each one's on its own test data, if known."""
    trained: dict[int, Counter[tuple[Subnet, ...]]] = {c.id: Counter() for c in setup.clients}
    for tasks in history(setup, method, chosen):
        for task in tasks:
            trained[task.client][task.subnets] += 1
    scores = []
    for client in setup.clients:
        rounds = sum(trained[client.id].values())
        sent, bytes_sent, macs = 0.0, 0.0, 0.0
        for subnets, count in trained[client.id].items():
            price = cost_of(setup, subnets)
            sent += count * sum(_num_params(setup, subnet) for subnet in subnets)
            bytes_sent += count * price.bytes
            macs += count * price.macs
        scores.append(
            ClientScore(
                client.id,
                client.group,
                client.budget.width,
                rounds,
                sent / max(rounds, 1),
                bytes_sent / max(rounds, 1),
                macs / max(rounds, 1),
                (accuracy or {}).get(client.id),
            )
        )
    return scores


def _num_params(setup: Setup, subnet: Subnet) -> int:
    weights = dict(setup.model.named_parameters())
    found = shapes(setup.structure, subnet)
    return sum(math.prod(shape) for name, shape in found.items() if name in weights)


def trained_shares(
    setup: Setup, method: Method, chosen: Mapping[int, Subnet] | None = None
) -> dict[str, float]:
    """For each group of clients, the share of all parameters that some of them ever trained."""
    groups = {client.id: client.group for client in setup.clients}
    seen: dict[str, set[Subnet]] = {group: set() for group in groups.values()}
    everything: set[Subnet] = set()
    for tasks in history(setup, method, chosen):
        for task in tasks:
            seen[groups[task.client]].update(task.subnets)
            everything.update(task.subnets)
    total = _covered(setup, everything)
    return {group: _covered(setup, subnets) / max(total, 1) for group, subnets in seen.items()}


def _covered(setup: Setup, subnets: set[Subnet]) -> int:
    """How many parameters are part of at least one of the subnets."""
    weights = dict(setup.model.named_parameters())
    masks: dict[str, Tensor] = {}
    for subnet in subnets:
        for name, where in cells(setup.structure, subnet).items():
            if name in weights:
                target = source_name(name, setup.structure, subnet)
                blank = torch.zeros(weights[name].shape, dtype=torch.bool)
                put(masks.setdefault(target, blank), where, True)
    return sum(int(mask.sum()) for mask in masks.values())
