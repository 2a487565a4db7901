"""Accuracy with hostile clients: every attack against every rule, mixed widths against equal ones.

    python benchmarks/hostile.py --data digits --seeds 0 1 2
    python benchmarks/hostile.py --data fashion-mnist --model cnn --fraction 0.05 --seeds 0 1 2

Twenty clients, all of them in every round, a fifth of them hostile. Half of HeteroFL's clients
train width 1.0 and half 0.5; FedAvg's all train the whole model. Writes one line of JSON for each
run, and prints tables for docs/results.md. What is in ``--out`` already is not computed again.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import fedquilt as fq

HOSTILE, NUM_HOSTILE = 0.2, 4  # of twenty clients
RULES: dict[str, dict[str, Any]] = {
    "mean": {},
    "mean, clipped": {"transforms": (fq.ClipQuantile(0.5, per_ring=True), fq.EqualWeights())},
    "trimmed mean": {"aggregator": fq.TrimmedMean(hostile=NUM_HOSTILE)},
    "median": {"aggregator": fq.Median(hostile=NUM_HOSTILE)},
    "geometric median": {"aggregator": fq.GeometricMedian(hostile=NUM_HOSTILE)},
    "centered clipping": {"aggregator": fq.CenteredClipping(hostile=NUM_HOSTILE)},
    "Krum": {"aggregator": fq.Krum(hostile=NUM_HOSTILE)},
    "Multi-Krum": {"aggregator": fq.MultiKrum(hostile=NUM_HOSTILE)},
    "Multi-Krum by ring": {"aggregator": fq.MultiKrum(hostile=NUM_HOSTILE, scope="ring")},
    "trimmed mean, NNM": {"aggregator": fq.TrimmedMean(hostile=NUM_HOSTILE, mixing="nnm")},
    "median, buckets": {"aggregator": fq.Median(hostile=NUM_HOSTILE, mixing="buckets")},
}
ATTACKS: dict[str, fq.Attack | None] = {
    "none": None,
    "sign flip ×10": fq.SignFlip(clients=HOSTILE, scale=10.0),
    "scaled ×10": fq.ScaledUpdate(clients=HOSTILE),
    "noise": fq.GaussianNoise(clients=HOSTILE),
    "label flip": fq.LabelFlip(clients=HOSTILE),
    "backdoor": fq.Backdoor(clients=HOSTILE),
    "ALIE": fq.ALIE(clients=HOSTILE),
    "IPM": fq.InnerProduct(clients=HOSTILE),
    "mimic": fq.Mimic(clients=HOSTILE),
}
RATES = {"mlp": 0.2, "cnn": 0.1}
METHODS = {"heterofl": (fq.HeteroFL, (1.0, 0.5)), "fedavg": (fq.FedAvg, (1.0,))}


def make_net(model: str, shape: tuple[int, ...]) -> torch.nn.Module:
    """An MLP with 32 hidden channels, or a CNN with 8 and 16."""
    channels, size = shape[0], shape[-1]
    if model == "mlp":
        options = {"in_channels": channels, "image_size": size, "hidden": [32]}
        return fq.make_model("mlp", options)
    side = ((size - 3) // 2 + 1 - 3) // 2 + 1
    return torch.nn.Sequential(
        torch.nn.Conv2d(channels, 8, 3, stride=2),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 16, 3, stride=2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * side**2, 10),
    )


def run_one(
    source: Any, model: str, method: str, rule: str, attack: str, seed: int, rounds: int
) -> dict[str, Any]:
    """Trains one combination: the accuracies of its sizes, and the backdoor's success, in %."""
    factory, budgets = METHODS[method]
    clients = fq.make_clients(source.train, test=source.test, count=20, budgets=budgets, seed=seed)
    torch.manual_seed(seed)
    training = fq.LocalTraining(lr=RATES[model], epochs=1, batch_size=10)
    run = fq.train(
        make_net(model, source.shape),
        source.example,
        factory(training, fraction=1.0, **RULES[rule]),
        clients,
        rounds,
        seed=seed,
        workers=0,
        cadence=fq.Cadence(evaluate_every=0),
        attacks=ATTACKS[attack],
    )
    return {
        "method": method,
        "rule": rule,
        "attack": attack,
        "seed": seed,
        "accuracy": [round(100 * (score.accuracy or 0.0), 2) for score in run.scores],
        "success": [
            round(100 * success, 2)
            for score in run.scores
            if (success := score.metrics.get("backdoor_success")) is not None
        ],
    }


def print_tables(results: list[dict[str, Any]], method: str) -> None:
    """Prints the mean over sizes and seeds: a row for each rule, two tables of attacks."""
    for attacks in (list(ATTACKS)[:4], list(ATTACKS)[4:]):
        has_success = "backdoor" in attacks
        heads = [method, *attacks, *["success"] * has_success]
        print(f"\n| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
        for rule in RULES:
            own = [r for r in results if (r["method"], r["rule"]) == (method, rule)]
            values = [
                _format_mean([r for r in own if r["attack"] == a], "accuracy") for a in attacks
            ]
            if has_success:
                values.append(_format_mean([r for r in own if r["success"]], "success"))
            print(f"| {' | '.join([rule, *values])} |")


def _format_mean(results: list[dict[str, Any]], key: str) -> str:
    return f"{fmean(fmean(result[key]) for result in results):.1f}" if results else "-"


def main() -> None:
    """Runs all combinations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--model", choices=list(RATES), default="mlp")
    parser.add_argument("--fraction", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    parser.add_argument("--limit", type=int, default=None, help="stop after that many runs")
    parser.add_argument("--out", type=Path, default=Path("hostile.jsonl"))
    asked = parser.parse_args()
    source = fq.load_dataset(asked.data)
    if asked.fraction < 1:
        source = source.take_first(asked.fraction)
    lines = asked.out.read_text().splitlines() if asked.out.exists() else []
    results = [json.loads(line) for line in lines]
    keys = ("method", "rule", "attack", "seed")
    done = {tuple(result[key] for key in keys) for result in results}
    cases = itertools.product(asked.seeds, asked.methods, ATTACKS, asked.rules)
    left = [
        (method, rule, attack, seed)
        for seed, method, attack, rule in cases
        if (method, rule, attack, seed) not in done
    ]
    for case in left[: asked.limit]:
        result = run_one(source, asked.model, *case, asked.rounds)
        results.append(result)
        with asked.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
    for method in asked.methods:
        print_tables([r for r in results if r["seed"] in asked.seeds], method)


if __name__ == "__main__":
    main()
