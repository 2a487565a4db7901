"""Blocks are found in any module's code, and what is built without them is that net and no more."""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedquilt.customize.export import export
from fedquilt.errors import StructureError, StructureWarning
from fedquilt.federation.aggregation import average
from fedquilt.federation.client import Update
from fedquilt.federation.update import validate_update
from fedquilt.structure.blocks.find import find_residual_blocks, select_blocks
from fedquilt.structure.blocks.stacks import find_block_candidates, find_working_blocks
from fedquilt.structure.cost import compute_cost
from fedquilt.structure.create import declare_structure, trace_structure
from fedquilt.structure.cut import build_module, copy_subnet_tensors
from fedquilt.structure.derive import add_block_steps
from fedquilt.structure.mask import mask_model
from fedquilt.structure.serialization import from_json, to_json
from fedquilt.structure.structure import STEPS, Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import named_tensors
from fedquilt.structure.verify.blocks import add_blocks
from fedquilt.training.context import ClientContext

from .nets import IMAGE, VECTOR, ZOO, head, inputs_for, plain_cnn, roughened
from .residuals import (
    DEEP,
    EQUALS,
    NOT_STACKED,
    SEQUENCE,
    STACKED,
    WITH_A_BLOCK,
    WITHOUT_BLOCKS,
    Basic,
    Middle,
    Nested,
    RepVGG,
    Residual,
    Written,
    by_value,
)

few = settings(max_examples=6, deadline=None)


def deep(model: nn.Module, example: Any, blocks: list[str] | None = None) -> Structure:
    """A structure of blocks alone, without following channels."""
    return add_blocks(model, declare_structure(model, {}), example, blocks)


@functools.cache
def skippable(name: str) -> tuple[nn.Module, Structure]:
    torch.manual_seed(0)
    model = roughened(DEEP[name].make())
    return model, deep(model, DEEP[name].example)


@functools.cache
def traced(name: str) -> tuple[nn.Module, Structure]:
    """With channels, too; in double precision, so that equal means equal."""
    torch.manual_seed(0)
    model = roughened(DEEP[name].make()).double()
    return model, trace_structure(model, DEEP[name].example.double())


def some_of(blocks: Mapping[str, object], seed: int) -> list[str]:
    drawn = torch.rand(len(blocks), generator=torch.Generator().manual_seed(seed))
    return [name for name, share in zip(blocks, drawn, strict=True) if share < 0.5]


def multiplied(model: nn.Module, name: str, factors: Mapping[str, Any]) -> nn.Module:
    """The oracle: what ends a branch is multiplied, from outside."""
    model = copy.deepcopy(model)
    for block, factor in factors.items():
        end = DEEP[name].blocks[block][-1]
        if end in dict(model.named_modules()):
            model.get_submodule(end).register_forward_hook(
                lambda module, inputs, output, factor=factor: output * factor
            )
        else:
            with torch.no_grad():
                model.get_parameter(end).mul_(factor)
    return model


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], msg=lambda m, n=name: f"{n}: {m}")


# what is a block


@pytest.mark.parametrize("name", DEEP)
def test_blocks_are_found_with_just_their_tensors(name):
    torch.manual_seed(0)
    model = DEEP[name].make()
    expected = {
        block: {
            tensor
            for tensor in named_tensors(model)
            if any(tensor == part or tensor.startswith(f"{part}.") for part in parts)
        }
        for block, parts in DEEP[name].blocks.items()
    }
    found = find_residual_blocks(model)
    assert {block: set(found[block].tensors) for block in found} == expected
    assert list(found) == list(expected)  # in the model's order
    assert list(skippable(name)[1].blocks) == list(expected)  # and they pass the check


@pytest.mark.parametrize("name", WITHOUT_BLOCKS)
def test_other_sums_are_no_blocks(name):
    model = Middle(Written(WITHOUT_BLOCKS[name]))
    numbers = torch.get_rng_state()
    assert find_residual_blocks(model) == {}
    assert torch.equal(torch.get_rng_state(), numbers)


@pytest.mark.parametrize("name", WITH_A_BLOCK)
def test_blocks_are_found_in_odd_code(name):
    model = Middle(Written(WITH_A_BLOCK[name]))
    found = find_residual_blocks(model)
    assert {b.name: b.tensors for b in found.values()} == {
        "function": ("function.f.weight", "function.f.bias")
    }
    structure = deep(model, VECTOR)
    whole = build_module(*add_block_steps(model, structure), structure.subnet())
    for training in (True, False):
        outputs = []
        for net in (whole.train(training), model.train(training)):
            torch.manual_seed(1)
            outputs.append(net(torch.randn(4, 8)))
        torch.testing.assert_close(*outputs)


def test_a_block_around_a_block_has_a_name_of_its_own():
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = Residual(nn.Linear(8, 8)), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x + self.inner(x))

    model = roughened(Around())
    structure = deep(model, VECTOR)
    assert list(structure.blocks) == ["inner_sum", "inner"]
    x = torch.randn(2, 8)
    for skipped, expected in {
        ("inner",): 2 * x,
        ("inner_sum",): x,
        ("inner", "inner_sum"): x,
    }.items():
        small = build_module(model, structure, Subnet().without_blocks(*skipped))
        torch.testing.assert_close(small(x), model.last(expected))


