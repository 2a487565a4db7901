"""How do I train a model with several inputs, from examples that are dicts?

Each example is a dict: a picture of a digit, another number, and as the label their sum. Entries go
to the arguments of ``forward`` with the same names. APFL finds an architecture for each client.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import fedquilt as fq


class Sums(Dataset[dict[str, Tensor]]):
    """A digit as a picture, a number, and their sum."""

    def __init__(self, rows: range) -> None:
        digits = fq.load_dataset("digits").train.select(torch.tensor(rows))
        self.images, self.labels = digits.batch(torch.arange(len(rows)))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        number = torch.tensor([float(row % 5)])
        return {"image": self.images[row], "number": number, "label": self.labels[row] + row % 5}


class Adder(nn.Module):
    """Looks at the picture, and adds."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())
        self.count, self.out = nn.Linear(1, 64), nn.Linear(64, 1)

    def forward(self, image: Tensor, number: Tensor) -> Tensor:
        return self.out(torch.relu(self.look(image) + self.count(number)))


def main() -> None:
    clients = fq.make_clients(
        Sums(range(400)), test=Sums(range(400, 500)), count=6, budgets=[1, 0.5, 0.25]
    )
    example = {"image": torch.zeros(1, 1, 8, 8), "number": torch.zeros(1, 1)}
    training = fq.LocalTraining(lr=0.1, epochs=2)
    methods = {"HeteroFL": fq.HeteroFL(training), "APFL": fq.APFL(training, warm_up=0.4)}
    for name, method in methods.items():
        torch.manual_seed(0)
        run = fq.train(
            Adder(), example, method, clients, rounds=12, loss="mse", metrics=["mae"], workers=0
        )
        print(f"{name}: off by {run.scores[0].user_value:.2f} in the mean over clients")


if __name__ == "__main__":
    main()
