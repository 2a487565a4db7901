"""A zoo of small nets as users write them, to be cut in every way.

A net whose statistics run over channels can also be constructed at the sizes of cut tensors.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fedquilt.errors import StructureWarning
from fedquilt.structure.create import trace_structure
from fedquilt.structure.structure import Structure

IMAGE = torch.zeros(2, 3, 8, 8)
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
VECTOR = torch.zeros(2, 8)
SERIES = torch.zeros(2, 2, 20)
GRAPH = (  # features of six nodes, and from where to where an edge goes
    torch.zeros(6, 4),
    torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 3, 5]]),
)
CLASSES = 5


@dataclass(frozen=True)
class Case:
    """A net, an example of its input, and how to construct it at the sizes of cut tensors."""

    make: Callable[[], nn.Module]
    example: Any = IMAGE
    at: Callable[[Mapping[str, Tensor]], nn.Module] | None = None


def head(channels: int, classes: int = CLASSES) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


def conv_block(inputs: int, outputs: int, norm: Callable[[int], nn.Module]) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1), norm(outputs), nn.ReLU()]


def plain_cnn(
    norm: Callable[[int], nn.Module] = nn.BatchNorm2d, a: int = 8, b: int = 12
) -> nn.Module:
    return nn.Sequential(
        *conv_block(3, a, norm), nn.MaxPool2d(2), *conv_block(a, b, norm), *head(b)
    )


def flat_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 7, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(7 * 16, 10),
        nn.ReLU(),
        nn.Linear(10, CLASSES),
    )


class Residual(nn.Module):
    """A basic block; the shortcut is a convolution where shapes differ."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride > 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class PreActivation(nn.Module):
    """Normalise and activate first; the shortcut starts behind the first activation."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(x))
        short = self.shortcut(y) if hasattr(self, "shortcut") else x
        return self.conv2(F.relu(self.norm2(self.conv1(y)))) + short


class ZeroPadded(nn.Module):
    """Option A of the ResNet paper: new channels of the shortcut are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.conv1 = nn.Conv2d(6, 12, 3, 2, 1)
        self.norm = nn.BatchNorm2d(12)
        self.conv2 = nn.Conv2d(12, 12, 3, 1, 1)
        self.fc = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        short = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 3, 3))
        x = F.relu(self.conv2(F.relu(self.norm(self.conv1(x)))) + short)
        return self.fc(x.mean((2, 3)))


class Inverted(nn.Module):
    """MobileNet's inverted residual with squeeze-excitation and a hard swish."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        hidden = 3 * inputs
        self.expand = nn.Sequential(nn.Conv2d(inputs, hidden, 1), nn.BatchNorm2d(hidden))
        self.depthwise = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False)
        self.norm = nn.BatchNorm2d(hidden)
        self.squeeze, self.excite = nn.Linear(hidden, 4), nn.Linear(4, hidden)
        self.project = nn.Conv2d(hidden, outputs, 1)
        self.is_residual = inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.norm(self.depthwise(F.relu6(self.expand(x)))))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3))))))
        y = self.project(y * gate[:, :, None, None])
        return x + y if self.is_residual else y


class Dense(nn.Module):
    """DenseNet: every layer sees what all layers before it made."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(6 + 4 * i) for i in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(6 + 4 * i, 4, 3, padding=1) for i in range(2))
        self.fc = nn.Linear(14, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=False):
            x = torch.cat([x, conv(F.relu(norm(x)))], 1)
        return self.fc(F.relu(self.norms[2](x)).mean((2, 3)))


def grouped_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Conv2d(8, 16, 3, padding=1, groups=4),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 1, groups=2),
        *head(16),
    )


