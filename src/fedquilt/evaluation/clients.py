"""Client by client: what each one trained and sent, and which part of the model each group saw.

Plans are pure functions of the state, and what a round learns does not change who is asked for
what, but for the subnets that clients choose. So a run's plans can be made again without training
anything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedquilt.data import ClientData
from fedquilt.evaluation.accuracy import cost_of
from fedquilt.federation.client import EVERYONE, Task, seed_of
from fedquilt.federation.state import Setup, sample
from fedquilt.methods.method import Method
from fedquilt.structure.cut import cells, put, shapes, source_name
from fedquilt.structure.subnet import Subnet
from fedquilt.training.sampling import divergence

_Exchange = tuple[
    tuple[Subnet, ...], tuple[Subnet, ...]
]  # what a client was sent, and what it sent


@dataclass(frozen=True)
class ClientScore:
    """What a client's part in a run was, and what it got from it."""

    client: int
    group: str  # where its data come from; empty if nobody said
    budget: float  # the width that it can afford
    rounds: int  # in which it took part
    params_per_round: float  # sent up
    bytes_per_round: float  # the same, with all that is no parameter; as planned, before any code
    params_received: float  # in a round
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
    """One line per client; ``accuracy`` is each one's on its own test data, if known.

    In the last phase a client that chose a net sends that net, whatever it was sent: which others
    it chose in earlier rounds is not known any more.
    """
    own = chosen or {}
    *early, _ = (phase.rounds for phase in method.phases(setup) if not phase.is_closing)
    done: dict[int, Counter[_Exchange]] = {c.id: Counter() for c in setup.clients}
    for round, tasks in enumerate(history(setup, method, chosen)):
        for task in tasks:
            if task.client != EVERYONE:  # where data are gathered, no client trains
                is_own = task.client in own and round >= sum(early)
                sent = (own[task.client],) if is_own else task.subnets
                done[task.client][task.subnets, sent] += 1
    scores = []
    for client in setup.clients:
        rounds = sum(done[client.id].values())
        num_sent, bytes_sent, num_received, macs = 0.0, 0.0, 0.0, 0.0
        for (received, sent), count in done[client.id].items():
            num_sent += count * _num_params(setup, sent)
            bytes_sent += count * cost_of(setup, sent, memory=False).bytes
            num_received += count * _num_params(setup, received)
            macs += count * cost_of(setup, received, memory=False).macs
        scores.append(
            ClientScore(
                client.id,
                client.group,
                client.budget.width,
                rounds,
                num_sent / max(rounds, 1),
                bytes_sent / max(rounds, 1),
                num_received / max(rounds, 1),
                macs / max(rounds, 1),
                (accuracy or {}).get(client.id),
            )
        )
    return scores


def _num_params(setup: Setup, subnets: Sequence[Subnet]) -> int:
    weights = dict(setup.model.named_parameters())
    found = [pair for subnet in subnets for pair in shapes(setup.structure, subnet).items()]
    return sum(math.prod(shape) for name, shape in found if name in weights)


def label_divergences(setup: Setup, data: Mapping[int, ClientData]) -> dict[int, float]:
    """How far the labels of each client are from uniform, in [0, 1] (ADDS, Sec. 4.1.4)."""
    classes = setup.structure.groups.get(setup.structure.classes or "")
    count = 1 if classes is None else classes.size
    return {
        client: divergence(np.bincount(np.asarray(own.labels).reshape(-1), minlength=count))
        for client, own in data.items()
        if len(own)
    }


def trained_shares(
    setup: Setup, method: Method, chosen: Mapping[int, Subnet] | None = None
) -> dict[str, float]:
    """For each group of clients, the share of all parameters that some of them ever trained."""
    groups = {client.id: client.group for client in setup.clients}
    seen: dict[str, set[Subnet]] = {group: set() for group in groups.values()}
    everything: set[Subnet] = set()
    for tasks in history(setup, method, chosen):
        for task in tasks:
            there = seen if task.client == EVERYONE else (groups[task.client],)
            for group in there:
                seen[group].update(task.subnets)
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
