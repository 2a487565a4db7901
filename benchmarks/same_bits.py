"""The bits of every method after a few rounds, to compare two checkouts.

    PYTHONPATH=src python benchmarks/same_bits.py --out here.json
    PYTHONPATH=../other/src python benchmarks/same_bits.py --out there.json
    python benchmarks/same_bits.py --compare here.json there.json

Run the same copy of this script for both checkouts. Every setting that matters is spelled out, so
that other defaults do not count as other bits. All tensors of the global model are hashed. Names
that a checkout calls otherwise are in ``FORMER_NAMES``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing
import warnings
from pathlib import Path
from typing import Any

import torch

import fedquilt as fq

FORMER_NAMES = {  # as checkouts up to e0fd4af spell them
    "LocalTraining": "Optimiser",
    "make_clients": "clients",
    "load_dataset": "load",
    "make_model": "make",
    "local_training": "optimiser",
    "max_grad_norm": "clip",
    "exit_modules": "at",
    "stacked": "together",
}
IS_FORMER = not hasattr(fq, "LocalTraining")

BUDGETS = [1, 0.5, 0.25, 0.25, 0.125]
DEPTHS = [1, 0.7, 0.7, 0.4, 0.4]  # of three exits
LOCAL: dict[str, Any] = {
    "lr": 0.05,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "epochs": 1,
    "batch_size": 20,
    "max_grad_norm": 1.0,
}
OTHERS: dict[str, dict[str, Any]] = {  # beside local training and the fraction
    "apfl": {"warm_up": 0.4, "nets": 3},
    "nefl": {"gammas": (0.1, 0.5, 1.0), "tolerance": 0.5},
    "depthfl": {"exit_modules": ("features.3", "features.7")},
    "fedavg-at": {"steps": 2},
    "fedavg-oat": {"steps": 2},
    "splitmix": {"base": 0.125, "stacked": False},
}


def spell(name: str) -> str:
    """The name as this checkout has it."""
    return FORMER_NAMES.get(name, name) if IS_FORMER else name


def find(module: str, name: str) -> Any:
    """A function or class of this checkout."""
    return getattr(importlib.import_module(module), spell(name))


def spell_all(settings: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments as this checkout has them."""
    return {spell(name): value for name, value in settings.items()}


def train(name: str, workers: int, rounds: int) -> str:
    """The hash of what a method has trained."""
    digits = find("fedquilt.data.load", "load_dataset")("digits")
    clients = find("fedquilt", "make_clients")(
        digits.train,
        test=digits.test,
        partition="classes:5",
        count=10,
        budgets=DEPTHS if name == "depthfl" else BUDGETS,
        seed=1,
    )
    torch.manual_seed(0)
    model = find("fedquilt.models", "make_model")("heterofl-cnn", {"width": 0.25})
    local_training = find("fedquilt", "LocalTraining")(**spell_all(LOCAL))
    settings = {"local_training": local_training, "fraction": 0.5, **OTHERS.get(name, {})}
    method = fq.METHODS[name](**spell_all(settings))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = fq.train(model, digits.example, method, clients, rounds, seed=3, workers=workers)
    digest = hashlib.sha256()
    for tensor_name, tensor in sorted(run.state.params.items()):
        digest.update(tensor_name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    """Trains every method, or compares two files."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2)
    parser.add_argument("--methods", nargs="*", default=sorted(fq.METHODS))
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--start-method", choices=("fork", "spawn"), help="of worker processes")
    given = parser.parse_args()
    if given.start_method:
        multiprocessing.set_start_method(given.start_method)
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
