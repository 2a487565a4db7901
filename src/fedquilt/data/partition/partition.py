"""The partitions that a text names, such as ``classes:2``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedquilt.data.partition.by_class import (
    ClassWeights,
    check_alpha,
    draw_class_weights,
    draw_dirichlet_weights,
)
from fedquilt.data.partition.by_group import count_group_clients, deal_groups
from fedquilt.data.partition.iid import deal_iid
from fedquilt.data.partition.rows import (
    Indices,
    Numbers,
    Stream,
    check_known,
    deal_evenly,
    require_examples,
    to_integers,
)
from fedquilt.errors import DataError, describe_unknown
from fedquilt.federation.columns import RaggedColumn

BLOCKS = "domain:blocks"
KINDS = ("iid", "classes", "dirichlet", "domain", BLOCKS, "natural")


@dataclass(frozen=True)
class Partition:
    """A way to divide a data set among clients, as ``parse_partition`` reads it.

    ``number`` is the classes per client of ``classes``, and the alpha of ``dirichlet``.
    """

    kind: str
    number: float | None = None
    exact: bool = True

    def __post_init__(self) -> None:
        """Checks that the kind is known."""
        if self.kind not in KINDS:
            raise DataError(
                f"{describe_unknown('partition', self.kind, KINDS)} "
                "(as in classes:2, dirichlet:0.5)"
            )

    def __str__(self) -> str:
        """The text that ``parse_partition`` reads."""
        return self.kind if self.number is None else f"{self.kind}:{self.number}"

    def split(
        self,
        labels_train: Numbers,
        groups_train: Numbers | None,
        labels_test: Numbers,
        groups_test: Numbers | None,
        num_clients: int | None,
        seed: int,
    ) -> tuple[RaggedColumn, RaggedColumn]:
        """Divides the training set, and the test set in the same way; returns rows per client.

        Every training row is used once, and every client has at least one. A client may have no
        test rows. ``natural`` has one client per id, and takes None or their number as
        ``num_clients``. ``domain`` deals each domain at random among its clients.
        ``domain:blocks`` cuts it into consecutive blocks of equal size, as Split-Mix does (Hong et
        al., ICLR 2022). Departure: if sizes are not even, the first clients get one example more;
        Split-Mix draws who does.
        """
        if self.kind in ("domain", BLOCKS, "natural"):
            return self._split_groups(groups_train, groups_test, num_clients, seed)
        if num_clients is None:
            raise DataError(
                f"partition '{self}' needs the number of clients, got none; "
                "give one, or use 'natural'"
            )
        if self.kind == "iid":
            dealt = deal_iid(len(labels_train), num_clients, seed)
            rng = Stream.TEST.make_generator(seed)
            return dealt, deal_evenly(len(labels_test), num_clients, rng)
        if labels_train.ndim > 1:
            raise DataError(
                f"partition '{self}' goes by the label of an example, and these have one at every "
                "position; use 'iid' or 'natural'"
            )
        train, test = to_integers(labels_train), to_integers(labels_test)
        weights = self._draw_weights(train, num_clients, seed)
        dealt = require_examples(weights.deal(train, seed, Stream.TRAIN))
        return dealt, weights.deal(test, seed, Stream.TEST)

    def _draw_weights(self, labels: Indices, num_clients: int, seed: int) -> ClassWeights:
        number = self.number or 0
        if self.kind == "classes":
            return draw_class_weights(labels, num_clients, int(number), seed, exact=self.exact)
        return draw_dirichlet_weights(labels, num_clients, number, seed, minimum=1)

    def _split_groups(
        self,
        groups_train: Numbers | None,
        groups_test: Numbers | None,
        num_clients: int | None,
        seed: int,
    ) -> tuple[RaggedColumn, RaggedColumn]:
        if groups_train is None or groups_test is None:
            key = "id" if self.kind == "natural" else "domain"
            raise DataError(
                f"partition '{self.kind}' needs data that say where each example comes from, these "
                f"do not; give {key}_train and {key}_test in the .npz file, groups=(train, test) "
                "in Python, or use 'iid'"
            )
        train, test = to_integers(groups_train), to_integers(groups_test)
        present = np.unique(train)
        if self.kind == "natural" and num_clients not in (None, len(present)):
            raise DataError(
                f"partition 'natural' has one client per id, got {num_clients} clients for "
                f"{len(present)} ids; ask for {len(present)} clients"
            )
        check_known(test, present, "group")
        count = count_group_clients(num_clients, len(present), len(train))
        rngs = [
            None if self.kind == BLOCKS else stream.make_generator(seed)
            for stream in (Stream.TRAIN, Stream.TEST)
        ]
        dealt = require_examples(deal_groups(train, present, count, rngs[0]))
        return dealt, deal_groups(test, present, count, rngs[1])


def parse_partition(text: str) -> Partition:
    """Reads a partition from text: iid, classes:2, dirichlet:0.5, domain, natural, ...

    >>> parse_partition("dirichlet:0.5")
    Partition(kind='dirichlet', number=0.5, exact=True)
    """
    if text.strip() == BLOCKS:
        return Partition(BLOCKS)
    kind, colon, number = text.strip().partition(":")
    if kind == "classes":
        return Partition(kind, _parse_classes(text, number))
    if kind == "dirichlet":
        return Partition(kind, _parse_alpha(text, number))
    if colon and kind in KINDS:
        raise DataError(f"partition '{kind}' takes no number, got '{text}'; write '{kind}'")
    return Partition(kind)


def _parse_classes(text: str, number: str) -> int:
    if not number.isdecimal() or int(number) < 1:
        raise DataError(
            f"'classes' needs a whole number of classes per client, got '{text}'; "
            "write for example classes:2"
        )
    return int(number)


def _parse_alpha(text: str, number: str) -> float:
    try:
        alpha = float(number)
    except ValueError:
        raise DataError(
            f"'dirichlet' needs a number alpha, got '{text}'; write for example dirichlet:0.5"
        ) from None
    check_alpha(alpha)
    return alpha
