"""ADDS' nets are those of its Table 2, as far as that can be, and its LSTM reads as it should."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.models import MODELS, make_model
from fedquilt.models.adds import VGG, ConvNet, MobileNet, TextLSTM
from fedquilt.structure.cost import compute_cost
from fedquilt.structure.create import trace_structure
from fedquilt.structure.structure import Structure
from fedquilt.structure.trace.readings import trace_once

WIDTHS = (1, 0.5, 0.3)
TOKENS = torch.randint(20, (4, 6), generator=torch.Generator().manual_seed(0))
FEMNIST = (("1.39", "24.39"), ("2.62", "46.07"), ("0.99", "17.45"), ("0.85", "15.06"))
CELEBA = (("1.57", "15.82"), ("4.41", "44.36"), ("1.37", "13.78"), ("1.31", "13.16"))


def on_paper(name: str, **options: object) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name](**options)


def size_of(net: nn.Module, *kinds: type[nn.Module]) -> int:
    layers = [m for m in net.modules() if isinstance(m, kinds)]
    return sum(p.numel() for layer in layers for p in layer.parameters(recurse=False))


def printed(number: float, digits: int = 2) -> str:
    return f"{number / 1e6:.{digits}f}M" if number >= 1e6 else f"{number / 1e3:.{digits}f}K"


@cache
def work(name: str, **options: int) -> int:
    """The multiply-accumulates of the whole net; nothing depends on numbers, so on paper."""
    net = on_paper(name, **options)
    side = {"adds-vgg": (1, 28), "adds-mobilenet": (3, 112)}[name]
    example = torch.zeros(1, side[0], side[1], side[1], device="meta")
    structure, _ = trace_once(net, example, ())
    return compute_cost(net, structure, structure.subnet(1), example).macs


def rectified(net: ConvNet, image: int) -> int:
    """How many numbers are rectified before convolutions, for one image."""
    counts: list[int] = []
    for layer in net.features:
        if isinstance(layer, nn.ReLU):
            layer.register_forward_hook(lambda m, given, out: counts.append(out.numel()))
    net.eval()(torch.empty(1, net.features[0].in_channels, image, image, device="meta"))
    return sum(counts)


def assert_learns(net: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """A step of descent reaches every weight that is trained, and makes the loss smaller."""
    net.train()
    weights = [p for p in net.parameters() if p.requires_grad]
    loss = F.cross_entropy(net(inputs), targets)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in weights)
    with torch.no_grad():
        for p in weights:
            p -= 0.01 * p.grad
        assert F.cross_entropy(net(inputs), targets) < loss


# Table 2


def test_parameters_of_the_vgg_are_those_of_the_table():
    net = on_paper("adds-vgg")
    convolutions, linear = size_of(net, nn.Conv2d), size_of(net, nn.Linear)
    assert (convolutions, linear) == (369_216, 5_308_478)
    assert printed(convolutions) == "369.22K"
    assert printed(linear) == "5.31M"
    assert printed(convolutions + linear) == "5.68M"
    assert printed(sum(p.numel() for p in net.parameters())) == "5.68M"  # also with normalisation


def test_work_of_the_vgg_is_that_of_the_table_where_rectified_numbers_count():
    linear = 4096 * 1024 + 1024 * 1024 + 1024 * 62
    convolutions = 28**2 * 9 * 64 + 14**2 * 9 * 64 * 128 + 7**2 * 9 * 128 * 256
    assert work("adds-vgg") == convolutions + linear == 34_659_328
    between = rectified(on_paper("adds-vgg"), 28)
    assert between == 64 * 14**2 + 128 * 7**2
    for count in (between, between + 28**2):  # the table cannot tell whether images are rectified
        assert printed(convolutions + count) == "29.37M"
        assert printed(convolutions + count + linear) == "34.68M"
    assert printed(linear) == "5.31M"
    assert printed(convolutions) == "29.35M"


def test_parameters_of_the_mobilenet_are_those_of_the_table_with_62_classes():
    two, many = on_paper("adds-mobilenet"), on_paper("adds-mobilenet", num_classes=62)
    convolutions = size_of(two, nn.Conv2d)
    pairs = ((64, 128), (128, 256), (256, 512), (512, 512))
    assert convolutions == 9 * 3 * 64 + sum(9 * a + a * b for a, b in pairs) == 444_544
    assert abs(convolutions - 444_630) == 86  # the table's 444.63K: by 0.02 %
    assert [size_of(net, nn.Linear) for net in (two, many)] == [9_441_282, 9_502_782]
    assert [printed(size_of(net, nn.Linear)) for net in (two, many)] == ["9.44M", "9.50M"]
    assert printed(convolutions + size_of(many, nn.Linear)) == "9.95M"
    assert printed(convolutions + size_of(two, nn.Linear)) == "9.89M"


def test_work_of_the_mobilenet_is_that_of_the_table_but_for_a_part_in_5000():
    sides, pairs = (56, 28, 14, 7), ((64, 128), (128, 256), (256, 512), (512, 512))
    convolutions = 112**2 * 9 * 3 * 64
    convolutions += sum(s**2 * (9 * a + a * b) for s, (a, b) in zip(sides, pairs, strict=True))
    linear = {n: 8192 * 1024 + 1024 * 1024 + 1024 * n for n in (2, 62)}
    assert work("adds-mobilenet") == convolutions + linear[2] == 124_417_536
    assert work("adds-mobilenet", num_classes=62) == convolutions + linear[62] == 124_478_976
    assert convolutions == pytest.approx(114.96e6, rel=2e-4)
    assert convolutions + linear[62] == pytest.approx(124.46e6, rel=2e-4)
    assert printed(linear[62]) == "9.50M"


@pytest.mark.parametrize(
    ("name", "rows", "total"),
    [("adds-vgg", FEMNIST, 5_677_694), ("adds-mobilenet", CELEBA, 9_947_326)],
)
def test_totals_are_those_of_which_table_3_prints_shares(name, rows, total):
    # of FEMNIST's net without biases in linear layers, STC's 24.39 % would be 1.38M
    net = on_paper(name, num_classes=62)
    assert size_of(net, nn.Conv2d, nn.Linear) == total
    for millions, percent in rows:
        least, most = ((float(percent) + 0.005 * sign) * total / 1e8 for sign in (-1, 1))
        assert least <= float(millions) + 0.005, millions
        assert most >= float(millions) - 0.005, millions


# layers


def test_layers_are_in_the_order_of_the_paper():
    block, tail = ["ReLU", "Conv2d", "BatchNorm2d", "MaxPool2d"], ["ReLU", "Linear"] * 3
    halves = ["ReLU", "Conv2d", "Conv2d", "BatchNorm2d", "MaxPool2d"]
    kinds = {
        name: [[type(m).__name__ for m in part] for part in (net.features, net.classifier)]
        for name, net in ((n, on_paper(n)) for n in ("adds-vgg", "adds-mobilenet"))
    }
    assert kinds["adds-vgg"] == [[*block[1:], *block * 2], ["Flatten", *tail]]
    assert kinds["adds-mobilenet"] == [[*block[1:], *halves * 4], ["Flatten", *tail]]


def test_convolutions_are_those_of_the_table_and_have_no_bias():
    found = {}
    for name in ("adds-vgg", "adds-mobilenet"):
        layers = [m for m in on_paper(name).modules() if isinstance(m, nn.Conv2d)]
        assert all(m.bias is None and m.stride == (1, 1) for m in layers)
        assert all(m.padding[0] == m.kernel_size[0] // 2 for m in layers)
        found[name] = [(m.in_channels, m.out_channels, m.kernel_size[0], m.groups) for m in layers]
    assert found["adds-vgg"] == [(1, 64, 3, 1), (64, 128, 3, 1), (128, 256, 3, 1)]
    expected = [(3, 64, 3, 1)]
    for inputs, outputs in ((64, 128), (128, 256), (256, 512), (512, 512)):
        expected += [(inputs, inputs, 3, inputs), (inputs, outputs, 1, 1)]
    assert found["adds-mobilenet"] == expected


@pytest.mark.parametrize(
    ("name", "image", "sides"),
    [("adds-vgg", 28, [14, 7, 4]), ("adds-mobilenet", 112, [56, 28, 14, 7, 4])],
)
def test_pools_halve_the_image_and_round_up(name, image, sides):
    net = on_paper(name)
    x, found = torch.empty(2, net.features[0].in_channels, image, image, device="meta"), []
    for layer in net.features:
        x = layer(x)
        if isinstance(layer, nn.MaxPool2d):
            found.append(x.shape[-1])
    assert found == sides
    assert x.flatten(1).shape[1] == {"adds-vgg": 4096, "adds-mobilenet": 8192}[name]


def test_images_are_not_rectified():
    net, x = VGG(width=1 / 16).eval(), -torch.rand(2, 1, 28, 28)
    assert not torch.allclose(net(x), net(torch.zeros_like(x)))


@pytest.mark.parametrize("name", ["adds-vgg", "adds-mobilenet"])
@pytest.mark.parametrize("image_size", [1, 9, 30])
def test_channels_classes_and_images_are_as_asked(name, image_size):
    for width in (1 / 64, 1):
        net = on_paper(name, in_channels=2, num_classes=7, image_size=image_size, width=width)
        assert net(torch.empty(3, 2, image_size, image_size, device="meta")).shape == (3, 7)


# structure


@cache
def traced(kind: type[ConvNet]) -> tuple[ConvNet, Structure]:
    torch.manual_seed(1)
    net = kind(width=1 / 16, in_channels=3, num_classes=5, image_size=20)
    return net, trace_structure(net, torch.zeros(1, 3, 20, 20))


@pytest.mark.parametrize("kind", [VGG, MobileNet])
def test_a_width_group_belongs_to_every_layer_but_the_last(kind):
    net, structure = traced(kind)
    assert structure.is_exact
    layers = {n: m for n, m in net.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    free = [n for n, m in layers.items() if getattr(m, "groups", 1) == 1]
    assert structure.cut_groups() == free[:-1]  # depthwise convolutions follow what they are given
    assert structure.classes == "classifier.6"


@pytest.mark.parametrize("kind", [VGG, MobileNet])
@pytest.mark.parametrize("width", WIDTHS)
def test_subnets_are_nets_made_at_that_width_and_learn(kind, width):
    net, structure = traced(kind)
    small = fq.build_module(net, structure, structure.subnet(width))
    if width != 0.3:  # there both round up, so once more than once is another size
        alone = kind(width=width / 16, in_channels=3, num_classes=5, image_size=20)
        shapes = {name: tensor.shape for name, tensor in alone.state_dict().items()}
        assert {name: tensor.shape for name, tensor in small.state_dict().items()} == shapes
    torch.manual_seed(0)
    assert_learns(small, torch.randn(8, 3, 20, 20), torch.randint(5, (8,)))


# text


@cache
def reader(*, bidirectional: bool = True, every_position: bool = False) -> TextLSTM:
    torch.manual_seed(1)
    return TextLSTM(
        20,
        embedding=4,
        hidden=5,
        head=7,
        bidirectional=bidirectional,
        every_position=every_position,
    )


def test_sizes_of_the_text_nets_are_those_of_the_paper():
    gates = 4 * 256
    layers = {e: (gates * (e + 256 + 2), gates * (512 + 256 + 2)) for e in (32, 300)}
    for name, tokens, embedding, classes in (
        ("char-lstm", 80, 32, 80),
        ("sentiment-lstm", 10_000, 300, 2),
    ):
        net = on_paper(name)
        assert size_of(net, nn.Embedding) == tokens * embedding
        assert size_of(net, nn.LSTM) == 2 * sum(layers[embedding])
        assert size_of(net, nn.Linear) == 512 * 256 + 256 + 256 * classes + classes
    assert sum(p.numel() for p in on_paper("char-lstm").parameters()) == 2_325_328
    assert sum(p.numel() for p in on_paper("sentiment-lstm").parameters()) == 5_851_586


@pytest.mark.parametrize("length", [1, 4])
def test_a_text_costs_what_its_steps_cost(length):
    net, example = on_paper("char-lstm"), torch.zeros(1, length, dtype=torch.long, device="meta")
    structure, _ = trace_once(net, example, ("lstm",))
    steps = length * 2 * 4 * 256 * ((32 + 256) + (512 + 256))
    for width, head in ((1, 256), (0.5, 128)):
        price = compute_cost(net, structure, structure.subnet(width), example, batch_size=1)
        assert price.macs == steps + 512 * head + head * 80


@pytest.mark.parametrize(("name", "length"), [("char-lstm", 80), ("sentiment-lstm", 25)])
def test_a_text_has_one_class(name, length):
    logits = MODELS[name]()(torch.randint(80, (3, length)))
    assert logits.shape == (3, {"char-lstm": 80, "sentiment-lstm": 2}[name])


def test_both_directions_are_read_where_they_have_seen_the_whole_text():
    net = reader()
    states, _ = net.lstm(net.embedding(TOKENS))
    seen = torch.cat((states[:, -1, :5], states[:, 0, 5:]), 1)
    torch.testing.assert_close(net(TOKENS), net.classifier(net.head(seen).relu()))


def test_at_every_position_only_what_came_before_counts():
    net = reader(bidirectional=False, every_position=True)
    logits = net(TOKENS)
    assert logits.shape == (4, 6, 20)
    for position in range(6):
        other = TOKENS.clone()
        other[:, position] = (other[:, position] + 1) % 20
        same = (net(other) == logits).all(2).all(0).tolist()
        assert same == [p < position for p in range(6)]


def test_a_net_of_one_direction_says_last_what_it_says_at_the_last_position():
    every, last = (reader(bidirectional=False, every_position=e) for e in (True, False))
    last.load_state_dict(every.state_dict())
    torch.testing.assert_close(last(TOKENS), every(TOKENS)[:, -1])


@pytest.mark.parametrize("frozen", [False, True])
def test_given_vectors_are_used_and_trained_unless_frozen(frozen):
    torch.manual_seed(0)
    vectors = torch.randn(20, 4)
    before = vectors.clone()
    net = TextLSTM(2, vocabulary=20, embedding=4, hidden=5, head=7, vectors=vectors, frozen=frozen)
    assert torch.equal(net.embedding.weight, vectors)
    assert_learns(net, TOKENS, torch.tensor([0, 1, 1, 0]))
    assert torch.equal(net.embedding.weight, before) == frozen
    assert torch.equal(vectors, before)  # the caller's own


def test_given_vectors_stay_at_a_reset_and_all_else_is_drawn_again():
    torch.manual_seed(3)
    vectors = torch.randn(20, 4)
    net = TextLSTM(2, 20, 4, 5, 7, vectors=vectors.tolist())
    old = {n: p.detach().clone() for n, p in net.named_parameters()}
    net.reset_parameters()
    same = [n for n, p in net.named_parameters() if torch.equal(p, old[n])]
    assert same == ["embedding.weight"]
    assert torch.equal(net.embedding.weight, vectors)


def test_without_recurrent_layers_only_the_head_is_cut():
    net = reader()
    structure = trace_structure(net, TOKENS, exclude=["lstm"])
    assert structure.cut_groups() == ["head"]
    assert structure.classes == "classifier"
    for width in WIDTHS:
        small = fq.build_module(net, structure, structure.subnet(width))
        whole = {n: t for n, t in net.state_dict().items() if n.startswith(("lstm", "embedding"))}
        for name, tensor in whole.items():
            assert torch.equal(small.state_dict()[name], tensor), name
        assert small.head.out_features == -(-7 * width // 1)
        assert_learns(small, TOKENS, torch.tensor([0, 9, 1, 3]))


@pytest.mark.parametrize("every_position", [False, True])
def test_embedding_states_and_head_can_be_cut_each_by_itself(every_position):
    net = reader(bidirectional=not every_position, every_position=every_position)
    structure = trace_structure(net, TOKENS)
    embedding, states, head = structure.cut_groups()
    assert (embedding, states, head) == ("embedding:2", "lstm.weight_ih_l0", "head")
    outer = fq.build_module(net, structure, structure.subnet({embedding: 0.5, head: 0.5}))
    assert (outer.embedding.embedding_dim, outer.lstm.input_size) == (2, 2)
    assert (outer.lstm.hidden_size, outer.head.out_features) == (5, 4)
    for name, weight in net.lstm.named_parameters():
        if "weight_ih_l0" not in name:  # nothing recurrent is touched
            assert torch.equal(outer.lstm.get_parameter(name), weight), name
    inner = fq.build_module(net, structure, structure.subnet({states: 0.5}))
    assert (inner.lstm.input_size, inner.lstm.hidden_size) == (4, 3)
    for small in (outer, inner, fq.build_module(net, structure, structure.subnet(0.3))):
        logits = small(TOKENS)
        assert logits.shape == net(TOKENS).shape
        logits.sum().backward()
        assert all(p.grad is not None for p in small.parameters())


# options


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("adds-vgg", {"in_channels": 0}, "image_size are at least 1, got 0, 62, 28"),
        ("adds-vgg", {"num_classes": 0}, "at least 1, got 1, 0, 28"),
        ("adds-mobilenet", {"image_size": 0}, "at least 1, got 3, 2, 0"),
        ("adds-mobilenet", {"width": 0}, r"width is a fraction in \(0, 1\], got 0"),
        ("adds-vgg", {"width": 1.5}, "got 1.5"),
        ("adds-vgg", {"channels": (8, 8)}, "option 'channels' is not known"),
        ("char-lstm", {"num_classes": 0}, "head are at least 1, got 0, 0, 32, 256, 256"),
        ("char-lstm", {"vocabulary": 0}, "at least 1, got 80, 0, 32, 256, 256"),
        ("char-lstm", {"embedding": 0}, "at least 1, got 80, 80, 0, 256, 256"),
        ("sentiment-lstm", {"hidden": -1}, "at least 1, got 2, 10000, 300, -1, 256"),
        ("sentiment-lstm", {"head": 0}, "at least 1, got 2, 10000, 300, 256, 0"),
        ("char-lstm", {"every_position": True}, "set bidirectional = false to predict at every"),
        (
            "sentiment-lstm",
            {"vocabulary": 3, "embedding": 2, "vectors": torch.zeros(2, 3)},
            "vectors are 3×2, the vocabulary by the embedding, got 2×3",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(name, options, sentence):
    with pytest.raises(ConfigError, match=f"model '{name}'.*{sentence}"):
        make_model(name, options)
