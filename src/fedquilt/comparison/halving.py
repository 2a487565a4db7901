"""Successive halving: many candidates get a few rounds, the better ones get more.

Jamieson, Talwalkar. "Non-stochastic Best Arm Identification and Hyperparameter Optimization."
AISTATS 2016.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
KEPT = 3  # one of so many candidates is kept, and trained for so many times as many rounds

Evaluate = Callable[[list[tuple[str, T]], int], Sequence[float | None]]


def plan_rungs(count: int, rounds: int) -> list[tuple[int, int]]:
    """How many candidates are trained for how many rounds, until one is left.

    >>> plan_rungs(6, 90)
    [(6, 10), (2, 30)]
    """
    sizes = [count]
    while sizes[-1] > KEPT:
        sizes.append(math.ceil(sizes[-1] / KEPT))
    sizes = [size for size in sizes if size > 1]
    number = len(sizes)
    return [(size, max(1, rounds // KEPT ** (number - i))) for i, size in enumerate(sizes)]


def halve(
    groups: Mapping[str, Sequence[T]], rounds: int, evaluate: Evaluate[T]
) -> dict[str, tuple[T, ...]]:
    """Finds the best candidate of each group; returns each group's candidates, the best first.

    Args:
        groups: The candidates of each group, the same number in all of them.
        rounds: The rounds of a whole run; the last rung trains for a third of them.
        evaluate: Takes candidates with their groups, and rounds; returns scores, of which larger is
            better, and None for a candidate that failed.

    >>> halve({"a": [1, 2, 3, 4]}, 9, lambda pairs, rounds: [-abs(x - 3) for _, x in pairs])["a"][0]
    3
    """
    ranked = {name: list(candidates) for name, candidates in groups.items()}
    if not ranked:
        return {}
    for size, budget in plan_rungs(max(map(len, ranked.values())), rounds):
        pairs = [(name, one) for name, candidates in ranked.items() for one in candidates[:size]]
        scores = dict(zip(range(len(pairs)), evaluate(pairs, budget), strict=True))
        for name, candidates in ranked.items():
            known = [scores[i] for i, (group, _) in enumerate(pairs) if group == name]
            order = sorted(range(len(known)), key=lambda i: _rank(known[i]))
            ranked[name] = [candidates[i] for i in order] + candidates[len(known) :]
    return {name: tuple(candidates) for name, candidates in ranked.items()}


def _rank(score: float | None) -> float:
    return math.inf if score is None or math.isnan(score) else -score
