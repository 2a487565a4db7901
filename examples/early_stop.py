"""How do I keep the best model, and stop when it gets no better?

Clients hold back a fifth of their examples. After every second round the model is compared on
these. The run stops after three comparisons without a better model, and keeps the best one.
"""

import torch

import fedquilt as fq


def main() -> None:
    torch.manual_seed(0)  # of the model's first weights
    digits = fq.load_dataset("digits")
    clients = fq.make_clients(
        digits.train,
        test=digits.test,
        partition="classes:3",
        count=6,
        budgets=[1, 0.5, 0.25],
        validation=0.2,
    )

    def report(event: object) -> None:
        if isinstance(event, fq.Evaluated) and not event.is_final:
            print(f"round {event.round}: validation {event.validation:.3f}")

    run = fq.train(
        fq.make_model("heterofl-cnn", {"width": 0.125}),
        digits.example,
        fq.HeteroFL(fq.LocalTraining(lr=0.05, epochs=1, batch_size=20), fraction=0.5),
        clients,
        rounds=30,
        workers=0,
        cadence=fq.Cadence(evaluate_every=2),
        selection=fq.Selection(keep="best", patience=3, min_delta=0.005),
        callbacks=[report],
    )
    print(f"{run.info.trained_rounds} rounds trained, kept that of round {run.info.model_round}")
    print(run)


if __name__ == "__main__":
    main()
