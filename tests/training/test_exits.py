"""Exits, against what hooks see in the net itself and heads written by hand."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.errors import StructureError
from fedquilt.models import make_model
from fedquilt.models.heterofl import PreResNet
from fedquilt.structure.blocks.block import Block
from fedquilt.structure.cut import build_module
from fedquilt.structure.derive import make_uncut_structure
from fedquilt.structure.tensors import named_tensors
from fedquilt.training.client_loss import ClientLoss
from fedquilt.training.exit_heads import ImageHead, TokenHead
from fedquilt.training.exits import (
    ExitLosses,
    MultiExit,
    find_natural_exits,
    mutual_divergence,
)


def chain() -> nn.Module:
    """A plain CNN; every ReLU works in place."""
    layers: list[nn.Module] = []
    for before, after in ((1, 6), (6, 8), (8, 12), (12, 10)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(True)]
        layers += [nn.MaxPool2d(2)] if after != 10 else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 5))


def resnet() -> nn.Module:
    return PreResNet((2, 2, 2, 2), in_channels=1, num_classes=5, width=0.0625)


class Mixer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        heard = self.mix(self.norm(x))
        return x + self.out(heard + heard.mean(1, keepdim=True))


class Encoder(nn.Module):
    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(16, dim))
        self.blocks = nn.ModuleList(Mixer(dim) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(dim) * 1.5)  # of what comes last

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places
        for block in self.blocks:
            x = F.dropout(block(x), 0.3, self.training)
        return x * self.scale


class Tokens(nn.Module):
    """Tokens in, an answer for all or for each; its layers are in a child with its own code."""

    def __init__(self, *, each: bool = False) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(7, 8), Encoder(8, 4)
        self.classifier, self.each = nn.Linear(8, 5), each

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(self.embed(x))
        return self.classifier(x if self.each else x.mean(1))


IMAGES = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(3))
WORDS = torch.randint(7, (4, 16), generator=torch.Generator().manual_seed(3))
NETS = {
    "chain": (chain, IMAGES, ("3", "7", "11")),
    "resnet": (resnet, IMAGES, ("blocks.1", "blocks.3", "blocks.5")),
    "tokens": (Tokens, WORDS, ("encoder.blocks.0", "encoder.blocks.2")),
    "each token": (lambda: Tokens(each=True), WORDS, ("encoder.blocks.1",)),
}


@pytest.fixture(params=NETS)
def case(request) -> tuple[MultiExit, nn.Module, Tensor, tuple[str, ...]]:
    """A net with exits, the net alone, inputs, and where the exits are."""
    factory, x, at = NETS[request.param]
    torch.manual_seed(0)
    net = factory()
    model = MultiExit(copy.deepcopy(net), at, x[:1])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # statistics and the like that matter
        for name, tensor in named_tensors(model).items():
            if tensor.is_floating_point():
                tensor += 0.2 * torch.rand(tensor.shape, generator=generator)
                if name.startswith("net."):
                    named_tensors(net)[name.removeprefix("net.")].copy_(tensor)
    return model, net, x, at


def by_hooks(model: MultiExit, net: nn.Module, x: Tensor, at) -> list[Tensor]:
    """All exits: the heads on what the net's modules give, copied before others change it."""
    seen: dict[str, Tensor] = {}
    handles = [
        net.get_submodule(name).register_forward_hook(
            lambda module, inputs, output, name=name: seen.update({name: output.clone()})
        )
        for name in at
    ]
    torch.manual_seed(9)
    logits = net(x)
    for handle in handles:
        handle.remove()
    return [*(model.heads[f"exit{i}"](seen[n]) for i, n in enumerate(at, start=1)), logits]


def test_exits_are_heads_on_the_nets_own_features(case):
    model, net, x, at = case
    expected = by_hooks(copy.deepcopy(model).train(), net.train(), x, at)
    torch.manual_seed(9)  # of dropout
    found = model.train()(x)
    assert isinstance(found, tuple)
    assert len(found) == len(at) + 1
    for logits, other in zip(found, expected, strict=True):
        torch.testing.assert_close(logits, other)
    for name, tensor in named_tensors(net).items():  # statistics have moved alike
        torch.testing.assert_close(named_tensors(model)[f"net.{name}"], tensor)


