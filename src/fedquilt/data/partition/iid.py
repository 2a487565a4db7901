"""Splits that deal examples at random."""

from __future__ import annotations

from fedquilt.data.partition.rows import Indices, Stream, check_num_clients, deal_evenly
from fedquilt.federation.columns import RaggedColumn


def split_iid(num_examples: int, num_clients: int, seed: int) -> list[Indices]:
    """Deals examples at random, so that sizes differ by one at most.

    >>> [len(rows) for rows in split_iid(10, num_clients=4, seed=0)]
    [3, 3, 2, 2]
    """
    return list(deal_iid(num_examples, num_clients, seed))


def deal_iid(num_examples: int, num_clients: int, seed: int) -> RaggedColumn:
    """The same as a column."""
    check_num_clients(num_clients, num_examples)
    return deal_evenly(num_examples, num_clients, Stream.TRAIN.make_generator(seed))
