"""Sizes, costs and names of NeFL's nets are those of its paper, and of torchvision and timm."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.models import MODELS, make_model
from fedquilt.models.nefl import BasicBlock, ResNet, ViT, WideBottleneck
from fedquilt.structure.trace.readings import trace_once

PARAMS = {  # name and classes
    ("resnet18", 10): 11_173_962,
    ("resnet34", 10): 21_282_122,
    ("resnet56", 10): 855_770,
    ("resnet110", 10): 1_730_714,
    ("wideresnet101-2", 10): 124_858_186,  # 124.8 M in Table 3
    ("wideresnet101-2", 1000): 126_886_696,  # torchvision's
    ("vit-b16", 10): 85_806_346,
    ("vit-b16", 1000): 86_567_656,  # torchvision's and timm's
}
SUBMODELS = (0.2, 0.4, 0.6, 0.8, 1)  # γ: parameters, so widths are their roots
MEANS = {  # Table 8, widthwise: parameters in millions, MACs in millions
    "resnet18": (6.71, 85),
    "resnet34": (12.8, 176),
    "resnet56": (0.52, None),  # printed: 530 M, more than ResNet110's
    "resnet110": (1.06, 158.6),  # printed as 158 and 159
}
# A 1×1 convolution of stride 2 has eight inputs or more here: from fewer, with channels last in
# memory, oneDNN's backward pass writes past its buffers (seen with PyTorch 2.13 on AVX2).
SMALL = {
    "resnet": (lambda: ResNet(BasicBlock, (2, 1, 1, 1), channels=(8, 9, 10, 11)), 16),
    "three stages": (lambda: ResNet(BasicBlock, (2, 1, 2), channels=(8, 9, 10), stem="plain"), 8),
    "wide": (lambda: ResNet(WideBottleneck, (2, 1), channels=(4, 6), stem="imagenet"), 16),
    "vit": (lambda: ViT(image_size=8, patch_size=4, dim=12, depth=2, heads=3, mlp_dim=20), 8),
}


def on_paper(name: str, **options: object) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name](**options)


def num_params(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def macs(net: nn.Module) -> int:
    """Multiply-accumulates of convolutions and linear layers for one image of 32×32."""
    total = 0

    def count(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        nonlocal total
        total += output[0, 0].numel() * layer.weight.numel()

    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(count)
    net.eval()(torch.empty(1, 3, 32, 32, device="meta"))
    return total


@pytest.mark.parametrize(("name", "num_classes"), PARAMS)
def test_nets_have_the_published_sizes(name, num_classes):
    assert num_params(on_paper(name, num_classes=num_classes)) == PARAMS[name, num_classes]


def test_the_papers_size_of_the_vit_fits_its_layers_alone():
    vit = on_paper("vit-b16", num_classes=1000)
    layers = num_params(vit) - vit.cls_token.numel() - vit.pos_embed.numel()
    assert round(layers / 1e6, 1) == 86.4


@pytest.mark.parametrize("name", MEANS)
def test_means_over_the_submodels_are_those_of_the_table(name):
    nets = [on_paper(name, width=sqrt(size)) for size in SUBMODELS]
    params, work = MEANS[name]
    assert sum(map(num_params, nets)) / 5e6 == pytest.approx(params, rel=0.015)
    if work is not None:
        assert sum(map(macs, nets)) / 5e6 == pytest.approx(work, rel=0.002)


@pytest.mark.parametrize(("stem", "size"), [("cifar", 16), ("plain", 32), ("imagenet", 8)])
def test_stems_shrink_the_image_as_they_should(stem, size):
    net = on_paper("resnet18", stem=stem)
    x = net.maxpool(net.bn1(net.conv1(torch.empty(2, 3, 32, 32, device="meta"))))
    assert x.shape == (2, 64, size, size)
    assert net.layer1(x).shape == (2, 64, size, size)
    assert net.layer4(net.layer3(net.layer2(net.layer1(x)))).shape == (2, 512, size // 8, size // 8)


@pytest.mark.parametrize("name", ["resnet56", "resnet110"])
def test_nets_of_three_stages_end_in_64_channels_of_8_by_8(name):
    net = on_paper(name)
    x = net.layer2(net.layer1(torch.empty(2, 16, 32, 32, device="meta")))
    assert net.layer3(x).shape == (2, 64, 8, 8)
    assert len(net.layer1) == len(net.layer2) == len(net.layer3) == (int(name[6:]) - 2) // 6


def test_blocks_rectify_behind_the_sum():
    block = BasicBlock(2, (2,), stride=1).eval()
    x = torch.randn(3, 2, 4, 4)
    with torch.no_grad():
        block.bn2.weight.zero_()
        assert torch.equal(block(x), x.relu())  # post-activation: nothing else is left
        block.bn2.weight.fill_(1)
        inner = block.bn2(block.conv2(block.bn1(block.conv1(x)).relu()))
        assert torch.equal(block(x), (x + inner).relu())


def test_names_are_those_of_torchvisions_resnet18():
    shapes = {name: tuple(t.shape) for name, t in on_paper("resnet18").state_dict().items()}
    assert len(shapes) == 122
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    expected = {
        "conv1.weight": (64, 3, 3, 3),
        **{f"bn1.{name}": () if name == norm[-1] else (64,) for name in norm},
        "layer1.1.conv2.weight": (64, 64, 3, 3),
        "layer2.0.conv1.weight": (128, 64, 3, 3),
        "layer2.0.downsample.0.weight": (128, 64, 1, 1),
        "layer4.0.downsample.1.running_var": (512,),
        "layer4.1.bn2.weight": (512,),
        "fc.weight": (10, 512),
        "fc.bias": (10,),
    }
    assert expected.items() <= shapes.items()
    assert not any(name.startswith("layer1.0.downsample") for name in shapes)
    assert on_paper("resnet18", stem="imagenet").conv1.weight.shape == (64, 3, 7, 7)


def test_names_are_those_of_torchvisions_wide_resnet():
    shapes = {name: tuple(t.shape) for name, t in on_paper("wideresnet101-2").state_dict().items()}
    expected = {
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer1.0.conv1.weight": (128, 64, 1, 1),
        "layer2.0.conv2.weight": (256, 256, 3, 3),
        "layer3.22.conv3.weight": (1024, 512, 1, 1),
        "layer4.2.bn3.weight": (2048,),
        "fc.weight": (10, 2048),
    }
    assert expected.items() <= shapes.items()


def test_names_of_the_vit_are_those_of_timm():
    shapes = {name: tuple(t.shape) for name, t in on_paper("vit-b16").state_dict().items()}
    expected = {
        "cls_token": (1, 1, 768),
        "pos_embed": (1, 197, 768),
        "patch_embed.proj.weight": (768, 3, 16, 16),
        "blocks.0.norm1.weight": (768,),
        "blocks.0.attn.qkv.weight": (2304, 768),
        "blocks.0.attn.proj.weight": (768, 768),
        "blocks.11.norm2.bias": (768,),
        "blocks.11.mlp.fc1.weight": (3072, 768),
        "blocks.11.mlp.fc2.weight": (768, 3072),
        "norm.weight": (768,),
        "head.weight": (10, 768),
    }
    assert expected.items() <= shapes.items()
    assert len(shapes) == 2 + 2 + 12 * 12 + 2 + 2


def test_attention_is_that_of_the_textbook():
    vit = ViT(image_size=8, patch_size=4, dim=12, depth=1, heads=3, mlp_dim=20)
    attention = vit.blocks[0].attn
    x = torch.randn(2, 5, 12)
    q, k, v = attention.qkv(x).chunk(3, -1)
    heard = []
    for head in torch.arange(12).chunk(3):
        scores = q[..., head] @ k[..., head].transpose(1, 2) / sqrt(4)
        heard.append(scores.softmax(-1) @ v[..., head])
    torch.testing.assert_close(attention(x), attention.proj(torch.cat(heard, -1)))


@pytest.mark.parametrize("kind", SMALL)
def test_small_nets_are_followed_and_run_at_every_width(kind):
    make_small, size = SMALL[kind]
    net, x = make_small(), torch.randn(2, 3, size, size)
    structure = fq.trace_structure(net, x[:1])
    for width in (1, 0.5, 0.3):
        small = fq.build_module(net, structure, structure.subnet(width))
        logits: Tensor = small(x)
        assert logits.shape == (2, 10)
        logits.sum().backward()
    assert structure.cut_groups()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet18", {"channels": (4, 6, 8, 10), "image": 16}),
        ("wideresnet101-2", {"channels": (2, 3, 4, 5), "image": 32}),
        ("vit-small", {"image_size": 8, "dim": 12, "mlp_dim": 20, "image": 8}),
    ],
)
def test_subnets_have_the_shapes_of_nets_made_at_that_width(name, options):
    options = dict(options)
    size = options.pop("image")
    net = MODELS[name](**options).eval()
    structure, _ = trace_once(net, torch.zeros(1, 3, size, size), ())
    for width in (0.5, 0.3):
        small = fq.build_module(net, structure, structure.subnet(width))
        alone = on_paper(name, width=width, **options)
        shapes = {key: tensor.shape for key, tensor in alone.state_dict().items()}
        assert {key: tensor.shape for key, tensor in small.state_dict().items()} == shapes


@pytest.mark.parametrize("kind", SMALL)
def test_sums_can_be_found_in_the_graph(kind):
    make_small, size = SMALL[kind]
    net, x = make_small().eval(), torch.randn(2, 3, size, size)
    graph = torch.fx.symbolic_trace(net)
    assert torch.equal(graph(x), net(x))
    found = [node for node in graph.graph.nodes if node.name.startswith("add")]
    blocks = [m for m in net.modules() if isinstance(m, BasicBlock | WideBottleneck)]
    assert len(found) == (len(blocks) or 2 * len(net.blocks) + 1)  # a ViT also adds positions


@pytest.mark.parametrize("kind", SMALL)
def test_a_reset_under_a_seed_gives_what_the_constructor_gives(kind):
    make_small, _ = SMALL[kind]
    torch.manual_seed(3)
    fresh = make_small()
    used = make_small()
    for tensor in used.state_dict().values():
        tensor.fill_(7)
    torch.manual_seed(3)
    used.reset_parameters()
    torch.testing.assert_close(used.state_dict(), fresh.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("resnet18", {"stem": "7x7"}, "stem '7x7' .*cifar, plain, imagenet"),
        ("resnet56", {"channels": [8, 16]}, r"each of 3 stages, got \[8, 16\]"),
        ("resnet18", {"width": 0}, r"fraction in \(0, 1\], got 0"),
        ("resnet18", {"channels": [0, 1, 1, 1]}, r"at least one channel, got sizes \[0\]"),
        ("vit-b16", {"image_size": 100}, "image_size 100 and patch_size 16; choose"),
        ("vit-small", {"heads": 5}, "dim 192 and 5 heads; choose"),
    ],
)
def test_options_that_make_no_sense_are_refused(name, options, sentence):
    with pytest.raises(ConfigError, match=f"model '{name}': .*{sentence}"):
        make_model(name, options)


def test_channels_and_classes_are_as_asked():
    for name in ("resnet34", "resnet56", "wideresnet101-2", "vit-small"):
        net = on_paper(name, in_channels=1, num_classes=7, width=0.25)
        assert net(torch.empty(2, 1, 32, 32, device="meta")).shape == (2, 7)