def test_in_use_it_answers_with_the_mean_of_its_exits(case):
    model, net, x, at = case
    expected = torch.stack(by_hooks(model.eval(), net.eval(), x, at)).mean(0)
    torch.testing.assert_close(model(x), expected)
    assert model(x).equal(model(x))  # nothing is dropped out


def test_gradients_reach_the_net_from_every_exit(case):
    model, net, x, at = case
    twin = copy.deepcopy(model).train()
    torch.manual_seed(9)
    torch.stack([out.square().sum() for out in model.train()(x)]).sum().backward()
    outs = by_hooks(twin, net.train(), x, at)
    torch.stack([out.square().sum() for out in outs]).sum().backward()
    for name, weight in net.named_parameters():
        torch.testing.assert_close(model.get_parameter(f"net.{name}").grad, weight.grad)
    for name, weight in twin.heads.named_parameters():
        torch.testing.assert_close(model.get_parameter(f"heads.{name}").grad, weight.grad)


def structure_of(model: MultiExit) -> fq.Structure:
    bare = make_uncut_structure(model, fq.Structure({}, {}, {}))
    return fq.Structure(bare.groups, bare.axes, bare.shapes, blocks=model.blocks())


def test_fewer_exits_are_the_first_ones_and_cost_less(case):
    model, net, x, at = case
    structure = structure_of(model)
    torch.manual_seed(9)
    full = copy.deepcopy(model).train()(x)
    in_use = by_hooks(model.eval(), net.eval(), x, at)
    every, count = list(model.exits), len(model.exits)
    assert list(structure.blocks) == every[:0:-1]
    prices = []
    for depth in range(count, 0, -1):
        subnet = fq.Subnet().without_blocks(*every[depth:])
        small = build_module(model, structure, subnet)
        prices.append(fq.compute_cost(model, structure, subnet, x))
        assert set(named_tensors(small)) == set(structure.tensor_names(subnet))
        torch.manual_seed(9)
        for logits, other in zip(copy.deepcopy(small).train()(x), full[:depth], strict=True):
            assert logits.equal(other)
        torch.testing.assert_close(small.eval()(x), torch.stack(in_use[:depth]).mean(0))
    for larger, smaller in itertools.pairwise(prices):
        assert larger.macs > smaller.macs
        assert larger.params > smaller.params
        assert larger.memory > smaller.memory
    gone = [set(block.tensors) for block in structure.blocks.values()]
    assert all(a.isdisjoint(b) for i, a in enumerate(gone) for b in gone[i + 1 :])


