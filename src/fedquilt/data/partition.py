"""How a set is divided among clients: labels and a seed in, lists of row numbers out.

A division by class is first written down as *shares*: how much of each class each client gets.
Dealing the training and the test examples by the same shares makes the test sets follow the
training sets.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedquilt.errors import DataError, unknown

Indices: TypeAlias = npt.NDArray[np.int64]
Numbers: TypeAlias = npt.NDArray[np.int64] | Tensor

SHARES, TRAIN, TEST, TAKEN, UNSEEN, HELD_BACK = range(
    6
)  # one stream of random numbers for each purpose
BLOCKS = "domain:blocks"
KINDS = ("iid", "classes", "dirichlet", "domain", BLOCKS, "natural")


def iid(num_examples: int, num_clients: int, seed: int) -> list[Indices]:
    """Examples dealt at random, so that sizes differ by one at most.

    >>> [len(rows) for rows in iid(10, num_clients=4, seed=0)]
    [3, 3, 2, 2]
    """
    _check_count(num_clients, num_examples)
    return _dealt_evenly(num_examples, num_clients, np.random.default_rng((seed, TRAIN)))


def by_class(
    labels: Numbers, num_clients: int, classes_per_client: int, seed: int, *, exact: bool = True
) -> list[Indices]:
    """Every client gets shards of exactly ``classes_per_client`` classes, every example once.

    The balanced non-IID split of HeteroFL (Diao et al., ICLR 2021, Sec. 4): the shards of a class
    have one size (give or take one example), and every class has equally many shards (give or
    take one, and no more than it has examples). Departure: the published code draws a client's
    classes with repetition and gives one shard for a class drawn twice, so some clients own
    fewer classes and some examples belong to nobody. ``exact=False`` does that.
    """
    shares = _class_shares(_array(labels), num_clients, classes_per_client, seed, exact=exact)
    return _nobody_empty(shares.deal(_array(labels), seed, TRAIN))


def dirichlet(
    labels: Numbers, num_clients: int, alpha: float, seed: int, minimum: int = 1
) -> list[Indices]:
    """Each class is divided in proportions drawn from Dirichlet(alpha, ..., alpha).

    Clients who would have fewer than ``minimum`` examples get some from whoever has most, out of
    that client's largest class, so that one draw is always enough.
    """
    shares = _dirichlet_shares(_array(labels), num_clients, alpha, seed, minimum)
    return _nobody_empty(shares.deal(_array(labels), seed, TRAIN))


def by_group(
    groups: Numbers, num_clients: int | None, seed: int, *, blocks: bool = False
) -> list[Indices]:
    """One client per natural id (``num_clients=None``), or equally many clients per domain.

    Clients stand in the order of the groups: with two domains and four clients, clients 0 and 1
    share the first domain and clients 2 and 3 the second. Inside a domain examples are dealt at
    random; with ``blocks`` neighbours get consecutive blocks in the order of the file, the first
    ones one example more where they do not come out even, and the seed plays no part.

    >>> [rows.tolist() for rows in by_group(np.array([7, 8, 7, 7]), 2, 0, blocks=True)]
    [[0, 2, 3], [1]]
    """
    numbers = _array(groups)
    present = np.unique(numbers)
    count = _count_for_groups(num_clients, len(present), len(numbers))
    rng = None if blocks else np.random.default_rng((seed, TRAIN))
    return _nobody_empty(_deal_groups(numbers, present, count, rng))


def first_rows(groups: Numbers, share: float) -> Indices:
    """The first ⌊share · n⌋ of the n rows of every group, in the order of the file.

    >>> first_rows(np.array([0, 1, 0, 1, 0, 0]), 0.5).tolist()
    [0, 1, 2]
    """
    if not 0 < share <= 1:
        raise DataError(f"a share of a set is in (0, 1], got {share}; write 0.3 for 30 %")
    numbers = _array(groups)
    rows_of = list(_rows_of(numbers, np.unique(numbers)))
    smallest = min(map(len, rows_of))
    if part_of(smallest, share) == 0:
        raise DataError(
            f"every domain must keep an example, a share of {share} leaves none of {smallest}; "
            "take a larger share"
        )
    return np.sort(np.concatenate([rows[: part_of(len(rows), share)] for rows in rows_of]))


def part_of(num_examples: int, share: float) -> int:
    """⌊share · num_examples⌋, the share taken as it is written and not as its nearest float.

    >>> part_of(7438, 0.3), part_of(100, 0.29)
    (2231, 29)
    """
    return math.floor(Fraction(str(share)) * num_examples)


def taking_part(sizes: Sequence[int], count: int | None, least: int, seed: int) -> list[int]:
    """Natural clients that take part: those with ``least`` examples, or ``count`` of them, drawn.

    They stay in their order.

    >>> taking_part([5, 1, 3], None, 2, seed=0)
    [0, 2]
    """
    found = [client for client, size in enumerate(sizes) if size >= least]
    if not found or (count is not None and count > len(found)):
        raise DataError(
            f"of {len(sizes)} natural clients {len(found)} have {least} examples or more, got "
            f"{'all' if count is None else count} to take part; ask for fewer clients or examples"
        )
    if count is None:
        return found
    rng = np.random.default_rng((seed, TAKEN))
    return sorted(rng.choice(found, count, replace=False).tolist())


def draw_unseen(num_clients: int, share: float, seed: int) -> list[int]:
    """The clients that never train: ⌊share · num_clients⌋ of them, drawn, in their order."""
    count = part_of(num_clients, share)
    if share and count == 0:
        raise DataError(
            f"a share of {share} of {num_clients} clients is nobody, so none would be unseen; "
            "take a larger share or more clients"
        )
    rng = np.random.default_rng((seed, UNSEEN))
    return sorted(rng.choice(num_clients, count, replace=False).tolist())


def held_back(num_examples: int, share: float, seed: int, client: int) -> tuple[Indices, Indices]:
    """Rows of one client without ⌊share · num_examples⌋ of them, drawn, and those; in order."""
    order = np.random.default_rng((seed, HELD_BACK, client)).permutation(num_examples)
    count = num_examples - part_of(num_examples, share)
    return np.sort(order[:count]), np.sort(order[count:])


@dataclass(frozen=True)
class Partition:
    """A way to divide a set among clients, as ``parse`` reads it.

    ``number`` is the classes per client of ``classes``, and the alpha of ``dirichlet``.
    """

    kind: str
    number: float | None = None
    exact: bool = True

    def __post_init__(self) -> None:
        """Refuses a kind that is not known."""
        if self.kind not in KINDS:
            raise DataError(
                f"{unknown('partition', self.kind, KINDS)} (as in classes:2, dirichlet:0.5)"
            )

    def __str__(self) -> str:
        """The text that ``parse`` reads."""
        return self.kind if self.number is None else f"{self.kind}:{self.number}"

    def split(
        self,
        labels_train: Numbers,
        groups_train: Numbers | None,
        labels_test: Numbers,
        groups_test: Numbers | None,
        num_clients: int | None,
        seed: int,
    ) -> tuple[list[Indices], list[Indices]]:
        """Rows of the training and of the test set for each client, the latter like the former.

        Every training row is used once and every client has some; a test list may be empty.
        ``natural`` has one client per id, and takes None or their number as ``num_clients``.
        ``domain`` deals each domain at random among its clients. ``domain:blocks`` cuts it into
        consecutive blocks of equal size, as Split-Mix does (Hong et al., ICLR 2022); departure:
        where sizes do not come out even the first clients get one more, there it is drawn who.
        """
        if self.kind in ("domain", BLOCKS, "natural"):
            return self._split_groups(groups_train, groups_test, num_clients, seed)
        if num_clients is None:
            raise DataError(
                f"partition '{self}' needs the number of clients, got none; "
                "give one, or use 'natural'"
            )
        if self.kind == "iid":
            dealt = iid(len(labels_train), num_clients, seed)
            rng = np.random.default_rng((seed, TEST))
            return dealt, _dealt_evenly(len(labels_test), num_clients, rng)
        if labels_train.ndim > 1:
            raise DataError(
                f"partition '{self}' goes by the label of an example, and these have one at every "
                "position; use 'iid' or 'natural'"
            )
        train, test = _array(labels_train), _array(labels_test)
        shares = self._shares(train, num_clients, seed)
        return _nobody_empty(shares.deal(train, seed, TRAIN)), shares.deal(test, seed, TEST)

    def _shares(self, labels: Indices, num_clients: int, seed: int) -> _Shares:
        number = self.number or 0
        if self.kind == "classes":
            return _class_shares(labels, num_clients, int(number), seed, exact=self.exact)
        return _dirichlet_shares(labels, num_clients, number, seed, minimum=1)

    def _split_groups(
        self,
        groups_train: Numbers | None,
        groups_test: Numbers | None,
        num_clients: int | None,
        seed: int,
    ) -> tuple[list[Indices], list[Indices]]:
        if groups_train is None or groups_test is None:
            key = "id" if self.kind == "natural" else "domain"
            raise DataError(
                f"partition '{self.kind}' needs data that say where each example comes from, these "
                f"do not; give {key}_train and {key}_test in the .npz file, or use 'iid'"
            )
        train, test = _array(groups_train), _array(groups_test)
        present = np.unique(train)
        if self.kind == "natural" and num_clients not in (None, len(present)):
            raise DataError(
                f"partition 'natural' has one client per id, got {num_clients} clients for "
                f"{len(present)} ids; ask for {len(present)} clients"
            )
        _refuse_strangers(test, present, "group")
        count = _count_for_groups(num_clients, len(present), len(train))
        rngs = [
            None if self.kind == BLOCKS else np.random.default_rng((seed, stream))
            for stream in (TRAIN, TEST)
        ]
        dealt = _nobody_empty(_deal_groups(train, present, count, rngs[0]))
        return dealt, _deal_groups(test, present, count, rngs[1])


def parse(text: str) -> Partition:
    """The partition that a text names: iid, classes:2, dirichlet:0.5, domain, natural, ...

    >>> parse("dirichlet:0.5")
    Partition(kind='dirichlet', number=0.5, exact=True)
    """
    if text.strip() == BLOCKS:
        return Partition(BLOCKS)
    kind, colon, number = text.strip().partition(":")
    if kind == "classes":
        return Partition(kind, _read_classes(text, number))
    if kind == "dirichlet":
        return Partition(kind, _read_alpha(text, number))
    if colon and kind in KINDS:
        raise DataError(f"partition '{kind}' takes no number, got '{text}'; write '{kind}'")
    return Partition(kind)


def _read_classes(text: str, number: str) -> int:
    if not number.isdecimal() or int(number) < 1:
        raise DataError(
            f"'classes' needs a whole number of classes per client, got '{text}'; "
            "write for example classes:2"
        )
    return int(number)


def _read_alpha(text: str, number: str) -> float:
    try:
        alpha = float(number)
    except ValueError:
        raise DataError(
            f"'dirichlet' needs a number alpha, got '{text}'; write for example dirichlet:0.5"
        ) from None
    _check_alpha(alpha)
    return alpha


class FlwrPartitioner(Protocol):
    """What we ask of a flwr-datasets partitioner; its ``dataset`` is set by us."""

    @property
    def num_partitions(self) -> int:
        """The number of clients."""

    def load_partition(self, partition_id: int) -> object:
        """The rows of one client."""


def from_flwr(partitioner: FlwrPartitioner, labels: Numbers) -> list[Indices]:
    """The division that a flwr-datasets partitioner makes of examples with these labels.

    It sees a table with the columns ``idx`` and ``label``: partitioners that look at labels take
    ``partition_by="label"``. The object you pass stays as it is and may be used again.
    """
    # dir, not hasattr: the properties raise before a dataset is set
    if not {"dataset", "load_partition", "num_partitions"} <= set(dir(partitioner)):
        raise DataError(
            "a flwr-datasets partitioner has dataset, load_partition and num_partitions, "
            f"{type(partitioner).__name__} does not; pass e.g. IidPartitioner(num_partitions=10)"
        )
    own = copy.deepcopy(partitioner)
    own.dataset = _index_table(_array(labels))  # type: ignore[attr-defined]
    parts = (own.load_partition(i) for i in range(own.num_partitions))
    rows = [np.sort(np.asarray(part["idx"], dtype=np.int64)) for part in parts]  # type: ignore[index]
    return _nobody_empty(rows)


def _index_table(labels: Indices) -> object:
    try:
        import datasets  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise DataError(
            "a flwr-datasets partitioner needs the extra: pip install 'fedquilt[hub]'"
        ) from error
    return datasets.Dataset.from_dict({"idx": np.arange(len(labels)), "label": labels})


@dataclass(frozen=True, eq=False)
class _Shares:
    """How much of each class each client gets: ``weights[c, i]`` of class ``classes[c]``.

    Only the ratios within a class count. A last column may stand for nobody.
    """

    classes: Indices
    weights: npt.NDArray[np.float64]
    num_clients: int

    def deal(self, labels: Indices, seed: int, stream: int) -> list[Indices]:
        """Rows for each client, the examples of every class dealt by its weights."""
        _refuse_strangers(labels, self.classes, "label")
        rng = np.random.default_rng((seed, stream))
        owner = np.empty(len(labels), dtype=np.int64)
        for weights, rows in zip(self.weights, _rows_of(labels, self.classes), strict=True):
            quota = _apportion(len(rows), weights, rng)
            owner[rng.permutation(rows)] = np.repeat(np.arange(len(quota)), quota)
        return _lists(owner, self.num_clients)


def _class_shares(
    labels: Indices, num_clients: int, classes_per_client: int, seed: int, *, exact: bool
) -> _Shares:
    _check_count(num_clients, len(labels))
    classes, sizes = np.unique(labels, return_counts=True)
    if not 1 <= classes_per_client <= len(classes):
        raise DataError(
            f"classes per client must be from 1 to the {len(classes)} classes there are, got "
            f"{classes_per_client}; write for example classes:{min(2, len(classes))}"
        )
    rng = np.random.default_rng((seed, SHARES))
    if not exact:
        weights = _published_shards(len(classes), num_clients, classes_per_client, rng)
        return _Shares(classes, weights, num_clients)
    shards = _shards_per_class(sizes, num_clients, classes_per_client, rng)
    return _Shares(classes, _holders(shards, num_clients, classes_per_client, rng), num_clients)


def _shards_per_class(
    sizes: Indices, num_clients: int, classes_per_client: int, rng: np.random.Generator
) -> Indices:
    """How many clients share each class: as even as can be, and no shard without an example."""
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


def _holders(
    shards: Indices, num_clients: int, classes_per_client: int, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """1 where a client holds a class: ``classes_per_client`` a row, ``shards[c]`` a column.

    Clients draw distinct classes in turn, likelier those with many shards left. A class with as
    many shards left as there are clients must be drawn by all of them; there are never more
    such classes than a client draws, so nobody is left without.
    """
    left = shards.copy()
    weights = np.zeros((len(shards), num_clients))
    for client in range(num_clients):
        # the top keys are a draw without repetition, weighted by the shards left
        with np.errstate(divide="ignore"):
            keys = np.log(left) + rng.gumbel(size=len(left))
        keys[left == num_clients - client] = np.inf
        drawn = np.argsort(-keys)[:classes_per_client]
        weights[drawn, client] = 1
        left[drawn] -= 1
    return weights


def _published_shards(
    num_classes: int, num_clients: int, classes_per_client: int, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Holders of the published split; the last column counts the shards that nobody holds."""
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


