"""Real training in one pass: what it leaves alone, and what makes it fall back to one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedquilt as fq
from fedquilt.data.examples import Examples
from fedquilt.federation.client import Failure, Update
from fedquilt.learning.task import CLASSIFICATION, make_task

LOCAL = fq.LocalTraining(epochs=1)


def noisy_loss(output, target):
    """A loss that draws from PyTorch's own generator."""
    return F.cross_entropy(output + 0.5 * torch.randn_like(output), target)


class Langevin(torch.optim.SGD):
    """An optimizer that does."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(0.01 * torch.randn_like(parameter))


def langevin(weights):
    return Langevin(weights, lr=1.0)


def make_net(*, norm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.ReLU(), nn.Linear(8, 3)]
    return nn.Sequential(*layers)


def make_examples(sizes=(16, 16, 16, 16)):
    draw = torch.Generator().manual_seed(1)
    return {
        client: Examples(
            torch.rand(size, 4, generator=draw), torch.randint(3, (size,), generator=draw)
        )
        for client, size in enumerate(sizes)
    }


class Setting:
    """Clients 0 to 3 that train a whole net, and an engine for them."""

    def __init__(self, *, settings=LOCAL, net=None, data=None, task=CLASSIFICATION, **engine):
        self.model = make_net() if net is None else net
        self.data = make_examples() if data is None else data
        example = self.data[1].batch(torch.arange(1))[0]
        self.structure = fq.trace_structure(self.model, example)
        self.recipe = fq.LocalSGD(settings, lr=0.1, weight=16.0)
        options = {"workers": 0, "task": task, **engine}
        self.engine = fq.LocalEngine(self.model, self.structure, {"train": self.data}, **options)

    def run(self):
        params = self.model.state_dict()
        subnets = (self.structure.subnet(),)
        return list(
            self.engine.run([fq.Task(c, subnets, params, self.recipe, seed=c) for c in self.data])
        )

    @property
    def reasons(self):
        return [size.reason for size in self.engine.pass_sizes.chosen.values()]


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        (make_task(noisy_loss, ["accuracy"]), LOCAL),
        (CLASSIFICATION, fq.LocalTraining(epochs=1, optimizer=langevin)),
    ],
    ids=["loss", "optimizer"],
)
def test_who_draws_from_the_common_generator_trains_alone_and_repeats(task, settings):
    results = []
    for history in (1, 2):
        made = Setting(settings=settings, task=task, clients_per_pass=4)
        torch.manual_seed(history)  # what the process did before
        results.append(made.run())
        assert made.reasons == ["its loss or its optimizer draws random numbers"]
        made.engine.close()
    for one, other in zip(*results, strict=True):
        assert all(other.params[0][n].equal(t) for n, t in one.params[0].items())


@pytest.mark.parametrize("per_pass", [1, 4])
def test_the_row_of_an_embedding_for_padding_is_not_trained(per_pass):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 8, padding_idx=1), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.embed(x).mean(1))

    torch.manual_seed(0)
    net = Words()
    with torch.no_grad():
        net.embed.weight[1] = 0.5
    words = torch.arange(16 * 6).reshape(16, 6) % 5
    words[:8][words[:8] == 1] = 0  # the first rows have no padding
    data = {c: Examples(words, torch.arange(16) % 3) for c in range(4)}
    settings = fq.LocalTraining(epochs=1, weight_decay=0.0)
    made = Setting(settings=settings, net=net, data=data, clients_per_pass=per_pass)
    for update in made.run():
        table = update.params[0]["embed.weight"]
        assert bool((table[1] == 0.5).all())
        assert not table.equal(net.embed.weight)
    assert per_pass == 1 or made.reasons == ["as the settings say"]
    made.engine.close()


@pytest.mark.parametrize("kind", ["max_norm", "scale_grad_by_freq"])
def test_embeddings_with_other_gradients_train_alone(kind):
    options = {kind: 1.0 if kind == "max_norm" else True}
    net = nn.Sequential(nn.Embedding(5, 8, **options), nn.Flatten(), nn.Linear(48, 3))
    structure = fq.declare_structure(net, {})
    words = torch.arange(16 * 6).reshape(16, 6) % 5
    data = {c: Examples(words, torch.arange(16) % 3) for c in range(4)}
    engine = fq.LocalEngine(net, structure, {"train": data}, workers=0, clients_per_pass=4)
    recipe, params = fq.LocalSGD(LOCAL, lr=0.1, weight=16.0), net.state_dict()
    work = [fq.Task(c, (fq.Subnet(),), params, recipe, seed=c) for c in data]
    assert all(isinstance(result, Update) for result in engine.run(work))
    (size,) = engine.pass_sizes.chosen.values()
    assert size.clients == 1
    engine.close()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("per_pass", [1, 4])
def test_a_damaged_state_costs_its_client_alone(tmp_path, workers, per_pass):
    settings = fq.LocalTraining(epochs=1, keep_optimizer=True, momentum=0.9)
    made = Setting(settings=settings, workers=workers, folder=tmp_path, clients_per_pass=per_pass)
    assert all(isinstance(result, Update) for result in made.run())
    state = tmp_path / "client-2.1.safetensors"
    damaged = bytearray(state.read_bytes())
    damaged[-5] ^= 255
    state.write_bytes(damaged)
    assert [isinstance(result, Failure) for result in made.run()] == [False, False, True, False]
    made.engine.close()


def test_a_trial_that_fails_for_one_client_is_made_with_another():
    net, data = make_net(norm=True), make_examples((1, 16, 16, 16))  # one example has no variance
    made = Setting(net=net, data=data, clients_per_pass=4)
    results = made.run()
    assert [isinstance(result, Failure) for result in results] == [True, False, False, False]
    assert made.reasons == ["as the settings say"]
    made.engine.close()


def test_a_state_that_cannot_be_written_leaves_no_file_of_the_update(tmp_path):
    (tmp_path / "clients").write_text("a file where a folder should be")
    settings = fq.LocalTraining(epochs=1, keep_optimizer=True)
    made = Setting(settings=settings, workers=1, folder=tmp_path / "clients")
    assert all(isinstance(result, Failure) for result in made.run())
    assert not list(made.engine._scratch.folder.glob("update-*"))
    made.engine.close()
