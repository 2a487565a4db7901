"""The classifiers of exits, as in the code of DepthFL (Zhang et al., "SCAN", NeurIPS 2019)."""

from __future__ import annotations

import itertools

import torch.nn.functional as F
from torch import Tensor, nn

from fedquilt.errors import StructureError

Shape = tuple[int, ...]


def make_head(features: Shape, last: Shape, logits: Shape) -> nn.Module:
    """The classifier of an exit.

    Args:
        features: The shape of the features at the exit, with the batch.
        last: The shape of the last images in the net; empty if it has none.
        logits: The shape of the net's logits.
    """
    if len(features) == 4 and len(logits) == 2:
        return ImageHead(features[1:], (last or features)[1:], logits[-1])
    if len(features) in (2, 3) and 2 <= len(logits) <= len(features):
        return TokenHead(features[-1], logits[-1], pooled=len(logits) < len(features))
    raise StructureError(
        "an exit makes logits of images (batch, channels, height, width) or of tokens (batch, "
        f"tokens, channels); here it would make {logits} of {features}; name other modules"
    )


class SeparableConv(nn.Sequential):
    """Two separable convolutions, the first with a stride, the second to ``size`` channels."""

    def __init__(self, channels: int, size: int, stride: int) -> None:
        layers: list[nn.Module] = []
        for step, out in ((stride, channels), (1, size)):
            layers += [
                nn.Conv2d(channels, channels, 3, step, 1, groups=channels, bias=False),
                nn.Conv2d(channels, out, 1, bias=False),
                nn.BatchNorm2d(out),
                nn.ReLU(),
            ]
        super().__init__(*layers)


class ImageHead(nn.Module):
    """Attention, a bottleneck that makes images as small and deep as the net's last, a classifier.

    ``features`` and ``last`` are (channels, height, width). Each step of the bottleneck halves the
    images; channels grow evenly. Where images are as small as the last already, it is one
    step that does not halve them.
    """

    def __init__(self, features: Shape, last: Shape, num_classes: int) -> None:
        super().__init__()
        channels, *size = features
        halvings = max(map(_count_halvings, size, last[1:]))
        steps = max(halvings, 1)
        growth = last[0] / channels
        sizes = [round(channels * growth ** (step / steps)) for step in range(steps + 1)]
        self.attention = nn.Sequential(
            SeparableConv(channels, channels, 2), nn.BatchNorm2d(channels), nn.ReLU()
        )
        self.bottleneck = nn.Sequential(
            *(SeparableConv(a, b, 2 if halvings else 1) for a, b in itertools.pairwise(sizes))
        )
        self.classifier = nn.Linear(sizes[-1], num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        seen = F.interpolate(self.attention(x), x.shape[-2:], mode="bilinear")
        return self.classifier(self.bottleneck(x * seen.sigmoid()).mean((2, 3)))  # type: ignore[no-any-return]


def _count_halvings(size: int, last: int) -> int:
    """How often a size is halved, rounded up, until it is the last one.

    >>> _count_halvings(32, 4), _count_halvings(7, 4), _count_halvings(4, 4)
    (3, 1, 0)
    """
    return 0 if size <= last else 1 + _count_halvings((size + 1) // 2, last)


class TokenHead(nn.Module):
    """Normalized tokens, their mean, a classifier; or a classifier for each of them."""

    def __init__(self, channels: int, num_classes: int, *, pooled: bool) -> None:
        super().__init__()
        self.norm, self.pooled = nn.LayerNorm(channels), pooled
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.norm(x)
        return self.classifier(x.mean(1) if self.pooled else x)  # type: ignore[no-any-return]
