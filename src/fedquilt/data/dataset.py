"""A whole data set, before it is divided among clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from fedquilt.data.examples import ClientData, Examples, NestedExamples
from fedquilt.data.partition import take_first_rows
from fedquilt.data.pipeline import (
    Pipeline,
    get_augmentation,
)
from fedquilt.data.transformed import TransformedExamples, transform_examples
from fedquilt.data.transforms import Normalize
from fedquilt.errors import DataError

MAX_CLASSES = 100_000


class TextEncoder(Protocol):
    """Turns a text into the tokens of one example, as those of the data set were."""

    @property
    def length(self) -> int:
        """The number of tokens of an example."""

    @property
    def unit(self) -> str:
        """What a token stands for, such as ``words``."""

    def __call__(self, text: str) -> Tensor:
        """The tokens, int64."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test examples, and which client or domain each comes from.

    Args:
        name: What the set is called.
        train: The training examples.
        test: The test examples.
        num_classes: The number of classes.
        groups_train: For each training example its natural client or its domain, a position in
            ``group_names``; None if the data do not tell.
        groups_test: The same for the test examples; None also if they belong to none of the
            clients.
        group_names: The names of the natural clients or domains.
        num_tokens: The size of the vocabulary of text; None for other data.
        text_encoder: Turns a text into the tokens of one example; None for other data.
        class_names: What the classes are called, if the data say so.

    >>> import fedquilt as fq
    >>> digits = fq.load_dataset("digits")
    >>> digits.num_classes, len(digits.train), len(digits.test)
    (10, 1442, 355)
    """

    name: str
    train: ClientData
    test: ClientData
    num_classes: int
    groups_train: Tensor | None = None
    groups_test: Tensor | None = None
    group_names: tuple[str, ...] = ()
    num_tokens: int | None = None
    text_encoder: TextEncoder | None = None
    class_names: tuple[str, ...] = ()

    @property
    def example(self) -> Tensor:
        """An input of zeros with the shape and type of the data, as a batch of one."""
        x, _ = self.train.batch(torch.zeros(1, dtype=torch.int64))
        return torch.zeros_like(x)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.example.shape[1:])

    @property
    def normalization(self) -> Normalize | None:
        """The normalization of the images; None if there is none."""
        return getattr(self.train, "scale", None)

    @property
    def stored_inputs(self) -> Tensor | None:
        """The training inputs as they are stored; None if they are not in memory."""
        data = self.train.data if isinstance(self.train, TransformedExamples) else self.train
        inputs = data.inputs if isinstance(data, Examples | NestedExamples) else None
        return inputs if isinstance(inputs, Tensor) else None

    def with_normalization(self, scale: Normalize | None) -> Dataset:
        """Returns the data set with another normalization; None keeps images in [0, 1]."""
        self._require_images("normalized")
        train, test = (_normalize(part, scale) for part in (self.train, self.test))
        return replace(self, train=train, test=test)

    def with_augmentation(self, augment: str) -> Dataset:
        """Returns the data set with another augmentation of the training images."""
        return self.with_transforms(get_augmentation(augment))

    def with_transforms(self, pipeline: Pipeline) -> Dataset:
        """Returns the data set with images that go through a pipeline, instead of another one."""
        self._require_images("augmented")
        train, test = (transform_examples(part, pipeline) for part in (self.train, self.test))
        return replace(self, train=train, test=test)

    def _require_images(self, purpose: str) -> None:
        if len(self.example.shape) != 4:
            raise DataError(
                f"only images can be {purpose}, '{self.name}' has inputs of shape {self.shape}; "
                "leave that out"
            )

    def take_first(self, fraction: float) -> Dataset:
        """Keeps the first ⌊fraction · n⌋ training examples of each group, or of the whole set.

        Examples stay in the order of the file. Test set and normalization do not change.
        """
        groups = self.groups_train
        whole = torch.zeros(len(self.train), dtype=torch.int64)
        rows = torch.from_numpy(take_first_rows(whole if groups is None else groups, fraction))
        return replace(
            self,
            train=self.train.select(rows),
            groups_train=None if groups is None else groups[rows],
        )


def _normalize(part: ClientData, scale: Normalize | None) -> ClientData:
    if isinstance(part, Examples):
        return replace(part, scale=scale)
    pipeline = part.pipeline if isinstance(part, TransformedExamples) else Pipeline()
    data = part.data if isinstance(part, TransformedExamples) else part
    return transform_examples(data, pipeline.with_normalization(scale))


def label_groups(
    name: str, train: Mapping[str, int], test: Mapping[str, int]
) -> tuple[Tensor, Tensor | None, tuple[str, ...]]:
    """Numbers the client of each example, given how many examples each client has.

    Returns the groups of the training and of the test examples, and the clients' names. Either all
    test clients train too, or none does. In the latter case the groups of the test part are None.

    >>> label_groups("a", {"eve": 2, "bob": 1}, {"bob": 1})
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
