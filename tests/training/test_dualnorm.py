"""Dual normalisation, against two normalisations whose outputs are blended."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedquilt.errors import ConfigError
from fedquilt.training.dualnorm import (
    DualNorm,
    at_robustness,
    make_dual,
    on_path,
    set_robustness,
)

SHAPES = {1: [(6, 5), (6, 5, 7)], 2: [(6, 5, 3, 4)], 3: [(6, 5, 2, 3, 2)]}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
KINDS = [
    {},
    {"affine": False},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False},
    {"eps": 0.1, "momentum": None},
]


class Net(nn.Module):
    """Two normalisations, one of them used thrice and also reached by another road."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(5)
        self.body = nn.Sequential(nn.Conv2d(5, 5, 3, padding=1, bias=False), self.norm)
        self.aside = [self.norm]
        self.head = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.head(torch.relu(self.aside[0](self.body(x))).mean((2, 3)))


def scramble(model: nn.Module, seed: int = 0) -> nn.Module:
    """Other values everywhere, so that the halves differ."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.is_floating_point():
            drawn = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
            tensor.data.copy_(drawn * 2 + 0.2)
    return model


def blended_by_hand(norm: DualNorm, x: Tensor, share: float) -> Tensor:
    return (1 - share) * norm.clean(x) + share * norm.noise(x)


CASES = [
    pytest.param(NORMS[d](5, **kind), shape, id=f"{d}d-{shape}-{kind}")
    for d in NORMS
    for shape in SHAPES[d]
    for kind in KINDS
]


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize(("norm", "shape"), CASES)
def test_the_blend_is_the_sum_of_both_halves(norm, shape, as_tensor):
    layer = scramble(make_dual(norm.double())).eval()
    x = torch.randn(shape, dtype=torch.float64) * 3 + 5
    for share in (0.0, 0.2, 0.5, 0.8, 1.0):
        layer.robustness = torch.tensor(share, dtype=x.dtype) if as_tensor else share
        expected = blended_by_hand(layer, x, share)
        torch.testing.assert_close(layer(x), expected, rtol=1e-9, atol=1e-9)


def test_normalisation_without_a_bias_is_blended_too():
    for tracks in (True, False):
        norm = nn.BatchNorm2d(5, bias=False, track_running_stats=tracks)
        layer = scramble(make_dual(norm)).eval()
        layer.robustness = 0.3
        x = torch.randn(6, 5, 3, 4)
        torch.testing.assert_close(layer(x), blended_by_hand(layer, x, 0.3))


class Doubled(nn.BatchNorm2d):
    """A normalisation of another kind: what it computes is its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x).abs()


@pytest.mark.parametrize("norm", [nn.SyncBatchNorm(5), Doubled(5)])
def test_subclasses_are_blended_by_what_they_compute(norm):
    layer = scramble(make_dual(norm)).eval()
    assert isinstance(layer.noise, type(norm))
    layer.robustness = 0.3
    x = torch.randn(6, 5, 3, 4)
    torch.testing.assert_close(layer(x), blended_by_hand(layer, x, 0.3))


@given(st.floats(0, 1), st.integers(0, 20))
@settings(max_examples=30, deadline=None)
def test_a_whole_net_is_blended_layer_by_layer(share, seed):
    model = scramble(make_dual(Net().double()), seed).eval()
    x = torch.rand(4, 1, 6, 6, dtype=torch.float64)
    set_robustness(model, share)
    found = model(x)
    norm, last = model.norm, model.head[1]
    hidden = torch.relu(blended_by_hand(norm, model.first(x), share))
    hidden = blended_by_hand(norm, model.body[0](hidden), share)
    hidden = torch.relu(blended_by_hand(norm, hidden, share))
    hidden = blended_by_hand(last, model.head[0](hidden.mean((2, 3))), share)
    torch.testing.assert_close(found, model.head[2](hidden))