@pytest.mark.parametrize("name", ["plain cnn", "dense", "bidirectional lstm", "mlp", "u-net"])
def test_nets_without_shortcuts_have_no_blocks(name):
    assert find_residual_blocks(ZOO[name].make()) == {}


def test_modules_that_share_their_weights_are_no_blocks():
    block = Residual(nn.Linear(8, 8))
    tied = Residual(nn.Linear(8, 8))
    tied.fn.weight = nn.Linear(8, 8).weight
    other = nn.Linear(8, 8)
    other.weight = tied.fn.weight
    assert find_residual_blocks(nn.Sequential(block, nn.ReLU(), block, tied, other)) == {}


def test_modules_whose_branch_begins_in_place_are_no_blocks():
    act = nn.Sequential(nn.ReLU(inplace=True))
    assert find_residual_blocks(Residual(nn.Sequential(act, nn.Linear(8, 8)))) == {}
    assert find_residual_blocks(Residual(nn.Sequential(nn.Linear(8, 8), act))) != {}


def test_a_module_without_its_own_forward_any_more_is_no_block():
    model = Middle(Residual(nn.Linear(8, 8)))
    model.function.forward = lambda x: x * 2
    assert find_residual_blocks(model) == {}


class Looking(nn.Module):
    """It looks at a mask, which it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.fn = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.fn(x)
        return x + (y if mask is None else y * mask)


class Further(nn.Module):
    """It hands on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.fn = Looking()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return x + self.fn(x, **kwargs)


class Giving(nn.Module):
    """Gives a mask to what is between its layers."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.first, self.function, self.last = nn.Linear(8, 8), function, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.function(x, mask=x > 0))


@pytest.mark.parametrize("kind", [Looking, Further])
def test_blocks_that_do_not_pass_the_check_are_left_alone(kind):
    model = nn.Sequential(Residual(nn.Linear(8, 8)), Giving(kind()))
    assert "1.function" in find_residual_blocks(model)
    assert list(deep(model, VECTOR).blocks) == ["0"]
    with pytest.raises(StructureError, match=r"blocks 1.function cannot be skipped"):
        deep(model, VECTOR, ["1.function"])


@pytest.mark.parametrize("name", EQUALS)
def test_sums_of_two_weighted_branches_are_no_blocks(name):
    make, example = EQUALS[name]
    assert deep(make(), example).blocks == {}


class Told(nn.Module):
    """A projection in a block that is called otherwise than its code can be read."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.long = nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 6))
            self.short = nn.Linear(8, 6)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            y = self.long(x)
            return self.short(x) + (y if mask is None else y * mask)

    def __init__(self, *, with_mask: bool) -> None:
        super().__init__()
        self.block, self.out, self.with_mask = Told.Block(), nn.Linear(6, 3), with_mask

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(x, mask=x[:, :6] > 0) if self.with_mask else self.block(x))


def test_a_projection_whose_code_cannot_be_run_is_left_alone():
    assert list(deep(Told(with_mask=False), VECTOR).blocks) == ["block"]
    assert deep(Told(with_mask=True), VECTOR).blocks == {}


def test_branches_beside_a_shortcut_are_one_block():
    net = nn.Sequential(nn.Conv2d(3, 6, 1), RepVGG(6, 6, identity=True), *head(6))
    assert {b.name: set(b.tensors) for b in deep(net, IMAGE).blocks.values()} == {
        "1": {n for n in named_tensors(net) if n.startswith(("1.big.", "1.small."))}
    }


# members of stacks


def replaced(model: nn.Module, name: str, share: float) -> nn.Module:
    """The oracle: a layer answers, from outside, its input and a share of the difference."""
    model = copy.deepcopy(model)

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> Any:
        x, y = inputs[0], output[0] if isinstance(output, tuple) else output
        mixed = x + share * (y - x)
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

    model.get_submodule(name).register_forward_hook(hook)
    return model


@pytest.mark.parametrize("name", STACKED)
def test_members_of_a_stack_are_blocks_where_no_sum_can_be_read(name):
    torch.manual_seed(0)
    model = roughened(STACKED[name]())
    assert find_residual_blocks(model) == {}
    structure = deep(model, SEQUENCE)
    layers = [f"{'' if name == 'a Sequential' else 'layers.'}{i}" for i in range(3)]
    assert list(structure.blocks) == layers
    (x,) = inputs_for(SEQUENCE)
    for layer in layers:
        small = build_module(model, structure, Subnet().without_blocks(layer))
        torch.testing.assert_close(small(x), replaced(model, layer, 0.0)(x))
        assert not any(n.startswith(f"{layer}.") for n in named_tensors(small))
        stepped, stepped_structure = add_block_steps(model, structure)
        step = {stepped_structure.blocks[layer].step: torch.tensor(0.25)}
        half = build_module(stepped, stepped_structure, Subnet(), step)
        torch.testing.assert_close(half(x), replaced(model, layer, 0.25)(x))
    again = from_json(json.loads(json.dumps(to_json(structure))))
    assert again.blocks == structure.blocks
    shallow = structure.subnet(depth=0.5)
    assert shallow.skipped == (layers[2],)


