"""How do I train my own model over clients of different sizes?

Any nn.Module will do: what can be cut is found by running it once on an example input.
"""

from sklearn.datasets import load_digits
from torch import Tensor, nn, relu, tensor, zeros

import fedquilt as fq


class Residual(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(2 * channels)
        self.second = nn.Conv2d(2 * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(relu(self.norm(self.first(x))))


class MyNet(nn.Module):
    """A stem, two residual blocks with a pool between them, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.blocks = nn.Sequential(Residual(16), nn.MaxPool2d(2), Residual(16))
        self.head = nn.Linear(16 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(relu(self.stem(x))).flatten(1))


def main() -> None:
    digits = load_digits()
    images = tensor(digits.images, dtype=zeros(0).dtype).unsqueeze(1) / 16
    labels = tensor(digits.target)
    run = fq.train(
        model=MyNet(),
        example=zeros(1, 1, 8, 8),
        method=fq.HeteroFL(fq.LocalTraining(lr=0.05, epochs=1), fraction=1.0),
        clients=fq.make_clients(
            (images[:1500], labels[:1500]),
            test=(images[1500:], labels[1500:]),
            partition="dirichlet:0.5",
            count=8,
            budgets=[1, 0.5, 0.25],
        ),
        rounds=3,
        workers=0,
    )
    for score in run.scores:
        print(f"width {score.width:g}: {score.params} parameters, accuracy {score.accuracy:.2f}")
    small = run.customize(width=0.25)  # an ordinary nn.Module
    print(small(images[:1]).argmax().item(), "is what the small model sees in the first image")


if __name__ == "__main__":
    main()
