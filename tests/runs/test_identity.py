"""What makes two runs the same run."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass, replace
from functools import partial

import torch
from torch import nn

import fedquilt as fq
from fedquilt.runs.identity import compute_fingerprint, describe_settings

NET = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
STEPS = fq.LocalTraining(lr=0.05, epochs=1, batch_size=4)
NONE = {"momentum": None, "weight_decay": None}


def make_setup(**changes):
    people = fq.make_clients((torch.zeros(8, 3), torch.arange(8) % 2), count=2)
    structure = fq.trace_structure(NET, torch.zeros(1, 3))
    setup = fq.Setup(NET, structure, torch.zeros(1, 3), people.clients, rounds=3, seed=0)
    return replace(setup, **changes)


def test_a_new_setting_with_a_default_leaves_a_run_its_identity():
    @dataclass(frozen=True)
    class Mine(fq.HeteroFL):
        """A method as it was."""

    later = make_dataclass(
        "Mine", [("extra", float, field(default=0.5))], bases=(fq.HeteroFL,), frozen=True
    )
    setup, before = make_setup(), Mine(STEPS)
    same, changed = later(STEPS), later(STEPS, extra=0.75)
    assert "extra" in repr(same)  # so that an identity made of repr would be another
    assert compute_fingerprint(setup, same) == compute_fingerprint(setup, before)
    assert compute_fingerprint(setup, changed) != compute_fingerprint(setup, before)


def test_a_new_setting_inside_a_setting_does_not_matter_either():
    later = make_dataclass(
        "LocalTraining", [("extra", int, field(default=1))], bases=(fq.LocalTraining,), frozen=True
    )
    method = replace(fq.HeteroFL(), local_training=later(lr=0.05, epochs=1, batch_size=4))
    assert describe_settings(method) == describe_settings(fq.HeteroFL(STEPS))


def test_every_setting_seed_client_and_tensor_is_part_of_the_identity():
    setup, method = make_setup(), fq.HeteroFL(STEPS)
    wider = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2))
    others = [
        (setup, fq.FjORD(STEPS)),
        (setup, replace(method, scaler=False)),
        (setup, replace(method, local_training=replace(STEPS, lr=0.06))),
        (replace(setup, seed=1), method),
        (replace(setup, clients=setup.clients[:1]), method),
        (replace(setup, structure=fq.trace_structure(wider, torch.zeros(1, 3))), method),
        (
            replace(setup, structure=fq.trace_structure(NET, setup.example, exclude=["0"])),
            method,
        ),
    ]
    prints = [compute_fingerprint(*pair) for pair in ((setup, method), *others)]
    assert len(set(prints)) == len(prints)
    assert compute_fingerprint(replace(setup, rounds=9), method) == prints[0]
    assert compute_fingerprint(make_setup(), fq.HeteroFL(STEPS)) == prints[0]  # in any process


def test_a_factory_of_other_settings_is_another_run():
    makers = [partial(torch.optim.AdamW, lr=lr) for lr in (0.1, 0.2)]
    first, other = (fq.FedAvg(replace(STEPS, optimizer=m, lr=1.0, **NONE)) for m in makers)
    again = fq.FedAvg(replace(STEPS, optimizer=partial(torch.optim.AdamW, lr=0.1), lr=1.0, **NONE))
    assert describe_settings(first) == describe_settings(again) != describe_settings(other)