def _dirichlet_shares(
    labels: Indices, num_clients: int, alpha: float, seed: int, minimum: int
) -> _Shares:
    """Examples of each class that each client gets, none with fewer than the minimum."""
    _check_alpha(alpha)
    _check_count(num_clients, len(labels))
    if not 1 <= minimum <= len(labels) // num_clients:
        raise DataError(
            f"the minimum must be from 1 to {len(labels) // num_clients}, which is all that "
            f"{len(labels)} examples give each of {num_clients} clients, got {minimum}; lower it"
        )
    classes, sizes = np.unique(labels, return_counts=True)
    rng = np.random.default_rng((seed, SHARES))
    # parts are equal long before 1e12, and numpy's sums overflow at 1e307
    drawn = rng.dirichlet(np.full(num_clients, min(alpha, 1e12)), size=len(classes))
    counts = np.stack([_apportion(n, p, rng) for n, p in zip(sizes, drawn, strict=True)])
    return _Shares(classes, _raised_to(counts, minimum).astype(np.float64), num_clients)


def _raised_to(counts: Indices, minimum: int) -> Indices:
    """The counts (class, client) after the richest clients gave to those below the minimum."""
    counts = counts.copy()
    totals = counts.sum(axis=0)
    while totals.min() < minimum:
        poor, rich = int(totals.argmin()), int(totals.argmax())
        label = int(counts[:, rich].argmax())
        given = min(minimum - totals[poor], counts[label, rich])
        counts[label, [poor, rich]] += (given, -given)
        totals[[poor, rich]] += (given, -given)
    return counts


