"""How do I say what my devices can afford?

Budgets are widths, or physical limits: parameters, MACs of one example, bytes of memory in a
training step, bytes to send. Each client trains the widest part of the model within its limits.
"""

import torch

import fedquilt as fq
from fedquilt.data import load_dataset
from fedquilt.models import make_model

PHONE = {"memory": 200_000}
SENSOR = {"params": 3_000, "upload": 20_000}


def main() -> None:
    digits = load_dataset("digits")
    model = make_model("heterofl-cnn", {"width": 0.25})
    population = fq.make_clients(
        digits.train,
        test=digits.test,
        partition="classes:4",
        count=10,
        budgets=[1, PHONE, SENSOR],  # a third of the clients each
    )
    run = fq.train(
        model=model,
        example=torch.zeros(1, 1, 8, 8),
        method=fq.HeteroFL(fq.LocalTraining(epochs=1), fraction=0.5),
        clients=population,
        rounds=4,
        workers=0,
    )
    for score in run.scores:
        subnet = run.setup.structure.subnet(score.width)
        price = fq.compute_cost(run.setup.model, run.setup.structure, subnet, run.setup.example)
        print(f"width {score.width:.3f}: {price}, accuracy {score.accuracy:.2f}")


if __name__ == "__main__":
    main()
