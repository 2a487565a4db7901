"""What ε costs: HeteroFL and FedAvg with differential privacy, 1,000 clients of 50 images each.

    python benchmarks/privacy.py --phase search     # settings, on images held back from training
    python benchmarks/privacy.py --phase test --seeds 0 1 2

Half of the clients can afford the whole net, half a net of half the width. The last sixth of the
training images is never trained on. The search scores HeteroFL on it, with one seed, and takes for
each ε the clipping norm and learning rate with the best mean accuracy over the sizes. The test
phase trains all methods with these and other seeds, and scores on the test images. Writes one line
of JSON for each run. What is in ``--out`` already is not computed again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import fedquilt as fq

CLIENTS, FRACTION, DELTA = 1000, 0.1, 1e-4
SEARCH_SEED = 100
EPSILONS = (1.0, 4.0, 8.0, None, "none")  # None: clipped, without noise; "none": neither
TRIED: dict[Any, tuple[tuple[float | None, float], ...]] = {  # clipping norms and learning rates
    1.0: ((0.1, 0.2), (0.2, 0.2), (0.4, 0.2), (0.2, 0.4)),
    4.0: ((0.2, 0.2), (0.4, 0.2), (0.8, 0.2), (0.4, 0.4)),
    8.0: ((0.2, 0.2), (0.4, 0.2), (0.8, 0.2), (0.4, 0.4)),
    None: ((0.8, 0.2), (1.6, 0.2), (0.8, 0.4), (1.6, 0.4)),
    "none": ((None, 0.1), (None, 0.2), (None, 0.4), (None, 0.8)),
}
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "heterofl": (fq.HeteroFL, {}),
    "fedavg": (fq.FedAvg, {}),
    "fedavg, width 0.5": (fq.FedAvg, {"width": 0.5}),
}
Result = dict[str, Any]


def make_privacy(epsilon: float | str | None, clip: float | None) -> fq.Privacy | None:
    """The privacy of a run; ``"none"``: none at all."""
    if epsilon == "none":
        return None
    assert clip is not None
    if epsilon is None:
        return fq.Privacy(noise_multiplier=0.0, clip=clip, delta=DELTA)
    return fq.Privacy(epsilon=float(epsilon), clip=clip, delta=DELTA)


def run_one(
    source: Any, phase: str, case: tuple[str, Any, float | None, float, int], rounds: int
) -> Result:
    """Trains one run: the accuracies of its sizes on validation or test images, in %."""
    name, epsilon, clip, lr, seed = case
    factory, options = METHODS[name]
    kept = len(source.train) * 5 // 6
    rows = torch.arange(len(source.train))
    scored = source.train.select(rows[kept:]) if phase == "search" else source.test
    clients = fq.make_clients(
        source.train.select(rows[:kept]),
        test=scored,
        count=CLIENTS,
        budgets=(1.0, 0.5),
        seed=seed,
    )
    torch.manual_seed(seed)
    channels, size = source.shape[0], source.shape[-1]
    model = fq.make_model("mlp", {"in_channels": channels, "image_size": size, "hidden": [32]})
    training = fq.LocalTraining(lr=lr, epochs=2, batch_size=25, momentum=0.0)
    started = time.perf_counter()
    run = fq.train(
        model,
        source.example,
        factory(training, fraction=FRACTION, **options),
        clients,
        rounds,
        seed=seed,
        workers=0,
        cadence=fq.Cadence(evaluate_every=0),
        privacy=make_privacy(epsilon, clip),
        sampling="poisson",
    )
    return {
        "phase": phase,
        "method": name,
        "epsilon": epsilon,
        "clip": clip,
        "lr": lr,
        "seed": seed,
        "rounds": rounds,
        "accuracy": [round(100 * (score.accuracy or 0.0), 2) for score in run.scores],
        "seconds": round(time.perf_counter() - started, 1),
    }


def list_search() -> list[tuple[str, Any, float | None, float, int]]:
    """All runs of the search: a few settings for each ε."""
    return [
        ("heterofl", epsilon, clip, lr, SEARCH_SEED)
        for epsilon in EPSILONS
        for clip, lr in TRIED[epsilon]
    ]


def list_tests(results: list[Result], seeds: list[int]) -> list[tuple[str, Any, Any, float, int]]:
    """The runs of the test: with the best settings for each ε, every method and seed."""
    tests = []
    for seed, epsilon, name in itertools.product(seeds, EPSILONS, METHODS):
        tried = [r for r in results if (r["phase"], r["epsilon"]) == ("search", epsilon)]
        if tried:
            best = max(tried, key=lambda r: fmean(r["accuracy"]))
            tests.append((name, epsilon, best["clip"], best["lr"], seed))
    return tests


def main() -> None:
    """Runs what is asked for and not there yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phase", choices=("search", "test"), required=True)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--limit", type=int, default=None, help="stop after that many runs")
    parser.add_argument("--out", type=Path, default=Path("privacy.jsonl"))
    asked = parser.parse_args()
    lines = asked.out.read_text().splitlines() if asked.out.exists() else []
    results = [json.loads(line) for line in lines]
    keys = ("phase", "method", "epsilon", "clip", "lr", "seed")
    done = {tuple(result[key] for key in keys) for result in results}
    cases = list_search() if asked.phase == "search" else list_tests(results, asked.seeds)
    left = [case for case in cases if (asked.phase, *case) not in done]
    source = fq.load_dataset(asked.data)
    for case in left[: asked.limit]:
        result = run_one(source, asked.phase, case, asked.rounds)
        with asked.out.open("a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
