"""What all partitions share: random streams, dealing rows to clients, and checks."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedquilt.errors import DataError
from fedquilt.federation.columns import RaggedColumn

Indices: TypeAlias = npt.NDArray[np.int64]
Numbers: TypeAlias = npt.NDArray[np.int64] | Tensor


class Stream(Enum):
    """One stream of random numbers for each purpose, so that one draw does not shift another."""

    WEIGHTS = 0
    TRAIN = 1
    TEST = 2
    NATURAL_CLIENTS = 3
    HOLDOUT_CLIENTS = 4
    HOLDOUT_ROWS = 5

    def make_generator(self, seed: int, *more: int) -> np.random.Generator:
        """Makes the generator of this stream."""
        return np.random.default_rng((seed, self.value, *more))


def deal_evenly(num_examples: int, num_clients: int, rng: np.random.Generator) -> RaggedColumn:
    """Deals the rows at random, so that the clients' sizes differ by one at most."""
    return group_rows(rng.permutation(num_examples) % num_clients, num_clients)


def group_rows(owner: Indices, num_clients: int) -> RaggedColumn:
    """The sorted rows of each client; rows of owners beyond the last client are left out."""
    order = np.argsort(owner, kind="stable")
    starts = np.searchsorted(owner[order], np.arange(num_clients + 1))
    return RaggedColumn(order[: starts[-1]], starts)


def iterate_rows(labels: Indices, classes: Indices) -> Iterator[Indices]:
    """Yields the rows of each class, in the order of the classes."""
    order = np.argsort(labels, kind="stable")
    yield from np.split(order, np.searchsorted(labels[order], classes[1:]))


def to_integers(numbers: Numbers) -> Indices:
    """Converts labels or groups to int64; they must be 1-D integers."""
    array = np.asarray(numbers)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            f"labels and groups must be 1-D integers, got {array.dtype} of shape {array.shape}; "
            "convert them with .astype('int64')"
        )
    return array.astype(np.int64, copy=False)


def check_num_clients(num_clients: int, num_examples: int) -> None:
    """Checks that there is at least one client, and an example for each."""
    if num_clients < 1:
        raise DataError(f"there must be at least one client, got {num_clients}; ask for 1 or more")
    if num_clients > num_examples:
        raise DataError(
            f"every client needs an example, got {num_clients} clients for {num_examples} "
            f"examples; ask for at most {num_examples} clients"
        )


def check_known(values: Indices, known: Indices, kind: str) -> None:
    """Checks that the test set has no label or group that the training set lacks."""
    strange = np.setdiff1d(values, known)
    if len(strange):
        raise DataError(
            f"every {kind} of the test set must occur in the training set, got "
            f"{', '.join(map(str, strange[:5]))} in the test set only; drop those examples"
        )


def require_examples(rows: RaggedColumn) -> RaggedColumn:
    """Returns the rows of all clients; each must have at least one."""
    empty = np.flatnonzero(rows.sizes == 0)
    if len(empty):
        raise DataError(
            f"every client needs an example, client {empty[0]} got none (so did {len(empty) - 1} "
            "others); ask for fewer clients or a less uneven partition"
        )
    return rows
