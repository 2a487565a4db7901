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

from fedquilt.data import to_examples
from fedquilt.engines.worker import retain_freed_memory
from fedquilt.federation.client import Recipe, Task
from fedquilt.models import make_model
from fedquilt.structure.create import trace_structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import named_tensors
from fedquilt.training.bilevel import Bilevel
from fedquilt.training.context import ClientContext
from fedquilt.training.gating import find_gateable_groups
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.settings import LocalTraining
from fedquilt.training.tracking import without_running_stats

BATCH = 10
LSTM_LENGTH = 80


def ways(
    net: nn.Module, x: Tensor, num_classes: int, exclude: tuple[str, ...], settings: LocalTraining
) -> dict[str, Callable[[], object]]:
    """A client's whole work: by SGD on all but a tenth of its data, by ADDS on all of them."""
    structure = trace_structure(net, x[:2], exclude=exclude)
    groups = find_gateable_groups(net, structure, x[:2])
    data = to_examples((x, torch.randint(num_classes, (len(x),))))
    rest = data.select(torch.arange(len(x) // 10, len(x)))
    params = {n: t.detach().clone() for n, t in named_tensors(net).items()}

    def work(recipe: Recipe, examples: object) -> Callable[[], object]:
        bench = ClientContext(net, structure, {"train": {0: examples}})  # type: ignore[dict-item]
        return lambda: recipe.run(Task(0, (Subnet(),), params, recipe, seed=0), bench).update

    return {
        "sgd": work(LocalSGD(settings, settings.lr), rest),
        "slimming": work(Bilevel(settings, settings.lr, groups, keep_fraction=0.9), data),
        "lrp": work(
            Bilevel(settings, settings.lr, groups, keep_fraction=0.9, importance="lrp"), data
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batches", type=int, default=9, help="of an epoch")
    options = parser.parse_args()
    retain_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    settings = LocalTraining(lr=0.01, epochs=options.epochs, batch_size=BATCH, max_grad_norm=None)
    count = options.batches * BATCH * 10 // 9
    nets = {
        "adds-vgg": (torch.rand(count, 1, 28, 28), 62, ()),
        "char-lstm": (torch.randint(80, (count, LSTM_LENGTH)), 80, ("lstm",)),
    }
    print(f"{'net':<10} {'way':<9} {'ms a step':>9} {'ratio':>6}")
    for name, (x, num_classes, exclude) in nets.items():
        steps = ways(without_running_stats(make_model(name, {})), x, num_classes, exclude, settings)
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
