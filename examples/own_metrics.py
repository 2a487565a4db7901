"""How do I measure models by my own metric, or by one of torchmetrics?

Clients send sums and no predictions, and the result is that of all test data in one place. Needs
``pip install 'fedquilt[metrics]'``.
"""

import torch
from torch import Tensor, nn
from torchmetrics import F1Score

import fedquilt as fq


@fq.metric(higher_is_better=True, is_fraction=True)
def among_the_best_two(output: Tensor, target: Tensor) -> Tensor:
    """One value per example: whether the label is one of the two largest logits."""
    return (output.topk(2).indices == target[:, None]).any(1).float()


def main() -> None:
    digits = fq.load_dataset("digits")
    clients = fq.make_clients(
        digits.train, test=digits.test, partition="dirichlet:0.5", count=9, budgets=[1, 0.5, 0.25]
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    run = fq.train(
        model,
        digits.example,
        fq.HeteroFL(fq.LocalTraining(epochs=2), fraction=1.0),
        clients,
        rounds=3,
        metrics=[among_the_best_two, F1Score("multiclass", num_classes=10, average="macro")],
        workers=0,
    )
    print(run)  # by the first metric
    for score in run.scores:
        values = ", ".join(f"{name} {value:.3f}" for name, value in score.metrics.items())
        print(f"width {score.width:g}: {values}")


if __name__ == "__main__":
    main()
