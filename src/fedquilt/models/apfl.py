"""The net of APFL (Luo et al., 2021, Appendix D.3): MobileNetV2 for images of 32×32.

A plain module that knows nothing of federated learning. It is Sandler et al.'s net (CVPR 2018)
with three of its five halvings of the image, as Tables 3 to 6 print it for four multipliers.
The paper names no activation: ReLU6 is Sandler et al.'s. Initial values are PyTorch's.

    multiplier           1.5           1        0.75         0.5
    parameters     4,641,482   2,236,682   1,368,234     700,490    with 10 classes
    without norms  4,591,386   2,202,570   1,341,594     681,946
    MACs         194,706,944  87,976,448  59,310,080  27,969,024    32×32

The paper's budgets (Table 2: 88 M and 2.2 M, 59 M and 1.3 M, 28 M and 0.7 M) are the last two rows
of its three smaller nets, rounded. So none of the three is within its own: each has too many
parameters, and the middle one too many MACs.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from fedquilt.models.initialization import reinitialize

STEM = 32
LAYERS = (  # expansion, channels, repeats, stride of the first
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def scale_channels(size: int, multiplier: float) -> int:
    """The nearest multiple of 8, at least 8, and the next one where that takes more than 10 %.

    >>> [scale_channels(24, multiplier) for multiplier in (0.5, 0.75, 1, 1.5)]
    [16, 24, 24, 40]
    """
    exact = size * multiplier
    nearest = max(8, int(exact + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * exact else nearest + 8


def make_convolution(
    channels: int, size: int, kernel: int = 1, stride: int = 1, *, groups: int = 1
) -> list[nn.Module]:
    """A convolution that keeps the image's size but for its stride, and batch normalization."""
    return [
        nn.Conv2d(channels, size, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(size),
    ]


class Bottleneck(nn.Module):
    """Expands, convolves every channel by itself, and projects without rectifying.

    Where the shape stays, the input is added.
    """

    def __init__(self, channels: int, size: int, expansion: int, stride: int) -> None:
        super().__init__()
        inside = expansion * channels
        expand = [] if expansion == 1 else [*make_convolution(channels, inside), nn.ReLU6()]
        self.branch = nn.Sequential(
            *expand,
            *make_convolution(inside, inside, 3, stride, groups=inside),
            nn.ReLU6(),
            *make_convolution(inside, size),
        )
        self.is_residual = stride == 1 and channels == size

    def forward(self, x: Tensor) -> Tensor:
        """The block's sum, or its branch alone."""
        inner: Tensor = self.branch(x)
        return x + inner if self.is_residual else inner


class MobileNetV2(nn.Module):
    """A 3×3 stem, seven layers of bottlenecks, a 1×1 convolution and a linear layer.

    ``multiplier`` scales all channels but the ``head``, the inputs of the linear layer: 1280 at
    every multiplier, where Sandler et al. widen it above 1.
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 10,
        multiplier: float = 1.5,
        head: int = 1280,
        stem_stride: int = 1,
    ) -> None:
        super().__init__()
        if not 0 < multiplier < math.inf:
            raise ValueError(
                f"multiplier is a positive number, got {multiplier}; write 0.5 for half as wide"
            )
        counts = (in_channels, num_classes, head, stem_stride)
        if min(counts) < 1:
            raise ValueError(
                "in_channels, num_classes, head and stem_stride are at least 1, got "
                f"{', '.join(map(str, counts))}"
            )
        channels = scale_channels(STEM, multiplier)
        self.stem = nn.Sequential(
            *make_convolution(in_channels, channels, 3, stem_stride), nn.ReLU6()
        )
        blocks = []
        for expansion, base, repeats, first in LAYERS:
            size = scale_channels(base, multiplier)
            for i in range(repeats):
                blocks.append(Bottleneck(channels, size, expansion, stride=1 if i else first))
                channels = size
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(*make_convolution(channels, head), nn.ReLU6())
        self.classifier = nn.Linear(head, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.head(self.blocks(self.stem(x)))
        return self.classifier(x.mean((2, 3)))  # type: ignore[no-any-return]

    def reset_parameters(self) -> None:
        """Draws all initial values again."""
        reinitialize(self)
