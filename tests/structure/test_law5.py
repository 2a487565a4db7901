"""Law 5: a built subnet computes what it is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedquilt.structure.create import trace_structure
from fedquilt.structure.cut import build_module, copy_subnet_tensors, load_tensors
from fedquilt.structure.groups import count_leading
from fedquilt.structure.mask import mask_model
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import find_tensors, named_tensors

from .nets import (
    ACROSS,
    CLASSES,
    EXACT,
    IMAGE,
    ZOO,
    Inverted,
    Residual,
    ViT,
    head,
    inputs_for,
    roughened,
    structured,
    vit_at,
)

few = settings(max_examples=6, deadline=None)
at_once = [Phase.explicit, Phase.reuse, Phase.generate]  # tracing is too slow for shrinking


def some_channels(structure: Structure, width: float | None, seed: int) -> Subnet:
    """Random channels of every group: as many as the width keeps, or any number of them."""
    generator = torch.Generator().manual_seed(seed)
    kept = {}
    for name in structure.cut_groups():
        size = structure.groups[name].size
        any_number = int(torch.randint(1, size + 1, (), generator=generator))
        count = count_leading(size, width) if width else any_number
        kept[name] = torch.randperm(size, generator=generator)[:count].tolist()
    return structure.subnet(channels=kept)


def assert_equal_outputs(left: nn.Module, right: nn.Module, example: object, seed: int = 0) -> None:
    inputs = inputs_for(example, seed)
    with torch.no_grad():
        pairs = zip(find_tensors(left(*inputs)), find_tensors(right(*inputs)), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", EXACT)
@given(seed=st.integers(0, 10**6))
@few
def test_a_subnet_of_any_channels_equals_the_masked_supernet(name, seed):
    model, structure = structured(name)
    assert structure.is_exact
    subnet = some_channels(structure, None, seed)
    small, whole = build_module(model, structure, subnet), mask_model(model, structure, subnet)
    assert_equal_outputs(small, whole, EXACT[name].example, seed)


@pytest.mark.parametrize("name", EXACT)
@given(width=st.floats(0.01, 1))
@few
def test_a_subnet_of_leading_channels_equals_the_masked_supernet(name, width):
    model, structure = structured(name)
    subnet = structure.subnet(width)
    small, whole = build_module(model, structure, subnet), mask_model(model, structure, subnet)
    assert_equal_outputs(small, whole, EXACT[name].example)


@pytest.mark.parametrize("name", ACROSS)
@given(width=st.floats(0.01, 1), seed=st.integers(0, 10**6))
@few
def test_where_statistics_run_over_channels_a_subnet_equals_the_net_of_that_width(
    name, width, seed
):
    model, structure = structured(name)
    assert not structure.is_exact
    subnet = some_channels(structure, width, seed)
    params = copy_subnet_tensors(named_tensors(model), structure, subnet)
    constructed = ACROSS[name].at(params).eval()
    assume(named_tensors(constructed).keys() == params.keys())  # PyTorch packs some sizes
    load_tensors(constructed, params)
    assert_equal_outputs(
        build_module(model, structure, subnet), constructed, ACROSS[name].example, seed
    )


@pytest.mark.parametrize("name", ZOO)
def test_any_channels_of_each_group_can_be_kept(name):
    model, structure = structured(name)
    inputs = inputs_for(ZOO[name].example)
    shapes = [out.shape for out in find_tensors(model(*inputs))]
    for seed in range(5):
        small = build_module(model, structure, some_channels(structure, None, seed))
        assert [out.shape for out in find_tensors(small(*inputs))] == shapes


@pytest.mark.parametrize("name", ZOO)
def test_a_subnet_can_be_trained(name):
    model, structure = structured(name)
    small = build_module(model, structure, structure.subnet(0.3)).train()
    sum(out.sum() for out in find_tensors(small(*inputs_for(ZOO[name].example)))).backward()
    used = [p for n, p in small.named_parameters() if n != "spare"]
    assert all(p.grad is not None and p.grad.shape == p.shape for p in used)


NORMS = {
    "none": lambda channels: nn.Identity(),
    "batch": nn.BatchNorm2d,
    "instance": lambda channels: nn.InstanceNorm2d(channels, affine=True),
    "one group a channel": lambda channels: nn.GroupNorm(channels, channels),
}


class Concatenated(nn.Module):
    """Two convolutions of one input, side by side."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(inputs, outputs, 1), nn.Conv2d(inputs, 3, 3, padding=1)
        self.join = nn.Conv2d(outputs + 3, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(F.relu(torch.cat([self.left(x), self.right(x)], 1)))


def block(kind: str, inputs: int, outputs: int) -> nn.Module:
    if kind == "conv":
        return nn.Conv2d(inputs, outputs, 3, padding=1)
    return {"residual": Residual, "inverted": Inverted, "concatenated": Concatenated}[kind](
        inputs, outputs
    )


kinds = st.sampled_from(["conv", "residual", "inverted", "concatenated"])


@given(
    layers=st.lists(st.tuples(kinds, st.integers(1, 9)), min_size=1, max_size=4),
    norm=st.sampled_from(sorted(NORMS)),
    is_flat=st.booleans(),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=20, deadline=None, phases=at_once)
def test_random_convolutional_nets_equal_their_masked_supernet(layers, norm, is_flat, seed):
    sizes = [5, *(channels for _, channels in layers)]
    net = nn.Sequential(nn.Conv2d(3, 5, 3, 2, 1))
    for i, (kind, channels) in enumerate(layers):
        net.extend([block(kind, sizes[i], channels), NORMS[norm](channels), nn.ReLU()])
    end = [nn.Flatten(), nn.Linear(16 * sizes[-1], CLASSES)] if is_flat else head(sizes[-1])
    model = roughened(net.extend(end), seed)
    structure = trace_structure(model, IMAGE)
    assert structure.is_exact
    assert sum(structure.groups[name].size for name in structure.cut_groups()) >= 5
    subnet = some_channels(structure, None, seed)
    assert_equal_outputs(
        build_module(model, structure, subnet), mask_model(model, structure, subnet), IMAGE
    )


@given(
    style=st.sampled_from(["fused", "chunk", "split", "attributes", "kernel"]),
    heads=st.integers(1, 4),
    head_dim=st.integers(2, 9),
    hidden=st.integers(2, 24),
    width=st.floats(0.05, 1),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=5, deadline=None, phases=at_once)
def test_random_transformers_equal_the_net_of_that_width(
    style, heads, head_dim, hidden, width, seed
):
    assume((heads, head_dim) != (2, 2))  # one of the two numbers cannot be told from the other
    model = roughened(ViT(style, heads * head_dim, heads, head_dim, hidden), seed)
    structure = trace_structure(model, IMAGE)
    subnet = some_channels(structure, width, seed)
    params = copy_subnet_tensors(named_tensors(model), structure, subnet)
    constructed = vit_at(style, heads)(params).eval()
    load_tensors(constructed, params)
    assert_equal_outputs(build_module(model, structure, subnet), constructed, IMAGE)
