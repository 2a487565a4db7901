"""Laws of what is taken away, for every method: it is what was trained, and what was scored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from tests.laws import conftest
from tests.laws.conftest import METHODS, NUM_CLASSES, OPTIMISER, Residual, population
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.data import to_examples
from fedquilt.data.population import Population
from fedquilt.errors import ConfigError, FedquiltError
from fedquilt.methods.method import shares_weights
from fedquilt.structure.cut import build_module

SCALED = {  # those that are not scaled at their defaults
    "splitmix robust batch": fq.SplitMix(
        OPTIMISER, base=0.25, robust=True, steps=2, statistics="batch", stacked=False
    ),
    "sheterofl scaler": fq.SHeteroFL(OPTIMISER, fraction=0.8, scaler=True),
    "nefl constant": fq.NeFL(
        OPTIMISER,
        fraction=1.0,
        scaling="prefix",
        gammas=(0.2, 1.0),
        steps="constant",
        step_start="ode",
    ),
}
EVERY = {**METHODS, **SCALED}
NORMS = ("batch", "group", "layer", "none")
SAMPLED = ("adds",)  # channels that are normalised together cannot be left out one by one
DUAL = ("fedavg-oat", "splitmix robust")  # which have two kinds of batch normalisation
WITHOUT = {"group": (*SAMPLED, *DUAL), "layer": (*SAMPLED, *DUAL), "none": DUAL}


class Net(nn.Module):
    """A net like that of the other laws, with another normalisation."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        first, second = conftest.HIDDEN
        self.features = nn.Sequential(
            nn.Conv2d(1, first, 3, padding=1),
            normalisation(norm, first),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 3, padding=1),
            normalisation(norm, second),
            nn.ReLU(),
        )
        self.blocks = nn.Sequential(Residual(second), Residual(second))
        for block in self.blocks:
            block.norm = normalisation(norm, second)
        self.classifier = nn.Linear(second, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.blocks(self.features(x)).mean((2, 3)))


def normalisation(kind: str, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return {"group": nn.GroupNorm(1, channels), "layer": Last(channels), "none": nn.Identity()}[
        kind
    ]


class Last(nn.Module):
    """Layer normalisation over channels, which are moved to the end for it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@cache  # fixtures with parameters are made anew for nearly every test
def traced(norm: str) -> tuple[str, nn.Module, fq.Structure]:
    torch.manual_seed(0)
    model = Net(norm)
    return norm, model, fq.trace_structure(model, torch.zeros(2, 1, 6, 6))


@pytest.fixture(scope="module", params=NORMS)
def structured(request: pytest.FixtureRequest) -> tuple[str, nn.Module, fq.Structure]:
    return traced(request.param)


@pytest.fixture(scope="module", params=sorted(EVERY))
def run(request: pytest.FixtureRequest, structured: Any) -> fq.Run:
    """Two rounds of a method, on a net with some normalisation."""
    norm, model, structure = structured
    example, method = torch.zeros(2, 1, 6, 6), EVERY[request.param]
    if request.param.startswith(WITHOUT.get(norm, ())):
        with pytest.raises(FedquiltError):
            fq.train(model, example, method, population(), 2, workers=0, structure=structure)
        pytest.skip("the method needs another normalisation")
    return fq.train(model, example, method, population(), 2, seed=7, workers=0, structure=structure)


def images(count: int = 5) -> Tensor:
    return torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(1))


@contextmanager
def speaking_up(module: nn.Module, whole: nn.Module) -> Iterator[None]:
    """Every layer's outputs divided by the share of its channels, by hand."""
    layers = {n: m for n, m in whole.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))}
    hooks = []
    for name, layer in module.named_modules():
        if name in layers:
            share = layer.weight.shape[0] / layers[name].weight.shape[0]
            hooks.append(layer.register_forward_hook(lambda m, i, o, share=share: o / share))
    yield
    for hook in hooks:
        hook.remove()


