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
from fedquilt.structure.cut import copy_subnet_tensors, global_name, index_cells
from fedquilt.structure.subnet import Subnet


def test_every_method_is_held_to_the_laws(case_names):
    assert case_names == set(fq.METHODS)


def test_what_is_trained_depends_on_the_setup_alone(case):
    before, drawn = case.bits(dict(case.given.model.state_dict())), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        setup = case.method.prepare_model(case.given)
        state = case.method.start(setup)
        drawn.append((case.bits(dict(setup.model.state_dict())), case.bits(state.params)))
        drawn[-1] += (setup.clients, state.method_state)
        following = torch.rand(())
        torch.manual_seed(seed)
        assert following.equal(torch.rand(()))  # nor does it move anybody else's draws
    assert drawn[0] == drawn[1]
    assert case.bits(dict(case.given.model.state_dict())) == before


def test_order_of_clients_does_not_change_the_result_beyond_rounding(case):
    start = case.start()
    for state in (start, *case.closings(start)):
        if not case.aggregation(state).aggregator.is_linear:
            continue
        updates = case.updates(state)
        expected = case.merge(state, updates)
        for order in itertools.islice(itertools.permutations(updates), 1, 120, 17):
            merged = case.merge(state, order)
            assert merged.keys() == expected.keys()
            for name, tensor in merged.items():
                torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def by_owner(params) -> list[tuple[Subnet, dict[str, Tensor]]]:
    """All global tensors as subnets: one with those that are shared, one for each owner's own."""
    owned: dict[str, dict[str, Tensor]] = {}
    for name, tensor in params.items():
        plain, _, owner = name.partition("@")
        owned.setdefault(owner, {})[plain] = tensor
    found = []
    for owner, tensors in owned.items():
        subnet = Subnet().excluding("*", *(f"!{name}" for name in tensors))
        found.append((subnet.with_private(owner, *tensors) if owner else subnet, tensors))
    return found


def test_whole_models_of_equal_weight_give_fedavg_bit_for_bit(case):
    state = case.start()
    trained = case.updates(state)
    state = replace(state, params=case.merge(state, trained))  # with all its owners
    params = state.params
    if case.merges_changes(state):  # of what clients send, and of nothing else
        names = {name for update in trained for part in update.params for name in part}
        params = {name: tensor for name, tensor in params.items() if name in names}
    generator = torch.Generator().manual_seed(1)
    sent = [
        case.told(
            state,
            {
                n: t + torch.randn(t.shape, generator=generator) if t.is_floating_point() else t
                for n, t in params.items()
            },
        )
        for _ in range(3)
    ]
    updates = []
    for client, tensors in enumerate(sent):
        subnets, parts = zip(*by_owner(tensors), strict=True)
        updates.append(Update(client, subnets, parts, 1.0, {}))
    expected = {}
    for name, old in params.items():
        mean = sent[0][name]
        for number, tensors in enumerate(sent[1:], start=2):  # FedAvg as a running mean
            if old.is_floating_point():
                mean = torch.lerp(mean, tensors[name], 1 / number)
        expected[name] = mean
        plain = torch.stack([tensors[name] for tensors in sent]).double().mean(0)
        torch.testing.assert_close(mean.double(), plain, rtol=1e-5, atol=1e-6)
    pipeline = case.aggregation(state)
    aggregate = pipeline.aggregator.aggregate(case.setup, state, iter(updates))
    assert case.bits(aggregate.params) == case.bits(expected)
    if pipeline.keeps_aggregate:
        assert case.bits(case.merge(state, updates)) == case.bits(expected)


def inside(shape, index) -> Tensor:
    """Which cells of a tensor an open mesh of indices means."""
    mask = torch.ones(shape, dtype=torch.bool)
    for axis, (size, kept) in enumerate(zip(shape, index, strict=True)):
        row = torch.zeros(size, dtype=torch.bool)
        row[kept] = True
        mask &= row.view([-1 if k == axis else 1 for k in range(len(shape))])
    return mask


def old_value(params, name: str) -> Tensor:
    """A global tensor; one that an owner has not trained yet is the shared one."""
    return params[name] if name in params else params[name.partition("@")[0]]


