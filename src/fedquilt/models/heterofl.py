"""The image nets of HeteroFL (Diao et al., ICLR 2021, Table 6): a CNN and a PreResNet18.

Plain modules that know nothing of federated learning. Scaling and static statistics are put around
them by the method. The paper's ResNet18 has blocks [1, 1, 1, 2] (9.6 M parameters, its Table 2);
the later public code has [2, 2, 2, 2] (11.2 M): both are here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from fedquilt.models.initialization import reinitialize

HIDDEN = (64, 128, 256, 512)
NORMS = ("batch", "none", "instance", "group", "layer")


def make_normalization(kind: str, channels: int) -> nn.Module:
    """The layer that Tables 4 and 5 compare: batch, none, instance, group (4 groups) or layer."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "none":
        return nn.Identity()
    groups = {"instance": channels, "group": math.gcd(4, channels), "layer": 1}
    if kind not in groups:
        raise ValueError(f"norm '{kind}' is not known; choose one of: {', '.join(NORMS)}")
    return nn.GroupNorm(groups[kind], channels)


def scale_widths(hidden: Sequence[int], width: float) -> list[int]:
    """The hidden sizes at a fraction of their full width, rounded up."""
    return [math.ceil(size * width) for size in hidden]


class CNN(nn.Module):
    """Four 3×3 convolutions with pooling between them, and a linear layer."""

    def __init__(
        self, in_channels: int = 1, num_classes: int = 10, width: float = 1.0, norm: str = "batch"
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for i, size in enumerate(scale_widths(HIDDEN, width)):
            layers += [
                nn.Conv2d(channels, size, 3, padding=1),
                make_normalization(norm, size),
                nn.ReLU(),
            ]
            if i < 3:
                layers.append(nn.MaxPool2d(2))
            channels = size
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, num_classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.classifier(self.features(x).mean((2, 3)))  # type: ignore[no-any-return]

    def reset_parameters(self) -> None:
        """Draws all initial values again."""
        reinitialize(self)
        initialize(self)


class PreActivationBlock(nn.Module):
    """BN-ReLU-conv twice, around a shortcut that starts behind the first activation."""

    def __init__(self, channels: int, size: int, stride: int, norm: str) -> None:
        super().__init__()
        self.norm1 = make_normalization(norm, channels)
        self.conv1 = nn.Conv2d(channels, size, 3, stride, padding=1, bias=False)
        self.norm2 = make_normalization(norm, size)
        self.conv2 = nn.Conv2d(size, size, 3, padding=1, bias=False)
        self.shortcut = (
            nn.Conv2d(channels, size, 1, stride, bias=False)
            if stride != 1 or channels != size
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """The block's sum."""
        active = F.relu(self.norm1(x))
        around = x if self.shortcut is None else self.shortcut(active)
        inner: Tensor = self.conv2(F.relu(self.norm2(self.conv1(active))))
        return inner + around


class PreResNet(nn.Module):
    """A 3×3 stem, four stages of pre-activation blocks, and a linear layer."""

    def __init__(
        self,
        blocks: Sequence[int],
        in_channels: int = 3,
        num_classes: int = 10,
        width: float = 1.0,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        sizes = scale_widths(HIDDEN, width)
        self.stem = nn.Conv2d(in_channels, sizes[0], 3, padding=1, bias=False)
        layers: list[nn.Module] = []
        channels = sizes[0]
        for stage, (size, count) in enumerate(zip(sizes, blocks, strict=True)):
            for i in range(count):
                stride = 2 if stage and i == 0 else 1
                layers.append(PreActivationBlock(channels, size, stride, norm))
                channels = size
        self.blocks = nn.Sequential(*layers)
        self.norm = make_normalization(norm, channels)
        self.classifier = nn.Linear(channels, num_classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        active = F.relu(self.norm(self.blocks(self.stem(x))))
        return self.classifier(active.mean((2, 3)))  # type: ignore[no-any-return]

    def reset_parameters(self) -> None:
        """Draws all initial values again."""
        reinitialize(self)
        initialize(self)


def initialize(model: nn.Module) -> None:
    """As the public code does: PyTorch's defaults, but no bias in the linear layer."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
