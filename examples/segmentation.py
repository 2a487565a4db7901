"""How do I train a network that marks pixels?

A small U-Net learns to find the ink of scikit-learn's digits under noise: a mask for each image,
with the Dice loss. HeteroFL gives a U-Net of every width.
"""

import torch
from torch import Tensor, nn

import fedquilt as fq


class UNet(nn.Module):
    """One level down and up again, with a connection across."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.first = self._block(1, channels)
        self.down = nn.MaxPool2d(2)
        self.middle = self._block(channels, 2 * channels)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.last = self._block(2 * channels, channels)
        self.mask = nn.Conv2d(channels, 1, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Sequential:
        layers = (nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        across = self.first(x)
        deep = self.up(self.middle(self.down(across)))
        return self.mask(self.last(torch.cat([across, deep], 1)))


def main() -> None:
    digits = fq.load_dataset("digits").train
    images, _ = digits.select(torch.arange(300)).batch(torch.arange(300))
    masks = (images > images.mean()).float()
    noisy = images + 0.5 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    clients = fq.make_clients(
        (noisy[:240], masks[:240]), test=(noisy[240:], masks[240:]), count=6, budgets=[1, 0.5, 0.25]
    )
    torch.manual_seed(0)
    method = fq.HeteroFL(fq.LocalTraining(lr=0.1, epochs=1), fraction=1.0)
    run = fq.train(
        UNet(), noisy[:1], method, clients, rounds=3, loss="dice", metrics="iou", workers=0
    )
    for score in run.scores:
        print(f"width {score.width:g}: {score.params:,} parameters, IoU {score.value:.2f}")


if __name__ == "__main__":
    main()
