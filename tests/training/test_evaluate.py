"""Counting right answers on clients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedquilt.federation.client import SERVER, Task
from fedquilt.structure.cut import build
from fedquilt.training.evaluate import Evaluate


def logits_of(net, structure, params, width, examples):
    module = build(net, structure, structure.subnet(width), params).eval()
    with torch.no_grad():
        return module(examples.batch(torch.arange(len(examples)))[0])


@pytest.mark.parametrize("batch_size", [1, 4, 250])
def test_hits_and_loss_are_those_of_the_built_models(
    net, structure, bench, data, params, batch_size
):
    widths = (1.0, 0.5, 0.1)
    recipe = Evaluate(batch_size=batch_size)
    task = Task(SERVER, tuple(structure.subnet(w) for w in widths), params, recipe, 0)
    update = recipe.run(task, bench)
    examples = data["test"][SERVER]
    for i, width in enumerate(widths):
        logits = logits_of(net, structure, params, width, examples)
        assert update.metrics[f"hits:{i}"] == (logits.argmax(1) == examples.labels).sum()
        loss = F.cross_entropy(logits, examples.labels, reduction="sum").item()
        assert update.metrics[f"loss:{i}"] == pytest.approx(loss, rel=1e-5)
    assert update.metrics["examples"] == 21
    assert (update.subnets, update.params, update.weight) == ((), (), 0.0)


def test_parts_add_up_to_the_whole(structure, bench, params):
    subnets = (structure.subnet(0.5),)

    def metrics(recipe):
        return recipe.run(Task(SERVER, subnets, params, recipe, 0), bench).metrics

    whole = metrics(Evaluate())
    parts = [metrics(Evaluate(part=p, parts=8)) for p in range(8)]
    for name, value in whole.items():
        assert sum(part[name] for part in parts) == pytest.approx(value)
    assert sum(metrics(Evaluate(part=p, parts=40))["examples"] for p in range(40)) == 21


def test_local_accuracy_never_answers_a_foreign_class(net, structure, bench, data, params):
    biased = {**params, "classifier.bias": torch.tensor([50.0, -60.0, 50.0, -60.0])}
    recipe, free = Evaluate(labels=(1, 3)), Evaluate()
    task = Task(1, (structure.subnet(1.0),), biased, recipe, 0)
    examples = data["test"][1]
    logits = logits_of(net, structure, biased, 1.0, examples)
    answers = torch.where(logits[:, 1] >= logits[:, 3], 1, 3)
    assert recipe.run(task, bench).metrics["hits:0"] == (answers == examples.labels).sum()
    assert free.run(task, bench).metrics["hits:0"] == 0


def test_a_client_can_be_asked_about_the_servers_data(structure, bench, params):
    recipe = Evaluate(of=SERVER)
    update = recipe.run(Task(1, (structure.subnet(1.0),), params, recipe, 0), bench)
    assert update.metrics["examples"] == 21
