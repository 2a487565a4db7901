"""First values drawn anew, and as large as in the whole net."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fedquilt.structure.create import declare_structure, trace_structure
from fedquilt.structure.cut import build_module
from fedquilt.structure.derive import make_uncut_structure
from fedquilt.structure.structure import Structure
from fedquilt.training.initialization import reinitialize_copy, rescale_initial


def made(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 48, 3, groups=4),
        nn.ReLU(),
        nn.Conv2d(48, 64, 3, stride=2, bias=False),
        nn.ConvTranspose2d(64, 32, 2),
        nn.Flatten(),
        nn.Linear(32 * 9, 40),
        nn.ReLU(),
        nn.Linear(40, 7),
    )


EXAMPLE = torch.zeros(2, 3, 7, 7)


@pytest.fixture(scope="module")
def whole() -> tuple[nn.Module, Structure]:
    net = made(0)
    return net, trace_structure(net, EXAMPLE)


def slim(whole, width: float) -> tuple[nn.Module, Structure]:
    net, structure = whole
    small = build_module(net, structure, structure.subnet(width))
    return small, make_uncut_structure(small, structure)


def bits(net: nn.Module) -> dict[str, bytes]:
    return {n: t.numpy().tobytes() for n, t in net.state_dict().items()}


def test_a_seed_gives_the_values_that_the_constructor_draws_with_it():
    used = made(3)
    for tensor in used.state_dict().values():
        tensor.fill_(7)
    before = bits(used)
    fresh = reinitialize_copy(used, 5)
    assert bits(fresh) == bits(made(5))
    assert bits(used) == before  # a copy was drawn


def test_draws_are_independent_and_leave_other_draws_alone():
    net = made(0)
    torch.manual_seed(1)
    first, second = reinitialize_copy(net, 1), reinitialize_copy(net, 2)
    following = torch.rand(())
    torch.manual_seed(1)
    assert following.equal(torch.rand(()))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        if one.numel() > 1000:
            pair = torch.stack([one.flatten(), other.flatten()])
            assert pair.corrcoef()[0, 1].abs() < 5 / math.sqrt(one.numel())


class Marked(nn.Module):
    """Says how it was reset: a layer with a layer inside whose values it decides."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(3, 3)
        self.mark = nn.Parameter(torch.zeros(4))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.inside.bias, 5.0)
        nn.init.uniform_(self.mark, 1.0, 2.0)


def test_a_layer_has_the_last_word_about_the_layers_inside_it():
    net = nn.Sequential(Marked(), nn.MultiheadAttention(4, 2))
    fresh = reinitialize_copy(net, 0)
    assert fresh[0].inside.bias.eq(5).all()
    assert not fresh[0].inside.weight.equal(net[0].inside.weight)
    assert fresh[1].out_proj.bias.eq(0).all()  # as its constructor leaves it
    assert not fresh[1].in_proj_weight.equal(net[1].in_proj_weight)


def test_a_model_that_can_reset_itself_does_so_alone():
    fresh = reinitialize_copy(Marked(), 0)
    assert fresh.inside.bias.eq(5).all()
    again = reinitialize_copy(fresh, 1)
    assert again.inside.weight.equal(fresh.inside.weight)  # it does not reset those
    assert not again.mark.equal(fresh.mark)


def test_what_no_layer_resets_keeps_its_value():
    net = nn.Sequential(nn.Linear(2, 2))
    net.register_parameter("token", nn.Parameter(torch.tensor([3.0])))
    net.register_buffer("table", torch.arange(3.0))
    fresh = reinitialize_copy(net, 0)
    assert fresh.token.equal(net.token)
    assert fresh.table.equal(net.table)


def fan_in(net: nn.Module, layer: str) -> int:
    """How many numbers one output of a layer is made of, as PyTorch counts them."""
    return nn.init._calculate_fan_in_and_fan_out(net.get_submodule(layer).weight)[0]


LAYERS = ("0", "3", "5", "6", "8", "10")


