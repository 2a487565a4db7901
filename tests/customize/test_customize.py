"""Models of any width and robustness, taken out of a run on disk."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.customize.ensemble import Ensemble
from fedquilt.errors import BudgetError, CheckpointError, ConfigError, TrainingError
from fedquilt.training.dualnorm import DualNorm, at_robustness


class Noted(Mapping):
    """Tensors, and the names of those that were read."""

    def __init__(self, tensors):
        self.tensors, self.read = tensors, set()

    def __getitem__(self, name):
        found = self.tensors[name]
        self.read.add(name)
        return found

    def __contains__(self, name):
        return name in self.tensors

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self):
        return len(self.tensors)


def base_by_hand(run, number, robustness, x):
    """The answer of one base, from its tensors by name."""
    net = run.setup.model.eval()
    values = {
        name.partition("@")[0]: tensor
        for name, tensor in run.state.params.items()
        if name.endswith(f"@{number}")
    }
    with at_robustness(net, robustness), torch.no_grad():
        return torch.func.functional_call(net, values, (x,))


@pytest.mark.parametrize("robustness", [0, 0.3, 1])
@pytest.mark.parametrize(("width", "count"), [(0.25, 1), (0.6, 2), (1.0, 4), (None, 4)])
def test_a_point_is_the_mean_of_its_bases_at_that_robustness(
    robust, images, width, count, robustness
):
    run = robust.open()
    model = run.customize(width, robustness)
    bases = [base_by_hand(run, i, robustness, images) for i in range(count)]
    assert isinstance(model, Ensemble)
    assert not model.training
    assert (len(model.nets), model.width, model.robustness) == (count, count / 4, robustness)
    assert model.fedquilt_info.width == count / 4
    assert torch.allclose(model(images), torch.stack(bases).mean(0), atol=1e-5)


def test_turning_the_dials_is_customizing_again(robust, images):
    run = robust.open()
    whole = run.customize()
    for width, robustness in [(0.25, 0.0), (0.5, 0.8), (1.0, 0.2)]:
        with whole.at_setting(width=width, robustness=robustness):
            expected = run.customize(width, robustness)(images)
            assert torch.allclose(whole(images), expected, atol=1e-6)


def test_without_a_robustness_a_model_is_accurate(robust):
    run = robust.open()
    run.customize(robustness=0.9)
    assert run.customize().robustness == 0.0


@pytest.mark.parametrize(("width", "owners"), [(0.25, "0"), (0.75, "012"), (1.0, "0123")])
def test_only_the_bases_that_are_needed_are_read(robust, width, owners):
    run = robust.open()
    noted = Noted(run.state.params)
    replace(run, state=replace(run.state, params=noted)).customize(width)
    assert noted.read == {n for n in noted if n.rpartition("@")[2] in owners}


def test_a_damaged_base_hurts_only_those_who_need_it(robust, images, tmp_path):
    """On disk, from opening the run on: nothing reads the last base before it is wanted."""
    run = robust.open()
    copied = replace(robust, folder=tmp_path)
    (tmp_path / "model").mkdir()
    for file in (robust.folder / "model").iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    bad = run.state.params["dense.0.weight@3"].numpy().tobytes()
    data = robust.file.read_bytes()
    assert data.count(bad) == 1
    copied.file.write_bytes(data.replace(bad, bytes(len(bad))))
    again = copied.open()
    for width in (0.25, 0.75):
        assert torch.equal(again.customize(width)(images), run.customize(width)(images))
    with pytest.raises(CheckpointError, match=r"'dense\.0\.weight@3' is not what was written"):
        again.customize(1.0)


def test_a_model_has_memory_of_its_own(robust):
    run = robust.open()
    model = run.customize(0.25)
    before = run.state.params["classifier.weight@0"].clone()
    with torch.no_grad():
        model.nets[0].classifier.weight.zero_()
    assert torch.equal(run.state.params["classifier.weight@0"], before)
    assert torch.equal(robust.open().state.params["classifier.weight@0"], before)


def test_a_run_is_opened_without_tracing_its_model(robust, images, monkeypatch):
    expected = robust.open().customize(0.5)(images)

    def refuse(*_, **__):
        raise AssertionError("traced")

    monkeypatch.setattr("fedquilt.structure.create._find_structure", refuse)
    assert torch.equal(robust.open().customize(0.5)(images), expected)


def test_a_run_whose_structure_was_declared_can_be_opened(tmp_path):
    """A trace would find another structure: here only four of the eight channels are cut."""
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    axes = {"2.weight": ("h", None), "2.bias": ("h",), "4.weight": (None, "h")}
    structure = fq.declare_structure(net, axes, example=torch.zeros(2, 4))
    people = fq.make_clients((torch.rand(12, 4), torch.arange(12) % 3), count=2, budgets=[1, 0.5])
    method = fq.HeteroFL(fq.LocalTraining(lr=0.1, epochs=1, batch_size=4))
    run = fq.train(
        net, torch.zeros(2, 4), method, people, 1, workers=0, structure=structure, out=tmp_path
    )
    again = fq.open_run(tmp_path, net, method).customize(0.5)
    shapes = {n: t.shape for n, t in run.customize(0.5).state_dict().items()}
    assert {n: t.shape for n, t in again.state_dict().items()} == shapes
    assert shapes["0.weight"] == (8, 4)


def test_another_model_is_refused(robust):
    with pytest.raises(CheckpointError, match="trained with another model"):
        fq.open_run(robust.folder, nn.Linear(4, 3), robust.method)
    with pytest.raises(CheckpointError, match=r"trained with base = .*, got base = 0\.125; open"):
        fq.open_run(robust.folder, robust.model, replace(robust.method, base=0.125))


def test_limits_choose_the_number_of_bases(robust):
    run = robust.open()
    one = sum(p.numel() for p in run.customize(0.25).parameters())
    model = run.customize(robustness=0.5, params=3 * one + 1)
    assert (len(model.nets), model.width, model.robustness) == (3, 0.75, 0.5)
    assert len(run.customize(0.6, params=3 * one + 1).nets) == 2
    with pytest.raises(BudgetError):
        run.customize(params=one - 1)


def test_points_that_do_not_exist_are_refused(robust, stored):
    run = robust.open()
    with pytest.raises(ConfigError, match=r"one base of width 0\.25, got width 0\.2"):
        run.customize(0.2)
    with pytest.raises(ConfigError, match=r"from 0 \(accurate\) to 1 \(robust\), got 1.5"):
        run.customize(0.5, 1.5)
    with pytest.raises(ConfigError, match=r"width, robustness, params.*got \['depth'\]"):
        run.customize(depth=3)
    for name in ("batch", "heterofl"):
        with pytest.raises(ConfigError, match="no robustness to choose"):
            stored(name).open().customize(robustness=0.5)


def test_a_method_of_one_net_gives_that_net(stored, images):
    model = stored("heterofl").open().customize(0.5)
    assert not isinstance(model, Ensemble)
    assert model.fedquilt_info.robustness is None
    assert model(images).shape == (5, 3)


def test_a_method_of_one_net_with_a_dial_has_it_turned(stored, images):
    run = stored("oat").open()
    answers = [run.customize(robustness=value)(images) for value in (None, 0, 0.5, 1)]
    assert torch.equal(answers[0], answers[1])
    assert not torch.allclose(answers[1], answers[2], atol=1e-3)
    assert not torch.allclose(answers[2], answers[3], atol=1e-3)


@pytest.mark.parametrize("name", ["batch", "robust batch"])
def test_a_model_trained_on_batch_statistics_answers_one_example_as_many(stored, images, name):
    model = stored(name).open().customize(0.5)
    assert model(images).shape == (5, 3)
    torch.testing.assert_close(model(images)[:1], model(images[:1]))


# scores


def test_scores_have_every_point_and_robust_accuracy_under_attack(robust):
    run = robust.open()
    scores = run.evaluate(
        robust.people,
        widths=(1.0, 0.25),
        robustness=(0, 0.5),
        attack=fq.PGD(epsilon=0.1, steps=1),
        workers=0,
    )
    points = [(s.robustness, s.width) for s in scores]
    assert points == [(0, 1.0), (0, 0.25), (0.5, 1.0), (0.5, 0.25)]
    held_out = robust.people.test[-1]
    x, y = held_out.batch(torch.arange(len(held_out)))
    for score in scores:
        model = run.customize(score.width, score.robustness)
        assert score.accuracy == pytest.approx((model(x).argmax(1) == y).double().mean().item())
        assert score.robust_accuracy is not None
        assert score.user_accuracy is not None
    assert not any(m.robustness for m in run.setup.model.modules() if isinstance(m, DualNorm))


def test_scores_of_points_that_make_no_sense_are_refused(robust, stored):
    run = robust.open()
    with pytest.raises(ConfigError, match="got 2"):
        run.evaluate(robust.people, robustness=(0, 2), workers=0)
    with pytest.raises(ConfigError, match="no robustness to choose"):
        stored("heterofl").open().evaluate(robust.people, robustness=(0.5,), workers=0)
    people = replace(robust.people, test={-1: robust.people.test[-1]})
    with pytest.raises(ConfigError, match="test data of clients, and these have none"):
        run.evaluate(people, attack=fq.PGD(steps=1), workers=0)


def test_an_attack_that_nobody_can_be_given_is_refused(robust):
    """Each client refuses inputs that are no pixels, and would be left out."""
    y = torch.arange(24) % 3
    x = 3 * torch.randn(24, 1, 6, 6)
    people = fq.make_clients((x, y), test=(x, y), count=2, budgets=[1])
    with pytest.raises(TrainingError, match=r"could be attacked; .* pixels are from 0 to 1"):
        robust.open().evaluate(people, attack=fq.PGD(steps=1), workers=0)
