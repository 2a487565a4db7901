"""Several nets that answer as one, and the dials between them."""

import copy
import tracemalloc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedquilt as fq
from fedquilt.customize.ensemble import Ensemble
from fedquilt.errors import ConfigError, FedquiltError
from fedquilt.training.dualnorm import DualNorm, make_dual, set_robustness

X = torch.rand(5, 4, generator=torch.Generator().manual_seed(0))


def net(seed):
    """A net whose two normalisations are not alike."""
    torch.manual_seed(seed)
    found = make_dual(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)))
    for norm in found[1].clean, found[1].noise:
        nn.init.uniform_(norm.weight)
        nn.init.uniform_(norm.running_mean)
    return found.eval()


@pytest.fixture
def model():
    return Ensemble([net(seed) for seed in range(4)], base=0.25)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_mixture_answers_with_the_mean_of_its_first_nets(model, count):
    model.width = count / 4
    expected = torch.stack([net(X) for net in model.nets[:count]]).mean(0)
    assert torch.allclose(model(X), expected, atol=1e-6)
    assert not torch.allclose(model.nets[0](X), model.nets[1](X), atol=1e-2)


def test_all_widths_at_once_are_the_widths_one_by_one(model):
    one_by_one = []
    for width in model.widths:
        with model.at_setting(width=width):
            one_by_one.append(model(X))
    assert torch.allclose(model.predict_all_widths(X), torch.stack(one_by_one), atol=1e-6)
    with model.at_setting(width=0.5):
        assert model.widths == (0.25, 0.5)
        assert model.predict_all_widths(X).shape == (2, 5, 3)


class Careful(nn.Module):
    """Notes how many answers of its kind are still in memory when it is asked."""

    answers: list
    most = 0

    def forward(self, x):
        Careful.most = max(Careful.most, sum(a() is not None for a in Careful.answers))
        answer = x + 1
        Careful.answers.append(weakref.ref(answer))
        return answer


def test_nets_that_are_not_mixed_are_not_asked_and_answers_are_not_collected():
    Careful.answers, Careful.most = [], 0
    model = Ensemble([Careful() for _ in range(8)], base=0.125)
    model.width = 0.625
    with torch.no_grad():
        assert torch.allclose(model(X), X + 1)
    assert len(Careful.answers) == 5
    assert Careful.most <= 1


@pytest.mark.parametrize("base", [0.125, 0.1, 0.3, 0.25, 1 / 3])
def test_widths_become_nets_as_the_method_makes_them(base):
    method = fq.SplitMix(base=base)
    model = Ensemble([nn.Identity() for _ in range(method.num_bases)], base)
    for width in [*(k * base for k in range(1, method.num_bases + 1)), 0.35, 0.7, 0.99, 1.0]:
        model.width = width
        assert len(model.widths) == len(method.ensemble(None, None, width))
        assert model.width == pytest.approx(len(model.widths) * base)


@pytest.mark.parametrize(
    ("width", "words"),
    [
        (0.2, "narrowest width is one net of 0.25, got 0.2"),
        (1.0, "holds 3 nets, up to width 0.75, got 1; take a wider one"),
        (0, r"fractions in \(0, 1\]"),
        (-0.5, r"fractions in \(0, 1\]"),
        (2, r"fractions in \(0, 1\]"),
        (float("nan"), r"fractions in \(0, 1\]"),
    ],
)
def test_widths_that_it_does_not_have_are_refused(model, width, words):
    part = Ensemble(model.nets[:3], base=0.25)
    part.width = 0.5
    with pytest.raises(FedquiltError, match=words):
        part.width = width
    assert part.width == 0.5


def test_robustness_turns_every_dial(model):
    model.width = 0.25
    model.robustness = 0.4
    dials = [m.robustness for m in model.modules() if isinstance(m, DualNorm)]
    assert dials == [0.4] * 4
    assert model.robustness == 0.4
    answers = []
    for value in (0, 0.4, 1):
        model.robustness = value
        answers.append(model(X))
    assert torch.allclose(answers[0], _by_halves(model, "clean"), atol=1e-6)
    assert torch.allclose(answers[2], _by_halves(model, "noise"), atol=1e-6)
    assert not torch.allclose(answers[0], answers[1], atol=1e-3)


def _by_halves(model, half):
    first = model.nets[0]
    return first[3](first[2](getattr(first[1], half)(first[0](X))))


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_robustness_out_of_range_is_refused(model, value):
    model.robustness = 0.5
    with pytest.raises(ConfigError, match=r"from 0 \(accurate\) to 1 \(robust\)"):
        model.robustness = value
    assert model.robustness == 0.5


def test_a_mixture_without_dials_has_no_robustness():
    model = Ensemble([nn.Linear(4, 3)], base=0.5)
    assert model.robustness is None
    with pytest.raises(ConfigError, match="no robustness to choose"):
        model.robustness = 0.5
    with pytest.raises(ConfigError, match="no robustness"), model.at_setting(robustness=0.5):
        pass


def test_a_context_gives_the_model_back_as_it_was(model):
    model.width, model.robustness = 0.75, 0.2
    before = model(X)
    with model.at_setting(width=0.25, robustness=0.9) as same:
        assert same is model
        assert (model.width, model.robustness) == (0.25, 0.9)
        with model.at_setting(robustness=0):
            assert (model.width, model.robustness) == (0.25, 0)
        assert model.robustness == 0.9
    assert (model.width, model.robustness) == (0.75, 0.2)
    assert torch.equal(model(X), before)


def test_a_context_gives_the_model_back_after_exceptions(model):
    model.width, model.robustness = 0.75, 0.2
    with pytest.raises(ZeroDivisionError), model.at_setting(width=0.25, robustness=0.9):
        raise ZeroDivisionError
    with pytest.raises(ConfigError), model.at_setting(width=0.25, robustness=9):
        pass
    assert (model.width, model.robustness) == (0.75, 0.2)


def test_a_context_remembers_dials_that_were_turned_one_by_one(model):
    set_robustness(model.nets[2], 0.7)
    with model.at_setting(robustness=0.1):
        pass
    assert [n[1].robustness for n in model.nets] == [0.0, 0.0, 0.7, 0.0]


class Forbidden(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")


def test_switching_touches_no_tensor_and_allocates_nothing():
    model = Ensemble([net(seed) for seed in range(8)], base=0.125)
    tensors = [*model.parameters(), *model.buffers()]
    places = [(id(t), t.data_ptr(), t._version) for t in tensors]
    points = [(0.125, 0.0), (1.0, 0.3), (0.5, 1.0), (0.25, 0.8)] * 5
    tracemalloc.start()
    try:
        with Forbidden():
            for width, robustness in points:
                model.width, model.robustness = width, robustness
                with model.at_setting(width=1.0, robustness=0.5):
                    pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10_000  # bytes
    assert [(id(t), t.data_ptr(), t._version) for t in tensors] == places
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == [p[0] for p in places]


def test_a_copy_has_dials_of_its_own(model):
    other = copy.deepcopy(model)
    other.width, other.robustness = 0.25, 1.0
    assert (model.width, model.robustness) == (1.0, 0.0)
    assert torch.allclose(other(X), _by_halves(other, "noise"), atol=1e-6)


def test_gradients_reach_the_inputs_and_the_nets_that_answer(model):
    model.width = 0.5
    x = X.clone().requires_grad_()
    model(x).square().sum().backward()
    assert x.grad.abs().sum() > 0
    assert [any(p.grad is not None for p in n.parameters()) for n in model.nets] == [
        True,
        True,
        False,
        False,
    ]