def test_what_only_a_later_exit_needs_is_gone():
    torch.manual_seed(0)
    model = MultiExit(resnet(), ("blocks.1", "blocks.3", "blocks.5"), IMAGES)
    model.drop_exit("exit4")
    model.drop_exit("exit3")
    assert [name for name, _ in model.net.named_children()] == ["stem", "blocks"]
    assert [name for name, _ in model.net.blocks.named_children()] == ["0", "1", "2", "3"]
    assert list(model.heads) == ["exit1", "exit2"]
    tokens = MultiExit(Tokens(), ("encoder.blocks.0", "encoder.blocks.2"), WORDS)
    layers = ("classifier", *(f"encoder.blocks.3.{part}" for part in ("norm", "mix", "out")))
    expected = {f"net.{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
    assert set(tokens.blocks()["exit3"].tensors) == expected | {"net.encoder.scale"}


class Reused(nn.Module):
    """A late layer uses what an early one has, and one layer is called in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.twice(x))
        x = self.last(self.twice(x).relu())
        return self.out(F.linear(x, self.first.weight))


def test_layers_that_others_need_too_stay():
    model = MultiExit(Reused(), ("first",), torch.zeros(2, 6))
    gone = model.blocks()["exit2"].tensors
    assert gone == ("net.last.weight", "net.last.bias", "net.out.weight", "net.out.bias")


def test_a_tied_weight_stays_under_its_first_name():
    net = Reused()
    net.last.weight = net.first.weight
    model = MultiExit(net, ("first",), torch.zeros(2, 6))
    assert "net.first.weight" not in model.blocks()["exit2"].tensors
    net = Reused()
    net.last.weight = net.first.weight
    net._modules = {"last": net.last, **net._modules}  # so that the late layer's name comes first
    with pytest.raises(StructureError, match="'exit2' share a tensor with earlier ones"):
        MultiExit(net, ("first",), torch.zeros(2, 6)).blocks()


@pytest.mark.parametrize("name", ["exit1", "exit2", "exit9"])
def test_exits_are_left_out_from_the_last_one(name):
    model = MultiExit(chain(), ("3", "7"), IMAGES)
    with pytest.raises(StructureError, match=f"'{name}' is not the last of exit1, exit2, exit3"):
        model.drop_exit(name)
    model.drop_exit("exit3")
    model.drop_exit("exit2")
    with pytest.raises(StructureError, match="the first one stays"):
        model.drop_exit("exit1")


def test_a_subnet_without_a_middle_exit_is_refused():
    model = MultiExit(chain(), ("3", "7"), IMAGES)
    with pytest.raises(StructureError, match="from the last one"):
        build_module(model, structure_of(model), fq.Subnet().without_blocks("exit2"))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_copies_and_files_of_a_model_answer_alike(depth):
    torch.manual_seed(0)
    model = MultiExit(resnet(), ("blocks.1", "blocks.3", "blocks.5"), IMAGES).eval()
    for exit in model.exits[:depth - 1:-1]:  # fmt: skip
        model.drop_exit(exit)
    expected = model(IMAGES)
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(IMAGES).equal(expected)
    assert len(model.exits) == depth


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(1, 1, 3, padding=1), nn.Flatten()
        self.spare, self.out = nn.Conv2d(1, 1, 3), nn.Linear(256, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.pool(self.conv(self.conv(x))))


class Moody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 1, 3), nn.Linear(196, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.out((x if x.sum() > 0 else -x).flatten(1))


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 1, 3), nn.Linear(196, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(x)
        return x, self.out(x.flatten(1))


class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv3d(1, 2, 3), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(
            self.conv(x.unflatten(-1, (4, 4))[..., :4, :]).mean((3, 4)).flatten(1)[:, :8]
        )


@pytest.mark.parametrize(
    ("net", "at", "said"),
    [
        (chain, ("3", "nowhere"), "'nowhere', which is no module of the net; its forward calls: 0"),
        (Twice, ("conv",), "'conv', which the net calls 2 times"),
        (Twice, ("spare",), "'spare', which the net calls 0 times"),
        (chain, ("7", "3"), "'7' in at = 7, 3 comes too late"),
        (chain, ("3", "3"), "'3' in at = 3, 3 comes too late"),
        (chain, ("17",), "'17' in at = 17 comes too late"),  # that is the output
        (Moody, ("conv",), "the code of Moody cannot be read"),
        (Pairs, ("conv",), "gives one tensor of logits, Pairs gives"),
        (Volumes, ("conv",), r"it would make \(\d, 5\) of \(\d, 2, "),
    ],
)
def test_places_where_no_exit_can_be_are_refused(net, at, said):
    with pytest.raises(StructureError, match=said):
        MultiExit(net(), at, IMAGES)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x).relu())


class OneActivation(nn.Module):
    """One module for the activations of all layers, as many people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.pool = nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.conv3, self.out = nn.Conv2d(4, 4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv3(self.relu(self.conv2(self.relu(self.conv1(x))))))
        return self.out(self.pool(x).flatten(1))


@pytest.mark.parametrize(
    ("net", "expected"),
    [
        (chain, ("3", "7", "11")),
        (OneActivation, ("conv1", "conv2")),
        (resnet, ("blocks.1", "blocks.3", "blocks.5")),  # the ends of its stages
        (lambda: PreResNet((1, 1, 1, 2), width=0.0625), ("blocks.0", "blocks.1", "blocks.2")),
        (lambda: make_model("resnet18", {"width": 0.1}), ("layer1", "layer2", "layer3")),
        (lambda: make_model("resnet56", {"width": 0.2}), ("layer1", "layer2")),
        (
            lambda: make_model("mlp", {"hidden": (8, 8, 8, 8)}),
            ("features.2", "features.4", "features.6"),
        ),
        (Tokens, ("encoder.blocks.0", "encoder.blocks.1", "encoder.blocks.2")),
    ],
)
def test_exits_are_behind_stages_or_split_the_net_evenly(net, expected):
    assert find_natural_exits(net()) == expected


def test_a_net_with_one_activation_for_all_layers_has_exits_that_answer():
    net = OneActivation().eval()
    model = MultiExit(net, find_natural_exits(net), torch.zeros(2, 3, 8, 8))
    x = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    answers = model(x)
    assert [a.shape for a in answers] == [(3, 2)] * 3
    assert answers[-1].equal(net(x))


def test_a_net_without_a_place_for_an_exit_is_told_so():
    with pytest.raises(StructureError, match=r"Two has no place for an exit.*method\.at"):
        find_natural_exits(Two())


def test_a_list_of_modules_ends_with_its_last_call():
    model = MultiExit(Tokens(), ("encoder.blocks",), WORDS)
    assert set(model.blocks()["exit2"].tensors) == {
        "net.encoder.scale", "net.classifier.weight", "net.classifier.bias",
    }  # fmt: skip


def test_without_places_there_is_one_exit():
    net = chain()
    model = MultiExit(copy.deepcopy(net), (), IMAGES)
    assert (model.exits, len(model.heads), model.blocks()) == (("exit1",), 0, {})
    assert model.eval()(IMAGES).equal(net.eval()(IMAGES))


def test_the_net_of_the_authors_has_as_many_parameters():
    """ResNet18 of 100 classes with their heads, from one exit to four."""
    net = make_model("resnet18", {"stem": "plain", "num_classes": 100})
    model = MultiExit(net, find_natural_exits(net), torch.zeros(1, 3, 32, 32))
    assert all(isinstance(block, Block) for block in model.blocks().values())

    def separable(channels: int, size: int) -> int:
        return 2 * 9 * channels + channels**2 + 2 * channels + channels * size + 2 * size

    sizes = (64, 128, 256, 512)
    for number, head in enumerate(model.heads.values()):
        left = sizes[number:]
        expected = separable(left[0], left[0]) + 2 * left[0] + 100 * 513
        expected += sum(separable(*pair) for pair in itertools.pairwise(left))
        assert sum(w.numel() for w in head.parameters()) == expected
    counts = [sum(w.numel() for w in model.parameters())]
    for exit in ("exit4", "exit3", "exit2"):
        model.drop_exit(exit)
        counts.append(sum(w.numel() for w in model.parameters()))
    assert counts == [12_283_344, 3_838_316, 1_347_336, 479_652]


def separable(x: Tensor, w: dict[str, Tensor], name: str, stride: int) -> Tensor:
    for first, step in ((0, stride), (4, 1)):
        depthwise, pointwise = (w[f"{name}.{first + i}.weight"] for i in (0, 1))
        x = F.conv2d(x, depthwise, stride=step, padding=1, groups=len(depthwise))
        x = norm(F.conv2d(x, pointwise), w, f"{name}.{first + 2}").relu()
    return x


def norm(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    weight, bias = w[f"{name}.weight"], w[f"{name}.bias"]
    return F.batch_norm(x, None, None, weight, bias, training=True)


def test_an_image_head_is_attention_a_bottleneck_and_a_classifier():
    torch.manual_seed(0)
    head = ImageHead((6, 12, 12), (24, 3, 3), 5).train()
    w = {name: tensor.detach() for name, tensor in head.named_parameters()}
    x = torch.randn(4, 6, 12, 12)
    seen = norm(separable(x, w, "attention.0", 2), w, "attention.1").relu()
    looked = x * F.interpolate(seen, scale_factor=2, mode="bilinear").sigmoid()
    small = separable(separable(looked, w, "bottleneck.0", 2), w, "bottleneck.1", 2)
    assert small.shape == (4, 24, 3, 3)
    expected = small.mean((2, 3)) @ w["classifier.weight"].T + w["classifier.bias"]
    torch.testing.assert_close(head(x), expected)


@pytest.mark.parametrize(
    ("features", "last", "sizes"),
    [
        ((8, 9, 7), (8, 9, 7), [(8, 8, 1)]),  # no smaller, and still a step
        ((8, 9, 7), (16, 9, 9), [(8, 16, 1)]),
        ((8, 9, 7), (16, 3, 1), [(8, 10, 2), (10, 13, 2), (13, 16, 2)]),
        ((16, 4, 4), (4, 1, 1), [(16, 8, 2), (8, 4, 2)]),
    ],
)
def test_a_bottleneck_halves_images_until_they_are_as_small_as_the_last(features, last, sizes):
    head = ImageHead(features, last, 3)
    steps = [(s[0].in_channels, s[5].out_channels, s[0].stride[0]) for s in head.bottleneck]
    assert steps == sizes
    out = head.bottleneck(torch.zeros(2, *features))
    assert out.shape[1] == last[0]
    assert all(a <= b for a, b in zip(out.shape[2:], last[1:], strict=True))
    assert head(torch.randn(2, *features)).shape == (2, 3)


@pytest.mark.parametrize("pooled", [True, False])
def test_a_token_head_is_a_norm_a_mean_and_a_classifier(pooled):
    head, x = TokenHead(6, 3, pooled=pooled), torch.randn(2, 5, 6)
    plain = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    plain = plain.mean(1) if pooled else plain
    torch.testing.assert_close(head(x), plain @ head.classifier.weight.T + head.classifier.bias)


def divergence(exits: list[np.ndarray]) -> float:
    """Σ_i 1/(n-1) Σ_{j≠i} mean over examples of Σ_c p_j log(p_j / p_i)."""
    said = [np.exp(e) / np.exp(e).sum(-1, keepdims=True) for e in exits]
    total = 0.0
    for i, student in enumerate(said):
        for j, teacher in enumerate(said):
            if i != j:
                for p, q in zip(teacher.reshape(-1, 5), student.reshape(-1, 5), strict=True):
                    rows = teacher.size // 5
                    total += sum(p * np.log(p / q)) / rows / (len(said) - 1)
    return total


@pytest.mark.parametrize("shape", [(3, 5), (2, 4, 5)])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_divergence_is_the_sum_over_all_pairs(shape, count):
    generator = torch.Generator().manual_seed(0)
    exits = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]
    expected = divergence([e.numpy() for e in exits])
    assert mutual_divergence(exits).item() == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_a_teacher_learns_nothing_from_its_students():
    generator = torch.Generator().manual_seed(0)
    exits = [torch.randn(4, 5, generator=generator, requires_grad=True) for _ in range(3)]
    found = torch.autograd.grad(mutual_divergence(exits), exits)
    said = [e.detach().softmax(1) for e in exits]
    for number, gradient in enumerate(found):
        others = [s for i, s in enumerate(said) if i != number]
        expected = sum(said[number] - other for other in others) / 2 / 4
        torch.testing.assert_close(gradient, expected)


class Said(nn.Module):
    """A model that says what it is told to."""

    def __init__(self, *exits: Tensor) -> None:
        super().__init__()
        self.exits = exits

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.exits


@pytest.mark.parametrize("own", [None, (0, 3)])
def test_the_loss_is_that_of_all_exits_and_of_their_differences(own):
    generator = torch.Generator().manual_seed(0)
    exits = [torch.randn(4, 5, generator=generator) for _ in range(3)]
    y, x = torch.tensor([0, 3, 3, 0]), torch.zeros(4)

    def loss(**settings: float) -> float:
        return (
            ExitLosses(**settings)
            .loss(Said(*exits), (x, y), ClientLoss(labels=own), generator)
            .item()
        )

    known = [e.clone() for e in exits]
    for e in known if own else ():
        e[:, [1, 2, 4]] = 0
    single = [-e.log_softmax(1)[range(4), y].mean().item() for e in known]
    far = divergence([e.double().numpy() for e in exits])
    assert loss() == pytest.approx(sum(single), rel=1e-5)
    assert loss(distil=0.3) == pytest.approx(sum(single) + 0.3 * far, rel=1e-5)
    assert loss(only_last=True) == pytest.approx(single[-1], rel=1e-5)
    assert loss(only_last=True, distil=0.3) == pytest.approx(single[-1], rel=1e-5)
    assert math.isfinite(far)