def test_gradients_go_through_the_blend():
    layer = scramble(make_dual(nn.BatchNorm2d(5).double())).eval()
    x = torch.randn(3, 5, 2, 2, dtype=torch.float64, requires_grad=True)
    share = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    inputs = [x, share, *layer.parameters()]
    layer.robustness = share
    weights = torch.randn_like(x)
    found = torch.autograd.grad((layer(x) * weights).sum(), inputs)
    expected = torch.autograd.grad((blended_by_hand(layer, x, share) * weights).sum(), inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_copy_starts_as_the_original_at_every_robustness():
    model = scramble(Net()).eval()
    x = torch.rand(4, 1, 6, 6)
    expected, both = model(x), make_dual(model)
    for share in (0.0, 1.0):
        set_robustness(both, share)
        assert both(x).equal(expected)
    set_robustness(both, 0.3)
    torch.testing.assert_close(both(x), expected)


def test_robustness_0_is_the_model_with_the_clean_half_and_1_with_the_noise_half():
    model = scramble(make_dual(scramble(Net())), 3).eval()
    x = torch.rand(4, 1, 6, 6)
    for share, half in ((0.0, "clean"), (1.0, "noise")):
        plain = Net().eval()
        state = {n.replace(f".{half}", ""): t for n, t in model.state_dict().items()}
        plain.load_state_dict({n: state[n] for n in plain.state_dict()})
        set_robustness(model, share)
        assert model(x).equal(plain(x))
        set_robustness(model, torch.tensor(share))
        torch.testing.assert_close(model(x), plain(x))


def test_the_original_is_left_alone_and_nothing_is_shared_with_it():
    model = scramble(Net())
    before = copy.deepcopy(model.state_dict())
    both = scramble(make_dual(model), 5)
    assert all(t.equal(before[n]) for n, t in model.state_dict().items())
    assert not any(isinstance(m, DualNorm) for m in model.modules())
    pointers = [t.data_ptr() for t in both.state_dict().values()]
    norm = both.norm
    assert norm.clean.weight.data_ptr() != norm.noise.weight.data_ptr()
    assert not set(pointers) & {t.data_ptr() for t in model.state_dict().values()}


def test_a_shared_normalisation_stays_shared_on_every_road():
    both = make_dual(Net())
    assert both.norm is both.body[1]
    assert both.norm is both.aside[0]
    assert sum(isinstance(m, DualNorm) for m in both.modules()) == 2


def test_tied_weights_stay_tied_among_the_halves():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    model[2].weight = model[0].weight
    both = make_dual(model)
    assert both[0].clean.weight is both[2].clean.weight
    assert both[0].noise.weight is both[2].noise.weight
    assert both[0].noise.weight is not both[0].clean.weight
    assert both[0].clean.bias is not both[2].clean.bias


def test_a_model_that_is_a_normalisation_is_doubled():
    layer = make_dual(nn.BatchNorm1d(3).eval())
    assert isinstance(layer, DualNorm)
    assert not layer.training
    assert not layer.noise.training


def test_names_say_which_half():
    names = {n for n in make_dual(Net()).state_dict() if n.startswith(("norm.", "head.1."))}
    tensors = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert names == {
        f"{layer}.{half}.{tensor}"
        for layer in ("norm", "head.1")
        for half in ("clean", "noise")
        for tensor in tensors
    }


@pytest.mark.parametrize("by_dial", [True, False])
@pytest.mark.parametrize("path", [0.0, 1.0])
def test_training_moves_one_half_only(path, by_dial):
    learns, rests = ("noise", "clean") if path else ("clean", "noise")
    model = scramble(make_dual(Net())).train()
    plain = Net().train()
    state = {n.replace(f".{learns}", ""): t for n, t in model.state_dict().items()}
    plain.load_state_dict({n: state[n] for n in plain.state_dict()})
    before = copy.deepcopy(model.state_dict())
    x = torch.rand(4, 1, 6, 6)
    set_robustness(model, path if by_dial else 0.5)
    with on_path(model, None if by_dial else path):
        out = model(x)
    expected = plain(x)
    assert out.equal(expected)
    out.square().sum().backward()
    after = model.state_dict()
    for name, tensor in plain.state_dict().items():
        if "running" in name or "tracked" in name:
            layer, kind = name.rsplit(".", 1)
            assert after[f"{layer}.{learns}.{kind}"].equal(tensor)
            assert not after[f"{layer}.{learns}.{kind}"].equal(before[f"{layer}.{learns}.{kind}"])
    assert all(t.equal(before[n]) for n, t in after.items() if f".{rests}." in n)
    gradients = {n: p.grad is not None for n, p in model.named_parameters()}
    assert all(has == (f".{rests}." not in n) for n, has in gradients.items())


@pytest.mark.parametrize("share", [0.5, torch.tensor(0.5)])
def test_training_on_a_blend_is_refused(share):
    model = make_dual(Net()).train()
    set_robustness(model, share)
    with pytest.raises(ConfigError, match=r"one half at a time.*0\.5.*with_path"):
        model(torch.rand(4, 1, 6, 6))


def test_normalisations_put_in_training_alone_learn_in_a_model_in_use():
    """As the query of statistics does it: the model in use, its normalisations in training."""
    model = make_dual(Net()).eval()
    model.norm.clean.train()
    model(torch.rand(4, 1, 6, 6))
    assert model.norm.clean.num_batches_tracked == 3  # it is used thrice
    assert model.head[1].clean.num_batches_tracked == 0
    set_robustness(model, 0.5)
    with pytest.raises(ConfigError, match="one half at a time"):
        model(torch.rand(4, 1, 6, 6))


def test_inputs_of_the_wrong_rank_are_refused_as_before():
    layer = make_dual(nn.BatchNorm2d(5)).eval()
    layer.robustness = 0.5
    with pytest.raises(ValueError, match="expected 4D input"):
        layer(torch.rand(2, 5, 3))


def test_copies_and_pickles_behave_alike():
    model = scramble(make_dual(Net())).eval()
    set_robustness(model, 0.3)
    x = torch.rand(4, 1, 6, 6)
    expected, buffer = model(x), io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ]
    for other in copies:
        assert other(x).equal(expected)
        set_robustness(other, 1.0)
        assert not other(x).equal(expected)
    assert model(x).equal(expected)


