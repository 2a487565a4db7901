"""Attacks on updates, against loops over single cells."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.federation.client import Client, Task, Update
from fedquilt.federation.hostile import RoundAttack
from fedquilt.federation.state import Setup, State
from fedquilt.structure.cut import copy_subnet_tensors, global_name

WIDTHS = (1.0, 0.5, 1.0, 0.75, 0.5, 1.0)
HOSTILE = (1, 5)


@pytest.fixture
def setup(structure, table) -> Setup:
    clients = tuple(Client(i, 10) for i in range(len(WIDTHS)))
    return Setup(table, structure, torch.zeros(1), clients, rounds=1, seed=3)


@pytest.fixture
def updates(setup, params) -> list[Update]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for client, width in enumerate(WIDTHS):
        subnet = setup.structure.subnet(width)
        if client == 4:
            subnet = subnet.with_private("x", "a")
        taken = copy_subnet_tensors(params, setup.structure, subnet)
        sent = {
            n: t + torch.randn(t.shape, generator=generator) if t.is_floating_point() else t
            for n, t in taken.items()
        }
        made.append(Update(client, (subnet,), (sent,), 1.0, {}))
    return made


def attack_round(attack, setup, params, updates) -> dict[int, Update]:
    """What is merged, with hostile clients asked last if they wait for the others."""
    state = State(0, "train", params)
    hostile = attack.list_hostile(setup)
    round_attack = RoundAttack(attack, hostile, setup, state, gives_changes=False)
    tasks = [Task(u.client, u.subnets, params, None, 0) for u in updates]
    order = [task.client for task in round_attack.plan(tasks)]
    by_client = {u.client: u for u in updates}
    return {client: round_attack.intercept(by_client[client]) for client in order}


def list_changes(setup, params, update) -> dict[tuple[str, int], float]:
    numbers, start = {}, 0
    for name, tensor in params.items():
        numbers[name] = torch.arange(start, start + tensor.numel()).view(tensor.shape)
        start += tensor.numel()
    changes = {}
    for subnet, sent in zip(update.subnets, update.params, strict=True):
        old = copy_subnet_tensors(params, setup.structure, subnet)
        where = copy_subnet_tensors(numbers, setup.structure, subnet)
        for name, tensor in sent.items():
            if tensor.is_floating_point():
                target = global_name(name, setup.structure, subnet)
                cells, values = where[name].flatten().tolist(), (tensor - old[name]).flatten()
                changes |= {(target, c): v for c, v in zip(cells, values.tolist(), strict=True)}
    return changes


def mean_less_deviations(values, z=1.5):
    deviation = np.std(values, ddof=1) if len(values) > 1 else 0.0
    return np.mean(values) - z * deviation


FORMULAS = {
    "alie": (fq.ALIE(clients=HOSTILE), lambda honest, own: mean_less_deviations(honest)),
    "ipm": (
        fq.InnerProduct(clients=HOSTILE, epsilon=2.0), lambda honest, own: -2 * np.mean(honest),
    ),
    "sign": (fq.SignFlip(clients=HOSTILE, scale=3.0), lambda honest, own: -3 * own),
    "scale": (fq.ScaledUpdate(clients=HOSTILE, scale=7.0), lambda honest, own: 7 * own),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_hostile_clients_send_what_the_formula_says_and_honest_ones_what_they_trained(
    setup, params, updates, name
):
    attack, formula = FORMULAS[name]
    before = [{n: t.clone() for n, t in u.params[0].items()} for u in updates]
    sent = attack_round(attack, setup, params, updates)
    honest = [list_changes(setup, params, u) for u in updates if u.client not in HOSTILE]
    for update in updates:
        if update.client not in HOSTILE:
            assert sent[update.client] is update
            continue
        own = list_changes(setup, params, update)
        for cell, value in list_changes(setup, params, sent[update.client]).items():
            known = [changes[cell] for changes in honest if cell in changes]
            expected = formula(known, own[cell]) if known or name in ("sign", "scale") else 0.0
            assert value == pytest.approx(expected, abs=1e-4)
    for update, tensors in zip(updates, before, strict=True):
        assert all(update.params[0][n].equal(t) for n, t in tensors.items())


def test_mimics_copy_the_first_honest_client_with_the_most_cells(setup, params, updates):
    sent = attack_round(fq.Mimic(clients=HOSTILE), setup, params, updates)
    copied = list_changes(setup, params, updates[0])
    for client in HOSTILE:
        changes = list_changes(setup, params, sent[client])
        assert changes == pytest.approx({cell: copied[cell] for cell in changes}, abs=1e-5)


def test_noise_is_drawn_by_seed_round_and_client(setup, params, updates):
    attack = fq.GaussianNoise(clients=HOSTILE, sigma=2.0)
    one = attack_round(attack, setup, params, updates)
    again = attack_round(attack, setup, params, updates)
    other = attack_round(attack, replace(setup, seed=4), params, updates)
    for client in HOSTILE:
        noise = list_changes(setup, params, one[client])
        assert noise == list_changes(setup, params, again[client])
        assert noise != list_changes(setup, params, other[client])
    first, second = (np.array(list(list_changes(setup, params, one[c]).values())) for c in HOSTILE)
    assert 1.5 < np.concatenate([first, second]).std() < 2.5
    assert not np.isin(first, second).any()


def test_a_fraction_of_clients_is_drawn_by_the_seed(setup):
    drawn = fq.SignFlip(clients=0.5).list_hostile(setup)
    assert len(drawn) == 3
    assert drawn == fq.ALIE(clients=0.5).list_hostile(setup)
    seeds = {fq.SignFlip(clients=0.5).list_hostile(replace(setup, seed=s)) for s in range(9)}
    assert len(seeds) > 1
    with pytest.raises(ConfigError, match="there is no 17"):
        fq.SignFlip(clients=(0, 17)).list_hostile(setup)
    with pytest.raises(ConfigError, match="clients"):
        fq.SignFlip(clients=1.5)
