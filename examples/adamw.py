"""How do I train with AdamW and a warm-up?

Name any optimizer of torch.optim, with its own settings. A schedule gives the learning rate of each
round: here it rises for two rounds and then falls along half a cosine. Clients have models of
widths 1, 1/2 and 1/4 (HeteroFL).
"""

import torch

import fedquilt as fq


def main() -> None:
    torch.manual_seed(0)  # of the model's first weights
    digits = fq.load_dataset("digits")
    clients = fq.make_clients(
        digits.train,
        test=digits.test,
        partition="dirichlet:0.5",
        count=6,
        budgets=[1, 0.5, 0.25],
    )
    local_training = fq.LocalTraining(
        optimizer={"name": "adamw", "betas": (0.9, 0.98)},
        lr=0.01,
        weight_decay=0.01,
        schedule=["warmup:2", "cosine"],
        epochs=1,
        batch_size=20,
    )
    rates = [round(local_training.lr_at(number, rounds=6), 5) for number in range(6)]
    print("learning rate of each round:", rates)
    run = fq.train(
        fq.make_model("heterofl-cnn", {"width": 0.125}),
        digits.example,
        fq.HeteroFL(local_training, fraction=1.0),
        clients,
        rounds=6,
        workers=0,
    )
    print(run)


if __name__ == "__main__":
    main()
