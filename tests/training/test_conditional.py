"""Layers that are told how robust to be."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch import Tensor, nn

from fedquilt.errors import ConfigError
from fedquilt.training.conditional import CODE, FiLM, encode_robustness, make_conditional
from fedquilt.training.dualnorm import DualNorm, at_robustness, on_path, set_robustness

SHARES = (0.0, 0.2, 0.5, 0.8, 1.0)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 5),
        nn.BatchNorm1d(5),
    )


def scramble(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if tensor.is_floating_point():
            drawn = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
            tensor.data.copy_(drawn + 0.1)
    return module


def film_by_hand(film: FiLM, share: float, x: Tensor) -> Tensor:
    code = encode_robustness(share, film.hidden.weight)
    hidden = code @ film.hidden.weight.T + film.hidden.bias
    hidden = torch.where(hidden > 0, hidden, 0.01 * hidden)
    scale = 1 + hidden @ film.scale.weight.T + film.scale.bias
    shift = hidden @ film.shift.weight.T + film.shift.bias
    tail = [1] * (x.ndim - 2)
    return x * scale.view(1, -1, *tail) + shift.view(1, -1, *tail)


def test_a_conditional_model_starts_as_the_original():
    plain = model()
    plain(torch.rand(8, 1, 5, 5))
    plain.eval()
    x = torch.rand(4, 1, 5, 5)
    told = make_conditional(plain)
    for share in SHARES:
        set_robustness(told, share)
        torch.testing.assert_close(told(x), plain(x))


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 5), (3, 4, 5, 2), (3, 4, 2, 2, 2)])
@pytest.mark.parametrize("share", [0.0, 0.3, torch.tensor(0.8)])
def test_film_scales_and_shifts_each_channel(shape, share):
    film = scramble(FiLM(4).double())
    film.robustness = share
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(film(x), film_by_hand(film, share, x))


@pytest.mark.parametrize("share", [*SHARES, 0.01, torch.tensor(0.0), torch.tensor(0.01)])
def test_the_noise_half_is_for_every_robustness_above_0(share):
    told = scramble(make_conditional(model())).eval()
    x = torch.rand(4, 1, 5, 5)
    set_robustness(told, share)
    half = "noise" if share > 0 else "clean"
    hidden = film_by_hand(told[1].film, share, getattr(told[1].norm, half)(told[0](x)))
    last = getattr(told[5].norm, half)(told[4](hidden.relu().flatten(1)))
    torch.testing.assert_close(told(x), film_by_hand(told[5].film, share, last))


def test_a_path_changes_the_half_but_not_what_the_layers_are_told():
    told = scramble(make_conditional(model()))[1].train()
    x = torch.rand(4, 4, 5, 5)
    for path, half, rests in ((0.0, "clean", "noise"), (1.0, "noise", "clean")):
        before = copy.deepcopy(told.state_dict())
        fresh = copy.deepcopy(getattr(told.norm, half))
        with at_robustness(told, 0.3), on_path(told, path):
            found = told(x)
        torch.testing.assert_close(found, film_by_hand(told.film, 0.3, fresh(x)))
        for name, tensor in told.state_dict().items():
            moved = f".{half}." in name and ("running" in name or "tracked" in name)
            assert tensor.equal(before[name]) != moved, name
            assert f".{rests}." not in name or not moved


def test_every_part_of_it_can_learn():
    torch.manual_seed(0)
    told = make_conditional(model())
    local_training = torch.optim.SGD(told.parameters(), lr=0.1)
    for _ in range(2):  # the hidden layers learn once the others are not zero
        for path in (0.0, 1.0):
            with at_robustness(told, 0.5), on_path(told, path):
                told(torch.rand(4, 1, 5, 5)).square().sum().backward()
        missing = [n for n, p in told.named_parameters() if p.grad is None]
        assert not missing
        local_training.step()
    assert told[1].film.hidden.weight.grad.ne(0).any()


def test_each_robustness_has_its_own_code_and_neighbours_have_similar_ones():
    like = torch.zeros((), dtype=torch.float64)
    codes = torch.cat([encode_robustness(s, like) for s in SHARES])
    assert codes.shape == (len(SHARES), CODE)
    assert torch.linalg.matrix_rank(codes) == len(SHARES)
    near = (encode_robustness(0.501, like) - encode_robustness(0.5, like)).norm()
    assert torch.pdist(codes).min() > 20 * near
    assert encode_robustness(torch.tensor(0.5), like).equal(encode_robustness(0.5, like))
    assert codes.abs().max() <= 1


def test_names_kinds_modes_and_precision_follow_the_original():
    told = make_conditional(model().double().eval())
    names = {n.removeprefix("1.") for n in told.state_dict() if n.startswith("1.")}
    assert {n.split(".")[0] for n in names} == {"norm", "film"}
    assert {"norm.clean.weight", "norm.noise.running_var", "film.hidden.bias"} <= names
    assert {t.dtype for n, t in told.named_parameters()} == {torch.float64}
    assert not any(m.training for m in told.modules())
    assert sum(isinstance(m, DualNorm) for m in told.modules()) == 2


def test_layers_without_any_tensor_become_conditional_too():
    bare = nn.Sequential(nn.BatchNorm2d(3, affine=False, track_running_stats=False))
    told = make_conditional(bare).eval()
    x = torch.rand(4, 3, 2, 2)
    set_robustness(told, torch.tensor(0.4))
    torch.testing.assert_close(told(x), bare(x))


def test_copies_and_pickles_behave_alike():
    told = scramble(make_conditional(model())).eval()
    set_robustness(told, 0.2)
    x = torch.rand(4, 1, 5, 5)
    for other in (copy.deepcopy(told), pickle.loads(pickle.dumps(told))):
        assert other(x).equal(told(x))
        set_robustness(other, 0.8)
        assert not other(x).equal(told(x))


def test_a_model_without_normalisation_is_refused():
    with pytest.raises(ConfigError, match="needs batch normalization"):
        make_conditional(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="doubled already"):
        make_conditional(make_conditional(model()))
