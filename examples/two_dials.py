"""How do I turn size and robustness after training, on the same model?

Split-Mix trains slim base nets instead of one wide one; with ``robust`` each of them has two kinds
of normalisation, for clean and for attacked images. Both dials are turned in place.
"""

import torch

import fedquilt as fq
from fedquilt.data import load_dataset
from fedquilt.models import make_model


def main() -> None:
    digits = load_dataset("digits")
    run = fq.train(
        model=make_model("heterofl-cnn", {"width": 0.5}),
        example=torch.zeros(1, 1, 8, 8),
        method=fq.SplitMix(
            fq.LocalTraining(lr=0.1, epochs=2, batch_size=32, max_grad_norm=None),
            base=0.25,
            robust=True,
            epsilon=0.2,
            steps=2,
        ),
        clients=fq.make_clients(digits.train, test=digits.test, count=4, budgets="4-2-1"),
        rounds=4,
        workers=0,
    )
    model = run.customize()  # all bases; an ordinary nn.Module
    images, labels = digits.test.batch(torch.arange(100))
    for width in (0.25, 1.0):
        for robustness in (0.0, 0.5, 1.0):
            with model.at_setting(width=width, robustness=robustness):
                right = (model(images).argmax(1) == labels).float().mean()
            print(f"width {width}, robustness {robustness}: {right:.0%} right")
    small = run.customize(width=0.25, robustness=0.5)  # takes one base only
    print(f"the smallest has {sum(p.numel() for p in small.parameters()):,} parameters")


if __name__ == "__main__":
    main()
