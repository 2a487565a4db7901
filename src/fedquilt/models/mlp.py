"""A multilayer perceptron, as LG-FedAvg uses on MNIST (Liang et al., 2020)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor, nn

from fedquilt.models.initialization import reinitialize


class MLP(nn.Module):
    """Linear layers with ReLU between them, on flattened images."""

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 10,
        image_size: int = 28,
        hidden: Sequence[int] = (512, 256, 256, 128),
    ) -> None:
        super().__init__()
        sizes = [in_channels * image_size**2, *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in itertools.pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(sizes[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.classifier(self.features(x))  # type: ignore[no-any-return]

    def reset_parameters(self) -> None:
        """Draws all initial values again."""
        reinitialize(self)
