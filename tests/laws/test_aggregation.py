"""Laws of aggregation, for every method: server optimizers, and parts that do nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.federation.aggregation import UpdateTransform
from fedquilt.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint

YOGI = fq.FedYogi(lr=0.1, beta1=0.5, beta2=0.7, tau=0.01)
REFUSED = {  # methods whose server's step is their own, or that average nothing
    "stc": "compressed",
    "depthfl feddyn": "FedDyn",
    "standalone": "there is no mean",
}


@pytest.fixture
def optimized(case, request):
    """The case with a server optimizer; skipped if the method refuses it, which it has to say."""
    name = request.node.callspec.params["case"]
    if name in REFUSED:
        with pytest.raises(ConfigError, match=f"{REFUSED[name]}.*leave out server_optimizer, got"):
            replace(case.method, server_optimizer=YOGI).prepare_model(case.given)
        pytest.skip("refused, with a reason")
    method = replace(case.method, server_optimizer=YOGI)
    return replace(case, method=method, setup=method.prepare_model(case.given), answers={})


def moments(state):
    return {n: t for n, t in state.server_tensors.items() if n.startswith("server_optimizer/")}


def old_value(params, name):
    return params[name] if name in params else params[name.partition("@")[0]]


def test_optimizers_move_what_was_trained_as_their_formula_says_and_nothing_else(case, optimized):
    """Two rounds, the second of narrow clients alone; from the mean of the default pipeline."""
    state, weights = case.start(), dict(case.setup.model.named_parameters())
    m, v = {}, {}
    for clients in (None, case.setup.clients[3:]):
        updates = case.updates(state, clients)
        aggregate = case.aggregation(state).aggregator.aggregate(case.setup, state, updates)
        after = optimized.method.merge(optimized.setup, state, updates)
        assert after.params.keys() == aggregate.params.keys()
        optimizes = False
        for name, mean in aggregate.params.items():
            old, new = old_value(state.params, name), after.params[name]
            if name.partition("@")[0] not in weights:
                assert new.equal(mean)  # statistics and counters
                continue
            cells = aggregate.trained(name).numpy()
            shape = tuple(old.shape)
            m.setdefault(name, np.zeros(shape)), v.setdefault(name, np.full(shape, YOGI.tau**2))
            change = (mean - old).double().detach().numpy()
            grown = YOGI.beta1 * m[name] + (1 - YOGI.beta1) * change
            spread = v[name] - (1 - YOGI.beta2) * change**2 * np.sign(v[name] - change**2)
            m[name], v[name] = np.where(cells, grown, m[name]), np.where(cells, spread, v[name])
            step = YOGI.lr * m[name] / (np.sqrt(v[name]) + YOGI.tau)
            expected = old.double().detach().numpy() + np.where(cells, step, 0)
            np.testing.assert_allclose(new.detach().numpy(), expected, rtol=1e-4, atol=1e-5)
            assert new[~torch.from_numpy(cells)].equal(old[~torch.from_numpy(cells)])
            optimizes |= bool(cells.any())
        assert optimizes == bool(moments(after)) or moments(state)
        for key, tensor in moments(after).items():
            _, what, name = key.split("/")
            kept = {"momentum": m, "variance": v}[what][name]
            np.testing.assert_allclose(tensor.numpy(), kept, rtol=1e-3, atol=1e-6)
        state = replace(after, round=state.round + 1)


def test_a_checkpoint_holds_all_that_a_server_optimizer_needs(optimized, tmp_path):
    state = optimized.start()
    updates = optimized.updates(state)
    after = replace(optimized.method.merge(optimized.setup, state, updates), round=1)
    path = save_checkpoint(tmp_path, Checkpoint(after, {}), "same")
    loaded = load_checkpoint(path, "same").state
    first, second = (
        optimized.method.merge(optimized.setup, one, updates) for one in (after, loaded)
    )
    assert optimized.bits(first.params) == optimized.bits(second.params)
    assert optimized.bits(first.server_tensors) == optimized.bits(second.server_tensors)
    assert moments(first)


def test_a_closing_phase_is_not_optimized(case, optimized):
    start = case.start()
    for state in case.closings(start):
        updates = case.updates(state)
        plain = case.method.merge(case.setup, state, updates)
        found = optimized.method.merge(optimized.setup, state, updates)
        assert case.bits(plain.params) == case.bits(found.params)
        assert case.bits(plain.server_tensors) == case.bits(found.server_tensors)


@dataclass(frozen=True)
class DoNothing(UpdateTransform):
    def transform(self, setup, state, update):
        return update


def test_a_part_that_does_nothing_changes_nothing(case):
    start = case.start()
    for state in (start, *case.closings(start)):
        pipeline, updates = case.aggregation(state), case.updates(state)
        more = replace(pipeline, transforms=(DoNothing(), *pipeline.transforms, DoNothing()))
        assert more.is_linear == pipeline.is_linear
        one, other = (p.merge(case.setup, state, updates) for p in (pipeline, more))
        assert case.bits(one.params) == case.bits(other.params)
        assert case.bits(one.server_tensors) == case.bits(other.server_tensors)
        assert (one.method_state, one.chosen_subnets) == (other.method_state, other.chosen_subnets)