@pytest.mark.parametrize("name", NOT_STACKED)
def test_other_members_of_stacks_are_no_blocks(name):
    torch.manual_seed(0)
    assert deep(roughened(NOT_STACKED[name]()), SEQUENCE).blocks == {}


def test_watching_a_model_at_work_leaves_it_as_it_was():
    torch.manual_seed(0)
    for model, example in (
        (STACKED["tuples taken apart"](), SEQUENCE),
        (EQUALS["two ways"][0](), IMAGE),
    ):
        before = [(m.forward.__func__, len(m._forward_hooks)) for m in model.modules()]
        candidates = find_block_candidates(model)
        assert any(candidates)
        find_working_blocks(model, *candidates, lambda net, x=example: net(x))
        assert [(m.forward.__func__, len(m._forward_hooks)) for m in model.modules()] == before


# law 5 for depth


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_net_without_blocks_is_the_net_with_their_branches_at_zero(name, seed):
    model, structure = skippable(name)
    skipped = some_of(structure.blocks, seed) if seed else list(structure.blocks)
    subnet = structure.subnet().without_blocks(*skipped)
    small, oracle = (
        build_module(model, structure, subnet),
        multiplied(model, name, dict.fromkeys(skipped, 0)),
    )
    inputs = inputs_for(DEEP[name].example)
    for x in inputs:
        x.requires_grad_()
    outputs = small(*inputs), oracle(*inputs)
    torch.testing.assert_close(*outputs)
    for x in inputs:
        torch.testing.assert_close(*(torch.autograd.grad(o.sum(), x)[0] for o in outputs))
    assert named_tensors(small).keys() == set(structure.tensor_names(subnet))
    assert (
        not {t for b in skipped for t in structure.blocks[b].tensors} & named_tensors(small).keys()
    )


@pytest.mark.parametrize("name", DEEP)
def test_a_step_multiplies_its_branch(name):
    model, structure = skippable(name)
    stepped, stepped_structure = add_block_steps(model, structure)
    values = {b.step: torch.rand(()) + 0.5 for b in stepped_structure.blocks.values()}
    small = build_module(stepped, stepped_structure, stepped_structure.subnet(), values)
    factors = {b.name: values[b.step] for b in stepped_structure.blocks.values()}
    inputs = inputs_for(DEEP[name].example)
    torch.testing.assert_close(small(*inputs), multiplied(model, name, factors)(*inputs))


@pytest.mark.parametrize("name", DEEP)
def test_steps_of_one_change_nothing_in_training(name):
    model, structure = skippable(name)
    small = build_module(*add_block_steps(model, structure), structure.subnet())
    results = []
    for net in (small, copy.deepcopy(model)):
        torch.manual_seed(3)
        outputs = net.train()(*inputs_for(DEEP[name].example))
        outputs.square().sum().backward()
        grads = {n: p.grad for n, p in net.named_parameters() if n in structure.shapes}
        buffers = {n: b for n, b in net.named_buffers()}
        results.append({"outputs": outputs, **grads, **buffers})
    assert_same(*results)


def some_channels(structure: Structure, seed: int) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    kept = {}
    for name in structure.cut_groups():
        size = structure.groups[name].size
        count = int(torch.randint(1, size + 1, (), generator=generator))
        kept[name] = torch.randperm(size, generator=generator)[:count].tolist()
    return kept


def gradients(model: nn.Module, example: Tensor) -> dict[str, Tensor]:
    (x,) = inputs_for(example)
    model(x.to(example)).square().sum().backward()
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()
    }


@pytest.mark.parametrize("name", ["resnet", "pre-activation"])
@given(seed=st.integers(0, 10**6), has_steps=st.booleans())
@few
def test_width_and_depth_equal_the_masked_net_and_so_do_gradients(name, has_steps, seed):
    """Channels masked as without blocks; branches multiplied from outside."""
    model, structure = traced(name)
    assert structure.is_exact
    skipped = some_of(structure.blocks, seed)
    whole, values = structure, {}
    factors: dict[str, Any] = {}
    if has_steps:
        drawn = torch.Generator().manual_seed(seed)
        stepped, structure = add_block_steps(model, structure)
        values = {
            b.step: torch.rand((), generator=drawn).double() + 0.5
            for b in structure.blocks.values()
        }
        factors = {b.name: values[b.step] for b in structure.blocks.values()}
    subnet = structure.subnet(channels=some_channels(structure, seed)).without_blocks(*skipped)
    small = build_module(stepped if has_steps else model, structure, subnet, values)
    factors |= dict.fromkeys(skipped, 0)
    oracle = multiplied(mask_model(model, whole, Subnet(subnet.kept)), name, factors)
    example = DEEP[name].example.double()
    (x,) = inputs_for(example)
    torch.testing.assert_close(small(x.to(example)), oracle(x.to(example)))
    found = gradients(small, example)
    cells = whole.tensor_names(subnet.excluding(*whole.statistics))
    expected = copy_subnet_tensors(
        {**named_tensors(model), **gradients(oracle, example)}, whole, subnet
    )
    weights = [n for n, _ in small.named_parameters() if n in cells]
    assert_same({n: found[n] for n in weights}, {n: expected[n] for n in weights})


