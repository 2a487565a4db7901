"""Static batch normalisation: what clients' statistics add up to."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedquilt.data import to_examples
from fedquilt.federation.aggregation import average
from fedquilt.federation.client import Task
from fedquilt.structure.cut import build_module, copy_subnet_tensors
from fedquilt.structure.subnet import Subnet
from fedquilt.training.loop import iterate_batches
from fedquilt.training.statistics import MAX_EXAMPLES, QueryStatistics, calibrate
from fedquilt.training.tracking import (
    cumulative_statistics,
    needs_batches,
    use_batch_statistics,
    without_running_stats,
)


def queried(structure, context, params, widths, batch_size=4):
    subnets = tuple(structure.subnet(w).with_private(f"{w:g}", ":statistics") for w in widths)
    recipe = QueryStatistics(batch_size)
    tasks = [Task(client, subnets, params, recipe, 20 + client) for client in (0, 1, 2)]
    return subnets, [recipe.run(task, context).update for task in tasks]


@pytest.mark.parametrize("widths", [(1.0,), (1.0, 0.5, 0.2)])
def test_the_mean_over_clients_is_one_pass_over_all_their_batches(
    net, structure, context, data, params, widths
):
    subnets, updates = queried(structure, context, params, widths)
    merged = average(params, structure, updates)
    for width, subnet in zip(widths, subnets, strict=True):
        module = build_module(net, structure, structure.subnet(width), params).eval()
        for layer in (module.norm, module.norm2):
            layer.reset_running_stats()
            layer.momentum = None  # cumulative
            layer.train()
        with torch.no_grad():
            for client in (0, 1, 2):
                examples = data["train"][client]
                generator = torch.Generator().manual_seed(20 + client)
                for rows in iterate_batches(len(examples), 4, generator):
                    module(examples.batch(rows)[0])
        found = copy_subnet_tensors(merged, structure, subnet)
        for name, tensor in module.named_buffers():
            if tensor.is_floating_point():
                torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("personal", [False, True])
def test_a_client_loads_a_batch_once_for_all_sizes(structure, context, data, params, personal):
    """The client's own net may be the module that was one of the sizes, so it comes after them."""
    loaded: list[int] = []

    class Noting:
        def __init__(self, examples):
            self.examples = examples

        def __len__(self):
            return len(self.examples)

        def batch(self, rows, generator=None):
            loaded.append(len(rows))
            return self.examples.batch(rows, generator)

    subnets = tuple(structure.subnet(w).with_private(f"{w:g}", ":statistics") for w in (1.0, 0.5))
    if personal:
        subnets = (*subnets, structure.subnet(0.5).with_private("own", ":tracked"))
    recipe = QueryStatistics(4, personal=personal)
    noting = context.with_data(lambda examples, split: Noting(examples))
    recipe.run(Task(1, subnets, params, recipe, 21), noting)
    count = len(data["train"][1])
    assert loaded == [len(b) for b in torch.arange(count).split(4) if len(b) > 1] * (1 + personal)


def test_every_size_has_statistics_of_its_own_and_the_shared_ones_stay(structure, context, params):
    _, updates = queried(structure, context, params, (1.0, 0.5))
    merged = average(params, structure, updates)
    assert all(merged[n].equal(t) for n, t in params.items())
    own = {f"{n}@{w}" for n in structure.statistics for w in ("1", "0.5")}
    assert set(merged) - set(params) == own
    assert not merged["norm2.running_mean@0.5"][:5].allclose(merged["norm2.running_mean@1"][:5])


def test_nothing_but_statistics_comes_back(structure, context, params):
    _, updates = queried(structure, context, params, (1.0, 0.5))
    for update in updates:
        assert all(set(part) == set(structure.statistics) for part in update.params)
    assert [u.weight for u in updates] == [4.0, 4.0, 2.0]  # batches of at most four examples


def test_the_answer_does_not_depend_on_the_statistics_sent(structure, context, params):
    other = {n: t + 5 if n in structure.statistics else t for n, t in params.items()}
    answers = [queried(structure, context, p, (0.5,))[1][0].params[0] for p in (params, other)]
    assert all(answers[1][n].equal(t) for n, t in answers[0].items())


def test_the_question_changes_neither_weights_nor_settings(structure, context, params):
    before = {n: t.clone() for n, t in params.items()}
    queried(structure, context, params, (1.0,))
    assert all(t.equal(before[n]) for n, t in params.items())
    module = context.module(structure.subnet(1.0), params)
    assert [module.norm.momentum, module.norm2.momentum] == [0.1, 0.1]
    assert all(module.state_dict()[n].equal(t) for n, t in params.items())


