"""Laws of how updates come together, for every method."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fedquilt as fq
from fedquilt.federation.client import Update
from fedquilt.structure.cut import cells, source_name, take
from fedquilt.structure.subnet import Subnet


def test_every_method_is_held_to_the_laws(case_names):
    assert case_names == set(fq.METHODS)


def test_order_of_clients_does_not_change_the_result_beyond_rounding(case):
    state = case.start()
    updates = case.updates(state)
    expected = case.merge(state, updates)
    for order in itertools.islice(itertools.permutations(updates), 1, 120, 17):
        merged = case.merge(state, order)
        assert merged.keys() == expected.keys()
        for name, tensor in merged.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def test_order_does_not_matter_in_the_closing_phase_either(case):
    state = case.closing(case.start())
    if state is None:
        assert not any(p.is_closing for p in case.method.phases(case.setup))
        return
    updates = case.updates(state)
    expected = case.merge(state, updates)
    for name, tensor in case.merge(state, updates[::-1]).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def test_whole_models_of_equal_weight_give_fedavg_bit_for_bit(case):
    state = case.start()
    generator = torch.Generator().manual_seed(1)
    sent = [
        {
            n: t + torch.randn(t.shape, generator=generator) if t.is_floating_point() else t
            for n, t in state.params.items()
        }
        for _ in range(3)
    ]
    updates = [Update(i, (Subnet(),), (tensors,), 1.0, {}) for i, tensors in enumerate(sent)]
    expected = {}
    for name, old in state.params.items():
        mean = sent[0][name]
        for number, tensors in enumerate(sent[1:], start=2):  # FedAvg as a running mean
            if old.is_floating_point():
                mean = torch.lerp(mean, tensors[name], 1 / number)
        expected[name] = mean
        plain = torch.stack([tensors[name] for tensors in sent]).double().mean(0)
        torch.testing.assert_close(mean.double(), plain, rtol=1e-5, atol=1e-6)
    assert case.bits(case.merge(state, updates)) == case.bits(expected)


def inside(shape, index) -> Tensor:
    """Which cells of a tensor an open mesh of indices means."""
    mask = torch.ones(shape, dtype=torch.bool)
    for axis, (size, kept) in enumerate(zip(shape, index, strict=True)):
        row = torch.zeros(size, dtype=torch.bool)
        row[kept] = True
        mask &= row.view([-1 if k == axis else 1 for k in range(len(shape))])
    return mask


def test_cells_that_nobody_trained_keep_their_value(case):
    state = case.start()
    narrow = case.setup.clients[3:]
    updates = case.updates(state, narrow)
    trained = {n: torch.zeros(t.shape, dtype=torch.bool) for n, t in state.params.items()}
    for subnet in (s for u in updates for s in u.subnets):
        for name, index in cells(case.setup.structure, subnet).items():
            trained[name] |= inside(trained[name].shape, index)
    merged = case.merge(state, updates)
    assert any(not mask.all() for mask in trained.values()) or not updates[0].params[0]
    for name, old in state.params.items():
        assert merged[name][~trained[name]].equal(old[~trained[name]]), name
    changed = [n for n, old in state.params.items() if not merged[n].equal(old)]
    sent = {n for u in updates for n, t in u.params[0].items() if t.is_floating_point()}
    assert set(changed) == sent


def snapshot(case, state, updates):
    tensors = [case.bits(part) for update in updates for part in update.params]
    return case.bits(state.params), tensors, case.bits(dict(case.setup.model.state_dict()))


def test_no_step_changes_its_arguments(case):
    state = case.start()
    updates = case.updates(state)
    before = snapshot(case, state, updates)
    for task in case.tasks(state):
        for subnet in task.subnets:
            for tensor in take(state.params, case.setup.structure, subnet).values():
                tensor.zero_()  # a copy, so that writing to it harms nobody
    merged = case.merge(state, updates)
    fq.average(state.params, case.setup.structure, updates)
    case.updates(state)
    case.updates(replace(state, params=merged))
    assert snapshot(case, state, updates) == before


@pytest.mark.parametrize("closing", [False, True])
def test_subnets_that_come_back_unchanged_change_nothing(case, closing):
    state = case.start()
    if closing:
        state = case.closing(state) or state
    structure = case.setup.structure
    updates = [
        Update(
            t.client,
            t.subnets,
            tuple(take(state.params, structure, s) for s in t.subnets),
            0.3 + t.client,
            {},
        )
        for t in case.tasks(state)
    ]
    merged = case.merge(state, updates)
    bits = case.bits(merged)
    assert {n: bits[n] for n in state.params} == case.bits(state.params)
    for subnet in {s for u in updates for s in u.subnets}:
        own = take(merged, structure, subnet)
        assert case.bits(own) == case.bits(take(state.params, structure, subnet))
        for name in own:  # and what is a subnet's own exists under its owner's name
            assert (
                source_name(name, structure, subnet) in merged or not own[name].is_floating_point()
            )


def live_bytes() -> int:
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if type(t) in (Tensor, torch.nn.Parameter) and t.device.type == "cpu"
    }
    return sum(storages.values())


def test_server_memory_does_not_grow_with_the_cohort(case):
    state = case.start()
    wide = [(t.client, t.subnets[0]) for t in case.tasks(state, case.setup.clients[:1])]

    def peak(count: int) -> int:
        alive: list[weakref.ref[Tensor]] = []
        highest = 0

        def lazily() -> Iterator[Update]:
            nonlocal highest
            for number in range(count):
                client, subnet = wide[number % len(wide)]
                tensors = take(state.params, case.setup.structure, subnet)
                alive.extend(weakref.ref(t) for t in tensors.values())
                yield Update(client, (subnet,), (tensors,), 1.0, {})
                del tensors
                if number >= count - 2:
                    highest = max(highest, live_bytes())
                one_update = len(alive) // (number + 1)
                assert sum(ref() is not None for ref in alive) <= one_update

        case.method.merge(case.setup, state, lazily())
        return highest

    gc.collect()
    peak(1)  # fills caches
    assert peak(200) == peak(10)
