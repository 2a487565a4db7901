"""Nets with shortcuts as users write them, and what may be left out of each."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedquilt.models.heterofl import PreResNet

from .nets import CLASSES, IMAGE, VECTOR, Inverted, Mixer, ViT, ZeroPadded, head

SEQUENCE = torch.zeros(2, 5, 8)


@dataclass(frozen=True)
class Deep:
    """A net, and for each block the modules and tensors that only its branch has.

    The last of them ends the branch: what follows it is linear.
    """

    make: Callable[[], nn.Module]
    blocks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    example: Any = field(default_factory=lambda: IMAGE)


def inside(path: str, names: str) -> tuple[str, ...]:
    return tuple(f"{path}.{name}" if path else name for name in names.split())


class Basic(nn.Module):
    """torchvision's block: everything in place."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride > 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(Basic):
    """torchvision's block of three convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, stride)
        inner = outputs // 2
        self.conv1, self.bn1 = nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Two stages of two blocks."""

    def __init__(self, block: Callable[..., nn.Module] = Basic) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, 1, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(6), nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(block(6, 6), block(6, 6))
        self.layer2 = nn.Sequential(block(6, 10, 2), block(10, 10))
        self.fc = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class ConvNeXt(nn.Module):
    """A depthwise convolution, a wide middle, a scale for each channel, functional dropout."""

    def __init__(self, rate: float, dim: int = 6) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.wide, self.narrow = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)
        self.gamma = nn.Parameter(0.5 * torch.ones(dim))
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.gamma * self.narrow(F.gelu(self.wide(y)))
        return x + F.dropout(y.permute(0, 3, 1, 2), self.rate, self.training)


class Mobile(nn.Module):
    """torchvision's inverted residual: whether there is a shortcut is known beforehand."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.use_res_connect = inputs == outputs
        expand = [nn.Conv2d(inputs, 12, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU6(inplace=True)]
        deep = [nn.Conv2d(12, 12, 3, 1, 1, groups=12, bias=False), nn.BatchNorm2d(12), nn.ReLU6()]
        project = [nn.Conv2d(12, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.conv = nn.Sequential(*expand, *deep, *project)

    def forward(self, x: Tensor) -> Tensor:
        if self.use_res_connect:
            return x + self.conv(x)
        return self.conv(x)


class Padded(nn.Module):
    """A shortcut without weights where the shape changes: pooled, new channels zero."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.stride, self.more = stride, outputs - inputs
        self.conv1, self.norm = nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        short = x
        if self.more:
            short = F.pad(F.avg_pool2d(x, self.stride), (0, 0, 0, 0, 0, self.more))
        return F.relu(short + self.conv2(F.relu(self.norm(self.conv1(x)))))


class Residual(nn.Module):
    """Adds what any function makes of the input."""

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.fn(x, **kwargs) + x


class Added(nn.Module):
    """The same, written in as many ways as there are."""

    def __init__(self, how: Callable[[Tensor, Tensor], Tensor], size: int = 8) -> None:
        super().__init__()
        self.how, self.fn = how, nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.how(x, self.fn(x))


def in_place(x: Tensor, y: Tensor) -> Tensor:
    y += x
    return F.relu(y, inplace=True)


ADDITIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: x + y,
    lambda x, y: y + x,
    torch.add,
    lambda x, y: x.add(y),
    lambda x, y: y.add_(x),
    in_place,
    lambda x, y: sum([x, y]),
]


def encoder(*, norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=norm_first)
    return nn.Sequential(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, CLASSES)
    )


class Decoder(nn.Module):
    """PyTorch's decoder, which looks at what it is given through another layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(8, 2, 12, batch_first=True)
        self.memory, self.decoder = nn.Linear(8, 8), nn.TransformerDecoder(layer, 1)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x, self.memory(x), tgt_mask=self.mask)


class Parallel(nn.Module):
    """Two branches beside each other, the heavier one added first."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 8))
        self.b, self.out = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.a(x) + self.b(x))


class Bare(nn.Module):
    """Weights without modules around them; two branches share a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        self.factor = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("mask", torch.randn(8))
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.factor * F.linear(x, self.w1)
        x = x + self.factor * F.linear(x * self.mask, self.w2)
        return self.out(x)


class Sized(nn.Module):
    """Sizes that a branch and what follows both need, and some that nobody does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(64, 64)
        self.fc = nn.Linear(6 * 64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        b, c, h, w = x.shape
        x = x + self.mix(x.view(b, c, h * w)).view(b, c, h, w)
        return self.fc(x.view(b, -1))


class Masked(nn.Module):
    """A layer that may be given a mask, for what it calls or for itself."""

    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fn = nn.Linear(8, 8)

        def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
            y = self.fn(x) * scale
            return y if mask is None else y * mask

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = Masked.Mix()

        def forward(self, x: Tensor, mask: Tensor | None = None, *, twice: bool = False) -> Tensor:
            y = self.mix(x, mask=mask, scale=0.5)
            return x + (2 * y if twice else y)

    def __init__(self) -> None:
        super().__init__()
        self.block1, self.block2 = Masked.Block(), Masked.Block()
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block2(x=self.block1(x, mask=x > 0)))


