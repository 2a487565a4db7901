"""Initial values: drawn once by the constructor in its order, and again on request."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from fedquilt.models import MODELS


def small(name: str) -> nn.Module:
    """The net by name, narrow where it can be."""
    factory = MODELS[name]
    narrow = "width" in inspect.signature(factory).parameters
    return factory(width=1 / 8) if narrow else factory()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_a_reset_under_a_seed_gives_what_the_constructor_gives(name):
    torch.manual_seed(3)
    fresh = small(name)
    used = small(name)
    for tensor in used.state_dict().values():
        tensor.fill_(7)
    torch.manual_seed(3)
    used.reset_parameters()
    assert_same(used, fresh)


@pytest.mark.parametrize("name", MODELS)
def test_resets_are_independent_draws_of_every_weight(name):
    net = small(name)
    weights = {n: p for n, p in net.named_parameters() if p.ndim > 1}
    before = {n: p.detach().clone() for n, p in weights.items()}
    net.reset_parameters()
    for n, p in weights.items():
        assert (p != before[n]).float().mean() > 0.99, n
        if p.numel() > 200:  # of fewer numbers the spread says little
            spread = p.std() / before[n].std()
            assert 0.7 < spread < 1.4, n


@pytest.mark.parametrize("name", MODELS)
def test_constructors_draw_every_layer_once_in_its_place_and_nothing_else(name):
    torch.manual_seed(5)
    net = small(name)
    after = torch.rand(())
    torch.manual_seed(5)
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            kernel, bias = layer.kernel_size, layer.bias is not None
            twin = nn.Conv2d(
                layer.in_channels, layer.out_channels, kernel, groups=layer.groups, bias=bias
            )
        elif isinstance(layer, nn.Linear):
            twin = type(layer)(layer.in_features, layer.out_features)
        elif isinstance(layer, nn.Embedding):
            twin = nn.Embedding(layer.num_embeddings, layer.embedding_dim)
        elif isinstance(layer, nn.LSTM):
            sizes, both = (layer.input_size, layer.hidden_size), layer.bidirectional
            twin = nn.LSTM(*sizes, num_layers=layer.num_layers, bidirectional=both)
        else:
            continue
        weights = {n: p for n, p in twin.named_parameters() if p.ndim > 1}
        assert weights
        for n, weight in weights.items():
            assert torch.equal(layer.get_parameter(n), weight), n
    for own in net.parameters(recurse=False):  # a ViT's class token and positions come last
        twin = nn.init.trunc_normal_(torch.empty_like(own), std=0.02)
        assert torch.equal(own, twin)
    assert torch.equal(torch.rand(()), after)


@pytest.mark.parametrize("name", MODELS)
def test_biases_of_linear_layers_start_at_zero_in_heterofls_nets_only(name):
    net = small(name)
    net.reset_parameters()
    biases = [m.bias for m in net.modules() if isinstance(m, nn.Linear)]
    is_heterofl = type(net).__module__ in (
        "fedquilt.models.heterofl",
        "fedquilt.models.transformer",
    )
    assert biases
    assert all((bias == 0).all().item() == is_heterofl for bias in biases)