@given(seed=st.integers(0, 10**6))
@few
def test_depth_of_a_transformer_at_any_width_equals_branches_at_zero(seed):
    """Layers are normalised over what is kept, so that the narrow net is cut first."""
    model, structure = traced("transformer")
    assert not structure.is_exact
    skipped = some_of(structure.blocks, seed)
    subnet = structure.subnet(channels=some_channels(structure, seed))
    narrow = multiplied(
        build_module(model, structure, subnet), "transformer", dict.fromkeys(skipped, 0)
    )
    small = build_module(model, structure, subnet.without_blocks(*skipped))
    example = DEEP["transformer"].example.double()
    (x,) = inputs_for(example)
    torch.testing.assert_close(small(x.to(example)), narrow(x.to(example)))
    found, expected = gradients(small, example), gradients(narrow, example)
    assert_same(found, {n: expected[n] for n in found})


def test_the_shortcut_stays_the_shortcut_where_a_branch_is_cut_to_the_bone():
    """It then has more weights than the branch has."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Basic(16, 64, 2), nn.Conv2d(64, 2, 4))
    model = roughened(net).double()
    structure = trace_structure(model, IMAGE.double())
    stepped, stepped_structure = add_block_steps(model, structure)
    (x,) = inputs_for(IMAGE)
    inner = next(g for g in structure.cut_groups() if g == "1.conv1")
    subnet = stepped_structure.subnet(channels={inner: [3]})
    small = build_module(stepped, stepped_structure, subnet, {"1.step": torch.tensor(0.5)})
    oracle = mask_model(model, structure, Subnet(subnet.kept))
    oracle[1].bn2.register_forward_hook(lambda module, inputs, output: output * 0.5)
    torch.testing.assert_close(small(x.double()), oracle(x.double()))


# a skipped block is gone


class Convolutions(TorchDispatchMode):
    """Counts convolutions that are really computed."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.convolution.default
        return func(*args, **(kwargs or {}))


def test_layers_of_skipped_blocks_are_neither_computed_nor_stored():
    model, structure = skippable("resnet")
    subnet = structure.subnet(blocks=["layer1.0"])
    small = build_module(model, structure, subnet)
    counted = []
    for net in (model, small):
        with Convolutions() as convolutions, torch.no_grad():
            net(torch.randn(2, 3, 8, 8))
        counted.append(convolutions.count)
    assert counted == [10, 4]  # left: the stem, two of layer1.0, and the shortcut of layer2.0
    assert [n for n, m in small.named_modules() if isinstance(m, nn.Conv2d)] == [
        "conv1",
        "layer1.0.conv1",
        "layer1.0.conv2",
        "layer2.0.downsample.0",
    ]
    assert small.layer2[0](torch.randn(2, 6, 8, 8)).shape == (2, 10, 4, 4)


def test_skipped_blocks_are_neither_taken_nor_sent():
    model, structure = skippable("resnet")
    subnet = structure.subnet(blocks=["layer1.*"])
    params = {n: t.detach() for n, t in named_tensors(model).items()}
    gone = {n for n in params if n.startswith("layer2.") and ".downsample" not in n}
    assert copy_subnet_tensors(params, structure, subnet).keys() == params.keys() - gone
    bench = ClientContext(model, structure, {})
    sent = bench.tensors(bench.module(subnet, params), subnet, subnet)
    assert sent.keys() == params.keys() - gone
    update = Update(0, (subnet,), (sent,), 1.0, {})
    assert validate_update(update, structure, params) is update


def test_a_module_serves_subnets_of_its_depth_only():
    model, structure = skippable("resnet")
    params = {n: t.detach() for n, t in named_tensors(model).items()}
    bench = ClientContext(model, structure, {})
    whole = bench.module(structure.subnet(), params)
    shallow = bench.module(structure.subnet(depth=0.5), params)
    assert named_tensors(whole).keys() > named_tensors(shallow).keys()
    assert bench.module(structure.subnet(depth=0.5).excluding("fc.*"), params) is shallow


