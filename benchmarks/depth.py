"""What skipping blocks saves: a training step and the upload, with half of ResNet110's blocks.

    python benchmarks/depth.py [--model resnet110] [--depth 0.5] [--batch 32] [--steps 7] [--save]

One thread. The whole net and the submodel are timed in turn, so that noise falls on both; printed
are medians and ratios. Wanted: a step at least 1.8 times faster, at most 0.55 of the bytes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from record import Recorder, Table
from torch import nn

import fedquilt as fq
from fedquilt.models import make_model
from fedquilt.structure.blocks.find import find_residual_blocks
from fedquilt.structure.derive import add_block_steps
from fedquilt.structure.layout import use_channels_last
from fedquilt.structure.trace.readings import trace_once
from fedquilt.training.objectives import PlainLoss
from fedquilt.training.trainer import make_trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet110")
    parser.add_argument("--depth", type=float, default=0.5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="store the figures")
    options = parser.parse_args()
    recorder = Recorder("depth", options.save)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, example = make_model(options.model, {}), torch.zeros(1, 3, 32, 32)
    found, _ = trace_once(model, example, ())  # unchecked: this is about time
    plain = replace(found, blocks=find_residual_blocks(model))
    model, structure = add_block_steps(model, plain)
    subnets = {"whole": structure.subnet(), "shallow": structure.subnet(depth=options.depth)}
    steps = {name: step_of(model, structure, s, options.batch) for name, s in subnets.items()}
    seconds: dict[str, list[float]] = {name: [] for name in subnets}
    for _ in range(options.steps + 1):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    sent = {
        name: sum(
            t.nbytes
            for t in fq.copy_subnet_tensors(dict(model.state_dict()), structure, s).values()
        )
        for name, s in subnets.items()
    }
    skipped = len(subnets["shallow"].skipped)
    cells = [
        (name, f"{1e3 * medians[name]:.1f}", f"{sent[name] / 1e6:.2f}")
        for name in ("whole", "shallow")
    ]
    faster, part = medians["whole"] / medians["shallow"], sent["shallow"] / sent["whole"]
    notes = (
        f"A step is {faster:.2f} times faster, and {part:.3f} of the bytes travel. Targets: at "
        "least 1.8, at most 0.55.",
        f"{options.model}, {skipped} of {len(structure.blocks)} blocks skipped, batches of "
        f"{options.batch}, one thread, medians of {options.steps} steps in turn.",
    )
    recorder.finish(Table("Skipping blocks", ("", "ms a step", "MB to send"), cells, notes))


def step_of(
    model: nn.Module, structure: fq.Structure, subnet: fq.Subnet, batch: int
) -> Callable[[], object]:
    """One step of training on the same images, as a client takes it."""
    net = fq.build_module(model, structure, subnet).train()
    use_channels_last(net)
    settings = fq.LocalTraining(lr=0.01, max_grad_norm=None)
    optimizer = settings.optimizer_at(settings.lr)
    x, y = torch.rand(batch, 3, 32, 32), torch.randint(10, (batch,))
    trained = make_trainer([net], optimizer, PlainLoss())
    generator = torch.Generator()
    return lambda: trained.step((x, y), generator)


if __name__ == "__main__":
    main()