def test_turning_the_dial_touches_no_tensor():
    model = scramble(make_dual(Net())).eval()
    before = {n: (t.data_ptr(), t._version) for n, t in model.state_dict().items()}
    for share in (0.0, 0.3, 1, torch.tensor(0.7)):
        set_robustness(model, share)
        assert all(m.robustness is share for m in model.modules() if isinstance(m, DualNorm))
    assert {n: (t.data_ptr(), t._version) for n, t in model.state_dict().items()} == before


def test_any_layer_with_a_robustness_takes_part():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.robustness = 0.0

    model = nn.Sequential(Own(), make_dual(nn.BatchNorm1d(3)))
    set_robustness(model, 0.25)
    assert [m.robustness for m in model] == [0.25, 0.25]


def test_contexts_put_everything_back():
    model = make_dual(Net())
    model.norm.robustness, model.head[1].robustness = 0.1, 0.2
    with suppress(KeyError), at_robustness(model, 0.7), on_path(model, 1.0):
        assert {m.robustness for m in (model.norm, model.head[1])} == {0.7}
        with on_path(model, 0.0):
            assert model.norm.path == 0.0
        assert model.norm.path == 1.0
        raise KeyError
    assert (model.norm.robustness, model.head[1].robustness, model.norm.path) == (0.1, 0.2, None)


def test_a_path_is_no_business_of_other_layers():
    model = nn.Sequential(nn.Identity(), make_dual(nn.BatchNorm1d(3)))
    model[0].path = "file.txt"
    with on_path(model, 1.0), on_path(Net(), 1.0):
        assert (model[0].path, model[1].path) == ("file.txt", 1.0)


class Dial(nn.Module):
    """A model whose robustness is an input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, robustness: Tensor) -> Tensor:
        with at_robustness(self.model, robustness):
            return self.model(x)


def test_robustness_can_be_an_input_of_an_exported_model():
    model = scramble(make_dual(nn.Sequential(nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5)))).eval()
    x = torch.rand(4, 1, 6, 6)
    program = torch.export.export(Dial(model), (x, torch.tensor(0.5))).module()
    for share in (0.0, 0.3, 1.0):
        set_robustness(model, share)
        torch.testing.assert_close(program(x, torch.tensor(share)), model(x))


def test_a_model_that_cannot_be_doubled_is_refused():
    with pytest.raises(ConfigError, match="needs batch normalization, but Linear has none"):
        make_dual(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"'1' .*does not know its number of channels.*run the"):
        make_dual(nn.Sequential(nn.Conv2d(1, 2, 1), nn.LazyBatchNorm2d()))
    with pytest.raises(ConfigError, match="'norm' is doubled already"):
        make_dual(make_dual(Net()))
    lazy = nn.Sequential(nn.LazyBatchNorm2d())
    lazy(torch.rand(2, 3, 4, 4))
    assert isinstance(make_dual(lazy)[0], DualNorm)


@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan"), torch.tensor([0.5])])
def test_a_robustness_that_is_none_is_refused(wrong):
    with pytest.raises(ConfigError, match="a robustness is"):
        set_robustness(make_dual(Net()), wrong)


def test_a_model_without_a_dial_says_how_to_get_one():
    with pytest.raises(ConfigError, match=r"Net has no robustness dial.*dual\(model\)"):
        set_robustness(Net(), 0.5)
    with pytest.raises(ConfigError, match="a path is"), on_path(make_dual(Net()), 0.5):
        pass