def test_cells_that_nobody_trained_keep_their_value(case):
    state = case.start()
    updates = case.updates(state, case.setup.clients[3:])  # narrow ones
    merged = case.merge(state, updates)
    trained = {n: torch.zeros(t.shape, dtype=torch.bool) for n, t in merged.items()}
    moved = set()
    for update in updates:
        for subnet, tensors in zip(update.subnets, update.params, strict=True):
            old = case.told(state, copy_subnet_tensors(state.params, case.setup.structure, subnet))
            for name, index in index_cells(case.setup.structure, subnet).items():
                if tensors[name].is_floating_point():
                    target = global_name(name, case.setup.structure, subnet)
                    held = inside(trained[target].shape, index)
                    trained[target] |= tensors[name] != 0 if case.merges_changes(state) else held
                    moved |= set() if tensors[name].equal(old[name]) else {target}
    assert set(state.params) <= set(merged)
    for name, tensor in merged.items():
        old = old_value(state.params, name)
        assert tensor[~trained[name]].equal(old[~trained[name]]), name
    changed = {n for n, t in merged.items() if not t.equal(old_value(state.params, n))}
    assert changed <= moved if case.merges_changes(state) else changed == moved
    assert moved or not any(part for update in updates for part in update.params)


def test_no_step_changes_its_arguments(case):
    start = case.start()
    for state in (start, *case.closings(start)):

        def given(state=state):
            return case.bits(state.params), case.bits(dict(case.setup.model.state_dict()))

        before = given()
        for task in case.tasks(state):
            for subnet in task.subnets:
                for tensor in copy_subnet_tensors(
                    state.params, case.setup.structure, subnet
                ).values():
                    tensor.zero_()  # a copy, so that writing to it harms nobody
        updates = case.updates(state)
        sent = [case.bits(part) for update in updates for part in update.params]
        merged = case.merge(state, updates)
        fq.average(state.params, case.setup.structure, updates)
        case.updates(replace(state, params=merged))
        assert given() == before
        assert [case.bits(part) for update in updates for part in update.params] == sent


def test_subnets_that_come_back_unchanged_change_nothing(case):
    start, structure = case.start(), case.setup.structure
    for state in (start, *case.closings(start)):
        updates = [
            replace(
                update,
                params=tuple(
                    case.told(state, copy_subnet_tensors(state.params, structure, s))
                    for s in update.subnets
                ),
                weight=0.3 + abs(update.client),
            )
            for update in case.updates(state)
        ]
        merged = case.merge(state, updates)
        bits, before = case.bits(merged), case.bits(state.params)
        if not any(update.subnets for update in updates):  # then names may change, no tensor does
            assert bits.keys() == before.keys()
            assert sorted(bits.values()) == sorted(before.values())
            continue
        assert {n: bits[n] for n in state.params} == before
        for subnet in {s for u in updates for s in u.subnets}:
            own = copy_subnet_tensors(merged, structure, subnet)
            assert case.bits(own) == case.bits(copy_subnet_tensors(state.params, structure, subnet))
            for name in own:  # and what is a subnet's own exists under its owner's name
                target = global_name(name, structure, subnet)
                assert target in merged or not own[name].is_floating_point()


def live_bytes() -> int:
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if type(t) in (Tensor, torch.nn.Parameter) and t.device.type == "cpu"
    }
    return sum(storages.values())


def test_server_memory_does_not_grow_with_the_cohort(case):
    state = case.start()
    if case.aggregation(state).aggregator.needs_all_updates:
        pytest.skip("it holds all updates at once, and says so")
    (wide,) = case.tasks(state, case.setup.clients[:1])

    def peak(count: int) -> int:
        alive: list[weakref.ref[Tensor]] = []
        highest = 0

        def lazily() -> Iterator[Update]:
            nonlocal highest
            for number in range(count):
                parts = tuple(
                    copy_subnet_tensors(state.params, case.setup.structure, s) for s in wide.subnets
                )
                alive.extend(weakref.ref(t) for part in parts for t in part.values())
                yield Update(wide.client, wide.subnets, parts, 1.0, {})
                del parts
                if number == count - 1:
                    highest = live_bytes()
                one_update = len(alive) // (number + 1)
                assert sum(ref() is not None for ref in alive) <= one_update

        case.method.merge(case.setup, state, lazily())
        return highest

    gc.collect()
    peak(1)  # fills caches
    assert peak(100) == peak(10)
