"""Splits by label: shards of a few classes per client, and Dirichlet proportions.

Both first draw *weights*: how much of each class each client gets. The training and the test
examples are dealt by the same weights, so a client is tested on the classes that it trains on.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedquilt.data.partition.rows import (
    Indices,
    Numbers,
    Stream,
    check_known,
    check_num_clients,
    group_rows,
    iterate_rows,
    require_examples,
    to_integers,
)
from fedquilt.errors import DataError
from fedquilt.federation.columns import RaggedColumn

BLOCK = 10_000  # clients whose draws are made at once


def split_by_class(
    labels: Numbers, num_clients: int, classes_per_client: int, seed: int, *, exact: bool = True
) -> list[Indices]:
    """Gives every client shards of exactly ``classes_per_client`` classes, every example once.

    The balanced non-IID split of HeteroFL (Diao et al., ICLR 2021, Sec. 4). Sizes of the shards of
    a class differ by one example at most. Numbers of shards of the classes differ by one at most,
    unless a class has too few examples. Departure: the published code draws a client's classes
    with repetition and gives one shard for a class drawn twice. Some clients then have fewer
    classes, and some examples belong to no client. ``exact=False`` does the same.

    >>> labels = np.array([0, 0, 1, 1])
    >>> [labels[rows].tolist() for rows in split_by_class(labels, 2, 2, seed=0)]
    [[0, 1], [0, 1]]
    """
    numbers = to_integers(labels)
    weights = draw_class_weights(numbers, num_clients, classes_per_client, seed, exact=exact)
    return list(require_examples(weights.deal(numbers, seed, Stream.TRAIN)))


def split_dirichlet(
    labels: Numbers, num_clients: int, alpha: float, seed: int, minimum: int = 1
) -> list[Indices]:
    """Divides each class in proportions drawn from Dirichlet(alpha, ..., alpha).

    A client with fewer than ``minimum`` examples gets more from the client with most examples, out
    of its largest class. So one draw is always enough.

    >>> [len(rows) for rows in split_dirichlet(np.zeros(12, int), 3, alpha=1e9, seed=0)]
    [4, 4, 4]
    """
    numbers = to_integers(labels)
    weights = draw_dirichlet_weights(numbers, num_clients, alpha, seed, minimum)
    return list(require_examples(weights.deal(numbers, seed, Stream.TRAIN)))


@dataclass(frozen=True, eq=False)
class ClassWeights:
    """How much of each class each client gets: ``weights[c, i]`` of class ``classes[c]``.

    Only the ratios within a class count. A last column may stand for examples of no client.
    """

    classes: Indices
    weights: npt.NDArray[np.float64]
    num_clients: int

    def deal(self, labels: Indices, seed: int, stream: Stream) -> RaggedColumn:
        """Deals the examples of each class by its weights; returns the rows of each client."""
        check_known(labels, self.classes, "label")
        rng = stream.make_generator(seed)
        owner = np.empty(len(labels), dtype=np.int64)
        for weights, rows in zip(self.weights, iterate_rows(labels, self.classes), strict=True):
            quota = _apportion(len(rows), weights, rng)
            owner[rng.permutation(rows)] = np.repeat(np.arange(len(quota)), quota)
        return group_rows(owner, self.num_clients)


def draw_class_weights(
    labels: Indices, num_clients: int, classes_per_client: int, seed: int, *, exact: bool
) -> ClassWeights:
    """Draws which clients hold a shard of which class."""
    check_num_clients(num_clients, len(labels))
    classes, sizes = np.unique(labels, return_counts=True)
    if not 1 <= classes_per_client <= len(classes):
        raise DataError(
            f"classes per client must be from 1 to the {len(classes)} classes of the data, got "
            f"{classes_per_client}; write for example classes:{min(2, len(classes))}"
        )
    rng = Stream.WEIGHTS.make_generator(seed)
    if not exact:
        weights = _assign_published_shards(len(classes), num_clients, classes_per_client, rng)
        return ClassWeights(classes, weights, num_clients)
    shards = _count_shards(sizes, num_clients, classes_per_client, rng)
    weights = _assign_holders(shards, num_clients, classes_per_client, rng)
    return ClassWeights(classes, weights, num_clients)


def _count_shards(
    sizes: Indices, num_clients: int, classes_per_client: int, rng: np.random.Generator
) -> Indices:
    """Counts the clients that share each class, as evenly as possible; no shard is empty."""
    left = num_clients * classes_per_client
    most = np.minimum(sizes, num_clients)
    if not len(sizes) <= left <= most.sum():
        remedy = "more" if left < len(sizes) else "fewer"
        raise DataError(
            f"{num_clients} clients of {classes_per_client} classes make {left} shards, but "
            f"{len(sizes)} classes with {sizes.sum()} examples make {len(sizes)} to {most.sum()}; "
            f"ask for {remedy} clients or {remedy} classes per client"
        )
    shards = np.zeros(len(sizes), dtype=np.int64)
    while left > 0:
        growing = np.flatnonzero(shards < most)
        if len(growing) > left:
            growing = rng.choice(growing, left, replace=False)
        shards[growing] += 1
        left -= len(growing)
    return shards


def _assign_holders(
    shards: Indices, num_clients: int, classes_per_client: int, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Draws who holds which class: 1 at (class, client), ``classes_per_client`` for each client.

    Clients draw distinct classes in turn, weighted by the shards left. A class with as many shards
    left as there are clients left must be drawn by all of them. There are never more such classes
    than a client draws, so every shard finds a client.
    """
    left = shards.copy()
    weights = np.zeros((len(shards), num_clients))
    for start in range(0, num_clients, BLOCK):
        drawn = rng.gumbel(size=(min(BLOCK, num_clients - start), len(left)))
        for client, noise in enumerate(drawn, start):
            # the top keys are a draw without repetition, weighted by the shards left
            with np.errstate(divide="ignore"):
                keys = np.log(left) + noise
            keys[left == num_clients - client] = np.inf
            chosen = np.argsort(-keys)[:classes_per_client]
            weights[chosen, client] = 1
            left[chosen] -= 1
    return weights