class Shuffled(nn.Module):
    """ShuffleNet: grouped convolutions between which channels are interleaved."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 1)
        self.conv1 = nn.Conv2d(12, 12, 3, padding=1, groups=3)
        self.conv2 = nn.Conv2d(12, 12, 3, padding=1, groups=3)
        self.fc = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(self.stem(x))
        b, c, h, w = x.shape
        x = x.view(b, 3, c // 3, h, w).transpose(1, 2).reshape(b, c, h, w)
        return self.fc(F.relu(self.conv2(x)).mean((2, 3)))


class Gated(nn.Module):
    """Convolutions over time with a gated linear unit."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv1d(2, 10, 3), nn.Conv1d(10, 14, 3)
        self.fc = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool1d(F.leaky_relu(self.conv(x)), 2)
        return self.fc(F.glu(self.gate(x), 1).mean(-1))


class Generator(nn.Module):
    """From a vector to an image; the number of channels is kept in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.channels = 9
        self.fc = nn.Linear(8, 9 * 16)
        self.up, self.out = nn.ConvTranspose2d(9, 6, 4, 2, 1), nn.Conv2d(6, 3, 3, padding=1)
        self.slope = nn.PReLU(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.slope(self.up(self.fc(x).view(-1, self.channels, 4, 4))))


class UNet(nn.Module):
    """Down, up, and a concatenated skip; all pixels are classified."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.mid = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 10, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(10, 6, 2, 2), nn.Conv2d(12, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.down(x))
        x = self.up(F.relu(self.mid(F.max_pool2d(skip, 2))))
        return self.out(torch.cat([skip, x], 1))


class SuperResolution(nn.Module):
    """Channels become pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 24, 3, padding=1)
        self.shuffle, self.out = nn.PixelShuffle(2), nn.Conv2d(6, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.shuffle(self.up(F.relu(self.conv(x)))))


def mlp() -> nn.Module:
    hidden = [nn.Linear(8, 11), nn.BatchNorm1d(11), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*hidden, nn.Linear(11, 6), nn.Tanh(), nn.Linear(6, CLASSES))


class LogSoftmax(nn.Module):
    """Logarithms of probabilities instead of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 9), nn.Linear(9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.b(F.relu(self.a(x))), dim=1)


class TwoInputs(nn.Module):
    """An image and a vector, concatenated; both branches have their own width."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.vector = nn.Conv2d(3, 6, 3), nn.Linear(8, 9)
        self.fc = nn.Linear(15, CLASSES)

    def forward(self, image: Tensor, vector: Tensor) -> Tensor:
        parts = [self.image(image).mean((2, 3)), self.vector(vector)]
        return self.fc(torch.relu(torch.cat(parts, 1)))


class TwoOutputs(nn.Module):
    """A dict with classes and a box."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.label = nn.Conv2d(3, 8, 3), nn.Linear(8, CLASSES)
        self.box = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.conv(x)).mean((2, 3))
        return {"label": self.label(x), "box": self.box(x)}


class Auxiliary(nn.Module):
    """A second output that only training has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3)
        self.extra, self.fc = nn.Linear(8, CLASSES), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = F.relu(self.conv1(x))
        y = self.fc(F.relu(self.conv2(x)).mean((2, 3)))
        return (y, self.extra(x.mean((2, 3)))) if self.training else y


class Unused(nn.Module):
    """A parameter that no forward pass meets."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.randn(4, 4))
        self.net = nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class SpatialGate(nn.Module):
    """One map of weights, spread over all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate, self.fc = (
            nn.Conv2d(3, 8, 3),
            nn.Conv2d(8, 1, 1),
            nn.Linear(8, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.fc((x * torch.sigmoid(self.gate(x)).expand_as(x)).mean((2, 3)))


class Recurrent(nn.Module):
    """An embedding, a recurrent net with a first state made by hand, and its last output."""

    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 7)
        self.rnn = kind(7, 6, batch_first=True, **options)
        both = 2 if options.get("bidirectional") else 1
        self.fc = nn.Linear(both * options.get("proj_size", 6), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.rnn(self.embed(x))[0][:, -1])


class StateByHand(nn.Module):
    """A first state in single precision, whatever the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = 6
        self.embed, self.rnn = nn.Embedding(20, 7), nn.GRU(7, 6, batch_first=True)
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(1, len(x), self.hidden)
        return self.fc(self.rnn(self.embed(x), state)[0][:, -1])


