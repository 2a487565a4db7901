"""How do I bring data that already lies with its clients, one Dataset each?

A client is a map-style torch Dataset of (input, label). Here each one is a sensor with a noise of
its own, with signals to learn from and others to test on; the server holds nothing.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import fedquilt as fq

CLASSES, LENGTH = 3, 32


class Sensor(Dataset[tuple[Tensor, int]]):
    """Sine waves of three frequencies, as one noisy sensor sees them."""

    def __init__(self, number: int, seed: int, count: int = 60) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(CLASSES, (count,), generator=generator)
        time = torch.linspace(0, 6.28, LENGTH)
        waves = torch.sin(time * (1 + self.targets[:, None]))
        noise = torch.randn(count, LENGTH, generator=generator)
        self.signals = waves + 0.2 * (1 + number) * noise

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.signals[index], int(self.targets[index])


def main() -> None:
    model = nn.Sequential(
        nn.Linear(LENGTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)
    )
    run = fq.train(
        model=model,
        example=torch.zeros(1, LENGTH),
        method=fq.HeteroFL(fq.LocalTraining(lr=0.05), fraction=1.0),
        clients=fq.make_clients(
            [Sensor(number, seed=number) for number in range(6)],
            test=[Sensor(number, seed=100 + number) for number in range(6)],
            budgets=[1, 0.5],
        ),
        rounds=5,
        workers=0,
    )
    for score in run.scores:
        print(f"width {score.width:g}: local accuracy {score.local_accuracy:.2f}")


if __name__ == "__main__":
    main()