@pytest.mark.parametrize("width", [0.5, 0.25])
@pytest.mark.parametrize("is_rescaled", [True, False])
def test_first_values_are_bounded_by_the_whole_nets_fan_in(whole, width, is_rescaled):
    """Kaiming's uniform bound is 1/√(fan-in), for weights and for biases."""
    small, structure = slim(whole, width)
    weights: dict[str, list] = {name: [] for name in LAYERS}
    biases: dict[str, list] = {name: [] for name in LAYERS}
    for seed in range(40):
        net = reinitialize_copy(small, seed)
        if is_rescaled:
            rescale_initial(net, structure)
        for name in LAYERS:
            layer = net.get_submodule(name)
            weights[name].append(layer.weight.detach().flatten())
            biases[name] += [] if layer.bias is None else [layer.bias.detach()]
    for name in LAYERS:
        bound = 1 / math.sqrt(fan_in(whole[0] if is_rescaled else small, name))
        for drawn in (weights[name], biases[name]):
            values = torch.cat(drawn).abs() if drawn else torch.tensor([bound])
            assert 0.97 * bound < values.max() <= bound * (1 + 1e-6), name


def test_only_sizes_change_not_what_was_drawn(whole):
    small, structure = slim(whole, 0.25)
    plain, net = reinitialize_copy(small, 3), reinitialize_copy(small, 3)
    rescale_initial(net, structure)
    for name in LAYERS:
        share = math.sqrt(fan_in(small, name) / fan_in(whole[0], name))
        one, other = plain.get_submodule(name), net.get_submodule(name)
        torch.testing.assert_close(other.weight, one.weight * share)
    first = (net[0], plain[0])  # its inputs are never cut
    assert first[0].weight.equal(first[1].weight)
    assert first[0].bias.equal(first[1].bias)
    assert bits(net[1]) == bits(plain[1])  # normalisation has no fan-in


def test_tied_layers_are_rescaled_once():
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    net[4].weight = net[2].weight
    structure = declare_structure(
        net,
        {
            "0.weight": ("h", None),
            "0.bias": ("h",),
            "2.weight": ("h", "h"),
            "2.bias": ("h",),
            "4.bias": ("h",),
        },
    )
    small = build_module(net, structure, structure.subnet(0.5))
    before = small[2].weight.detach().clone()
    rescale_initial(small, make_uncut_structure(small, structure))
    assert small[4].weight is small[2].weight
    torch.testing.assert_close(small[2].weight, before * math.sqrt(4 / 8))


def test_a_net_that_was_not_cut_stays_as_it_is(whole):
    net, structure = whole
    before = bits(net)
    rescale_initial(net, structure)
    assert bits(net) == before


NORMALISED = {
    "weight norm": parametrizations.weight_norm,
    "weight norm by a hook": nn.utils.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "spectral norm by a hook": nn.utils.spectral_norm,
}


def normalised(how: str, seed: int) -> nn.Module:
    """Layers whose weights are computed from others in every call."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 16, 3), nn.Linear(16, 7)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch's, about its older kind
        first, last = (NORMALISED[how](layer) for layer in layers)
    return nn.Sequential(first, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), last)


def plain(seed: int) -> list[Tensor]:
    """The weights before they are normalised."""
    torch.manual_seed(seed)
    return [nn.Conv2d(3, 16, 3).weight.detach(), nn.Linear(16, 7).weight.detach()]


def used(net: nn.Module) -> list[Tensor]:
    """The weights that a net computes with, in use."""
    net.eval()(torch.zeros(2, 3, 5, 5))
    return [net[i].weight.detach().clone() for i in (0, 4)]


def as_computed(how: str, weight: Tensor) -> Tensor:
    if how.startswith("weight"):
        return weight
    return weight / torch.linalg.matrix_norm(weight.flatten(1), 2)


@pytest.mark.parametrize("how", NORMALISED)
def test_weights_that_are_computed_are_drawn_anew(how):
    net = normalised(how, 0)
    net(torch.randn(2, 3, 5, 5)).sum().backward()  # it may have been used, too
    found, other = (used(reinitialize_copy(net, seed)) for seed in (5, 6))
    for weight, different, expected in zip(found, other, plain(5), strict=True):
        torch.testing.assert_close(weight, as_computed(how, expected), rtol=0.05, atol=0.005)
        assert not torch.allclose(weight, different, rtol=0.1)


@pytest.mark.parametrize("how", NORMALISED)
def test_weights_that_are_computed_become_as_small_as_in_the_whole_net(how):
    net = normalised(how, 0)
    structure = trace_structure(net, torch.zeros(2, 3, 5, 5))
    small = build_module(net, structure, structure.subnet(0.25))
    before = used(small)
    rescale_initial(small, make_uncut_structure(small, structure))
    shares = (1, 1 / 2) if how.startswith("weight") else (1, 1)  # no scale of a spectral norm stays
    for weight, old, share in zip(used(small), before, shares, strict=True):
        torch.testing.assert_close(
            as_computed(how, weight), share * as_computed(how, old), rtol=0.05, atol=0.005
        )
