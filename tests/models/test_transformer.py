"""HeteroFL's Transformer has the published sizes at every level, and hides tokens as it says."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.models import make_model
from fedquilt.models.transformer import EncoderLayer, MaskedTransformer
from fedquilt.structure.cost import Cost, compute_cost
from fedquilt.structure.create import trace_structure
from fedquilt.structure.cut import index_cells
from fedquilt.structure.structure import Structure
from fedquilt.structure.trace.readings import trace_once

WIDTHS = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.125, "e": 0.0625}
PARAMS = {"a": 19_263_486, "b": 9_107_710, "c": 4_435_326, "d": 2_200_510, "e": 1_108_446}
TABLE_3 = {  # parameters, FLOPs and MB, as printed
    "a": ("19.3 M", "1.4 B", "73.49"),
    "b": ("9.1 M", "614.8 M", "34.74"),
    "c": ("4.4 M", "290.1 M", "16.92"),
    "d": ("2.2 M", "140.7 M", "8.39"),
    "e": ("1.1 M", "69.3 M", "4.23"),
}
TEXT = torch.randint(20, (3, 6), generator=torch.Generator().manual_seed(0))


def on_paper(**options: float) -> MaskedTransformer:
    with torch.device("meta"):
        return MaskedTransformer(**options)


@cache
def supernet(num_classes: int) -> tuple[nn.Module, Structure]:
    """The whole net; its groups are those of the small one that is checked, see below."""
    net = on_paper(num_classes=num_classes)
    example = torch.zeros(1, 64, dtype=torch.long, device="meta")
    return net, trace_once(net, example, ())[0]


@cache
def price(level: str, num_classes: int = 33278) -> Cost:
    net, structure = supernet(num_classes)
    example = torch.zeros(1, 64, dtype=torch.long)
    return compute_cost(net, structure, structure.subnet(WIDTHS[level]), example, batch_size=1)


def small(**options: float) -> MaskedTransformer:
    torch.manual_seed(1)
    sizes = {"num_classes": 20, "length": 8, "dim": 16, "hidden": 24, "layers": 2, "heads": 4}
    return MaskedTransformer(**{**sizes, **options})


@cache
def traced() -> tuple[MaskedTransformer, Structure]:
    net = small()
    return net, trace_structure(net, TEXT)


def groups(structure: Structure) -> dict[str, list[str | None]]:
    return {n: [axis and axis[0].group for axis in axes] for n, axes in structure.axes.items()}


# sizes and costs


@pytest.mark.parametrize("level", WIDTHS)
def test_levels_have_the_published_parameters(level):
    assert price(level).params == PARAMS[level]
    assert f"{PARAMS[level] / 1e6:.1f} M" == TABLE_3[level][0]
    net, structure = supernet(33278)
    cut = fq.build_module(net, structure, structure.subnet(WIDTHS[level]))
    alone = on_paper(width=WIDTHS[level])
    assert [p.shape for p in cut.parameters()] == [p.shape for p in alone.parameters()]


@pytest.mark.parametrize("level", WIDTHS)
def test_megabytes_of_the_table_are_those_of_one_token_more(level):
    # the public code's vocabulary has <ukn> besides the <unk> of the text
    assert f"{4 * price(level, 33279).params / 2**20:.2f}" == TABLE_3[level][2]
    fits = f"{4 * price(level).params / 2**20:.2f}" == TABLE_3[level][2]
    assert fits == (level != "a")


def test_the_whole_net_has_the_parameters_of_its_layers():
    tokens, dim, hidden = 33278, 256, 512
    layer = 4 * (dim + 1) * dim + (dim + 1) * hidden + (hidden + 1) * dim + 4 * dim
    decoder = (dim + 1) * dim + 2 * dim + (dim + 1) * tokens
    assert PARAMS["a"] == (tokens + 1 + 64 + 2) * dim + 4 * layer + decoder


@pytest.mark.parametrize("level", WIDTHS)
def test_work_explains_the_flops_of_the_table(level):
    # its counter takes a linear layer once for its weight and once for its bias, a normalisation
    # four times per number, and attention's own products not at all
    dim, hidden = int(256 * WIDTHS[level]), int(512 * WIDTHS[level])
    linear = 64 * (4 * (4 * dim**2 + 2 * dim * hidden) + dim**2 + dim * 33278)
    attention = 4 * 2 * 64**2 * dim
    assert price(level).macs == linear + attention
    flops = 2 * linear + 10 * 4 * 64 * dim
    printed = f"{flops / 1e9:.1f} B" if flops >= 1e9 else f"{flops / 1e6:.1f} M"
    assert printed == TABLE_3[level][1]


# structure


def test_heads_are_kept_and_channels_are_cut_inside_each_head():
    _, structure = traced()
    heads = [0, 1, 4, 5, 8, 9, 12, 13]  # the first half of each of four
    where = index_cells(structure, structure.subnet(0.5))

    def kept(name: str, axis: int) -> list[int]:
        return torch.arange(structure.shapes[name][axis])[where[name][axis]].tolist()

    for layer in ("layers.0", "layers.1"):
        for part in "qkv":
            assert kept(f"{layer}.attention.{part}.weight", 0) == heads
            assert kept(f"{layer}.attention.{part}.bias", 0) == heads
            assert kept(f"{layer}.attention.{part}.weight", 1) == list(range(8))
        assert kept(f"{layer}.attention.o.weight", 1) == heads
        assert kept(f"{layer}.attention.o.weight", 0) == list(range(8))
        assert kept(f"{layer}.linear1.weight", 0) == list(range(12))
    assert kept("embedding.weight", 0) == list(range(21))
    assert kept("embedding.weight", 1) == kept("positions.weight", 1) == list(range(8))
    assert kept("positions.weight", 0) == list(range(8))
    assert kept("decoder.3.weight", 0) == list(range(20))


def test_tokens_and_positions_are_never_cut():
    _, structure = traced()
    whole = {g.name: g.size for g in structure.groups.values() if not g.is_cut}
    assert whole == {"embedding": 21, "positions": 8, "decoder.3": 20}
    assert structure.classes == "decoder.3"
    assert not structure.is_exact  # layers of normalisation run across channels


def test_the_whole_net_has_the_groups_of_the_small_one():
    _, structure = traced()
    found, expected = groups(supernet(33278)[1]), groups(structure)
    names = [n for n in found if not n.startswith(("layers.2.", "layers.3."))]
    assert {n: found[n] for n in names} == expected


@pytest.mark.parametrize("width", [1, 0.5, 0.3, 0.0625])
def test_subnets_learn(width):
    net, structure = traced()
    cut = fq.build_module(net, structure, structure.subnet(width))
    assert cut.layers[0].attention.heads == 4
    torch.manual_seed(2)
    losses = [_loss(cut, seed=5)]
    losses[0].backward()
    with torch.no_grad():
        for p in cut.parameters():
            assert p.grad is not None
            p -= 0.01 * p.grad
    assert _loss(cut, seed=5) < losses[0]


def _loss(net: nn.Module, seed: int) -> Tensor:
    torch.manual_seed(seed)  # the same tokens are hidden
    return F.cross_entropy(net(TEXT).flatten(0, 1), TEXT.flatten())


# layers


@pytest.mark.parametrize("width", [1, 0.5])
def test_attention_is_that_of_each_head_by_itself_at_its_own_temperature(width):
    net, structure = traced()
    attention = fq.build_module(net, structure, structure.subnet(width)).layers[0].attention
    size = int(4 * width)
    x = torch.randn(2, 5, int(16 * width))
    heard = []
    for head in range(4):
        rows = slice(head * size, (head + 1) * size)
        q, k, v = (
            x @ layer.weight[rows].T + layer.bias[rows]
            for layer in (attention.q, attention.k, attention.v)
        )
        heard.append((q @ k.transpose(1, 2) / size**0.5).softmax(-1) @ v)
    torch.testing.assert_close(attention(x), attention.o(torch.cat(heard, 2)))


def test_layers_normalise_behind_each_sum():
    layer, x = EncoderLayer(8, 2, 4, 12, dropout=0.5).eval(), torch.randn(2, 3, 8)
    with torch.no_grad():
        nn.init.normal_(layer.linear1.weight)
        nn.init.normal_(layer.linear2.weight)
        first = F.layer_norm(x + layer.attention(x), (8,))
        inner = layer.linear2(F.gelu(layer.linear1(first)))
        torch.testing.assert_close(layer(x), F.layer_norm(first + inner, (8,)))


def test_embeddings_are_added_and_normalised_and_the_decoder_has_two_layers():
    net = small(mask_rate=0).eval()
    x = F.layer_norm(net.embedding(TEXT) + net.positions.weight[:6], (16,))
    for layer in net.layers:
        x = layer(x)
    seen = F.layer_norm(F.gelu(net.decoder[0](x)), (16,))
    expected = seen @ net.decoder[3].weight.T + net.decoder[3].bias
    torch.testing.assert_close(net(TEXT), expected)


def test_dropout_follows_embeddings_attention_and_both_layers_of_perceptrons():
    assert {m.p for m in on_paper().modules() if isinstance(m, nn.Dropout)} == {0.2}
    net, sizes = small(mask_rate=0, dropout=1.0), []
    for m in net.modules():
        if isinstance(m, nn.Dropout):
            m.register_forward_hook(lambda m, given, out: sizes.append(out.shape[-1]))
    assert net(TEXT).unique(dim=0).shape[0] == 1  # all is dropped: no text differs from another
    assert sizes == [16, *[16, 24, 16] * 2]
    layer, x = EncoderLayer(8, 2, 4, 12, dropout=1.0), torch.randn(2, 3, 8)
    torch.testing.assert_close(layer(x), F.layer_norm(F.layer_norm(x, (8,)), (8,)))
    assert torch.equal(net.eval()(TEXT), net(TEXT))


def test_perceptrons_start_small_biases_at_zero_and_layers_apart():
    net = MaskedTransformer(num_classes=10)
    for layer in net.layers:
        for linear in (layer.linear1, layer.linear2):
            assert linear.weight.std().item() == pytest.approx(0.02, rel=0.02)
            assert abs(linear.weight.mean().item()) < 2e-4
    assert not any(m.bias.any() for m in net.modules() if isinstance(m, nn.Linear))
    assert not torch.equal(net.layers[0].linear1.weight, net.layers[1].linear1.weight)
    assert not torch.equal(net.layers[0].attention.q.weight, net.layers[1].attention.q.weight)


# hidden tokens


@pytest.mark.parametrize("rate", [0.15, 0.5])
def test_a_share_of_all_tokens_is_hidden_behind_one_more(rate):
    net = small(mask_rate=rate)
    tokens = torch.randint(20, (200, 500))
    seen = net.mask_tokens(tokens)
    hidden = seen != tokens
    assert (seen[hidden] == 20).all()
    assert hidden.float().mean().item() == pytest.approx(rate, abs=0.01)
    assert hidden.float().mean(0).std() < 0.1  # whatever the position
    assert MaskedTransformer(num_classes=5, width=1 / 32).mask_rate == 0.15


@pytest.mark.parametrize("training", [True, False])
def test_tokens_are_hidden_anew_in_every_forward_and_a_seed_settles_which(training):
    net = small(dropout=0.0).train(training)
    torch.manual_seed(4)
    first, second = net(TEXT), net(TEXT)
    assert not torch.equal(first, second)
    torch.manual_seed(4)
    assert torch.equal(net(TEXT), first)
    assert torch.equal(net(TEXT), second)


def test_a_net_that_hides_nothing_is_a_function_of_its_tokens_and_one_that_hides_all_of_none():
    other = (TEXT + 1) % 20
    open_, blind = small(mask_rate=0).eval(), small(mask_rate=1).eval()
    assert torch.equal(open_(TEXT), open_(TEXT))
    assert not torch.equal(open_(TEXT), open_(other))
    assert torch.equal(blind(TEXT), blind(other))
    assert torch.equal(blind(TEXT)[0], blind(TEXT)[1])
    assert not torch.equal(blind(TEXT)[0, 0], blind(TEXT)[0, 1])  # positions differ


def test_texts_are_left_as_they_are():
    before = TEXT.clone()
    small(mask_rate=1)(TEXT)
    assert torch.equal(TEXT, before)


# options


def test_texts_may_be_shorter_than_the_positions_but_not_longer():
    net = small()
    for length in (1, 8):
        assert net(torch.zeros(2, length, dtype=torch.long)).shape == (2, length, 20)
    with pytest.raises(ValueError, match="knows 8 positions, got 9 tokens a text; cut texts, or"):
        net(torch.zeros(2, 9, dtype=torch.long))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_classes": 0}, "num_classes, length and layers are at least 1, got 0, 64, 4"),
        ({"length": 0}, "at least 1, got 33278, 0, 4"),
        ({"layers": 0}, "at least 1, got 33278, 64, 0"),
        ({"heads": 3}, "heads share the dim equally, got dim 256 and 3 heads; choose a dim"),
        ({"heads": 0}, "got dim 256 and 0 heads"),
        ({"dim": 0}, "a layer has at least one channel, got sizes"),
        ({"hidden": 0}, "a layer has at least one channel, got sizes"),
        ({"mask_rate": -0.1}, r"mask_rate is a fraction in \[0, 1\], got -0.1"),
        ({"mask_rate": float("nan")}, "got nan"),
        ({"dropout": 2.0}, "dropout"),
        ({"width": 0}, r"width is a fraction in \(0, 1\], got 0"),
        ({"image_size": 28}, "option 'image_size' is not known"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, sentence):
    with pytest.raises(ConfigError, match=f"model 'heterofl-transformer'.*{sentence}"):
        make_model("heterofl-transformer", options)