class Packed(nn.Module):
    """Sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(20, 7), nn.LSTM(7, 6, batch_first=True)
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True)
        return self.fc(self.rnn(packed)[1][0][-1])


class TiedWords(nn.Module):
    """A model of words whose decoder is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.decode = nn.Linear(8, 20, bias=False)
        self.decode.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.tanh(self.hidden(self.embed(x))))


class Shared(nn.Module):
    """Stages that have a convolution and its normalisation in common; a layer with two names."""

    def __init__(self) -> None:
        super().__init__()
        common, mixed = (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)), nn.Linear(8, 8)
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), *common)
        self.second = nn.Sequential(*common, nn.ReLU())
        self.mixed, self.again, self.out = mixed, mixed, nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.relu(self.first(x))).mean((2, 3))
        return self.out(torch.relu(self.again(torch.relu(self.mixed(x)))))


class Attention(nn.Module):
    """Self-attention by hand, as different people write it."""

    def __init__(self, style: str, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.style, self.heads, self.head_dim = style, heads, head_dim
        self.scale = head_dim**-0.5
        self.drop_rate = 0.5  # the scale of four channels, by chance
        inner = heads * head_dim
        if style in ("fused", "chunk", "split"):
            self.qkv = nn.Linear(dim, 3 * inner)
        else:
            self.q, self.k, self.v = (nn.Linear(dim, inner) for _ in range(3))
        self.inner = inner
        self.out = nn.Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        if self.style == "fused":  # as in timm
            qkv = self.qkv(x).reshape(b, t, 3, self.heads, c // self.heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        elif self.style == "chunk":
            parts = self.qkv(x).chunk(3, -1)
            q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in parts)
        elif self.style == "split":  # as in nanoGPT
            parts = self.qkv(x).split(self.inner, dim=2)
            q, k, v = (p.view(b, t, self.heads, c // self.heads).transpose(1, 2) for p in parts)
        else:  # as in BERT
            parts = [layer(x) for layer in (self.q, self.k, self.v)]
            shape = (b, t, self.heads, self.head_dim)
            q, k, v = (p.view(shape).transpose(1, 2) for p in parts)
        if self.style == "kernel":
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            weights = (q @ k.transpose(-2, -1) * self.scale).softmax(-1)
            y = F.dropout(weights, self.drop_rate, self.training) @ v
        return self.out(
            y.transpose(1, 2).reshape(b, t, self.inner if self.style == "split" else -1)
        )


class Layer(nn.Module):
    """One layer of a transformer."""

    def __init__(self, style: str, dim: int, heads: int, head_dim: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(style, dim, heads, head_dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A class token, learned positions, two layers."""

    def __init__(
        self, style: str, dim: int = 16, heads: int = 2, head_dim: int = 8, hidden: int = 20
    ) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, dim))
        self.places = nn.Parameter(torch.randn(1, 5, dim))
        self.layers = nn.ModuleList(Layer(style, dim, heads, head_dim, hidden) for _ in range(2))
        self.norm, self.fc = nn.LayerNorm(dim), nn.Linear(dim, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.fc(self.norm(x[:, 0]))


def vit_at(style: str, heads: int) -> Callable[[Mapping[str, Tensor]], nn.Module]:
    """The net whose first layer has these sizes; both layers are to be cut alike."""

    def at(params: Mapping[str, Tensor]) -> nn.Module:
        dim, hidden = params["patch.weight"].shape[0], params["layers.0.mlp.0.weight"].shape[0]
        head_dim = params["layers.0.attention.out.weight"].shape[1] // heads
        return ViT(style, dim, heads, head_dim, hidden)

    return at


def vit_case(style: str, heads: int = 2, head_dim: int = 8) -> Case:
    dim = heads * head_dim
    return Case(lambda: ViT(style, dim, heads, head_dim), IMAGE, vit_at(style, heads))


class Crossed(nn.Module):
    """PyTorch's attention from one sequence to another, of another width."""

    def __init__(self, dim: int = 12, other: int = 10, **options: Any) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, dim), nn.Linear(6, other)
        self.attention = nn.MultiheadAttention(
            dim, 3, kdim=other, vdim=other, batch_first=True, **options
        )
        self.fc = nn.Linear(dim, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        key = self.key(y)
        return self.fc(self.query(x) + self.attention(self.query(x), key, key)[0])


class Selfish(nn.Module):
    """PyTorch's attention of a sequence to itself."""

    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, dim)
        self.attention = nn.MultiheadAttention(dim, 3, batch_first=True)
        self.fc = nn.Linear(dim, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.fc(x + self.attention(x, x, x, need_weights=False)[0])


class Words(nn.Module):
    """PyTorch's encoder over embedded words, with a causal mask and fixed places."""

    def __init__(self, dim: int = 12, hidden: int = 14) -> None:
        super().__init__()
        self.dim = dim
        self.embed = nn.Embedding(20, dim, padding_idx=1)
        layer = nn.TransformerEncoderLayer(dim, 2, hidden, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(dim, CLASSES)
        self.register_buffer("places", torch.randn(1, 6, dim))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * math.sqrt(self.dim) + self.places
        return self.fc(self.encoder(x, mask=self.mask))


class Rotary(nn.Module):
    """Attention that turns pairs of channels by their place: in halves, or side by side."""

    def __init__(self, style: str, dim: int = 16, heads: int = 2, head_dim: int = 8) -> None:
        super().__init__()
        self.style, self.heads, self.head_dim = style, heads, head_dim
        self.embed = nn.Embedding(20, dim)
        self.q, self.k, self.v = (nn.Linear(dim, heads * head_dim) for _ in range(3))
        self.out, self.fc = nn.Linear(heads * head_dim, dim), nn.Linear(dim, CLASSES)
        self.register_buffer("speed", 100.0 ** (-torch.arange(0, head_dim, 2) / head_dim))

    def turned(self, x: Tensor) -> Tensor:
        angle = torch.outer(torch.arange(x.shape[-2]).to(x), self.speed)
        if self.style == "complex":
            pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
            turned = pairs * torch.polar(torch.ones_like(angle), angle)
            return torch.view_as_real(turned).flatten(-2)
        if self.style == "halves":
            angle = torch.cat([angle, angle], -1)
            a, b = x.chunk(2, -1)
            return x * angle.cos() + torch.cat([-b, a], -1) * angle.sin()
        angle = angle.repeat_interleave(2, -1)
        other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return x * angle.cos() + other * angle.sin()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        shape = (*x.shape[:2], self.heads, self.head_dim)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        return self.fc(x + self.out(y.transpose(1, 2).flatten(2)))


def rotary_case(style: str) -> Case:
    def at(params: Mapping[str, Tensor]) -> nn.Module:
        return Rotary(style, params["embed.weight"].shape[1], 2, params["q.weight"].shape[0] // 2)

    return Case(lambda: Rotary(style), TOKENS, at)


class Mixer(nn.Module):
    """MLP-Mixer: a net over tokens and a net over channels."""

    def __init__(self, dim: int = 10, tokens: int = 7, hidden: int = 12) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 2, 2)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens = nn.Sequential(nn.Linear(16, tokens), nn.GELU(), nn.Linear(tokens, 16))
        self.channels = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.fc = nn.Linear(dim, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return self.fc((x + self.channels(self.norm2(x))).mean(1))


class Pooled(nn.Module):
    """ConvNeXt's end: images whose channels come last in memory are pooled to one place."""

    def __init__(self, norm: Callable[[int], nn.Module], width: int = 8) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, width, 3), norm(width)
        self.fc = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Convolved(nn.Module):
    """A graph convolution as PyTorch Geometric does it: messages along edges, brought together."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 10)
        self.out = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            messages = layer(x).index_select(0, edges[0])
            x = F.relu(self.combine(messages, edges[1], len(x)))
        return self.out(x)

    def combine(self, messages: Tensor, to: Tensor, count: int) -> Tensor:
        empty = messages.new_zeros(count, messages.shape[1])
        if self.how == "index":
            return empty.index_add(0, to, messages)
        to = to.view(-1, 1).expand_as(messages)
        if self.how == "sum":
            return empty.scatter_add_(0, to, messages)
        return empty.scatter_reduce(0, to, messages, "amax", include_self=False)


class Attended(nn.Module):
    """Graph attention: a softmax over the edges that end in one node."""

    def __init__(self, heads: int = 2, dim: int = 6) -> None:
        super().__init__()
        self.heads = heads
        self.lin = nn.Linear(4, heads * dim)
        self.score = nn.Parameter(torch.randn(1, heads, dim))
        self.out = nn.Linear(heads * dim, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        start, end = edges
        x = self.lin(x).view(len(x), self.heads, -1)
        score = (x * self.score).sum(-1)
        score = F.leaky_relu(score[start] + score[end])
        to = end[:, None].expand_as(score)
        empty = score.new_zeros(len(x), self.heads)
        most = empty.scatter_reduce(0, to, score, "amax", include_self=False)
        share = (score - most.index_select(0, end)).exp()
        share = share / empty.scatter_add(0, to, share)[end]
        x = torch.zeros_like(x).index_add_(0, end, x[start] * share[..., None])
        return self.out(F.elu(x).flatten(1))


class Rows(nn.Module):
    """Only some tokens are looked at, and written back by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(10, 8), nn.Linear(8, 8)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        states, mask = self.embed(x), x != 5
        states[mask] = F.relu(self.mix(states[mask]))
        states[~mask] = 0.0
        return self.out(states.sum(1))


class Clipped(nn.Module):
    """Masks that are computed, element by element."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(8, 10), nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = torch.where(x > 0.5, x, torch.zeros_like(x)) + x.masked_fill(x < 0, 0.0)
        y[y > 1] = 1.0
        return self.out(y * (x > 0).any(0))


class Picked(nn.Module):
    """Places picked by several indices at once."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 8, 3), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x, i = self.conv(x), torch.arange(3)
        edge = x.permute(2, 0, 3, 1)[i, :, i + 1]  # the picked axis comes first
        x = x[:, :, i, i + 1].mean(-1) + x[:, :, i[:, None], i].amax((2, 3)) + edge.mean(0)
        return self.out(x)


class Patches(nn.Module):
    """Patches of an image, each a vector, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mix = nn.Conv2d(3, 6, 1), nn.Linear(24, 20)
        self.out = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.unfold(self.conv(x), 2, stride=2).transpose(1, 2)
        x = F.fold(F.relu(self.mix(x)).transpose(1, 2), (8, 8), 2, stride=2)
        return self.out(x.unfold(2, 4, 4).amax((2, 3, 4)))


class Maxout(nn.Module):
    """The larger of every two neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(8, 12), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.first(x).view(len(x), -1, 2).max(-1).values)


class Cbam(nn.Module):
    """Gates from means and maxima, over places and then over channels."""

    def __init__(self, width: int = 8, hidden: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.gate, self.fc = nn.Conv2d(2, 1, 3, padding=1), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        x = x * torch.sigmoid(self.mlp(x.mean((2, 3))) + self.mlp(x.amax((2, 3))))[..., None, None]
        both = torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True)[0]], 1)
        return self.fc((x * torch.sigmoid(self.gate(both))).mean((2, 3)))


class Root(nn.Module):
    """Root-mean-square normalisation by hand."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Chance(nn.Module):
    """Words, a normalisation, and a number that has nothing to do with the width it equals."""

    def __init__(self, use: str, dim: int = 6, number: float = 6) -> None:
        super().__init__()
        self.use, self.number = use, number
        self.embed, self.norm = nn.Embedding(20, dim), nn.LayerNorm(dim)
        self.mix, self.fc = nn.Linear(dim, dim), nn.Linear(dim, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embed(x))
        if self.use == "length":
            x = x[:, : self.number]
        elif self.use == "pool":
            x = F.adaptive_max_pool1d(x.transpose(1, 2), self.number).transpose(1, 2)
        elif self.use == "steps":
            for _ in range(self.number):
                x = x + torch.tanh(self.mix(x))
        elif self.use == "largest":
            x = x.topk(self.number, dim=1).values
        elif self.use == "limit" and x.shape[1] > self.number:
            raise ValueError("too many words")
        elif self.use == "window":  # as many windows as channels
            x = x.unflatten(1, (self.number, -1)).flip(1).flatten(1, 2)
        x = torch.relu(self.mix(x)).mean(1)
        if self.use == "cosine":
            cosine = F.linear(F.normalize(x), F.normalize(self.fc.weight))
            return self.number * cosine + self.fc.bias
        return self.fc(x)


def chance_case(use: str, dim: int = 6, number: float = 6) -> Case:
    def at(params: Mapping[str, Tensor]) -> nn.Module:
        return Chance(use, params["embed.weight"].shape[1], number)

    return Case(lambda: Chance(use, dim, number), TOKENS, at)


class Scaled(nn.Module):
    """A number that does depend on the width, in the ways people write it."""

    def __init__(self, use: str, dim: int = 6) -> None:
        super().__init__()
        self.use, self.dim, self.root, self.scale = use, dim, dim**0.5, dim**-0.5
        self.embed, self.norm = nn.Embedding(20, dim), nn.LayerNorm(dim)
        self.key, self.fc = nn.Linear(dim, dim), nn.Linear(dim, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embed(x))
        key = self.key(x)
        if self.use == "embedding":
            return self.fc(torch.relu(x * self.root + key))
        if self.use == "root mean square":
            return self.fc(F.normalize(key, dim=-1) * self.root)
        if self.use == "mean":
            return self.fc(key - key.sum(-1, keepdim=True) / self.dim)
        if self.use == "query":
            return self.fc(((x * self.scale) @ key.mT).softmax(-1) @ x)
        return self.fc((x @ key.mT / self.root).softmax(-1) @ x)


def scaled_case(use: str) -> Case:
    def at(params: Mapping[str, Tensor]) -> nn.Module:
        return Scaled(use, params["embed.weight"].shape[1])

    return Case(lambda: Scaled(use), TOKENS, at)


class Partitioned(nn.Module):
    """Attention within windows and then across them, as MaxViT has it, all of whose sizes agree."""

    def __init__(self, dim: int = 16, inner: int = 16) -> None:
        super().__init__()
        self.window, self.grid, self.length, self.heads = 4, (16, 16), 16, 2
        self.stem, self.norm = nn.Conv2d(3, dim, 3, padding=1), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * inner), nn.Linear(inner, dim)
        self.bias = nn.Parameter(torch.randn(self.length**2, self.heads))
        self.fc = nn.Linear(dim, CLASSES)

    def attend(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:3], self.heads, -1)
        q, k, v = (part.reshape(shape).transpose(2, 3) for part in self.qkv(x).chunk(3, -1))
        bias = self.bias.view(self.length, self.length, -1).permute(2, 0, 1)
        y = (q @ k.mT / 4 + bias).softmax(-1) @ v
        return x + self.out(y.transpose(2, 3).flatten(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        b, c, (h, w), p = len(x), x.shape[1], self.grid, self.window
        x = x.reshape(b, c, h // p, p, w // p, p).permute(0, 2, 4, 3, 5, 1)
        x = x.reshape(b, (h // p) * (w // p), p * p, c)
        x = self.attend(self.norm(x)).transpose(1, 2)
        return self.fc(self.attend(self.norm(x)).mean((1, 2)))


def normed_mlp(norm: Callable[[int], nn.Module], width: int = 10) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), norm(width), nn.ReLU(), nn.Linear(width, CLASSES))


def normed_mlp_case(norm: Callable[[int], nn.Module]) -> Case:
    return Case(
        lambda: normed_mlp(norm), VECTOR, lambda p: normed_mlp(norm, p["0.weight"].shape[0])
    )


def computed(how: Callable[[nn.Module], nn.Module], a: int = 8, b: int = 12) -> nn.Module:
    """Weights that are computed in every call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch's, about its older kind
        return nn.Sequential(
            how(nn.Conv2d(3, a, 3)), nn.ReLU(), how(nn.Conv2d(a, b, 3)), *head(b)[:2],
            how(nn.Linear(b, CLASSES)),
        )  # fmt: skip


def computed_case(how: Callable[[nn.Module], nn.Module]) -> Case:
    def at(params: Mapping[str, Tensor]) -> nn.Module:
        return computed(how, params["0.bias"].shape[0], params["2.bias"].shape[0])

    return Case(lambda: computed(how), IMAGE, at)


COMPUTED = {
    "weight norm": parametrizations.weight_norm,
    "weight norm by a hook": torch.nn.utils.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "spectral norm by a hook": torch.nn.utils.spectral_norm,
}


def group_norm(groups: int) -> Callable[[int], nn.Module]:
    return lambda channels: nn.GroupNorm(groups, channels)


def group_norm_case(groups: int) -> Case:
    norm = group_norm(groups)
    return Case(
        lambda: plain_cnn(norm),
        IMAGE,
        lambda p: plain_cnn(norm, p["0.weight"].shape[0], p["4.weight"].shape[0]),
    )


def bare_layer_norm(width: int) -> nn.Module:
    return nn.LayerNorm(width, elementwise_affine=False)


def instance_norm(*, affine: bool) -> Callable[[int], nn.Module]:
    return lambda channels: nn.InstanceNorm2d(channels, affine=affine)


CHANCES = ("length", "pool", "steps", "largest", "limit", "window")
SCALES = ("embedding", "root mean square", "mean", "query", "score")

EXACT = {
    "plain cnn": Case(plain_cnn),
    "conv, flatten, linear": Case(flat_cnn),
    "residual": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), Residual(8, 8), Residual(8, 12, 2), *head(12))
    ),
    "pre-activation": Case(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), PreActivation(8, 8), PreActivation(8, 12, 2), *head(12)
        )
    ),
    "zero-padded shortcut": Case(ZeroPadded),
    "mobile": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 6, 3), Inverted(6, 6), Inverted(6, 8), *head(8))
    ),
    "dense": Case(Dense),
    "grouped": Case(grouped_cnn),
    "shuffled": Case(Shuffled),
    "gated": Case(Gated, SERIES),
    "generator": Case(Generator, VECTOR),
    "u-net": Case(UNet),
    "super-resolution": Case(SuperResolution),
    "mlp": Case(mlp, VECTOR),
    "log-softmax": Case(LogSoftmax, VECTOR),
    "two inputs": Case(TwoInputs, (IMAGE, VECTOR)),
    "two outputs": Case(TwoOutputs),
    "auxiliary output": Case(Auxiliary),
    "unused parameter": Case(Unused, VECTOR),
    "spatial gate": Case(SpatialGate),
    "bidirectional lstm": Case(
        lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True), TOKENS
    ),
    "projected lstm": Case(lambda: Recurrent(nn.LSTM, num_layers=2, proj_size=4), TOKENS),
    "gru": Case(lambda: Recurrent(nn.GRU), TOKENS),
    "state by hand": Case(StateByHand, TOKENS),
    "packed": Case(Packed, (TOKENS, torch.tensor([6, 4]))),
    "tied words": Case(TiedWords, TOKENS),
    "shared modules": Case(Shared),
    "one group a channel": Case(
        lambda: plain_cnn(lambda channels: nn.GroupNorm(channels, channels))
    ),
    "channels last in memory": Case(lambda: Pooled(lambda width: nn.Identity())),
    "graph, sums": Case(lambda: Convolved("sum"), GRAPH),
    "graph, sums by index": Case(lambda: Convolved("index"), GRAPH),
    "graph, maxima": Case(lambda: Convolved("max"), GRAPH),
    "rows by a mask": Case(Rows, TOKENS),
    "computed masks": Case(Clipped, VECTOR),
    "several indices": Case(Picked),
    "patches": Case(Patches),
    "maxout": Case(Maxout, VECTOR),
    "instance norm": Case(lambda: plain_cnn(instance_norm(affine=True))),
    "bare instance norm": Case(lambda: plain_cnn(instance_norm(affine=False))),
}