def _apportion(total: int, weights: npt.NDArray[np.float64], rng: np.random.Generator) -> Indices:
    """Whole numbers in the ratio of the weights that add up to the total (largest remainder)."""
    ideal = total * weights / weights.sum()
    quota: Indices = np.floor(ideal).astype(np.int64)
    short = int(total - quota.sum())
    if short > 0:
        remainder = np.where(weights > 0, ideal - quota, -1.0)
        quota[np.lexsort((rng.random(len(weights)), -remainder))[:short]] += 1
    return quota


def _count_for_groups(num_clients: int | None, num_groups: int, num_examples: int) -> int:
    count = num_groups if num_clients is None else num_clients
    _check_count(count, num_examples)
    if count % num_groups:
        raise DataError(
            f"domains are shared by equally many clients, got {count} clients for {num_groups} "
            f"domains; ask for a multiple of {num_groups}"
        )
    return count


def _deal_groups(
    groups: Indices, present: Indices, num_clients: int, rng: np.random.Generator | None
) -> list[Indices]:
    """Rows of each client, dealt at random inside its group; without ``rng`` in blocks."""
    per_group = num_clients // len(present)
    owner = np.empty(len(groups), dtype=np.int64)
    for position, rows in enumerate(_rows_of(groups, present)):
        turns = np.arange(len(rows)) % per_group
        order, turns = (rows, np.sort(turns)) if rng is None else (rng.permutation(rows), turns)
        owner[order] = position * per_group + turns
    return _lists(owner, num_clients)