def test_skipping_saves_what_the_block_costs():
    model, structure = skippable("resnet")
    whole, less = (
        compute_cost(model, structure, subnet, IMAGE)
        for subnet in (
            structure.subnet(),
            structure.subnet().without_blocks("layer1.1", "layer2.0"),
        )
    )
    first, second = (2 * 6 * 6 * 9, 6 * 10 * 9 + 10 * 10 * 9)
    assert whole.params - less.params == first + second + 4 * 6 + 4 * 10
    assert whole.bytes - less.bytes == 4 * (first + second + 8 * 6 + 8 * 10) + 4 * 8
    assert whole.macs - less.macs == first * 8 * 8 + second * 4 * 4
    assert less.memory < whole.memory


@pytest.mark.parametrize("depth", [0.01, 0.5, 0.6, 1])
def test_depth_keeps_the_first_blocks_of_each_stage(depth):
    _, structure = skippable("transformer")
    count = 1 if depth <= 0.5 else 2
    kept = [b for b in structure.blocks if b < f"layers.{count}"]
    assert structure.subnet(depth=depth).skipped == tuple(sorted(structure.blocks.keys() - kept))


# steps


def test_steps_are_named_after_their_module_or_branch():
    model, structure = skippable("resnet")
    stepped, stepped_structure = add_block_steps(model, structure)
    assert [b.step for b in stepped_structure.blocks.values()] == [
        f"layer{i}.{j}.step" for i in (1, 2) for j in (0, 1)
    ]
    assert stepped_structure.match_names((STEPS,)) == {
        b.step for b in stepped_structure.blocks.values()
    }
    assert named_tensors(stepped).keys() == set(stepped_structure.shapes)
    assert not any(name.endswith("step") for name in named_tensors(model))
    _, two = add_block_steps(*skippable("transformer"))
    steps = [b.step for b in two.blocks.values()]
    assert steps == [f"layers.{i}.{kind}_step" for i in (0, 1) for kind in ("attention", "mlp")]


@pytest.mark.parametrize("learnable", [False, True])
def test_steps_learn_if_they_may(learnable):
    model, structure = skippable("transformer")
    stepped, stepped_structure = add_block_steps(model, structure, learnable=learnable)
    small = build_module(stepped, stepped_structure, stepped_structure.subnet())
    small(torch.randn(2, 3, 8, 8)).sum().backward()
    steps = [p for n, p in small.named_parameters() if n.endswith("step")]
    assert len(steps) == 4
    for step in steps:
        assert step.requires_grad == learnable
        assert (step.grad is not None and bool(step.grad != 0)) == learnable


@pytest.mark.parametrize("name", ["resnet", "transformer", "nested", "encoder"])
def test_a_skipped_block_takes_its_step_along(name):
    model, structure = skippable(name)
    stepped, stepped_structure = add_block_steps(model, structure)
    params = {n: t.detach() for n, t in named_tensors(stepped).items()}
    bench = ClientContext(stepped, stepped_structure, {})
    for seed in range(4):
        subnet = stepped_structure.subnet().without_blocks(*some_of(structure.blocks, seed))
        gone = {stepped_structure.blocks[b].step for b in subnet.skipped}
        small = bench.module(subnet, params)  # loads just what is there
        assert named_tensors(small).keys() == set(stepped_structure.tensor_names(subnet))
        assert not gone & named_tensors(small).keys()


def test_a_step_needs_its_name():
    model = Middle(Residual(nn.Linear(8, 8)))
    model.function.step = 3
    with pytest.raises(StructureError, match=r"'function' has something named 'step' already"):
        add_block_steps(model, deep(model, VECTOR))


# as a value


@given(skipped=st.lists(st.text(max_size=9), max_size=5), channels=st.sets(st.integers(0, 99)))
def test_a_subnet_that_skips_survives_being_sent(skipped, channels):
    subnet = (
        Subnet.from_channels({"a": channels})
        .without_blocks(*skipped)
        .excluding("*.bias")
        .with_private("x", "b")
    )
    again = Subnet.decode(subnet.encode())
    assert again == subnet
    assert hash(again) == hash(subnet)
    assert set(again.skipped) == set(skipped)


def test_skipped_blocks_are_part_of_a_subnet():
    subnet = Subnet.from_channels({"a": [0, 2]}).without_blocks("b", "a.1").excluding("*.bias")
    same = (
        Subnet.from_channels({"a": [0, 2]})
        .without_blocks("a.1")
        .without_blocks("b", "b")
        .excluding("*.bias")
    )
    assert subnet == same
    assert subnet != Subnet.from_channels({"a": [0, 2]}).without_blocks("b").excluding("*.bias")
    assert repr(subnet) == "Subnet(a: 0,2; skips a.1, b; without *.bias)"
    assert subnet.shape == Subnet.from_channels({"a": [0, 2]}).without_blocks("a.1", "b")
    assert subnet.with_private("x", "c").skipped == ("a.1", "b")


@pytest.mark.parametrize("is_stepped", [False, True])
def test_blocks_survive_being_written_down(is_stepped):
    model, structure = traced("pre-activation")
    if is_stepped:
        model, structure = add_block_steps(model, structure)
    again = from_json(json.loads(json.dumps(to_json(structure))))
    assert again.blocks == structure.blocks
    assert list(again.blocks) == list(structure.blocks)
    subnet = again.subnet(0.5, depth=0.5)
    assert subnet == structure.subnet(0.5, depth=0.5)
    x = torch.randn(2, 3, 8, 8).double()
    torch.testing.assert_close(
        build_module(model, again, subnet)(x), build_module(model, structure, subnet)(x)
    )