def in_training(run: fq.Run, width: float, x: Tensor) -> Tensor:
    """What the subnets of a width answer as clients train them, with statistics of the end."""
    setup, answers = run.setup, []
    for subnet in run.method.ensemble(setup, run.state, width):
        net = build_module(setup.model, setup.structure, subnet, run.state.params).eval()
        if run.method.scales_outputs:
            with speaking_up(net, run.user_setup.model):
                answers.append(net(x))
        else:
            answers.append(net(x))
    return torch.stack(answers).mean(0)


def taken(run: fq.Run) -> Iterator[tuple[float, nn.Module]]:
    if shares_weights(run.setup, run.method):
        for width in run.method.sizes(run.setup):
            yield width, run.customize(width=width)


@torch.no_grad()
def test_a_model_taken_away_answers_as_it_did_in_training(run):
    for width, model in taken(run):
        expected = in_training(run, width, images())
        torch.testing.assert_close(model(images()), expected, rtol=1e-4, atol=1e-5)
        assert not model.training


@torch.no_grad()
def test_a_model_answers_one_example_as_it_answers_many(run):
    x = images()
    for _, model in taken(run):
        alone = torch.cat([model(x[i : i + 1]) for i in range(len(x))])
        torch.testing.assert_close(alone, model(x), rtol=1e-4, atol=1e-5)
        reordered = model(x.flip(0)).flip(0)
        torch.testing.assert_close(reordered, model(x), rtol=1e-4, atol=1e-5)


def shuffled(people: Population) -> Population:
    """The same people, whose test data come in another order and so in other batches."""

    def reorder(data: Any) -> Any:
        order = torch.arange(len(data)).flip(0).roll(1)
        return to_examples((data.inputs[order], data.labels[order]))

    return replace(people, test={client: reorder(data) for client, data in people.test.items()})


def test_scores_do_not_depend_on_the_order_or_the_batches_of_test_data(run, monkeypatch):
    if run.method.local_params:
        with pytest.raises(ConfigError, match="ended with the run, which was not kept"):
            run.evaluate(workers=0)
        return
    before = run.evaluate(workers=0)
    for one, other in zip(before, run.scores, strict=True):  # own nets may have ended with the run
        assert replace(one, personal_value=None) == replace(other, personal_value=None)
    monkeypatch.setattr("fedquilt.evaluation.accuracy.PARTS", 3)
    after = run.evaluate(shuffled(population()), workers=0)
    for one, other in zip(before, after, strict=True):
        assert replace(one, loss=None) == replace(other, loss=None)
        assert one.loss == pytest.approx(other.loss, rel=1e-5)


@torch.no_grad()
def test_scores_are_those_of_the_models_that_are_taken_away(run):
    held_out = population().test[-1]
    for score, (width, model) in zip(run.scores, taken(run), strict=False):
        assert score.width == width
        hits = (model(held_out.inputs).argmax(1) == held_out.labels).float().mean()
        assert score.accuracy == pytest.approx(float(hits))
        assert not score.batch_statistics


EXPORTED = ("adds", "apfl", "feddrop", "heterofl", "sheterofl", "splitmix", "stc")


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_model_answers_one_example_as_it_answers_many(name, tmp_path):
    torch.manual_seed(0)
    model, method = Net("batch"), METHODS[name]
    run = fq.train(model, torch.zeros(2, 1, 6, 6), method, population(), 1, workers=0)
    path = fq.export(run.customize(), tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feed = session.get_inputs()[0].name
    x = images()
    many = session.run(None, {feed: x.numpy()})[0]
    alone = [session.run(None, {feed: x[i : i + 1].numpy()})[0][0] for i in range(len(x))]
    torch.testing.assert_close(torch.tensor(np.stack(alone)), torch.tensor(many))
    with torch.no_grad():
        torch.testing.assert_close(run.customize()(x), torch.tensor(many), rtol=1e-4, atol=1e-4)
