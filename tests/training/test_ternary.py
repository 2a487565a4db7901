"""Sparse ternary compression, and the client that sends and receives codes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedquilt.errors import TrainingError
from fedquilt.federation.client import Task
from fedquilt.structure.subnet import Subnet
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.settings import LocalTraining
from fedquilt.training.ternary import (
    TernarySGD,
    add_code,
    apply_codes,
    compress,
    flatten_weights,
    ternarize,
    unflatten_weights,
)

WHOLE = (Subnet(),)
SGD_RECIPE = LocalSGD(
    LocalTraining(lr=0.05, epochs=1, batch_size=4, max_grad_norm=None), lr=0.05, weight=14
)


def slowly(change, p):
    """Algorithm 1, entry by entry."""
    k = max(1, math.floor(p * len(change)))
    order = sorted(range(len(change)), key=lambda i: (-abs(change[i]), i))
    chosen = [i for i in order[:k] if change[i] != 0]
    mu = sum(abs(float(change[i])) for i in chosen) / max(len(chosen), 1)
    return [float(np.sign(change[i])) * mu if i in chosen else 0.0 for i in range(len(change))]


def dense(code, size, p):
    vector = torch.zeros(size)
    add_code(vector, code, p)
    return vector


changes = arrays.arrays(
    np.float32,
    st.integers(1, 60),
    elements=st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -3.0]) | st.floats(-8, 8, width=32),
)
sparsities = st.sampled_from([0.001, 0.05, 0.3, 0.5, 1.0])


@given(changes, sparsities)
def test_the_largest_entries_become_signs_of_one_magnitude(change, p):
    found = ternarize(torch.from_numpy(change), p)
    vector = np.zeros(len(change), np.float32)
    vector[found.positions] = found.values
    np.testing.assert_allclose(vector, slowly(change, p), rtol=1e-6)
    assert (np.sign(vector[found.positions]) == np.sign(change[found.positions])).all()


@given(changes, sparsities)
def test_a_code_and_what_is_left_are_the_change(change, p):
    vector = torch.from_numpy(change)
    before = vector.clone()
    code, left = compress(vector, p)
    sent = dense(code, len(vector), p)
    assert left.equal(vector - sent)
    assert vector.equal(before)
    assert dense(compress(sent, p)[0], len(vector), p).equal(sent)  # nothing more is lost


def test_what_is_left_travels_later():
    draw = torch.Generator().manual_seed(0)
    residual, total, sent = torch.zeros(300), torch.zeros(300), torch.zeros(300)
    for _ in range(50):
        step = torch.randn(300, generator=draw)
        total += step
        code, residual = compress(step + residual, 0.1)
        sent += dense(code, 300, 0.1)
    torch.testing.assert_close(sent + residual, total, rtol=0, atol=1e-4)
    assert (sent != 0).sum() > 250
    assert residual.norm() < total.norm()


def test_vectors_are_in_the_order_of_names_and_leave_integers_alone():
    params = {"b": torch.ones(2, 1), "c": torch.tensor(7), "a": torch.tensor([-0.0, 3.0])}
    vector = flatten_weights(params)
    assert vector.tolist() == [0.0, 3.0, 1.0, 1.0]
    back = unflatten_weights(vector, params)
    assert list(back) == list(params)
    assert back["b"].shape == (2, 1)
    assert back["c"] is params["c"]
    vector.fill_(5)
    assert back["a"].tolist() == [0.0, 3.0]
    assert back["a"].signbit().tolist() == [True, False]


def test_changes_are_added_one_after_the_other_to_the_same_bits_in_any_order_of_names(params):
    draw = torch.Generator().manual_seed(1)
    size = len(flatten_weights(params))
    codes = [compress(torch.randn(size, generator=draw) * 1e-3, 0.02)[0] for _ in range(4)]
    expected, other = params, dict(reversed(params.items()))
    before = {name: tensor.clone() for name, tensor in params.items()}
    for code in codes:
        change = unflatten_weights(dense(code, size, 0.02), params)
        expected = {n: t + change[n] if t.is_floating_point() else t for n, t in expected.items()}
    found = apply_codes(other, codes, 0.02)
    assert all(found[name].equal(tensor) for name, tensor in expected.items())
    assert not found["second.weight"].equal(params["second.weight"])
    assert all(params[name].equal(tensor) for name, tensor in before.items())
    storages = {tensor.untyped_storage().data_ptr() for tensor in found.values()}
    assert len(storages) == len(found)  # each can be saved by itself


@pytest.mark.parametrize(
    "code", [torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16), torch.zeros(1, 8).byte()]
)
def test_a_code_is_a_row_of_bytes(code):
    with pytest.raises(ValueError, match=r"shape .* row of bytes"):
        dense(code, 10, 0.1)


def recipe(round=0, up=0.05, down=0.02):
    return TernarySGD(SGD_RECIPE, round, up, down)


def run(context, task, kept):
    result = task.recipe.run(task, context.for_client(kept))
    return result.update, result.state


def copy_of(kept):
    return {n.removeprefix("weights/"): t for n, t in kept.items() if n.startswith("weights/")}


def test_a_client_sends_its_change_and_keeps_the_rest(context, params):
    plain = Task(0, WHOLE, params, SGD_RECIPE, seed=3)
    trained = SGD_RECIPE.run(plain, context).update.params[0]
    change = torch.cat([(trained[n] - params[n]).reshape(-1) for n in sorted(floats(params))])
    result = recipe().run(replace(plain, recipe=recipe()), context)
    update, kept = result.update, result.state
    (code,) = update.params[0].values()
    expected = torch.tensor(slowly(change.numpy(), 0.05))
    torch.testing.assert_close(dense(code, len(change), 0.05), expected)
    torch.testing.assert_close(kept["residual"], change - expected, rtol=0, atol=1e-7)
    assert (update.client, update.subnets, update.weight) == (0, WHOLE, 14)
    assert update.metrics["examples"] == 14
    assert code.nbytes < sum(t.nbytes for t in trained.values()) / 20
    subnets, (own,) = result.local_model
    assert subnets == WHOLE
    assert all(own[name].equal(tensor) for name, tensor in trained.items())
    assert all(copy_of(kept)[name].equal(tensor) for name, tensor in params.items())


def floats(params):
    return {n: t for n, t in params.items() if t.is_floating_point()}


def test_what_a_client_did_not_send_is_added_to_its_next_change(context, params):
    task = Task(0, WHOLE, params, recipe(), seed=3)
    _, kept = run(context, task, None)
    size = len(kept["residual"])
    plain = dense(run(context, task, None)[0].params[0]["code"], size, 0.05)
    change = plain + kept["residual"]  # the same training again
    update, again = run(context, task, kept)
    expected = torch.tensor(slowly((change + kept["residual"]).numpy(), 0.05))
    sent = dense(update.params[0]["code"], size, 0.05)
    torch.testing.assert_close(sent, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(sent + again["residual"], change + kept["residual"])


def test_a_client_that_catches_up_has_the_bits_of_the_server(context, params):
    draw = torch.Generator().manual_seed(2)
    size = len(flatten_weights(params))
    _, kept = run(context, Task(0, WHOLE, params, recipe(5), seed=3), None)
    server, codes, versions = params, {}, {5: params}
    for number in range(5, 9):
        code, _ = compress(torch.randn(size, generator=draw) * 1e-2, 0.02)
        codes[str(number)] = code
        server = versions[number + 1] = apply_codes(server, [code], 0.02)
    assert not server["second.weight"].equal(params["second.weight"])
    seven, since = run(context, Task(0, (), codes, recipe(7), seed=4), kept)
    assert all(copy_of(since)[n].equal(t) for n, t in versions[7].items())
    dense_task = Task(0, WHOLE, versions[7], recipe(7), seed=4)
    same, _ = run(context, dense_task, kept)
    assert seven.params[0]["code"].equal(same.params[0]["code"])
    # codes that it has already are not added again
    _, now = run(context, Task(0, (), codes, recipe(9), seed=4), since)
    assert all(copy_of(now)[n].equal(t) for n, t in versions[9].items())


def test_a_client_without_the_copy_that_codes_are_for_says_so(context, params):
    _, kept = run(context, Task(0, WHOLE, params, recipe(5), seed=3), None)
    codes = {"6": compress(torch.ones(len(flatten_weights(params))), 0.02)[0]}
    for state, round in ((None, 7), ({}, 7), (kept, 7), (kept, 4)):
        update, new = run(context, Task(0, (), codes, recipe(round), seed=3), state)
        assert (update.subnets, update.params, update.weight) == ((), (), 0.0)
        assert new is None


def test_a_client_that_diverges_sends_nothing(context, params):
    broken = {**params, "classifier.bias": torch.full((4,), math.inf)}
    with pytest.raises(TrainingError, match="diverged"):
        run(context, Task(0, WHOLE, broken, recipe(), seed=3), None)