def test_a_description_names_the_blocks():
    _, structure = skippable("resnet")
    assert structure.describe().splitlines()[-1] == (
        "blocks that may be skipped: layer1.0, layer1.1, layer2.0, layer2.1"
    )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"depth": 0}, r"^depths are fractions in \(0, 1\], got 0; 1 keeps every block$"),
        ({"depth": 2}, r"^depths are fractions in \(0, 1\], got 2; 1 keeps every block$"),
        ({"depth": float("nan")}, r"^depths are fractions"),
        (
            {"blocks": ["nope"]},
            r"^the model has no block 'nope' that may be skipped; its blocks are: layer1.0, ",
        ),
    ],
)
def test_impossible_depths_are_refused(asked, message):
    with pytest.raises(StructureError, match=message):
        skippable("resnet")[1].subnet(**asked)


def test_unknown_blocks_are_refused():
    model, structure = skippable("resnet")
    with pytest.raises(StructureError, match=r"no block 'layer3.0' that may be skipped"):
        copy_subnet_tensors(named_tensors(model), structure, Subnet().without_blocks("layer3.0"))


def test_a_net_without_blocks_has_no_depth():
    model = plain_cnn()
    structure = trace_structure(model, IMAGE)
    assert structure.blocks == {}
    assert "blocks" not in structure.describe()
    assert structure.subnet(depth=1) == structure.subnet()
    with pytest.raises(StructureError, match=r"^no block of this model can be skipped"):
        structure.subnet(depth=0.5)
    with pytest.raises(StructureError, match=r"no block 'nope' .* its blocks are: none$"):
        structure.subnet(blocks=["nope"])


# named by the user


def test_patterns_choose_among_the_blocks():
    model, _ = skippable("transformer")
    assert list(select_blocks(model, ["*.mlp"])) == ["layers.0.mlp", "layers.1.mlp"]
    assert list(select_blocks(model, ["layers.1.*", "layers.0.mlp"])) == [
        "layers.0.mlp",
        "layers.1.attention",
        "layers.1.mlp",
    ]


def declared() -> tuple[nn.Module, Structure]:
    torch.manual_seed(0)
    model = roughened(nn.Sequential(*(Middle(Written(by_value)) for _ in range(2)))[:1])
    with pytest.warns(StructureWarning, match="not run on the example"):
        return model, trace_structure(model, VECTOR, blocks=["0.function"])


def test_a_declared_module_is_a_block_as_a_whole():
    model, structure = declared()
    assert list(structure.blocks) == ["0.function"]
    subnet = structure.subnet().without_blocks("0.function")
    x = torch.randn(2, 8)
    expected = model[0].last(torch.relu(model[0].first(x)))
    small = build_module(model, structure, subnet)
    torch.testing.assert_close(small(x), expected)
    assert not any("function" in name for name in named_tensors(small))
    assert named_tensors(small).keys() == set(structure.tensor_names(subnet))


def test_the_step_of_a_declared_module_is_between_its_input_and_output():
    model, structure = declared()
    small = build_module(
        *add_block_steps(model, structure),
        structure.subnet(),
        {"0.function.step": torch.tensor(0.25)},
    )
    x = torch.randn(2, 8)
    hidden = torch.relu(model[0].first(x))
    expected = model[0].last(hidden + 0.25 * (model[0].function(hidden) - hidden))
    torch.testing.assert_close(small(x), expected)


def test_a_pattern_of_modules_names_the_outermost():
    model = nn.Sequential(
        nn.Linear(8, 8), *(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
    )
    assert list(deep(model, VECTOR, ["[12]*"]).blocks) == ["1", "2"]


def test_a_declared_module_may_be_called_by_keyword():
    class Calling(Middle):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.function(x=self.first(x)))

    model = roughened(Calling(Written(by_value)))
    structure = deep(model, VECTOR, ["function"])
    x = torch.randn(2, 8)
    small = build_module(model, structure, Subnet().without_blocks("function"))
    torch.testing.assert_close(small(x), model.last(model.first(x)))


def test_a_declared_module_may_hold_blocks_of_its_own():
    torch.manual_seed(0)
    model = roughened(nn.Sequential(nn.Linear(8, 8), Nested(), nn.Linear(8, 3)))
    structure = deep(model, VECTOR, ["1.inner", "1.last", "1"])
    stepped, stepped_structure = add_block_steps(model, structure)
    values = {b.step: torch.rand(()) for b in stepped_structure.blocks.values()}
    small = build_module(stepped, stepped_structure, Subnet(), values)
    inner, last, whole = (
        values[stepped_structure.blocks[b].step] for b in ("1.inner", "1.last", "1")
    )
    x = torch.randn(2, 8)
    hidden, net = model[0](x), model[1]
    y = hidden + inner * net.inner.fn(hidden)
    block = hidden + last * net.last(y + net.first(y))
    torch.testing.assert_close(small(x), model[2](hidden + whole * (block - hidden)))


