"""A client's step of ADDS against a plain step of SGD of the same net, on as many batches.

    python benchmarks/adds_step.py [--repeats 5] [--epochs 3] [--batches 9]

One thread. A step of ADDS is one of the shares, on validation data, and one of the weights; a
client holds back a tenth of its data for the former. By relevance (``lrp``) channels are looked at
before every epoch and at the end, which is part of the time. Ways take turns within one run;
printed are milliseconds of the processor a step, medians of whole clients, and the ratio to SGD's.
Wanted: at most 2.5.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedquilt.data.examples import as_examples
from fedquilt.engines.worker import keep_memory
from fedquilt.federation.client import Task
from fedquilt.models import make
from fedquilt.structure.groups import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.trace import named_tensors
from fedquilt.training.bilevel import Bilevel
from fedquilt.training.descent import Optimiser
from fedquilt.training.gating import gateable
from fedquilt.training.recipe import Recipe, Workbench
from fedquilt.training.sgd import SGD
from fedquilt.training.tracking import untracked

BATCH = 10
LSTM_LENGTH = 80


def ways(
    net: nn.Module, x: Tensor, num_classes: int, exclude: tuple[str, ...], settings: Optimiser
) -> dict[str, Callable[[], object]]:
    """A client's whole work: by SGD on all but a tenth of its data, by ADDS on all of them."""
    structure = Structure.trace(net, x[:2], exclude=exclude)
    groups = gateable(net, structure, x[:2])
    data = as_examples((x, torch.randint(num_classes, (len(x),))))
    rest = data.select(torch.arange(len(x) // 10, len(x)))
    params = {n: t.detach().clone() for n, t in named_tensors(net).items()}

    def work(recipe: Recipe, examples: object) -> Callable[[], object]:
        bench = Workbench(net, structure, {"train": {0: examples}})  # type: ignore[dict-item]
        return lambda: recipe.run(Task(0, (Subnet(),), params, recipe, seed=0), bench)

    return {
        "sgd": work(SGD(settings, settings.lr), rest),
        "slimming": work(Bilevel(settings, settings.lr, groups, share=0.9), data),
        "lrp": work(Bilevel(settings, settings.lr, groups, share=0.9, importance="lrp"), data),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batches", type=int, default=9, help="of an epoch")
    options = parser.parse_args()
    keep_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    settings = Optimiser(lr=0.01, epochs=options.epochs, batch_size=BATCH, clip=None)
    count = options.batches * BATCH * 10 // 9
    nets = {
        "adds-vgg": (torch.rand(count, 1, 28, 28), 62, ()),
        "char-lstm": (torch.randint(80, (count, LSTM_LENGTH)), 80, ("lstm",)),
    }
    print(f"{'net':<10} {'way':<9} {'ms a step':>9} {'ratio':>6}")
    for name, (x, num_classes, exclude) in nets.items():
        steps = ways(untracked(make(name, {})), x, num_classes, exclude, settings)
        seconds: dict[str, list[float]] = {way: [] for way in steps}
        for number in range(options.repeats + 1):
            for way, step in steps.items():
                started = time.process_time()
                step()
                if number:
                    seconds[way].append(time.process_time() - started)
        each = options.epochs * options.batches
        for way, times in seconds.items():
            ratio = statistics.median(
                [own / plain for own, plain in zip(times, seconds["sgd"], strict=True)]
            )
            print(f"{name:<10} {way:<9} {1000 * statistics.median(times) / each:9.1f} {ratio:6.2f}")


if __name__ == "__main__":
    main()
