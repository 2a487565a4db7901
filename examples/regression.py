"""How do I train a regressor over clients of three sizes?

The data are scikit-learn's diabetes: ten numbers of a patient, and how far the disease went in a
year. HeteroFL and NeFL train the same network, with the mean squared error as the loss.
"""

import torch
from sklearn.datasets import load_diabetes
from torch import nn

import fedquilt as fq

BUDGETS = [1, 0.5, 0.25]
TRAINING = fq.LocalTraining(lr=0.05, epochs=2, batch_size=16)
METHODS = {
    "HeteroFL": fq.HeteroFL(TRAINING, fraction=1.0),
    "NeFL": fq.NeFL(TRAINING, fraction=1.0, gammas=(0.25, 0.5, 1.0), tolerance=0.1),
}


def main() -> None:
    patients = load_diabetes()
    inputs = torch.tensor(patients.data, dtype=torch.float32) * 20  # about one, not about 0.05
    targets = torch.tensor(patients.target, dtype=torch.float32) / 100
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    train, test = order[:360], order[360:]
    clients = fq.make_clients(
        (inputs[train], targets[train]),
        test=(inputs[test], targets[test]),
        count=6,
        budgets=BUDGETS,
    )
    for name, method in METHODS.items():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
        )
        task = {"loss": "mse", "metrics": ["mae", "r2"]}
        run = fq.train(model, inputs[:1], method, clients, rounds=8, workers=0, **task)
        print(name)
        for score in run.scores:
            print(f"  size {score.width:g}: mae {score.value:.2f}, r2 {score.metrics['r2']:.2f}")


if __name__ == "__main__":
    main()
