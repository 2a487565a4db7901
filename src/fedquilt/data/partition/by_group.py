"""Splits by group: one client per natural id, or equally many clients per domain."""

from __future__ import annotations

import numpy as np

from fedquilt.data.partition.rows import (
    Indices,
    Numbers,
    Stream,
    check_num_clients,
    group_rows,
    iterate_rows,
    require_examples,
    to_integers,
)
from fedquilt.errors import DataError
from fedquilt.federation.columns import RaggedColumn


def split_by_group(
    groups: Numbers, num_clients: int | None, seed: int, *, blocks: bool = False
) -> list[Indices]:
    """Makes one client per natural id (``num_clients=None``), or equally many per domain.

    Clients are in the order of the groups: with two domains and four clients, clients 0 and 1
    share the first domain and clients 2 and 3 the second. Inside a domain examples are dealt at
    random. With ``blocks`` they are dealt in consecutive blocks in the order of the file, and the
    seed is not used. If sizes are not even, the first clients get one example more.

    >>> [rows.tolist() for rows in split_by_group(np.array([7, 8, 7, 7]), 2, 0, blocks=True)]
    [[0, 2, 3], [1]]
    """
    numbers = to_integers(groups)
    present = np.unique(numbers)
    count = count_group_clients(num_clients, len(present), len(numbers))
    rng = None if blocks else Stream.TRAIN.make_generator(seed)
    return list(require_examples(deal_groups(numbers, present, count, rng)))


def count_group_clients(num_clients: int | None, num_groups: int, num_examples: int) -> int:
    """Counts the clients, by default one per group; each group must have equally many."""
    count = num_groups if num_clients is None else num_clients
    check_num_clients(count, num_examples)
    if count % num_groups:
        raise DataError(
            f"domains are shared by equally many clients, got {count} clients for {num_groups} "
            f"domains; ask for a multiple of {num_groups}"
        )
    return count


def deal_groups(
    groups: Indices, present: Indices, num_clients: int, rng: np.random.Generator | None
) -> RaggedColumn:
    """Deals each group to its clients, at random, or in blocks if ``rng`` is None."""
    per_group = num_clients // len(present)
    owner = np.empty(len(groups), dtype=np.int64)
    for position, rows in enumerate(iterate_rows(groups, present)):
        turns = np.arange(len(rows)) % per_group
        order, turns = (rows, np.sort(turns)) if rng is None else (rng.permutation(rows), turns)
        owner[order] = position * per_group + turns
    return group_rows(owner, num_clients)
