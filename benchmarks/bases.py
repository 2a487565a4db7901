"""A client's eight x1/8 bases against one x1 net of the same family, on the same batches.

    python benchmarks/bases.py [--batches 20] [--batch-size 32] [--save]
    python benchmarks/bases.py --model resnet20 --base 0.25

One thread. Ways take turns within one run; printed are milliseconds of processor time a batch
(medians) and the ratio to the wide net's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from record import Recorder, Table
from torch import Tensor

from fedquilt.engines.worker import retain_freed_memory
from fedquilt.models import make_model
from fedquilt.structure.layout import use_channels_last
from fedquilt.training.objectives import PlainLoss
from fedquilt.training.settings import LocalTraining
from fedquilt.training.stack.program import find_program
from fedquilt.training.tracking import without_running_stats
from fedquilt.training.trainer import make_trainer

Step = Callable[[Tensor, Tensor], object]


def ways(model: str, base: float) -> dict[str, Step]:
    """How a batch is learned from: by the wide net, and by the bases in several ways."""
    settings, generator = LocalTraining(max_grad_norm=None), torch.Generator()

    def step(count: int, width: float, *, stacked: bool = False, rows: bool = True) -> Step:
        nets = [
            without_running_stats(make_model(model, {"width": width, "in_channels": 3})).train()
            for _ in range(count)
        ]
        for net in nets if rows else ():
            use_channels_last(net)
        inputs = (torch.rand(4, 3, 28, 28),)
        program = find_program(nets[0], lambda: inputs) if stacked else None
        trained = make_trainer(nets, settings.optimizer_at(0.01), PlainLoss(), program=program)
        return lambda x, y: trained.step((x, y), generator)

    count = round(1 / base)
    return {
        "x1": step(1, 1.0),
        "bases in turn": step(count, base),
        "bases in turn, channels first": step(count, base, rows=False),
        "bases together": step(count, base, stacked=True),
        "bases together, channels first": step(count, base, stacked=True, rows=False),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--model", default="digits-cnn", help="of the zoo, with an option width")
    parser.add_argument("--base", type=float, default=0.125, help="width of a base")
    parser.add_argument("--save", action="store_true", help="store the figures")
    options = parser.parse_args()
    recorder = Recorder("bases", options.save)
    retain_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    steps = ways(options.model, options.base)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options.batches + 2):
        x = torch.rand(options.batch_size, 3, 28, 28)
        y = torch.randint(10, (options.batch_size,))
        for name, step in steps.items():
            started = time.process_time()
            step(x, y)
            if number > 1:
                seconds[name].append(time.process_time() - started)
    wide = statistics.median(seconds["x1"])
    rows = []
    for name, times in seconds.items():
        middle = statistics.median(times)
        rows.append((name, f"{1000 * middle:.2f}", f"{middle / wide:.3f}"))
    title = f"{round(1 / options.base)} bases of width {options.base:g} against one net of width 1"
    note = f"{options.model}, one thread; target for 8 bases of digits-cnn: 0.30 or less."
    recorder.finish(Table(title, ("way", "ms a batch", "ratio"), rows, (note,)))


if __name__ == "__main__":
    main()
