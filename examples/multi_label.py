"""How do I train with several labels for each example?

Each signal may hold a slow, a middle and a fast wave, in any combination: three yes-or-no answers,
with binary cross entropy as the loss. Split-Mix and ADDS train it, too.
"""

import torch
from torch import nn

import fedquilt as fq

TRAINING = fq.LocalTraining(lr=0.05, epochs=2, batch_size=16)
METHODS = {
    "HeteroFL": fq.HeteroFL(TRAINING, fraction=1.0),
    "Split-Mix": fq.SplitMix(TRAINING, fraction=1.0, base=0.25, stacked=False),
    "ADDS": fq.ADDS(TRAINING, fraction=1.0),
}


def signals(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count, 3), generator=generator).float()
    time = torch.linspace(0, 6.28, 32)
    waves = torch.stack([torch.sin(time * speed) for speed in (1, 3, 7)])
    return labels @ waves + 0.3 * torch.randn(count, 32, generator=generator), labels


def main() -> None:
    clients = fq.make_clients(
        signals(240, seed=0), test=signals(80, seed=1), count=6, budgets=[1, 0.5, 0.25]
    )
    example = torch.zeros(1, 32)
    for name, method in METHODS.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 3))
        run = fq.train(
            model, example, method, clients, rounds=5, loss="bce", metrics=["f1"], workers=0
        )
        best = run.scores[0]
        print(f"{name}: F1 {best.value:.2f} with {best.params:,} parameters")


if __name__ == "__main__":
    main()