def test_several_passes_are_shuffled_anew_and_count_as_so_many_batches(
    structure, context, data, params
):
    """By hand for the first layer: the mean of all batches' means, over three passes."""
    recipe = QueryStatistics(4, epochs=3)
    update = recipe.run(Task(0, (Subnet(),), params, recipe, 9), context).update
    examples, generator = data["train"][0], torch.Generator().manual_seed(9)
    drawn = [list(iterate_batches(14, 4, generator)) for _ in range(3)]
    assert not drawn[0][0].equal(drawn[1][0])
    outputs = [
        F.conv2d(examples.inputs[rows], params["first.weight"], params["first.bias"], padding=1)
        for rows in itertools.chain(*drawn)
    ]
    mean = torch.stack([y.mean((0, 2, 3)) for y in outputs]).mean(0)
    var = torch.stack([y.var((0, 2, 3)) for y in outputs]).mean(0)
    torch.testing.assert_close(update.params[0]["norm.running_mean"], mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(update.params[0]["norm.running_var"], var, rtol=1e-4, atol=1e-5)
    assert update.weight == 12.0


def test_subnets_that_own_everything_are_asked_one_by_one(structure, context, params):
    given = {
        f"{n}@{i}": t * (1 + i) if t.is_floating_point() else t
        for i in range(3)
        for n, t in params.items()
    }
    subnets = tuple(Subnet().with_private(str(i), "*") for i in range(3))
    recipe = QueryStatistics(4)
    update = recipe.run(Task(0, subnets, given, recipe, 2), context).update
    for subnet, found in zip(subnets, update.params, strict=True):
        alone = recipe.run(Task(0, (subnet,), given, recipe, 2), context).update
        assert all(t.equal(found[n]) for n, t in alone.params[0].items())
    merged = average(given, structure, [update])
    assert merged.keys() == given.keys()
    changed = {n for n, t in merged.items() if not t.equal(given[n])}
    assert changed == {f"{n}@{i}" for n in structure.statistics for i in range(3)}


def test_an_untracked_copy_normalises_every_batch_by_itself(net, data):
    bare = without_running_stats(net)
    assert net.norm.running_mean is not None  # the model itself is left as it is
    assert not any("running" in n or "tracked" in n for n in bare.state_dict())
    assert bare.state_dict().keys() == dict(net.named_parameters()).keys()
    x = data["test"][0].inputs
    with torch.no_grad():
        expected = without_running_stats(net).train()(x)
        assert bare.eval()(x).equal(expected)
        assert not bare(x[:4]).allclose(bare(x)[:4])  # it depends on the company
    plain = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    assert without_running_stats(plain).state_dict().keys() == plain.state_dict().keys()


def small_net(rate: float = 0.5) -> nn.Module:
    """Two normalised layers with dropout between them, which is as in use."""
    torch.manual_seed(1)
    first = [nn.Linear(3, 5), nn.BatchNorm1d(5, momentum=0.3), nn.ReLU(), nn.Dropout(rate)]
    net = nn.Sequential(*first, nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with torch.no_grad():
        for tensor in net.parameters():
            tensor.add_(0.1 * torch.randn(tensor.shape))
    return net


def one_pass(net: nn.Module, batches: list[np.ndarray]) -> dict[str, np.ndarray]:
    """In NumPy: the mean over batches of their means and (unbiased) variances, layer by layer."""
    p = {n: t.detach().double().numpy() for n, t in net.named_parameters()}
    seen: dict[str, list[np.ndarray]] = {n: [] for n in ("1.mean", "1.var", "5.mean", "5.var")}
    for x in batches:
        for linear, norm in (("0", "1"), ("4", "5")):
            x = x @ p[f"{linear}.weight"].T + p[f"{linear}.bias"]
            seen[f"{norm}.mean"].append(x.mean(0))
            seen[f"{norm}.var"].append(x.var(0, ddof=1))
            x = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
            x = np.maximum(x * p[f"{norm}.weight"] + p[f"{norm}.bias"], 0)
    return {n.replace(".", ".running_"): np.mean(each, 0) for n, each in seen.items()}


@pytest.mark.parametrize(
    ("count", "batch_size"), [(30, 128), (30, 8), (2, 4), (MAX_EXAMPLES + 200, 128)]
)
def test_calibrated_statistics_are_those_of_one_pass_over_the_data(count, batch_size):
    data = to_examples((3 * torch.randn(count, 3) + 1, torch.zeros(count, dtype=torch.int64)))
    net = small_net()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(7))[:MAX_EXAMPLES]
    parts = -(-len(order) // batch_size)
    rows = np.array_split(order.numpy(), parts)
    expected = one_pass(net, [data.inputs.double().numpy()[some] for some in rows])
    calibrate([net], data, seed=7, batch_size=batch_size)
    found = dict(net.named_buffers())
    for name, value in expected.items():
        np.testing.assert_allclose(found[name].numpy(), value, rtol=1e-4, atol=1e-5)
    assert found["1.num_batches_tracked"] == parts


def test_calibration_forgets_what_was_known_and_leaves_all_else():
    data = to_examples((torch.randn(20, 3), torch.zeros(20, dtype=torch.int64)))
    net, other = small_net(), small_net()
    with torch.no_grad():
        for name, buffer in other.named_buffers():
            buffer.fill_(5 if "tracked" in name else 0.7)
    weights = {n: t.detach().clone() for n, t in net.named_parameters()}
    calibrate([net, other.train()], data, seed=3)
    assert all(t.equal(net.state_dict()[n]) for n, t in other.state_dict().items())
    assert all(t.equal(weights[n]) and t.grad is None for n, t in net.named_parameters())
    assert [net[1].momentum, net[5].momentum] == [0.3, 0.1]
    assert not any(m.training for m in (*net.modules(), *other.modules()))


def test_instance_normalisation_that_tracks_is_averaged_over_batches_too():
    layer = nn.InstanceNorm1d(2, track_running_stats=True)
    batches = [torch.randn(4, 2, 9) + 3 * i for i in range(3)]
    with torch.no_grad(), cumulative_statistics(layer):
        for x in batches:
            layer(x)
    expected = torch.stack([x.mean((0, 2)) for x in batches]).mean(0)
    torch.testing.assert_close(layer.running_mean, expected)
    assert layer.momentum == 0.1


@torch.no_grad()
def test_batch_statistics_are_used_within_and_stored_ones_are_as_before(net):
    model, x = copy.deepcopy(net).eval(), torch.randn(6, 1, 5, 5)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    stored = model(x)
    assert not needs_batches(model)
    with use_batch_statistics(model):
        assert needs_batches(model)
        torch.testing.assert_close(model(x), without_running_stats(model)(x))
        assert not torch.allclose(model(x), stored)
    assert model(x).equal(stored)
    assert all(t.equal(before[n]) for n, t in model.state_dict().items())