def _dealt_evenly(num_examples: int, num_clients: int, rng: np.random.Generator) -> list[Indices]:
    return _lists(rng.permutation(num_examples) % num_clients, num_clients)


def _rows_of(labels: Indices, classes: Indices) -> Iterator[Indices]:
    """The rows of each class, in the order of the classes."""
    order = np.argsort(labels, kind="stable")
    yield from np.split(order, np.searchsorted(labels[order], classes[1:]))


def _lists(owner: Indices, num_clients: int) -> list[Indices]:
    """The sorted rows of each client; rows of owners beyond the last client belong to nobody."""
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.searchsorted(owner[order], np.arange(1, num_clients + 1)))[:-1]


def _array(numbers: Numbers) -> Indices:
    array = np.asarray(numbers)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            f"labels and groups must be 1-D integers, got {array.dtype} of shape {array.shape}; "
            "convert them with .astype('int64')"
        )
    return array.astype(np.int64, copy=False)


def _check_count(num_clients: int, num_examples: int) -> None:
    if num_clients < 1:
        raise DataError(f"there must be at least one client, got {num_clients}; ask for 1 or more")
    if num_clients > num_examples:
        raise DataError(
            f"every client needs an example, got {num_clients} clients for {num_examples} "
            f"examples; ask for at most {num_examples} clients"
        )


def _check_alpha(alpha: float) -> None:
    if not (alpha > 0 and math.isfinite(alpha)):
        raise DataError(
            f"alpha must be a finite number above 0, got {alpha}; "
            "write for example dirichlet:0.5 (smaller is more uneven)"
        )


def _refuse_strangers(values: Indices, known: Indices, kind: str) -> None:
    strange = np.setdiff1d(values, known)
    if len(strange):
        raise DataError(
            f"every {kind} of the test set must occur in the training set, got "
            f"{', '.join(map(str, strange[:5]))} in the test set only; drop those examples"
        )


def _nobody_empty(rows: Sequence[Indices]) -> list[Indices]:
    empty = [client for client, own in enumerate(rows) if len(own) == 0]
    if empty:
        raise DataError(
            f"every client needs an example, client {empty[0]} got none (so did {len(empty) - 1} "
            "others); ask for fewer clients or a less uneven partition"
        )
    return list(rows)
