"""Law 12: sizes and costs of the nets are those that were published (HeteroFL, Tables 1, 2, 7, 8).

How the paper's FLOPs columns count, found by undoing them: every layer with learned tensors counts
once *per learned tensor*. A convolution is its multiply-accumulates and one addition per output if
it has a bias, a linear layer its multiply-accumulates, a normalisation twice its elements.
So the biased CNN is counted twice, the bias-free convolutions of the ResNet once, and every
normalisation four times per element. Pooling, activations and sums cost nothing.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from fedquilt.models import MODELS
from fedquilt.structure.cost import compute_cost
from fedquilt.structure.create import trace_structure
from fedquilt.structure.cut import build_module
from fedquilt.structure.structure import Structure

LEVELS = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.125, "e": 0.0625}
EXAMPLES = {
    "heterofl-cnn": torch.zeros(1, 1, 28, 28),
    "heterofl-resnet18": torch.zeros(1, 3, 32, 32),
    "preresnet18": torch.zeros(1, 3, 32, 32),
}
PARAMS = {  # from a to e
    "heterofl-cnn": (1_556_874, 391_370, 98_922, 25_274, 6_594),
    "heterofl-resnet18": (9_622_090, 2_408_746, 603_802, 151_762, 38_350),
    "preresnet18": (11_172_170, 2_796_714, 701_018, 176_178, 44_510),
}
FLOPS = {  # as printed, also for mixes, which are means over their levels
    "heterofl-cnn": {
        "a": "80.5 M",
        "a-e": "40.5 M",
        "a-b-c-d-e": "21.6 M",
        "b": "20.5 M",
        "b-e": "10.4 M",
        "b-c-d-e": "6.9 M",
        "c": "5.3 M",
        "c-e": "2.9 M",
        "c-d-e": "2.4 M",
        "d": "1.4 M",
        "d-e": "909.5 K",
        "e": "400.5 K",
    },
    "heterofl-resnet18": {
        "a": "330.2 M",
        "a-e": "165.9 M",
        "a-b-c-d-e": "88.4 M",
        "b": "83.3 M",
        "b-e": "42.4 M",
        "b-c-d-e": "27.9 M",
        "c": "21.2 M",
        "c-e": "11.3 M",
        "c-d-e": "9.4 M",
        "d": "5.5 M",
        "d-e": "3.5 M",
        "e": "1.5 M",
    },
}


@cache
def traced(name: str) -> tuple[nn.Module, Structure]:
    """The net, followed on a small image: where it can be cut does not depend on the size."""
    net = MODELS[name]()
    return net, trace_structure(net, EXAMPLES[name][..., :8, :8])


def papers_flops(net: nn.Module, example: Tensor) -> tuple[int, int]:
    """The paper's count, and the multiply-accumulates inside it counted once."""
    total = macs = 0

    def count(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        nonlocal total, macs
        tensors = list(layer.parameters(recurse=False))
        if isinstance(layer, nn.Conv2d):
            work = output[0, 0].numel() * layer.weight.numel()
            extra = 0 if layer.bias is None else output.numel()
        elif isinstance(layer, nn.Linear):
            work, extra = layer.weight.numel(), 0
        elif isinstance(layer, nn.BatchNorm2d):
            work, extra = 0, 2 * output.numel()
        else:
            assert not tensors, f"no rule for {layer}"
            return
        total += len(tensors) * (work + extra)
        macs += work

    hooks = [m.register_forward_hook(count) for m in net.modules()]
    with torch.no_grad():
        net.eval()(example)
    for hook in hooks:
        hook.remove()
    return total, macs


def printed(number: float) -> str:
    return f"{number / 1e6:.1f} M" if number >= 1e6 else f"{number / 1e3:.1f} K"


@pytest.mark.parametrize(
    "name",
    ["heterofl-cnn", "heterofl-resnet18", pytest.param("preresnet18", marks=pytest.mark.slow)],
)
def test_parameter_counts_are_the_published_ones(name):
    model, structure = traced(name)
    for width, expected in zip(LEVELS.values(), PARAMS[name], strict=True):
        subnet = structure.subnet(width)
        assert compute_cost(model, structure, subnet, EXAMPLES[name]).params == expected
        small = build_module(model, structure, subnet)
        assert sum(p.numel() for p in small.parameters()) == expected
        alone = MODELS[name](width=width)  # the net constructed at that width
        assert [p.shape for p in small.parameters()] == [p.shape for p in alone.parameters()]


@pytest.mark.parametrize("name", FLOPS)
def test_macs_explain_every_printed_digit_of_the_flops_columns(name):
    model, structure = traced(name)
    flops = {}
    for level, width in LEVELS.items():
        subnet = structure.subnet(width)
        small = build_module(model, structure, subnet)
        flops[level], macs = papers_flops(small, EXAMPLES[name])
        assert compute_cost(model, structure, subnet, EXAMPLES[name]).macs == macs
    for mix, expected in FLOPS[name].items():
        levels = mix.split("-")
        assert printed(sum(flops[level] for level in levels) / len(levels)) == expected, mix


def test_the_cnns_column_is_twice_its_work():
    model, structure = traced("heterofl-cnn")
    price = compute_cost(model, structure, structure.subnet(1.0), EXAMPLES["heterofl-cnn"])
    outputs = 64 * 28**2 + 128 * 14**2 + 256 * 7**2 + 512 * 3**2
    assert price.macs == 39_974_912
    assert 2 * (price.macs + outputs + 2 * outputs) == 80_504_320  # bias, then normalisation
    assert round(80_504_320 / 2, -4) == 40_250_000  # what is 40.25 M in words