class Halving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fn = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x).repeat(1, 2)[:, :4]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fn = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.fn(x), x


class First(nn.Module):
    """A pair's first."""

    def __init__(self, pair: nn.Module) -> None:
        super().__init__()
        self.pair, self.last = pair, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pair(x)[0])


@pytest.mark.parametrize(
    ("make", "named", "message"),
    [
        (
            lambda: nn.Sequential(Halving(), nn.Linear(4, 3)),
            "0",
            r"'0'.* shape \(2, 4\) of .*\(2, 8\)",
        ),
        (lambda: First(Written(lambda self, x: (self.f(x), x))), "pair", r"'pair'.* a tuple"),
        (lambda: Middle(nn.ReLU()), "neck", r"'neck', which is no module and no residual block"),
        (lambda: Middle(nn.Linear(8, 8)), "last", r"'last'.* shape \(2, 5\) of .*\(2, 8\)"),
    ],
)
def test_a_declared_module_that_cannot_be_skipped_is_refused(make, named, message):
    with pytest.raises(StructureError, match=message):
        deep(make(), VECTOR, [named])


def test_a_declared_module_whose_weights_others_use_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    model[1].weight = model[0].weight
    for name in "01":
        with pytest.raises(StructureError, match=rf"'{name}' shares '.\.weight'"):
            deep(model, VECTOR, [name])


def test_one_of_a_pair_is_a_block_where_the_sum_is():
    model = roughened(First(Pair()))
    structure = deep(model, VECTOR)
    x = torch.randn(2, 8)
    small = build_module(model, structure, Subnet().without_blocks("pair"))
    torch.testing.assert_close(small(x), model.last(x))


# what else a user does


@pytest.mark.parametrize("name", ["resnet", "encoder", "masks", "sums in the root"])
def test_looking_for_blocks_leaves_the_model_as_it_was(name):
    torch.manual_seed(0)
    model = DEEP[name].make()
    next(model.children()).eval()
    before = copy.deepcopy(model.state_dict())
    kinds = [(type(m), m.training, sorted(vars(m))) for m in model.modules()]
    forwards = [m.forward.__func__ for m in model.modules()]
    deep(model, DEEP[name].example)
    assert [(type(m), m.training, sorted(vars(m))) for m in model.modules()] == kinds
    assert [m.forward.__func__ for m in model.modules()] == forwards
    assert_same(model.state_dict(), before)


def test_looking_for_blocks_does_not_run_what_the_code_does_to_its_tensors():
    class Average(nn.Module):
        """Keeps a running mean by hand."""

        def __init__(self) -> None:
            super().__init__()
            self.fn = nn.Linear(8, 8)
            self.register_buffer("mean", torch.ones(8))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.count.add_(1)
                self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return x - self.mean + self.fn(x)

    model = roughened(Middle(Average()))
    assert find_residual_blocks(model)["function"].tensors == (
        "function.fn.weight",
        "function.fn.bias",
    )
    structure = deep(model, VECTOR)
    assert (model.function.mean >= 1).all()
    whole = build_module(*add_block_steps(model, structure), structure.subnet()).train()
    x = torch.randn(4, 8)
    torch.testing.assert_close(whole(x), model.train()(x))
    torch.testing.assert_close(whole.function.mean, model.function.mean)
    assert whole.function.count == model.function.count


