"""What is taken away, against what was trained: scales, statistics, single examples.

    PYTHONPATH=src python benchmarks/taken_away.py
    PYTHONPATH=../other/src python benchmarks/taken_away.py     # another version

HeteroFL on the built-in MLP, which has no normalisation: the accuracy of the modules that
``customize`` gives, and of the same subnets with the scale that they are trained with. Then methods
that normalise every batch by itself in training: the exported ONNX file on all test images at once
and one at a time, and ``evaluate`` on test images in their order and sorted by class.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.data import load_dataset, to_examples
from fedquilt.models import make_model
from fedquilt.structure.cut import build_module
from fedquilt.training.scaler import scale_outputs

WIDTHS = (1.0, 0.5, 0.25, 0.125, 0.0625)
BATCHES = ("adds", "apfl", "feddrop", "sheterofl", "stc")
LOCAL = {"epochs": 2}


def percent(answers: Tensor, labels: Tensor) -> str:
    return f"{100 * (answers.argmax(1) == labels).float().mean().item():.1f}"


def train(name: str, model: nn.Module, rounds: int) -> tuple[fq.Run, Any]:
    """A run on the embedded digits, and their test images."""
    source = load_dataset("digits")
    people = fq.make_clients(source.train, test=source.test, count=10, budgets=list(WIDTHS), seed=0)
    local_training = (
        fq.LocalTraining(max_grad_norm=None, **LOCAL)
        if name == "stc"
        else fq.LocalTraining(**LOCAL)
    )
    settings = {} if name != "apfl" else {"warm_up": 0.2}
    method = fq.METHODS[name](local_training=local_training, fraction=1.0, **settings)
    run = fq.train(model, source.example, method, people, rounds, seed=0)
    return run, source.test


def show_scales(rounds: int) -> None:
    torch.manual_seed(0)
    run, test = train("heterofl", make_model("mlp", {"image_size": 8}), rounds)
    x, y = test.batch(torch.arange(len(test)))
    print("| width | taken away | as trained |\n| --- | --- | --- |")
    for width in WIDTHS:
        (subnet,) = run.method.ensemble(run.setup, run.state, width)
        net = build_module(run.setup.model, run.setup.structure, subnet, run.state.params)
        with torch.no_grad(), scale_outputs(net.train(), run.setup.structure):  # it has no dropout
            trained = percent(net(x), y)
            print(f"| {width:g} | {percent(run.customize(width=width)(x), y)} | {trained} |")


def show_statistics(rounds: int) -> None:
    print("| method | all at once | one at a time | evaluate | sorted by class |")
    print("| --- | --- | --- | --- | --- |")
    for name in BATCHES:
        torch.manual_seed(0)
        run, test = train(name, make_model("heterofl-cnn", {"width": 0.5}), rounds)
        x, y = test.batch(torch.arange(len(test)))
        with tempfile.TemporaryDirectory() as folder:
            path = fq.export(run.customize(), Path(folder) / "net.onnx")
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            feed = session.get_inputs()[0].name
            many = session.run(None, {feed: x.numpy()})[0]
            alone = [session.run(None, {feed: one[None].numpy()})[0][0] for one in x]
        order = y.argsort(stable=True)
        source = load_dataset("digits")
        people = fq.make_clients(
            source.train,
            test=to_examples((x[order], y[order])),
            count=10,
            budgets=list(WIDTHS),
            seed=0,
        )
        ordered = run.evaluate(people)[0].accuracy if name != "apfl" else None
        at_once, single = percent(torch.tensor(many), y), percent(torch.tensor(alone), y)
        in_order = "" if ordered is None else f"{100 * ordered:.1f}"
        print(
            f"| {name} | {at_once} | {single} | {100 * (run.scores[0].accuracy or 0):.1f} | "
            f"{in_order} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    show_scales(given.rounds)
    show_statistics(given.rounds)


if __name__ == "__main__":
    main()