class Nested(nn.Module):
    """A residual module in the branch of another, and two sums in one another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), Residual(nn.Linear(8, 8))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return x + self.last(y + self.first(y))


def layer_blocks(path: str) -> dict[str, tuple[str, ...]]:
    return {
        f"{path}.attention": inside(path, "norm1 attention"),
        f"{path}.mlp": inside(path, "norm2 mlp"),
    }


def encoder_blocks(path: str, *, norm_first: bool) -> dict[str, tuple[str, ...]]:
    attention, dense = "self_attn dropout1", "linear1 linear2 dropout2"
    if norm_first:
        attention, dense = f"norm1 {attention}", f"norm2 {dense}"
    return {
        f"{path}.self_attn": inside(path, attention),
        f"{path}.linear2": inside(path, dense),
    }


BASIC, WIDE = "conv1 bn1 conv2 bn2", "conv1 bn1 conv2 bn2 conv3 bn3"
STAGED = ("layer1.0", "layer1.1", "layer2.0", "layer2.1")

DEEP = {
    "resnet": Deep(ResNet, {b: inside(b, BASIC) for b in STAGED}),
    "bottlenecks": Deep(lambda: ResNet(Bottleneck), {b: inside(b, WIDE) for b in STAGED}),
    "pre-activation": Deep(
        lambda: PreResNet((2, 1, 1, 1), width=1 / 16, num_classes=CLASSES),
        {
            "blocks.0": inside("blocks.0", "norm1 conv1 norm2 conv2"),
            "blocks.1": inside("blocks.1", "norm1 conv1 norm2 conv2"),
            **{f"blocks.{i}": inside(f"blocks.{i}", "conv1 norm2 conv2") for i in (2, 3, 4)},
        },
    ),
    "convnext": Deep(
        lambda: nn.Sequential(nn.Conv2d(3, 6, 2, 2), ConvNeXt(0.5), ConvNeXt(0.1), *head(6)),
        {b: inside(b, "conv norm wide gamma narrow") for b in ("1", "2")},
    ),
    "mobile": Deep(
        lambda: nn.Sequential(nn.Conv2d(3, 6, 3), Mobile(6, 6), Mobile(6, 8), *head(8)),
        {"1": ("1.conv",)},
    ),
    "squeeze and excite": Deep(
        lambda: nn.Sequential(nn.Conv2d(3, 6, 3), Inverted(6, 6), Inverted(6, 8), *head(8)),
        {"1": inside("1", "expand depthwise norm squeeze excite project")},
    ),
    "padded shortcut": Deep(
        lambda: ResNet(Padded), {b: inside(b, "conv1 norm conv2") for b in STAGED}
    ),
    "sum in the root": Deep(ZeroPadded, {"conv2": inside("", "conv1 norm conv2")}),
    "sums in the root": Deep(
        Mixer, {"tokens": ("norm1", "tokens"), "channels": ("norm2", "channels")}
    ),
    "transformer": Deep(
        lambda: ViT("fused"), {**layer_blocks("layers.0"), **layer_blocks("layers.1")}
    ),
    "encoder": Deep(
        lambda: encoder(norm_first=False),
        {
            **encoder_blocks("0.layers.0", norm_first=False),
            **encoder_blocks("0.layers.1", norm_first=False),
        },
        SEQUENCE,
    ),
    "encoder, normalised first": Deep(
        lambda: encoder(norm_first=True),
        {
            **encoder_blocks("0.layers.0", norm_first=True),
            **encoder_blocks("0.layers.1", norm_first=True),
        },
        SEQUENCE,
    ),
    "decoder": Deep(
        Decoder,
        {
            "decoder.layers.0.self_attn": inside("decoder.layers.0", "self_attn dropout1"),
            "decoder.layers.0.multihead_attn": inside(
                "decoder.layers.0", "multihead_attn dropout2"
            ),
            "decoder.layers.0.linear2": inside("decoder.layers.0", "linear1 linear2 dropout3"),
        },
        SEQUENCE,
    ),
    "wrappers": Deep(
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 1),
            Residual(nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 1))),
            nn.ReLU(inplace=True),
            Residual(nn.BatchNorm2d(6)),
            nn.ReLU(inplace=True),
            *head(6),
        ),
        {"1": ("1.fn",), "3": ("3.fn",)},
    ),
    "additions": Deep(
        lambda: nn.Sequential(nn.Linear(8, 8), *map(Added, ADDITIONS), nn.Linear(8, CLASSES)),
        {str(i): (f"{i}.fn",) for i in range(1, len(ADDITIONS) + 1)},
        VECTOR,
    ),
    "parallel": Deep(Parallel, {"a": ("a",), "b": ("b",)}, VECTOR),
    "bare weights": Deep(Bare, {"w1": ("w1",), "w2": ("mask", "w2")}, VECTOR),
    "sizes": Deep(Sized, {"mix": ("mix",)}),
    "masks": Deep(Masked, {b: inside(b, "mix") for b in ("block1", "block2")}, VECTOR),
    "nested": Deep(
        lambda: nn.Sequential(nn.Linear(8, 8), Nested(), nn.Linear(8, CLASSES)),
        {
            "1.first": ("1.first",),
            "1.last": ("1.first", "1.inner", "1.last"),
            "1.inner": ("1.inner.fn",),
        },
        VECTOR,
    ),
}


class Attending(nn.Module):
    """Attention that also returns its weights, if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, with_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.transpose(1, 2) / 3).softmax(-1)
        return self.out(weights @ v), weights if with_weights else None


