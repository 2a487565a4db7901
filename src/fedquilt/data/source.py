"""A whole set before it is divided among clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedquilt.data.examples import Examples, Normalise
from fedquilt.data.partition import first_rows
from fedquilt.data.windows import Windows
from fedquilt.errors import DataError

MOST_CLASSES = 100_000


@dataclass(frozen=True, eq=False)
class Source:
    """Training and test examples, and who they come from.

    ``groups_train[i]`` is the natural client or the domain of example i, a position in
    ``group_names``; None when the set does not say. ``groups_test`` is None also where test
    examples belong to none of the clients. ``num_tokens`` is how many different tokens inputs are
    made of; None where they are no text.
    """

    name: str
    train: Examples | Windows
    test: Examples | Windows
    num_classes: int
    groups_train: Tensor | None = None
    groups_test: Tensor | None = None
    group_names: tuple[str, ...] = ()
    num_tokens: int | None = None

    @property
    def example(self) -> Tensor:
        """An input like the data's, of zeros."""
        x, _ = self.train.batch(torch.zeros(1, dtype=torch.int64))
        return torch.zeros_like(x)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.example.shape[1:])

    @property
    def scale(self) -> Normalise | None:
        """How images are normalised; None if they are not, or are no images."""
        return self.train.scale if isinstance(self.train, Examples) else None

    def scaled(self, scale: Normalise | None) -> Source:
        """The set normalised in another way; None: images stay in [0, 1]."""
        train, test = (replace(part, scale=scale) for part in self._parts("normalised"))
        return replace(self, train=train, test=test)

    def augmented(self, augment: str) -> Source:
        """The set with training images changed in this way."""
        train, _ = self._parts("augmented")
        return replace(self, train=replace(train, augment=augment))

    def _parts(self, purpose: str) -> tuple[Examples, Examples]:
        if not isinstance(self.train, Examples) or not isinstance(self.test, Examples):
            raise DataError(f"only images can be {purpose}, '{self.name}' is text; leave that out")
        return self.train, self.test

    def first(self, share: float) -> Source:
        """The set with the first ⌊share · n⌋ training examples of each group, or of the whole.

        Examples stay in the order of the file; the test set and the normalisation stay as they are.
        """
        groups = self.groups_train
        whole = torch.zeros(len(self.train), dtype=torch.int64)
        rows = torch.from_numpy(first_rows(whole if groups is None else groups, share))
        return replace(
            self,
            train=self.train.select(rows),
            groups_train=None if groups is None else groups[rows],
        )


def owners(
    name: str, train: Mapping[str, int], test: Mapping[str, int]
) -> tuple[Tensor, Tensor | None, tuple[str, ...]]:
    """Whose each example is, from how many every client has: groups of both parts, and names.

    Clients of the test part also train, or none of them does: then the test part is of unseen
    clients, and belongs to none of those that are there.

    >>> owners("a", {"eve": 2, "bob": 1}, {"bob": 1})
    (tensor([0, 0, 1]), tensor([1]), ('eve', 'bob'))
    """
    names = tuple(train)
    strangers = [client for client in test if client not in train]
    if strangers and len(strangers) < len(test):
        raise DataError(
            f"of the test clients of '{name}' {len(strangers)} do not train, such as "
            f"'{strangers[0]}', and {len(test) - len(strangers)} do; leave out one kind"
        )
    number = {client: i for i, client in enumerate(names)}
    groups = torch.repeat_interleave(torch.arange(len(names)), torch.tensor([*train.values()]))
    if strangers or not test:
        return groups, None, names
    owner = torch.tensor([number[client] for client in test])
    return groups, torch.repeat_interleave(owner, torch.tensor([*test.values()])), names
