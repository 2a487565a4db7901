"""Who can afford what: budgets dealt to clients, in blocks, by proportion."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from statistics import NormalDist

import numpy as np

from fedquilt.errors import BudgetError
from fedquilt.federation.columns import CodedColumn
from fedquilt.structure.budget import Budget

LEVELS = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.125, "e": 0.0625}  # HeteroFL's levels
EIGHTHS = tuple(k / 8 for k in range(1, 9))
TIERS = (  # APFL's high, medium and low budget (Table 2)
    Budget(params=2_200_000, macs=88_000_000),
    Budget(params=1_300_000, macs=59_000_000),
    Budget(params=700_000, macs=28_000_000),
)
CAPACITIES = {"high-capacity": (5, 3, 2), "low-capacity": (2, 3, 5)}  # parts of its tiers

Share = tuple[Budget, int]  # a budget, and its part of the clients
Limits = float | Budget | Mapping[str, float]
BudgetDistribution = str | Limits | Sequence[Limits]


@dataclass(frozen=True)
class FractionBudgets:
    """Budgets and their parts: contiguous blocks in this order, each as large as its part.

    Where numbers do not divide, the largest remainders get one client more, and of equal remainders
    those of the larger budgets. The largest budget has at least one client, if there is one: the
    whole model would not be trained otherwise.
    """

    fractions: tuple[Share, ...]

    def __post_init__(self) -> None:
        """Refuses parts that leave every client without a budget."""
        if not any(part for _, part in self.fractions):
            raise BudgetError(
                "the parts of the budgets are all 0; give at least one of them a part above 0"
            )

    def assign(self, num_clients: int) -> CodedColumn[Budget]:
        """A budget for each client."""
        total = sum(part for _, part in self.fractions)
        counts = [num_clients * part // total for _, part in self.fractions]
        largest = max(budget.limits for budget, part in self.fractions if part)

        def claim(number: int) -> tuple[bool, int, tuple[float, ...]]:
            """What decides who gets one client more; the largest claims come first."""
            budget, part = self.fractions[number]
            is_left_out = part > 0 and budget.limits == largest and not counts[number]
            return is_left_out, num_clients * part % total, budget.limits

        order = sorted(range(len(self.fractions)), key=claim, reverse=True)
        for number in order[: num_clients - sum(counts)]:
            counts[number] += 1
        budgets = (budget for budget, _ in self.fractions)
        return CodedColumn.blocks(zip(budgets, counts, strict=True))


@dataclass(frozen=True)
class TierBudgets:
    """Widths from small to large: of k, client i of N gets number ⌊k i / N⌋ (Split-Mix).

    With fewer clients than widths that would leave out the largest; then they are dealt as
    ``Shares`` are.
    """

    widths: tuple[float, ...]

    def assign(self, num_clients: int) -> CodedColumn[Budget]:
        """A budget for each client."""
        if num_clients < len(self.widths):
            return FractionBudgets(tuple((Budget(width), 1) for width in self.widths)).assign(
                num_clients
            )
        numbers = len(self.widths) * np.arange(num_clients) // num_clients
        budgets = CodedColumn.of(map(Budget, self.widths))
        return CodedColumn(budgets.values, budgets.codes[numbers])


@dataclass(frozen=True)
class LogNormalBudgets:
    """Widths whose logarithm is normal, on the grid of eighths (Split-Mix, Appendix A.5).

    Client i of N gets the quantile at (i + 1/2) / N of exp(log ``median`` + ``spread`` · z), down
    to a multiple of 1/8 and at least 1/8, at most 1. So no seed is needed, and later clients can
    afford more. With spread 0.5 and median 0.4 the mean is the paper's 0.45.

    Departure: the public code leaves out what lies below 1/8, and takes the quantiles at
    (i + 1) / N; of 50 clients four then have an eighth more or less.
    """

    spread: float
    median: float

    def assign(self, num_clients: int) -> CodedColumn[Budget]:
        """A budget for each client."""
        # compared on the side of probabilities, where nothing overflows
        below = [NormalDist().cdf(math.log(w / self.median) / self.spread) for w in EIGHTHS]
        quantiles = (np.arange(num_clients) + 0.5) / num_clients
        numbers = np.maximum(np.searchsorted(below, quantiles, side="right"), 1) - 1
        return CodedColumn(tuple(map(Budget, EIGHTHS)), numbers)


def parse_budgets(budgets: BudgetDistribution) -> FractionBudgets | TierBudgets | LogNormalBudgets:
    """Reads how budgets are distributed over clients.

    They are a list of widths, of budgets or of limits; with limits may stand how many parts of the
    clients have them (``{"params": 100_000, "part": 2}``; otherwise 1). Or it is a text: widths
    (``1,0.5,0.25``), HeteroFL's levels with proportions (``a1-e9``), Split-Mix's divisors joined
    by hyphens (``8-4-2-1`` are 1/8, 1/4, 1/2 and 1, and ``8d3`` is 3/8), its log-normal widths
    (``ln0.5_0.4``: spread and median), or APFL's ``high-capacity`` and ``low-capacity``. One number
    alone is a width, and one budget alone is everybody's.

    >>> parse_budgets("8-4-8d3-2")
    TierBudgets(widths=(0.125, 0.25, 0.375, 0.5))
    >>> [(budget.width, part) for budget, part in parse_budgets("a1-e9").fractions]
    [(1.0, 1), (0.0625, 9)]
    >>> [(budget.macs, part) for budget, part in parse_budgets("low-capacity").fractions]
    [(88000000, 2), (59000000, 3), (28000000, 5)]
    """
    if isinstance(budgets, (int, float, Mapping, Budget)):  # one for all
        budgets = (budgets,)
    if not isinstance(budgets, str):
        shares = tuple(_share(item) for item in budgets)
        if not shares:
            raise BudgetError("budgets are empty; give at least one, such as 1")
        return FractionBudgets(shares)
    if budgets in CAPACITIES:
        return FractionBudgets(tuple(zip(TIERS, CAPACITIES[budgets], strict=True)))
    if budgets.startswith("ln"):
        return _log_normal(budgets)
    if re.fullmatch(r"\d+(d\d+)?(-\d+(d\d+)?)+", budgets):
        return TierBudgets(tuple(sorted(_parse_fraction(word) for word in budgets.split("-"))))
    if budgets[:1].isalpha():
        return FractionBudgets(tuple(_parse_level(word) for word in budgets.split("-")))
    return FractionBudgets(tuple(_parse_widths(budgets)))


def assign_budgets(budgets: BudgetDistribution, num_clients: int) -> CodedColumn[Budget]:
    """A budget for each client, neighbours alike.

    >>> [b.width for b in assign_budgets([1, 0.5], 5)]
    [1, 1, 1, 0.5, 0.5]
    >>> [b.width for b in assign_budgets("a1-e9", 3)]
    [1.0, 0.0625, 0.0625]
    >>> [b.width for b in assign_budgets("2-1", 5)]
    [0.5, 0.5, 0.5, 1.0, 1.0]
    """
    if isinstance(budgets, np.ndarray) and budgets.shape == (num_clients,):  # one for each client
        widths, codes = np.unique(budgets, return_inverse=True)
        return CodedColumn([Budget(width) for width in widths.tolist()], codes)
    return parse_budgets(budgets).assign(num_clients)


def _log_normal(text: str) -> LogNormalBudgets:
    number = r"(\d+(?:\.\d+)?)"
    match = re.fullmatch(f"ln{number}_{number}", text)
    if match is None or not (float(match[1]) > 0 and float(match[2]) > 0):
        raise BudgetError(
            f"log-normal budgets are ln, a spread, _ and a median, both above 0, got '{text}'; "
            "write for example ln0.5_0.4"
        )
    return LogNormalBudgets(float(match[1]), float(match[2]))


def _parse_fraction(word: str) -> float:
    """1/8 for 8, and 3/8 for 8d3."""
    divisor, _, times = word.partition("d")
    if not 0 < int(times or 1) <= int(divisor):
        raise BudgetError(
            f"widths are fractions in (0, 1], got '{word}'; write 8 for 1/8 and 8d3 for 3/8"
        )
    return int(times or 1) / int(divisor)


def _parse_level(word: str) -> Share:
    match = re.fullmatch(r"([a-z])(\d*)", word)
    if match is None or match[1] not in LEVELS:
        raise BudgetError(
            f"'{word}' is not a level with its part; write levels {', '.join(LEVELS)} like a1-e9, "
            f"widths like 1,0.5,0.25, or {' or '.join(CAPACITIES)}"
        )
    return Budget(LEVELS[match[1]]), int(match[2] or 1)


def _parse_widths(text: str) -> list[Share]:
    try:
        return [(Budget(float(word)), 1) for word in text.split(",")]
    except ValueError:
        raise BudgetError(
            f"budgets are widths like 1,0.5,0.25, levels like a1-e9, {', '.join(CAPACITIES)} or "
            f"divisors like 8-4-2-1, got '{text}'"
        ) from None


def _share(item: float | Budget | Mapping[str, float]) -> Share:
    if isinstance(item, Budget):
        return item, 1
    if not isinstance(item, Mapping):
        return Budget(item), 1
    known = {"part", *(field.name for field in fields(Budget))}
    if not all(name in known and isinstance(value, Real) for name, value in item.items()):
        raise BudgetError(
            "a budget limits width, params, macs, memory or upload by a number, and may have a "
            f"part, got {dict(item)}; write for example {{params = 100000, part = 2}}"
        )
    part = item.get("part", 1)
    if part < 0 or part % 1 != 0:
        raise BudgetError(
            f"a budget's part is a whole number, got {part}; write 5, 3 and 2 for 50, 30 and 20 %"
        )
    limits = {name: _limit(name, item[name]) for name in item if name not in ("width", "part")}
    return Budget(item.get("width", 1.0), **limits), int(part)


def _limit(name: str, limit: float) -> int:
    """The limit as a count: settings give 2.2e6 as a float."""
    if not 1 <= limit < math.inf:
        raise BudgetError(
            f"the limit on {name} is a number from 1 on, got {limit}; leave it out if there is none"
        )
    return int(limit)