ACROSS = {
    "fused attention": vit_case("fused"),
    "chunked attention": vit_case("chunk"),
    "split attention": vit_case("split"),
    "split attention, equal numbers": vit_case("split", 4, 4),
    "attention with attributes": vit_case("attributes"),
    "attention with attributes, equal numbers": vit_case("attributes", 4, 4),
    "attention of one head": vit_case("fused", 1, 8),
    "attention in one kernel": vit_case("kernel"),
    "attention to itself": Case(Selfish, TOKENS, lambda p: Selfish(p["embed.weight"].shape[1])),
    "attention to another": Case(
        Crossed,
        (torch.zeros(2, 5, 8), torch.zeros(2, 7, 6)),
        lambda p: Crossed(p["query.weight"].shape[0], p["key.weight"].shape[0]),
    ),
    "attention without biases": Case(
        lambda: Crossed(bias=False),
        (torch.zeros(2, 5, 8), torch.zeros(2, 7, 6)),
        lambda p: Crossed(p["query.weight"].shape[0], p["key.weight"].shape[0], bias=False),
    ),
    "encoder": Case(
        Words,
        TOKENS,
        lambda p: Words(p["embed.weight"].shape[1], p["encoder.layers.0.linear1.weight"].shape[0]),
    ),
    "rotary halves": rotary_case("halves"),
    "rotary neighbours": rotary_case("neighbours"),
    "rotary complex": rotary_case("complex"),
    "mixer": Case(
        Mixer,
        IMAGE,
        lambda p: Mixer(
            p["patch.weight"].shape[0],
            p["tokens.0.weight"].shape[0],
            p["channels.0.weight"].shape[0],
        ),
    ),
    "graph attention": Case(Attended, GRAPH, lambda p: Attended(2, p["score"].shape[2])),
    "gates from maxima": Case(
        Cbam, IMAGE, lambda p: Cbam(p["conv.weight"].shape[0], p["mlp.0.weight"].shape[0])
    ),
    "channels last in memory, normalised": Case(
        lambda: Pooled(nn.LayerNorm),
        IMAGE,
        lambda p: Pooled(nn.LayerNorm, p["conv.weight"].shape[0]),
    ),
    **{name: computed_case(how) for name, how in COMPUTED.items()},
    "layer norm": normed_mlp_case(nn.LayerNorm),
    "bare layer norm": normed_mlp_case(bare_layer_norm),
    "rms norm": normed_mlp_case(nn.RMSNorm),
    "rms norm by hand": normed_mlp_case(Root),
    "group norm": group_norm_case(4),
    "one group": group_norm_case(1),
    **{f"{use} by chance": chance_case(use) for use in CHANCES},
    "windows and grid": Case(
        Partitioned,
        torch.zeros(2, 3, 16, 16),
        lambda p: Partitioned(p["stem.weight"].shape[0], p["out.weight"].shape[1]),
    ),
    "temperature by chance": chance_case("cosine", 16, 4.0),
    **{f"{use} of a width": scaled_case(use) for use in SCALES},
}

ZOO = {**EXACT, **ACROSS}
PARTLY_WHOLE = {"shuffled", "unused parameter", "projected lstm"}  # and it is said why


def inputs_for(example: Any, seed: int = 0) -> tuple[Any, ...]:
    """Random inputs in the shape of the example."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(x.shape, generator=generator) if x.is_floating_point() else x
        for x in (example if isinstance(example, tuple) else (example,))
    )


def roughened(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model for evaluation, with tensors in which no two channels are alike."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point() and tensor.isfinite().all():
                tensor.add_(0.1 * torch.rand(tensor.shape, generator=generator))
    return model.eval()


@functools.cache
def structured(name: str) -> tuple[nn.Module, Structure]:
    """A net of the zoo, ready for evaluation, and its structure."""
    torch.manual_seed(0)
    model = roughened(ZOO[name].make())
    with warnings.catch_warnings():
        if name in PARTLY_WHOLE:
            warnings.simplefilter("ignore", StructureWarning)
        return model, trace_structure(model, ZOO[name].example)