def wide(size: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(size, 12), nn.GELU(), nn.Linear(12, size))


class Unpacking(nn.Module):
    """A layer as Hugging Face writes them: torch.fx cannot take a child's tuple apart."""

    def __init__(self, length: int | None = None) -> None:
        super().__init__()
        self.norm1, self.norm2, self.length = nn.LayerNorm(8), nn.LayerNorm(8), length
        self.attention, self.mlp = Attending(), wide()

    def forward(self, hidden: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Any:
        y, *_ = self.attention(self.norm1(hidden), **kwargs)
        hidden = hidden + (y if mask is None else y * mask)
        hidden = hidden + self.mlp(self.norm2(hidden))
        return hidden if self.length is None else (hidden, *[None] * (self.length - 1))


class Handing(nn.Module):
    """A layer as DeBERTa writes them: what adds is a child, which is given both sides."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, y: Tensor, x: Tensor) -> Tensor:
            return self.norm(self.dense(y) + x)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sum = nn.Linear(8, 8), Handing.Sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.sum(F.gelu(self.first(x)), x)


class Stack(nn.Module):
    """Layers one after the other, each in its own way called."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(8, 8), nn.ModuleList(layers)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.out(x)


STACKED: dict[str, Callable[[], nn.Module]] = {
    "tuples taken apart": lambda: Stack(*(Unpacking() for _ in range(3))),
    "tuples of one": lambda: Stack(*(Unpacking(1) for _ in range(3))),
    "tuples with nothing else": lambda: Stack(*(Unpacking(3) for _ in range(3))),
    "sums in a child": lambda: Stack(*(Handing() for _ in range(3))),
    "a Sequential": lambda: nn.Sequential(*(Unpacking() for _ in range(3)), nn.Linear(8, CLASSES)),
}


class Plain(nn.Module):
    """A layer of one shape without a shortcut, which torch.fx cannot read."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attending(), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        y, *_ = self.attention(x)
        return self.norm(y)


class Scored(nn.Module):
    """A residual layer that gives something beside, which nobody else could give."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attending()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        y, weights = self.attention(x, with_weights=True)
        return x + y, weights


class Narrowing(nn.Module):
    """A residual layer after which fewer tokens are left."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attending()

    def forward(self, x: Tensor) -> Tensor:
        y, *_ = self.attention(x)
        return (x + y)[:, 1:]


class Demanding(nn.Module):
    """A residual layer that refuses what its matrices never give."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attending()

    def forward(self, x: Tensor) -> Tensor:
        y, *_ = self.attention(x)
        if not (y - self.attention.out.bias).any():
            raise ValueError("nothing is attended to")
        return x + y


NOT_STACKED: dict[str, Callable[[], nn.Module]] = {
    "a demand on values": lambda: Stack(*(Demanding() for _ in range(2))),
    "no shortcut": lambda: Stack(*(Plain() for _ in range(2))),
    "another result": lambda: Stack(*(Scored() for _ in range(2))),
    "another shape": lambda: Stack(*(Narrowing() for _ in range(2))),
    "shared weights": lambda: Stack(*[Unpacking()] * 2),
    "one of a kind": lambda: Stack(Unpacking(), Plain()),
}


class RepVGG(nn.Module):
    """Two convolutions beside each other, and where shapes allow it a third branch with neither."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, *, identity: bool) -> None:
        super().__init__()
        self.big = nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs))
        self.small = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        self.same = nn.BatchNorm2d(outputs) if identity else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.big(x) + self.small(x)
        return F.relu(y if self.same is None else self.same(x) + y)


class LowRank(nn.Module):
    """LoRA: a layer and its low-rank update."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.a, self.b = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(x))


class Inception(nn.Module):
    """Two ways through an image, of one shape, added."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Conv2d(6, 6, 3, padding=1)
        self.long = nn.Sequential(nn.Conv2d(6, 9, 1), nn.ReLU(), nn.Conv2d(9, 6, 5, padding=2))

    def forward(self, x: Tensor) -> Tensor:
        return self.short(x) + self.long(x)


EQUALS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "repvgg": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 1),
            RepVGG(6, 6, identity=False),
            RepVGG(6, 8, 2, identity=False),
            *head(8),
        ),
        IMAGE,
    ),
    "low rank": (lambda: nn.Sequential(LowRank(8, 8), nn.ReLU(), LowRank(8, CLASSES)), VECTOR),
    "two ways": (lambda: nn.Sequential(nn.Conv2d(3, 6, 1), Inception(), *head(6)), IMAGE),
}


class Middle(nn.Module):
    """One function between two layers."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.first, self.function, self.last = nn.Linear(8, 8), function, nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(torch.relu(self.first(x))))


class Written(nn.Module):
    """A module of two layers that computes what a function of it says."""

    def __init__(self, code: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.code, self.f, self.g = code, nn.Linear(8, 8), nn.Linear(8, 8)
        self.places, self.p = nn.Parameter(torch.randn(4, 8)), 0.5
        self.calls, self.seen = 0, []

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


def shared_in_a_loop(self: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = x + self.f(x)
    return x


def used_elsewhere(self: Any, x: Tensor) -> Tensor:
    inner = self.f(x)
    return torch.relu(x + self.g(inner)) * inner


def by_value(self: Any, x: Tensor) -> Tensor:
    return x + self.f(x) if x.sum() > 0 else x - self.f(x)


def by_chance(draw: Callable[[], float]) -> Callable[[Any, Tensor], Tensor]:
    def stochastic_depth(self: Any, x: Tensor) -> Tensor:
        return x if self.training and draw() < 1e-9 else x + self.f(x)

    return stochastic_depth


def counting(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x + self.f(x)


def remembering(self: Any, x: Tensor) -> Tensor:
    self.seen.append(self.f(x))
    return x + self.seen[-1]


def without_gradient(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = self.f(x)
    return x + self.g(y)


def in_another_precision(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = self.f(x)
    return x + self.g(y)


def also_in_training(self: Any, x: Tensor) -> Tensor:
    y = x + self.f(x)
    return self.f(y) if self.training else y


WITHOUT_BLOCKS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "places": lambda self, x: self.f(x) + self.places[0],
    "places as many as rows": lambda self, x: self.f(x) + self.places[: x.shape[0]],
    "places in the shape of the input": lambda self, x: x + self.places[0].expand_as(x),
    "two equal branches": lambda self, x: self.f(x) + self.g(x),
    "one weight in several branches": shared_in_a_loop,
    "a weight that is used elsewhere in training": also_in_training,
    "a branch that others use": used_elsewhere,
    "a choice by value": by_value,
    "a choice by chance": by_chance(lambda: torch.rand(()).item()),
    "a choice by Python's chance": by_chance(random.random),
    "a choice by NumPy's chance": by_chance(lambda: np.random.rand()),
    "a counter": counting,
    "a memory": remembering,
    "a part without gradient": without_gradient,
    "a part in another precision": in_another_precision,
    "a shortcut that the branch changes": lambda self, x: x + self.f(F.relu(x, inplace=True)),
    "a shortcut that it multiplies": lambda self, x: x + self.f(x.mul_(2)),
    "no weights": lambda self, x: x + torch.tanh(x),
    "no sum": lambda self, x: self.g(self.f(x)),
}


def noisy(self: Any, x: Tensor) -> Tensor:
    if self.training:
        x = x + 0.1 * torch.randn_like(x)
    return x + self.f(x)


def dropping(self: Any, x: Tensor) -> Tensor:
    y = self.f(x)
    if self.training:
        y = y * y.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(self.p)
    return x + y


def asking_its_child(self: Any, x: Tensor) -> Tensor:
    return x + F.dropout(self.f(x), self.p, self.g.training)


WITH_A_BLOCK: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a gate": lambda self, x: x + x * torch.sigmoid(self.f(x)),
    "noise in training": noisy,
    "branches dropped by chance in training": dropping,
    "dropout as a child is told to": asking_its_child,
    "places beside it": lambda self, x: x + self.f(x) + self.places[: x.shape[0]],
    "a shortcut through the lighter of two layers": lambda self, x: self.f(x) + self.g.bias * x,
}
