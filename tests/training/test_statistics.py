"""Static batch normalisation: what clients' statistics add up to."""

from __future__ import annotations

import pytest
import torch

from fedquilt.federation.average import average
from fedquilt.federation.client import Task
from fedquilt.structure.cut import build, take
from fedquilt.training.sgd import batches
from fedquilt.training.statistics import Statistics


def queried(structure, bench, params, widths, batch_size=4):
    subnets = tuple(structure.subnet(w).owning(f"{w:g}", ":statistics") for w in widths)
    recipe = Statistics(batch_size)
    tasks = [Task(client, subnets, params, recipe, 20 + client) for client in (0, 1, 2)]
    return subnets, [recipe.run(task, bench) for task in tasks]


@pytest.mark.parametrize("widths", [(1.0,), (1.0, 0.5, 0.2)])
def test_the_mean_over_clients_is_one_pass_over_all_their_batches(
    net, structure, bench, data, params, widths
):
    subnets, updates = queried(structure, bench, params, widths)
    merged = average(params, structure, updates)
    for width, subnet in zip(widths, subnets, strict=True):
        module = build(net, structure, structure.subnet(width), params).eval()
        for layer in (module.norm, module.norm2):
            layer.reset_running_stats()
            layer.momentum = None  # cumulative
            layer.train()
        with torch.no_grad():
            for client in (0, 1, 2):
                examples = data["train"][client]
                generator = torch.Generator().manual_seed(20 + client)
                for rows in batches(len(examples), 4, generator):
                    module(examples.batch(rows)[0])
        found = take(merged, structure, subnet)
        for name, tensor in module.named_buffers():
            if tensor.is_floating_point():
                torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def test_every_size_has_statistics_of_its_own_and_the_shared_ones_stay(structure, bench, params):
    _, updates = queried(structure, bench, params, (1.0, 0.5))
    merged = average(params, structure, updates)
    assert all(merged[n].equal(t) for n, t in params.items())
    own = {f"{n}@{w}" for n in structure.statistics for w in ("1", "0.5")}
    assert set(merged) - set(params) == own
    assert not merged["norm2.running_mean@0.5"][:5].allclose(merged["norm2.running_mean@1"][:5])


def test_nothing_but_statistics_comes_back(structure, bench, params):
    _, updates = queried(structure, bench, params, (1.0, 0.5))
    for update in updates:
        assert all(set(part) == set(structure.statistics) for part in update.params)
    assert [u.weight for u in updates] == [4.0, 4.0, 2.0]  # batches of at most four examples


def test_the_answer_does_not_depend_on_the_statistics_sent(structure, bench, params):
    other = {n: t + 5 if n in structure.statistics else t for n, t in params.items()}
    answers = [queried(structure, bench, p, (0.5,))[1][0].params[0] for p in (params, other)]
    assert all(answers[1][n].equal(t) for n, t in answers[0].items())


def test_the_question_changes_neither_weights_nor_settings(structure, bench, params):
    before = {n: t.clone() for n, t in params.items()}
    queried(structure, bench, params, (1.0,))
    assert all(t.equal(before[n]) for n, t in params.items())
    module = bench.module(structure.subnet(1.0), params)
    assert [module.norm.momentum, module.norm2.momentum] == [0.1, 0.1]
    assert all(module.state_dict()[n].equal(t) for n, t in params.items())
