"""Which clients and which rows take part: fractions, natural clients, and what is held out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from fedquilt.data.partition.rows import (
    Indices,
    Numbers,
    Stream,
    iterate_rows,
    to_integers,
)
from fedquilt.errors import DataError


def count_fraction(num_examples: int, fraction: float) -> int:
    """Computes ⌊fraction · num_examples⌋, with the fraction as written, not as its nearest float.

    >>> count_fraction(7438, 0.3), count_fraction(100, 0.29)
    (2231, 29)
    """
    return math.floor(Fraction(str(fraction)) * num_examples)


def take_first_rows(groups: Numbers, fraction: float) -> Indices:
    """Takes the first ⌊fraction · n⌋ of the n rows of each group, in the order of the file.

    >>> take_first_rows(np.array([0, 1, 0, 1, 0, 0]), 0.5).tolist()
    [0, 1, 2]
    """
    if not 0 < fraction <= 1:
        raise DataError(f"fraction must be in (0, 1], got {fraction}; write 0.3 for 30 %")
    numbers = to_integers(groups)
    rows_by_group = list(iterate_rows(numbers, np.unique(numbers)))
    smallest = min(map(len, rows_by_group))
    if count_fraction(smallest, fraction) == 0:
        raise DataError(
            f"every domain must keep an example, a fraction of {fraction} leaves none of "
            f"{smallest}; take a larger fraction"
        )
    return np.sort(
        np.concatenate([rows[: count_fraction(len(rows), fraction)] for rows in rows_by_group])
    )


def choose_natural_clients(
    sizes: Sequence[int] | Indices, count: int | None, min_examples: int, seed: int
) -> list[int]:
    """Chooses the natural clients that take part: all with ``min_examples``, or ``count`` of them.

    They are drawn if ``count`` is given, and returned in order.

    >>> choose_natural_clients([5, 1, 3], None, 2, seed=0)
    [0, 2]
    """
    eligible = np.flatnonzero(np.asarray(sizes) >= min_examples).tolist()
    if not eligible or (count is not None and count > len(eligible)):
        raise DataError(
            f"of {len(sizes)} natural clients {len(eligible)} have {min_examples} examples or "
            f"more, got {'all' if count is None else count} to take part; ask for fewer clients "
            "or examples"
        )
    if count is None:
        return eligible
    rng = Stream.NATURAL_CLIENTS.make_generator(seed)
    return sorted(rng.choice(eligible, count, replace=False).tolist())


def draw_holdout_clients(num_clients: int, fraction: float, seed: int) -> list[int]:
    """Draws the ⌊fraction · num_clients⌋ clients that never train, and returns them in order."""
    count = count_fraction(num_clients, fraction)
    if fraction and count == 0:
        raise DataError(
            f"a fraction of {fraction} of {num_clients} clients is less than one client; "
            "take a larger fraction or more clients"
        )
    rng = Stream.HOLDOUT_CLIENTS.make_generator(seed)
    return sorted(rng.choice(num_clients, count, replace=False).tolist())


def split_holdout_rows(
    num_examples: int, fraction: float, seed: int, client: int
) -> tuple[Indices, Indices]:
    """Draws ⌊fraction · num_examples⌋ rows of a client; returns the others and these, in order."""
    order = Stream.HOLDOUT_ROWS.make_generator(seed, client).permutation(num_examples)
    count = num_examples - count_fraction(num_examples, fraction)
    return np.sort(order[:count]), np.sort(order[count:])