def _assign_published_shards(
    num_classes: int, num_clients: int, classes_per_client: int, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Draws the holders of the published split; the last column counts shards of no client."""
    shards, rest = divmod(num_clients * classes_per_client, num_classes)
    if rest or not shards:
        raise DataError(
            f"the published split needs clients x classes per client to be a multiple of the "
            f"{num_classes} classes, got {num_clients} x {classes_per_client}; use exact=True"
        )
    drawn = rng.permutation(np.repeat(np.arange(num_classes), shards)).reshape(num_clients, -1)
    weights = np.zeros((num_classes, num_clients + 1))
    weights[drawn, np.arange(num_clients)[:, None]] = 1
    weights[:, -1] = shards - weights.sum(axis=1)
    return weights


def draw_dirichlet_weights(
    labels: Indices, num_clients: int, alpha: float, seed: int, minimum: int
) -> ClassWeights:
    """Draws how many examples of each class each client gets, at least ``minimum`` in all."""
    check_alpha(alpha)
    check_num_clients(num_clients, len(labels))
    most = len(labels) // num_clients
    if not isinstance(minimum, (int, np.integer)) or not 1 <= minimum <= most:
        raise DataError(
            f"the minimum must be a whole number from 1 to {most}, which is all that {len(labels)} "
            f"examples give each of {num_clients} clients, got {minimum!r}"
        )
    classes, sizes = np.unique(labels, return_counts=True)
    rng = Stream.WEIGHTS.make_generator(seed)
    # parts are equal long before 1e12, and numpy's sums overflow at 1e307
    drawn = rng.dirichlet(np.full(num_clients, min(alpha, 1e12)), size=len(classes))
    counts = np.stack([_apportion(n, p, rng) for n, p in zip(sizes, drawn, strict=True)])
    return ClassWeights(classes, _raise_to_minimum(counts, minimum).astype(np.float64), num_clients)


def _raise_to_minimum(counts: Indices, minimum: int) -> Indices:
    """Moves counts (class, client) from the largest clients to those below the minimum.

    The poorest client gets from the richest, which keeps the minimum; of equal ones the first is
    meant. Heaps find them: to look at all clients for each one that is poor would take time in the
    square of their number.
    """
    counts = counts.copy()
    totals = counts.sum(axis=0).tolist()
    poorest = [(total, client) for client, total in enumerate(totals) if total < minimum]
    if not poorest:
        return counts
    richest = [(-total, client) for client, total in enumerate(totals)]
    for heap in (poorest, richest):
        heapq.heapify(heap)
    while poorest:
        _, poor = heapq.heappop(poorest)
        while totals[richest[0][1]] != -richest[0][0]:  # it has given or got since
            heapq.heapreplace(richest, (-totals[richest[0][1]], richest[0][1]))
        rich = richest[0][1]
        label = int(counts[:, rich].argmax())
        spare = totals[rich] - minimum  # above 0: all have the minimum on average, and one has less
        given = min(minimum - totals[poor], int(counts[label, rich]), spare)
        counts[label, poor] += given
        counts[label, rich] -= given
        totals[poor] += given
        totals[rich] -= given
        if totals[poor] < minimum:
            heapq.heappush(poorest, (totals[poor], poor))
    return counts


def _apportion(total: int, weights: npt.NDArray[np.float64], rng: np.random.Generator) -> Indices:
    """Divides the total into whole numbers in the ratio of the weights, by largest remainders."""
    ideal = total * weights / weights.sum()
    quota: Indices = np.floor(ideal).astype(np.int64)
    short = int(total - quota.sum())
    if short > 0:
        remainder = np.where(weights > 0, ideal - quota, -1.0)
        quota[np.lexsort((rng.random(len(weights)), -remainder))[:short]] += 1
    return quota


def check_alpha(alpha: float) -> None:
    """Checks that the concentration of a Dirichlet distribution is a finite number above 0."""
    if not (alpha > 0 and math.isfinite(alpha)):
        raise DataError(
            f"alpha must be a finite number above 0, got {alpha}; "
            "write for example dirichlet:0.5 (smaller is more uneven)"
        )