def test_what_follows_in_place_does_not_reach_what_came_before():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.act, self.last = (
                Residual(nn.Linear(8, 8)),
                nn.ReLU(inplace=True),
                nn.Linear(8, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = torch.sigmoid(x) - 0.5
            return self.last(self.act(self.block(x)) - x)

    model = roughened(Twice())
    structure = deep(model, VECTOR)
    assert list(structure.blocks) == ["block"]
    small = build_module(model, structure, structure.subnet().without_blocks("block"))
    x = torch.randn(4, 8)
    hidden = torch.sigmoid(x) - 0.5
    torch.testing.assert_close(small(x), model.last(F.relu(hidden) - hidden))


@pytest.mark.parametrize("name", ["resnet", "encoder"])
def test_a_copy_of_a_subnet_is_a_net_of_its_own(name):
    model, structure = skippable(name)
    stepped, stepped_structure = add_block_steps(model, structure)
    small = build_module(stepped, stepped_structure, stepped_structure.subnet(depth=0.5))
    inputs = inputs_for(DEEP[name].example)
    expected = small(*inputs)
    other = copy.deepcopy(small)
    torch.testing.assert_close(other(*inputs), expected)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    torch.testing.assert_close(small(*inputs), expected)
    assert not torch.allclose(other(*inputs), expected)
    values = {n: t.detach() for n, t in named_tensors(other).items()}
    torch.testing.assert_close(torch.func.functional_call(small, values, inputs), other(*inputs))


def test_an_encoder_takes_padding_without_its_first_attention():
    """With padding it would use a kernel that asks for all tensors of its first layer."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            return self.encoder(x, src_key_padding_mask=padding)[:, 0]

    model = roughened(Padded())
    inputs = (torch.randn(2, 5, 8), torch.arange(5).expand(2, 5) > torch.tensor([[4], [2]]))
    structure = deep(model, (SEQUENCE, inputs[1]))
    small = build_module(model, structure, Subnet().without_blocks("encoder.layers.0.self_attn"))
    with torch.no_grad():
        torch.testing.assert_close(small(*inputs), small.requires_grad_()(*inputs))
    assert model.encoder.use_nested_tensor


def test_hooks_on_a_module_with_a_block_are_called():
    model, structure = skippable("resnet")
    small = build_module(model, structure, structure.subnet(depth=0.5))
    seen = []
    small.layer1[1].register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    small(torch.randn(2, 3, 8, 8))
    assert seen == [(2, 6, 8, 8)]


def test_a_shallow_net_is_exported_as_it_answers(tmp_path):
    model, structure = skippable("sums in the root")
    small = build_module(model, structure, structure.subnet(blocks=["channels"]))
    assert list(inspect.signature(small.forward).parameters) == ["x"]  # as files name it, too
    path = export(small, tmp_path / "small.pt2", IMAGE)
    (x,) = inputs_for(IMAGE)
    torch.testing.assert_close(torch.export.load(path).module()(x), small(x))


# averages


def changed(params: Mapping[str, Tensor], structure: Structure, subnet: Subnet, shift: float):
    taken = copy_subnet_tensors(params, structure, subnet)
    return Update(
        0,
        (subnet,),
        ({n: t + shift if t.is_floating_point() else t for n, t in taken.items()},),
        1.0,
        {},
    )


def test_a_block_is_averaged_over_those_that_kept_it_and_stays_where_nobody_did():
    model, structure = skippable("resnet")
    params = {n: t.detach() for n, t in named_tensors(model).items()}
    skips = (["layer1.1", "layer2.1"], ["layer2.1", "layer1.0"], ["layer2.1"])
    updates = [
        changed(params, structure, Subnet().without_blocks(*skipped), shift)
        for skipped, shift in zip(skips, (1.0, 2.0, 6.0), strict=True)
    ]
    found = average(params, structure, updates)
    shifts = {"layer1.0": 3.5, "layer1.1": 4.0, "layer2.0": 3.0, "layer2.1": 0.0}
    block_of = {t: b.name for b in structure.blocks.values() for t in b.tensors}
    for name, tensor in params.items():
        if tensor.is_floating_point():
            expected = tensor + shifts.get(block_of.get(name, ""), 3.0)
            torch.testing.assert_close(found[name], expected)


@given(seed=st.integers(0, 10**6))
@few
def test_what_is_taken_and_sent_back_unchanged_changes_nothing(seed):
    model, structure = traced("resnet")
    params = {n: t.detach() for n, t in named_tensors(model).items()}
    subnets = [
        structure.subnet(channels=some_channels(structure, seed + i)).without_blocks(
            *some_of(structure.blocks, seed + i)
        )
        for i in range(3)
    ]
    found = average(params, structure, [changed(params, structure, s, 0.0) for s in subnets])
    assert all(torch.equal(found[n], t) for n, t in params.items())


def test_cells_of_a_block_are_averaged_as_in_the_example_of_nefl():
    """Kang et al., Sec. 4.2: a layer that submodels 1, 3 and 5 have, trained by 2, 3 and 2."""
    model, structure = traced("resnet")
    params = {n: t.detach() for n, t in named_tensors(model).items()}
    clients = [(1, 7), (3, 30), (5, 100), (1, 0), (3, 40), (5, 200), (3, 20), (2, 999), (4, 999)]
    updates = []
    for number, value in clients:
        subnet = structure.subnet(number / 6 if number < 5 else 1)
        if number in (2, 4):
            subnet = subnet.without_blocks("layer1.0")
        taken = copy_subnet_tensors(params, structure, subnet)
        sent = {n: torch.full_like(t, value) for n, t in taken.items()}
        updates.append(Update(len(updates), (subnet,), (sent,), 1.0, {}))
    found = average(params, structure, updates)
    expected = torch.full((6, 6, 1, 1), (100 + 200) / 2).double()  # of the two that have it all
    expected[:3, :3] = (30 + 40 + 20 + 100 + 200) / 5
    expected[0, 0] = (7 + 0 + 30 + 40 + 20 + 100 + 200) / 7
    layer = found["layer1.0.conv1.weight"]
    torch.testing.assert_close(layer, expected.expand_as(layer))
    stem = found["conv1.weight"][1]  # which 2 and 4 have as well
    everyone = (30 + 40 + 20 + 100 + 200 + 999 + 999) / 7
    torch.testing.assert_close(stem, torch.full_like(stem, everyone))
