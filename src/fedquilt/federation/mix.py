"""Who can afford what: budgets dealt to clients, in blocks, by proportion."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fedquilt.errors import BudgetError
from fedquilt.structure.budget import Budget

LEVELS = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.125, "e": 0.0625}  # HeteroFL's levels

Share = tuple[Budget, int]  # a budget, and its part of the clients
Mix = str | Sequence[float | Budget | Mapping[str, float]]


def parse(mix: Mix) -> list[Share]:
    """The shares that a mix names, in its order.

    A mix is a list of widths, of budgets or of limits (``{"params": 100_000}``), equal parts each;
    or a text of widths (``1,0.5,0.25``) or of HeteroFL's levels with proportions (``a1-e9``).

    >>> [(budget.width, part) for budget, part in parse("a1-e9")]
    [(1.0, 1), (0.0625, 9)]
    """
    if isinstance(mix, str):
        return _levels(mix) if mix[:1].isalpha() else _widths(mix)
    shares = [(_budget(item), 1) for item in mix]
    if not shares:
        raise BudgetError("budgets are empty; give at least one, such as 1")
    return shares


def deal(mix: Mix, num_clients: int) -> list[Budget]:
    """A budget for each client: contiguous blocks in the mix's order, the rest gets the last.

    >>> [b.width for b in deal([1, 0.5], 5)]
    [1, 1, 0.5, 0.5, 0.5]
    """
    shares = parse(mix)
    total = sum(part for _, part in shares)
    dealt: list[Budget] = []
    for budget, part in shares:
        dealt += [budget] * (num_clients * part // total)
    return dealt + [shares[-1][0]] * (num_clients - len(dealt))


def _levels(text: str) -> list[Share]:
    shares = [_level(word) for word in text.split("-")]
    if not any(part for _, part in shares):
        raise BudgetError(f"the parts of '{text}' are all 0; give a level some clients, like a1-e9")
    return shares


def _level(word: str) -> Share:
    match = re.fullmatch(r"([a-z])(\d*)", word)
    if match is None or match[1] not in LEVELS:
        raise BudgetError(
            f"'{word}' is not a level with its part; write levels {', '.join(LEVELS)} like a1-e9, "
            "or widths like 1,0.5,0.25"
        )
    return Budget(LEVELS[match[1]]), int(match[2] or 1)


def _widths(text: str) -> list[Share]:
    try:
        return [(Budget(float(word)), 1) for word in text.split(",")]
    except ValueError:
        raise BudgetError(
            f"budgets are widths like 1,0.5,0.25 or levels like a1-e9, got '{text}'"
        ) from None


def _budget(item: float | Budget | Mapping[str, float]) -> Budget:
    if isinstance(item, Budget):
        return item
    if isinstance(item, Mapping):
        try:
            return Budget(**item)  # type: ignore[arg-type]
        except TypeError:
            raise BudgetError(
                f"a budget limits width, params, macs, memory or upload, got {dict(item)}"
            ) from None
    return Budget(item)
