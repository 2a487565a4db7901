"""The bits of every method's weights after a few rounds, to compare two checkouts.

    PYTHONPATH=src python benchmarks/same_bits.py --out here.json
    PYTHONPATH=../other/src python benchmarks/same_bits.py --out there.json
    python benchmarks/same_bits.py --compare here.json there.json

Every setting that matters is spelled out, so that other defaults do not count as other bits. What
is hashed are the weights: statistics of normalisation are found in another way by some versions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedquilt as fq
from fedquilt.data.load import load
from fedquilt.models import make

BUDGETS = [1, 0.5, 0.25, 0.25, 0.125]
DEPTHS = [1, 0.7, 0.7, 0.4, 0.4]  # of three exits
LOCAL: dict[str, Any] = {
    "lr": 0.05,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "epochs": 1,
    "batch_size": 20,
    "clip": 1.0,
}
OTHERS: dict[str, dict[str, Any]] = {  # beside the optimiser and the fraction
    "apfl": {"warm_up": 0.4, "nets": 3},
    "nefl": {"gammas": (0.1, 0.5, 1.0), "tolerance": 0.5},
    "depthfl": {"at": ("features.3", "features.7")},
    "fedavg-at": {"steps": 2},
    "fedavg-oat": {"steps": 2},
    "splitmix": {"base": 0.125, "together": False},
}


def train(name: str, workers: int, rounds: int) -> str:
    """The hash of what a method has trained."""
    source = load("digits")
    people = fq.clients(
        source.train,
        test=source.test,
        partition="classes:5",
        count=10,
        budgets=DEPTHS if name == "depthfl" else BUDGETS,
        seed=1,
    )
    torch.manual_seed(0)
    model: nn.Module = make("heterofl-cnn", {"width": 0.25})
    settings = OTHERS.get(name, {})
    method = fq.METHODS[name](optimiser=fq.Optimiser(**LOCAL), fraction=0.5, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = fq.train(model, source.example, method, people, rounds, seed=3, workers=workers)
    digest = hashlib.sha256()
    for tensor_name, tensor in sorted(run.state.params.items()):
        if not any(word in tensor_name for word in ("running_", "num_batches_tracked")):
            digest.update(tensor_name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    """Trains every method, or compares two files."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2)
    parser.add_argument("--methods", nargs="*", default=sorted(fq.METHODS))
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if given.compare:
        one, other = (json.loads(path.read_text()) for path in given.compare)
        print("| method | workers | same bits |\n| --- | --- | --- |")
        for key in one:
            method, workers = key.split()
            print(f"| {method} | {workers} | {'yes' if one[key] == other.get(key) else 'NO'} |")
        return
    hashes = {}
    for name in given.methods:
        for workers in given.workers:
            hashes[f"{name} {workers}"] = train(name, workers, given.rounds)
            print(name, workers, hashes[f"{name} {workers}"][:16], flush=True)
            if given.out:
                given.out.write_text(json.dumps(hashes, indent=1))


if __name__ == "__main__":
    main()
