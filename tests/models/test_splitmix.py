"""Sizes, costs and layers of Split-Mix's nets are those of its paper and public code."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from fedquilt.errors import ConfigError
from fedquilt.models import MODELS, make_model
from fedquilt.structure.cost import compute_cost
from fedquilt.structure.create import trace_structure
from fedquilt.structure.cut import build_module
from fedquilt.structure.structure import Structure
from fedquilt.structure.trace.readings import trace_once

WIDTHS = (1 / 8, 1 / 4, 1 / 2, 1)
PARAMS = {
    "digits-cnn": (224_194, 892_154, 3_559_402, 14_219_210),
    "alexnet-bn": (901_714, 3_583_770, 14_288_938, 57_063_498),
    "preresnet18": (176_178, 701_018, 2_796_714, 11_172_170),
}
EXAMPLES = {
    "digits-cnn": (1, 3, 28, 28),
    "alexnet-bn": (1, 3, 64, 64),  # the paper's 256×256 in small: pooling makes them 6×6
    "preresnet18": (1, 3, 8, 8),
}


@cache
def traced(name: str, width: float) -> tuple[nn.Module, Structure]:
    net = MODELS[name](width=width)
    return net, trace_structure(net, torch.zeros(EXAMPLES[name]))


def on_paper(name: str, **options: float) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name](**options)


@pytest.mark.parametrize("name", PARAMS)
def test_nets_made_at_a_width_have_the_published_sizes(name):
    for width, expected in zip(WIDTHS, PARAMS[name], strict=True):
        net = on_paper(name, width=width)
        assert sum(p.numel() for p in net.parameters()) == expected


@pytest.mark.parametrize(
    ("name", "whole"), [("digits-cnn", 1), ("alexnet-bn", 1 / 4), ("preresnet18", 1 / 2)]
)
def test_subnets_have_the_published_sizes_and_the_shapes_of_nets_made_at_that_width(name, whole):
    model, structure = traced(name, whole)
    for width, expected in zip(WIDTHS, PARAMS[name], strict=True):
        if width <= whole:
            subnet = structure.subnet(width / whole)
            assert (
                compute_cost(model, structure, subnet, torch.zeros(EXAMPLES[name])).params
                == expected
            )
            small, alone = build_module(model, structure, subnet), on_paper(name, width=width)
            shapes = {key: tensor.shape for key, tensor in alone.state_dict().items()}
            assert {key: tensor.shape for key, tensor in small.state_dict().items()} == shapes


def test_the_whole_alexnet_is_cut_to_the_published_sizes():
    # on paper only, so not checked by running it: that takes 2 GB, and the quarter was checked
    model, example = on_paper("alexnet-bn"), torch.zeros(EXAMPLES["alexnet-bn"], device="meta")
    structure, _ = trace_once(model, example, ())
    for width, expected in zip(WIDTHS, PARAMS["alexnet-bn"], strict=True):
        assert compute_cost(model, structure, structure.subnet(width), example).params == expected


def test_the_digits_net_costs_what_was_counted():
    model, structure = traced("digits-cnn", 1)
    example = torch.zeros(EXAMPLES["digits-cnn"])
    whole, base = (
        compute_cost(model, structure, structure.subnet(w), example).macs for w in (1, 1 / 8)
    )
    by_hand = (
        28**2 * 64 * 3 * 25
        + 14**2 * 64 * 64 * 25
        + 7**2 * 128 * 64 * 25
        + (128 * 7**2) * 2048
        + 2048 * 512
        + 512 * 10
    )
    assert whole == by_hand == 47_767_552  # 47.8 M
    # the counter that says 48.05 M and 9.55 M takes four for every normalised number
    normalised = 64 * 28**2 + 64 * 14**2 + 128 * 7**2 + 2048 + 512
    assert round((whole + 4 * normalised) / 1e6, 2) == 48.05
    assert round((8 * base + 4 * normalised) / 1e6, 2) == 9.55


def test_alexnet_meets_images_of_256_as_the_paper_says():
    model, structure = traced("alexnet-bn", 1 / 4)
    sizes = [c // 4 for c in (64, 192, 384, 256, 256)]
    work = [
        63**2 * sizes[0] * 3 * 121,
        31**2 * sizes[1] * sizes[0] * 25,
        15**2 * sizes[2] * sizes[1] * 9,
        15**2 * sizes[3] * sizes[2] * 9,
        15**2 * sizes[4] * sizes[3] * 9,
        sizes[4] * 36 * 1024 + 1024 * 1024 + 1024 * 10,
    ]
    price = compute_cost(model, structure, structure.subnet(1), torch.zeros(1, 3, 256, 256))
    assert price.macs == sum(work)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("digits-cnn", "64/5/1/2 pool/2/2 64/5/1/2 pool/2/2 128/5/1/2"),
        (
            "alexnet-bn",
            "64/11/4/2 pool/3/2 192/5/1/2 pool/3/2 384/3/1/1 256/3/1/1 256/3/1/1 pool/3/2",
        ),
    ],
)
def test_convolutions_and_pools_are_those_of_the_tables(name, expected):
    found = []
    for m in on_paper(name).modules():
        if isinstance(m, nn.Conv2d):  # channels / kernel / stride / padding
            found.append(f"{m.out_channels}/{m.kernel_size[0]}/{m.stride[0]}/{m.padding[0]}")
        elif isinstance(m, nn.MaxPool2d):
            found.append(f"pool/{m.kernel_size}/{m.stride}")
    assert " ".join(found) == expected


@pytest.mark.parametrize("name", ["digits-cnn", "alexnet-bn"])
def test_every_layer_but_the_last_has_a_bias_and_is_normalised_and_rectified(name):
    layers = [m for m in on_paper(name).modules() if not list(m.children())]
    weighted = [i for i, m in enumerate(layers) if isinstance(m, nn.Conv2d | nn.Linear)]
    assert all(layers[i].bias is not None for i in weighted)
    assert isinstance(layers[-1], nn.Linear)
    assert layers[-1].out_features == 10
    for i in weighted[:-1]:
        norm, active = layers[i + 1 : i + 3]
        assert isinstance(norm, nn.BatchNorm2d | nn.BatchNorm1d)
        assert norm.affine
        assert norm.track_running_stats
        assert isinstance(active, nn.ReLU)


@pytest.mark.parametrize(
    ("name", "in_channels", "num_classes", "size"),
    [("digits-cnn", 1, 7, 28), ("alexnet-bn", 1, 345, 256)],
)
def test_channels_and_classes_are_as_asked_whatever_the_width(name, in_channels, num_classes, size):
    for width in (1 / 8, 1):
        net = on_paper(name, width=width, in_channels=in_channels, num_classes=num_classes)
        logits: Tensor = net(torch.empty(2, in_channels, size, size, device="meta"))
        assert logits.shape == (2, num_classes)


def test_the_digits_net_fits_other_image_sizes():
    net = on_paper("digits-cnn", image_size=18)
    assert net(torch.empty(2, 3, 18, 18, device="meta")).shape == (2, 10)


def test_widths_are_rounded_down():
    sizes = [
        p.shape[0] for n, p in on_paper("digits-cnn", width=0.3).named_parameters() if p.ndim > 1
    ]
    assert sizes == [19, 19, 38, 614, 153, 10]


@pytest.mark.parametrize("name", ["digits-cnn", "alexnet-bn"])
def test_a_width_that_leaves_nothing_is_refused(name):
    with pytest.raises(ConfigError, match=f"'{name}': width 0.01 .*; use at least 1/64"):
        make_model(name, {"width": 0.01})
