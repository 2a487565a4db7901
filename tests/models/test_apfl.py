"""APFL's MobileNetV2 is that of its Tables 3 to 6, and costs what its Table 2 rounds."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.federation.budgets import TIERS
from fedquilt.models import make_model
from fedquilt.models.apfl import MobileNetV2, scale_channels
from fedquilt.structure.cost import Cost, compute_cost
from fedquilt.structure.create import trace_structure
from fedquilt.structure.structure import Structure
from fedquilt.structure.trace.readings import trace_once

CHANNELS = {  # stem, seven layers, head
    1.5: (48, 24, 40, 48, 96, 144, 240, 480, 1280),  # Table 3
    1: (32, 16, 24, 32, 64, 96, 160, 320, 1280),  # Table 4
    0.75: (24, 16, 24, 24, 48, 72, 120, 240, 1280),  # Table 5, as far as it is consistent
    0.5: (16, 8, 16, 16, 32, 48, 80, 160, 1280),  # Table 6
}
TABLE_3 = (  # inputs, channels of the depthwise convolution, outputs, its stride, repetition
    (48, 48, 24, 1, 1),
    (24, 144, 40, 1, 1),
    (40, 240, 40, 1, 1),
    (40, 240, 48, 2, 1),
    (48, 288, 48, 1, 2),
    (48, 288, 96, 2, 1),
    (96, 576, 96, 1, 3),
    (96, 576, 144, 1, 1),
    (144, 864, 144, 1, 2),
    (144, 864, 240, 2, 1),
    (240, 1440, 240, 1, 2),
    (240, 1440, 480, 1, 1),
)
PRICES = {  # parameters, and multiply-accumulates for an image of 32×32
    1.5: (4_641_482, 194_706_944),
    1: (2_236_682, 87_976_448),
    0.75: (1_368_234, 59_310_080),
    0.5: (700_490, 27_969_024),
}
BUDGETS = dict(zip((1, 0.75, 0.5), TIERS, strict=True))
STARTS = (0, 1, 3, 6, 10, 13, 16)  # the first block of each layer


def on_paper(**options: float) -> MobileNetV2:
    with torch.device("meta"):
        return MobileNetV2(**options)


@cache
def supernet() -> tuple[nn.Module, Structure]:
    """The net of Table 3; its groups are those of the checked half, see below."""
    net = on_paper()
    return net, trace_once(net, torch.zeros(1, 3, 32, 32, device="meta"), ())[0]


@cache
def price(multiplier: float) -> Cost:
    """The cost of a smaller net as a subnet of the supernet: the leading channels."""
    net, structure = supernet()
    small = on_paper(multiplier=multiplier)
    sizes = {g: small.get_submodule(g).out_channels for g in structure.cut_groups()}
    subnet = structure.subnet(channels={group: range(size) for group, size in sizes.items()})
    return compute_cost(net, structure, subnet, torch.zeros(1, 3, 32, 32))


def params_of(multiplier: float, *kinds: type[nn.Module]) -> int:
    layers = [m for m in on_paper(multiplier=multiplier).modules() if isinstance(m, kinds)]
    return sum(p.numel() for layer in layers for p in layer.parameters())


# the tables of the nets


@pytest.mark.parametrize("multiplier", CHANNELS)
def test_channels_are_those_of_the_tables(multiplier):
    net = on_paper(multiplier=multiplier)
    outputs = [block.branch[-2].out_channels for block in net.blocks]
    assert CHANNELS[multiplier] == (
        net.stem[0].out_channels,
        *(outputs[i] for i in STARTS),
        net.head[0].out_channels,
    )
    for start, end in zip(STARTS, (*STARTS[1:], 17), strict=True):
        assert len(set(outputs[start:end])) == 1


def test_the_supernet_is_table_3_line_by_line():
    net = on_paper()
    found = [
        (m.in_channels, m.out_channels, m.kernel_size[0], m.stride[0], m.padding[0], m.groups)
        for m in net.modules()
        if isinstance(m, nn.Conv2d)
    ]
    expected = [(3, 48, 3, 1, 1, 1)]
    for inputs, inside, outputs, stride, repetition in TABLE_3:
        expand = [] if inputs == inside else [(inputs, inside, 1, 1, 0, 1)]
        depthwise, project = (inside, inside, 3, stride, 1, inside), (inside, outputs, 1, 1, 0, 1)
        expected += [*expand, depthwise, project] * repetition
    expected.append((480, 1280, 1, 1, 0, 1))
    assert found == expected
    assert len(found) == 52
    assert (net.classifier.in_features, net.classifier.out_features) == (1280, 10)


@given(st.integers(1, 1000), st.floats(0.001, 10))
def test_channels_are_the_nearest_multiple_of_eight_that_takes_at_most_a_tenth(size, multiplier):
    exact = size * multiplier
    allowed = [n for n in range(8, int(exact) + 17, 8) if n >= 0.9 * exact]
    assert scale_channels(size, multiplier) == min(allowed, key=lambda n: (abs(n - exact), -n))


def test_layers_are_normalised_and_rectified_but_for_projections():
    net = on_paper()
    kinds = [[type(layer).__name__ for layer in block.branch] for block in net.blocks]
    active, linear = ["Conv2d", "BatchNorm2d", "ReLU6"], ["Conv2d", "BatchNorm2d"]
    assert kinds == [[*active, *linear], *[[*active, *active, *linear]] * 16]
    for outer in (net.stem, net.head):
        assert [type(layer).__name__ for layer in outer] == active
    assert all(m.bias is None for m in net.modules() if isinstance(m, nn.Conv2d))


@pytest.mark.parametrize("multiplier", [0.5, 0.75, 1.5])
def test_blocks_add_their_input_where_the_shape_stays(multiplier):
    # at 0.75 and 0.5 the third layer halves the image and keeps the channels: nothing is added
    net = MobileNetV2(multiplier=multiplier).eval()
    for number, block in enumerate(net.blocks):
        nn.init.zeros_(block.branch[-1].weight)
        x = torch.randn(2, block.branch[0].in_channels, 4, 4)
        if number in STARTS:
            assert not block(x).any()
        else:
            assert torch.equal(block(x), x)  # and nothing behind the sum


@pytest.mark.parametrize(
    ("image", "sizes"), [(32, (32, 32, 16, 8, 8, 4, 4)), (28, (28, 28, 14, 7, 7, 4, 4))]
)
def test_three_layers_halve_the_image(image, sizes):
    net, found = on_paper(multiplier=0.5), []
    x = net.stem(torch.empty(2, 3, image, image, device="meta"))
    for block in net.blocks:
        x = block(x)
        found.append(x.shape[-1])
    assert tuple(found[i] for i in STARTS) == sizes
    assert net(torch.empty(2, 3, image, image, device="meta")).shape == (2, 10)


def test_the_average_is_over_the_whole_image():
    # in training, where normalisation keeps the numbers from fading
    net, x = MobileNetV2(multiplier=0.25), torch.randn(2, 3, 32, 32)
    seen = net.head(net.blocks(net.stem(x)))
    assert seen.shape == (2, 1280, 4, 4)
    expected = net.classifier(nn.AvgPool2d(4)(seen).flatten(1))
    torch.testing.assert_close(net(x), expected)


# costs, and the budgets of Table 2


@pytest.mark.parametrize("multiplier", PRICES)
def test_nets_and_the_subnets_of_their_channels_cost_the_same(multiplier):
    params, macs = PRICES[multiplier]
    assert sum(p.numel() for p in on_paper(multiplier=multiplier).parameters()) == params
    assert (price(multiplier).params, price(multiplier).macs) == (params, macs)


def test_the_supernet_costs_what_the_lines_of_table_3_cost():
    pixels = 32**2
    weights, norms, macs = 48 * 27, 48, pixels * 48 * 27
    for inputs, inside, outputs, stride, repetition in TABLE_3:
        expand = 0 if inputs == inside else inputs * inside
        behind = pixels // stride**2
        rest = 9 * inside + inside * outputs
        weights += repetition * (expand + rest)
        norms += repetition * ((inside if expand else 0) + inside + outputs)
        macs += repetition * (pixels * expand + behind * rest)
        pixels = behind
    weights += 480 * 1280 + 1280 * 10
    assert pixels == 4**2
    assert weights + 2 * (norms + 1280) + 10 == PRICES[1.5][0]
    assert macs + pixels * 480 * 1280 + 1280 * 10 == PRICES[1.5][1]


def test_with_1000_classes_the_size_is_torchvisions():
    net = on_paper(multiplier=1, num_classes=1000)
    assert sum(p.numel() for p in net.parameters()) == 3_504_872


def test_budgets_are_the_costs_of_the_three_nets_rounded_without_normalisation():
    for multiplier, budget in BUDGETS.items():
        weights = params_of(multiplier, nn.Conv2d, nn.Linear)
        assert round(weights, -5) == budget.params
        assert round(price(multiplier).macs, -6) == budget.macs
    counts = [params_of(m, nn.Conv2d, nn.Linear) for m in BUDGETS]
    assert counts == [2_202_570, 1_341_594, 681_946]
    # the convolutions alone round to the same; with normalisation the middle one is 1.4 M
    assert [params_of(m, nn.Conv2d) for m in BUDGETS] == [2_189_760, 1_328_784, 669_136]
    assert [params_of(m, nn.BatchNorm2d) for m in BUDGETS] == [34_112, 26_640, 18_544]
    assert round(PRICES[0.75][0], -5) == 1_400_000


def test_no_net_is_within_the_budget_that_is_its_own():
    exceeded = {m: _exceeded(m, PRICES[m][0]) for m in BUDGETS}
    assert exceeded == {1: ["params"], 0.75: ["params", "macs"], 0.5: ["params"]}
    unnormalised = {m: _exceeded(m, params_of(m, nn.Conv2d, nn.Linear)) for m in BUDGETS}
    assert unnormalised == {1: ["params"], 0.75: ["params", "macs"], 0.5: []}
    convolutions = {m: _exceeded(m, params_of(m, nn.Conv2d)) for m in BUDGETS}
    assert convolutions == {1: [], 0.75: ["params", "macs"], 0.5: []}
    assert not any(budget.allows(price(m)) for m, budget in BUDGETS.items())


def _exceeded(multiplier: float, params: int) -> list[str]:
    budget, spent = BUDGETS[multiplier], {"params": params, "macs": PRICES[multiplier][1]}
    return [name for name, count in spent.items() if count > getattr(budget, name)]


# structure


def test_34_layers_can_be_slimmed_and_residual_sums_leave_24_free_widths():
    net, structure = supernet()
    convolutions = {n: m for n, m in net.named_modules() if isinstance(m, nn.Conv2d)}
    group = {name: structure.axes[f"{name}.weight"][0][0].group for name in convolutions}
    classified = structure.axes["classifier.weight"][1][0].group
    slimmed = [g for n, g in group.items() if convolutions[n].groups == 1 and g != classified]
    assert set(slimmed) == set(structure.cut_groups()) - {classified}
    assert len(slimmed) == 34
    sharing = Counter(slimmed)
    assert len(sharing) == 24
    tied = {name: count for name, count in sharing.items() if count > 1}
    assert list(tied.values()) == [2, 3, 4, 3, 3]  # the repetitions of layers 2 to 6
    assert list(tied) == [f"blocks.{start}.branch.6" for start in STARTS[1:-1]]
    for name, layer in convolutions.items():
        if layer.groups > 1:  # a depthwise convolution follows the one before it
            assert group[name] in slimmed


def test_the_half_is_followed_has_the_groups_of_the_supernet_and_runs_at_every_width():
    net = MobileNetV2(multiplier=0.5)
    structure = trace_structure(net, torch.zeros(1, 3, 8, 8))
    groups = {n: [a and a[0].group for a in axes] for n, axes in structure.axes.items()}
    whole = supernet()[1]
    assert groups == {n: [a and a[0].group for a in axes] for n, axes in whole.axes.items()}
    assert structure.is_exact
    residual = [f"blocks.{number}" for number in range(17) if number not in STARTS]
    assert list(structure.blocks) == residual
    for width in (1, 0.5, 0.3):
        small = fq.build_module(net, structure, structure.subnet(width))
        logits: Tensor = small(torch.randn(2, 3, 16, 16))
        assert logits.shape == (2, 10)
        logits.sum().backward()


# options


def test_channels_classes_head_and_stem_are_as_asked():
    net = on_paper(in_channels=1, num_classes=7, multiplier=0.25, head=64, stem_stride=2)
    assert net.stem(torch.empty(2, 1, 28, 28, device="meta")).shape == (2, 8, 14, 14)
    assert net.classifier.in_features == 64
    assert net(torch.empty(2, 1, 28, 28, device="meta")).shape == (2, 7)


@pytest.mark.parametrize("multiplier", [0.01, 0.35, 1.4, 2])
def test_any_multiplier_makes_a_net_with_the_same_head(multiplier):
    net = on_paper(multiplier=multiplier)
    assert net.head[0].out_channels == 1280
    assert net(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 10)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"multiplier": 0}, "multiplier is a positive number, got 0; write 0.5 for half"),
        ({"multiplier": -1.0}, "got -1.0"),
        ({"multiplier": float("nan")}, "got nan"),
        ({"multiplier": float("inf")}, "got inf"),
        ({"head": 0}, "head and stem_stride are at least 1, got 3, 10, 0, 1"),
        ({"num_classes": 0}, "at least 1, got 3, 0, 1280, 1"),
        ({"in_channels": 0}, "at least 1, got 0, 10, 1280, 1"),
        ({"stem_stride": 0}, "at least 1, got 3, 10, 1280, 0"),
        ({"width": 0.5}, "option 'width' is not known"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, sentence):
    with pytest.raises(ConfigError, match=f"model 'mobilenetv2'.*{sentence}"):
        make_model("mobilenetv2", options)
