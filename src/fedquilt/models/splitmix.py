"""The image nets of Split-Mix (Hong et al., ICLR 2022, Tables 2 and 3): a CNN and an AlexNet.

Both come from FedBN (Li et al., ICLR 2021), normalize after every layer but the last, and have no
dropout. Plain modules that know nothing of federated learning: the division by the width that
Split-Mix calls rescaling is put around them by the method. Its third net is ``preresnet18``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fedquilt.models.initialization import reinitialize


def scale_widths(sizes: Sequence[int], width: float) -> list[int]:
    """The sizes at a fraction of their full width, rounded down as the public code does."""
    narrow = [int(width * size) for size in sizes]
    if min(narrow) < 1:
        raise ValueError(
            f"width {width} leaves a layer without channels; use at least 1/{min(sizes)}"
        )
    return narrow


def make_convolution(
    channels: int, size: int, kernel: int, stride: int = 1, *, padding: int
) -> list[nn.Module]:
    """A convolution with bias, batch normalization and ReLU."""
    return [
        nn.Conv2d(channels, size, kernel, stride, padding),
        nn.BatchNorm2d(size),
        nn.ReLU(),
    ]


def make_dense(features: int, size: int) -> list[nn.Module]:
    """A linear layer, batch normalization and ReLU."""
    return [nn.Linear(features, size), nn.BatchNorm1d(size), nn.ReLU()]


class DigitsCNN(nn.Module):
    """Three 5×5 convolutions and three linear layers, for images of 28×28 (Table 2)."""

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 10,
        width: float = 1.0,
        image_size: int = 28,
    ) -> None:
        super().__init__()
        conv1, conv2, conv3, fc1, fc2 = scale_widths((64, 64, 128, 2048, 512), width)
        self.features = nn.Sequential(
            *make_convolution(in_channels, conv1, 5, padding=2),
            nn.MaxPool2d(2),
            *make_convolution(conv1, conv2, 5, padding=2),
            nn.MaxPool2d(2),
            *make_convolution(conv2, conv3, 5, padding=2),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            *make_dense(conv3 * (image_size // 4) ** 2, fc1),
            *make_dense(fc1, fc2),
            nn.Linear(fc2, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.classifier(self.features(x))  # type: ignore[no-any-return]

    def reset_parameters(self) -> None:
        """Draws all initial values again."""
        reinitialize(self)


class AlexNetBN(nn.Module):
    """AlexNet with batch normalization, for images of 256×256 (Table 3)."""

    def __init__(self, in_channels: int = 3, num_classes: int = 10, width: float = 1.0) -> None:
        super().__init__()
        conv1, conv2, conv3, conv4, fc = scale_widths((64, 192, 384, 256, 4096), width)
        self.features = nn.Sequential(
            *make_convolution(in_channels, conv1, 11, 4, padding=2),
            nn.MaxPool2d(3, 2),
            *make_convolution(conv1, conv2, 5, padding=2),
            nn.MaxPool2d(3, 2),
            *make_convolution(conv2, conv3, 3, padding=1),
            *make_convolution(conv3, conv4, 3, padding=1),
            *make_convolution(conv4, conv4, 3, padding=1),
            nn.MaxPool2d(3, 2),
            nn.AdaptiveAvgPool2d(6),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            *make_dense(conv4 * 6 * 6, fc),
            *make_dense(fc, fc),
            nn.Linear(fc, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.classifier(self.features(x))  # type: ignore[no-any-return]

    def reset_parameters(self) -> None:
        """Draws all initial values again."""
        reinitialize(self)
