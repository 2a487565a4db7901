"""The nets of NeFL (Kang et al., 2023, Appendix B.1): ResNets, a Wide ResNet and a ViT.

Plain modules that know nothing of federated learning: step sizes and skipped blocks are put around
them by the method. Tensors are named as in torchvision (ResNets) and timm (ViT), so that files of
pre-trained weights fit by name. Initial values are PyTorch's; the paper's public code draws those
of ResNet56 and ResNet110 by Kaiming's normal rule.

Parameters with 10 classes; the paper prints means over five submodels of them (Table 8):

    ResNet18  11,173,962    ResNet34   21,282,122
    ResNet56     855,770    ResNet110   1,730,714
    Wide ResNet101-2  124,858,186 (with 1000 classes 126,886,696)
    ViT-B/16           85,806,346 (with 1000 classes  86,567,656)

The paper's 86.4 M for ViT-B/16 fits the layers of the net of 1000 classes, that is without its
class token and positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedquilt.models.initialization import reinitialize

STEMS = ("cifar", "plain", "imagenet")


def scale_widths(sizes: Sequence[int], width: float) -> list[int]:
    """The sizes at a fraction of their full width, rounded up."""
    if not 0 < width <= 1:
        raise ValueError(f"width is a fraction in (0, 1], got {width}; write 1/8 as 0.125")
    if min(sizes) < 1:
        raise ValueError(f"a layer has at least one channel, got sizes {list(sizes)}")
    return [math.ceil(round(size * width, 9)) for size in sizes]  # 0.3 · 10 is more than 3


def make_shortcut(channels: int, size: int, stride: int) -> nn.Module | None:
    """Around a block: nothing, or a 1×1 convolution where the shape changes (He et al.'s B)."""
    if stride == 1 and channels == size:
        return None
    return nn.Sequential(
        nn.Conv2d(channels, size, 1, stride, bias=False),
        nn.BatchNorm2d(size),
    )


class BasicBlock(nn.Module):
    """Two 3×3 convolutions."""

    multiples = (1,)  # of the stage's channels: sizes inside the block and behind it

    def __init__(self, channels: int, sizes: Sequence[int], stride: int) -> None:
        super().__init__()
        (size,) = sizes
        self.conv1 = nn.Conv2d(channels, size, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(size)
        self.conv2 = nn.Conv2d(size, size, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(size)
        self.downsample = make_shortcut(channels, size, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The block's sum, rectified."""
        around = x if self.downsample is None else self.downsample(x)
        inner = F.relu(self.bn1(self.conv1(x)))
        inner = self.bn2(self.conv2(inner))
        return F.relu(around + inner)


class WideBottleneck(nn.Module):
    """A 3×3 convolution, twice as wide as ResNet101's, between two of 1×1."""

    multiples = (2, 4)

    def __init__(self, channels: int, sizes: Sequence[int], stride: int) -> None:
        super().__init__()
        inside, size = sizes
        self.conv1 = nn.Conv2d(channels, inside, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inside)
        self.conv2 = nn.Conv2d(inside, inside, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inside)
        self.conv3 = nn.Conv2d(inside, size, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(size)
        self.downsample = make_shortcut(channels, size, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The block's sum, rectified."""
        around = x if self.downsample is None else self.downsample(x)
        inner = F.relu(self.bn1(self.conv1(x)))
        inner = F.relu(self.bn2(self.conv2(inner)))
        inner = self.bn3(self.conv3(inner))
        return F.relu(around + inner)


class ResNet(nn.Module):
    """A stem, stages of blocks that halve the image from the second on, and a linear layer.

    ``blocks`` says how many blocks each stage has, ``channels`` how wide it is. Stems: ``cifar``
    is a 3×3 convolution and a pool that halves the image (as in the paper's public code for
    ResNet18 and ResNet34), ``plain`` the convolution alone (ResNet56, ResNet110), ``imagenet`` a
    7×7 convolution of stride 2 and the pool. Shortcuts are 1×1 convolutions with normalization,
    also in the nets of three stages, where He et al. pad with zeros.
    """

    def __init__(
        self,
        block: type[BasicBlock | WideBottleneck],
        blocks: Sequence[int],
        channels: Sequence[int] = (64, 128, 256, 512),
        in_channels: int = 3,
        num_classes: int = 10,
        width: float = 1.0,
        stem: str = "cifar",
    ) -> None:
        super().__init__()
        if len(channels) != len(blocks):
            raise ValueError(
                f"channels are one number for each of {len(blocks)} stages, got {list(channels)}"
            )
        if stem not in STEMS:
            raise ValueError(f"stem '{stem}' is not known; choose one of: {', '.join(STEMS)}")
        (size,) = scale_widths(channels[:1], width)
        kernel, stride = (7, 2) if stem == "imagenet" else (3, 1)
        self.conv1 = nn.Conv2d(in_channels, size, kernel, stride, kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(size)
        self.maxpool = nn.Identity() if stem == "plain" else nn.MaxPool2d(3, 2, padding=1)
        self.stages = tuple(f"layer{i}" for i in range(1, len(blocks) + 1))
        for name, count, stage in zip(self.stages, blocks, channels, strict=True):
            sizes = scale_widths([stage * times for times in block.multiples], width)
            layers = []
            for i in range(count):
                stride = 2 if i == 0 and name != "layer1" else 1
                layers.append(block(size, sizes, stride))
                size = sizes[-1]
            self.add_module(name, nn.Sequential(*layers))
        self.fc = nn.Linear(size, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        for name in self.stages:
            x = self.get_submodule(name)(x)
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]

    def reset_parameters(self) -> None:
        """Draws all initial values again."""
        reinitialize(self)


class PatchEmbedding(nn.Module):
    """An image as a row of tokens, one for each square patch."""

    def __init__(self, in_channels: int, dim: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, dim, patch_size, patch_size)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens: (batch, patches, dim)."""
        return self.proj(x).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Self-attention of several heads; their queries, keys and values come from one layer."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * heads * head_dim)
        self.proj = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """What every token hears from all."""
        qkv = self.qkv(x).unflatten(2, (3, self.heads, -1))  # (batch, tokens, 3, heads, head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        heard = F.scaled_dot_product_attention(q, k, v)
        return self.proj(heard.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two linear layers with GELU between them, for every token by itself."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens of the same size."""
        return self.fc2(F.gelu(self.fc1(x)))  # type: ignore[no-any-return]


class EncoderBlock(nn.Module):
    """Attention and a perceptron, each normalized first and with a shortcut around it."""

    def __init__(self, dim: int, heads: int, head_dim: int, mlp_dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads, head_dim)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = MLP(dim, mlp_dim)

    def forward(self, x: Tensor) -> Tensor:
        """The block's two sums."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al., ICLR 2021) with a class token; by default B/16.

    ``width`` narrows tokens, heads and perceptrons; the number of heads stays.
    """

    def __init__(
        self,
        image_size: int = 224,
        patch_size: int = 16,
        dim: int = 768,
        depth: int = 12,
        heads: int = 12,
        mlp_dim: int = 3072,
        in_channels: int = 3,
        num_classes: int = 10,
        width: float = 1.0,
    ) -> None:
        super().__init__()
        if patch_size < 1 or image_size % patch_size:
            raise ValueError(
                f"images are cut into whole patches, got image_size {image_size} and patch_size "
                f"{patch_size}; choose a patch_size that divides the image_size"
            )
        if heads < 1 or dim % heads:
            raise ValueError(
                f"heads share the dim equally, got dim {dim} and {heads} heads; choose a dim that "
                "is a multiple of heads"
            )
        dim, head_dim, mlp_dim = scale_widths((dim, dim // heads, mlp_dim), width)
        num_tokens = (image_size // patch_size) ** 2 + 1
        self.patch_embed = PatchEmbedding(in_channels, dim, patch_size)
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, num_tokens, dim))
        self.blocks = nn.Sequential(
            *(EncoderBlock(dim, heads, head_dim, mlp_dim) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, num_classes)
        self._draw_places()

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed
        x = self.norm(self.blocks(x))
        return self.head(x[:, 0])  # type: ignore[no-any-return]

    def reset_parameters(self) -> None:
        """Draws all initial values again."""
        reinitialize(self)
        self._draw_places()

    def _draw_places(self) -> None:
        """The class token and the positions start small, as in DeiT (Touvron et al., 2021)."""
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
