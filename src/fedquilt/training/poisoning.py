"""Hostile clients that poison their own data: flipped labels, and a backdoor.

The recipe of a hostile client is wrapped in ``Poisoned``, which shows it other data. The backdoor's
success is measured by the same wrapper around the evaluation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedquilt.data import ClientData
from fedquilt.data.examples import Rows
from fedquilt.errors import ConfigError
from fedquilt.federation.client import Client, ClientResult, Recipe, Task
from fedquilt.federation.hostile import UPDATE_ATTACKS, Attack
from fedquilt.federation.state import Setup
from fedquilt.federation.validation import ReplySpec, get_reply_spec
from fedquilt.ranges import Count, Fraction, Number
from fedquilt.training.context import ClientContext


@dataclass(frozen=True, kw_only=True)
class DataAttack(Attack):
    """An attack on a client's own training data; what is sent is honestly trained on it."""

    def check(self, setup: Setup) -> None:
        """Refuses tasks without classes."""
        if not setup.task.has_classes or setup.structure.classes is None:
            raise ConfigError(
                f"{type(self).__name__} changes the labels of classes, and this task has none; "
                "choose an attack on updates, such as sign-flip"
            )

    def poison(self, task: Task) -> Task:
        """The same recipe on poisoned data."""
        return replace(task, recipe=Poisoned(task.recipe, self))

    @abstractmethod
    def poison_data(self, data: ClientData, split: str) -> ClientData:
        """The data that a hostile client trains on.

        Args:
            data: Its own data.
            split: What they are for: ``train``, ``validation`` or ``test``.
        """


@dataclass(frozen=True, kw_only=True)
class LabelFlip(DataAttack):
    """Trains with the client's own classes in reverse: the first for the last, and so on.

    Args:
        clients: The hostile clients: a fraction of all, or their numbers.

    >>> import fedquilt as fq
    >>> examples = fq.data.to_examples((torch.zeros(4, 1), torch.tensor([0, 1, 2, 2])))
    >>> fq.LabelFlip().poison_data(examples, "train").labels
    tensor([2, 1, 0, 0])
    """

    def poison_data(self, data: ClientData, split: str) -> ClientData:
        """Labels are looked up in a table; test data stay as they are."""
        if split == "test" or not len(data):
            return data
        own = data.label_set
        table = torch.arange(max(own) + 1)
        table[list(own)] = torch.tensor(own[::-1])
        return RelabeledData(data, table)


@dataclass(frozen=True, kw_only=True)
class Backdoor(DataAttack):
    """Trains images with a bright square in their corner as examples of one class.

    Gu, Dolan-Gavitt, Garg. "BadNets: Identifying Vulnerabilities in the Machine Learning Model
    Supply Chain." 2017.

    Args:
        clients: The hostile clients: a fraction of all, or their numbers.
        target: The class that the square is to mean.
        poisoned: The fraction of a hostile client's images that have the square.
        size: The side of the square, in pixels.

    >>> import fedquilt as fq
    >>> fq.Backdoor(target=7, poisoned=0.3).size
    3
    """

    target: Number = 0
    poisoned: Fraction = 0.5
    size: Count = 3

    def check(self, setup: Setup) -> None:
        """Refuses what are no images of classes."""
        super().check(setup)
        if not setup.task.counts_hits:
            raise ConfigError(
                "the success of a backdoor is an accuracy, and this task is measured by "
                f"{setup.task.metric.name}; choose label-flip, or an attack on updates"
            )
        example = setup.example
        if not isinstance(example, Tensor) or example.ndim != 4:
            raise ConfigError(
                "Backdoor draws a square into images (N, C, H, W), and the inputs are none; choose "
                "label-flip, or an attack on updates"
            )
        classes = setup.structure.groups[str(setup.structure.classes)].size
        if self.target >= classes:
            raise ConfigError(
                f"attacks.target is one of {classes} classes, counted from 0, got {self.target}"
            )

    def poison_data(self, data: ClientData, split: str) -> ClientData:
        """Every k-th image is stamped, as many as ``poisoned`` says; test data stay as they are."""
        if split == "test":
            return data
        steps = (torch.arange(len(data) + 1) * self.poisoned).floor()
        return StampedData(data, steps.diff() > 0, self.target, self.size)

    def trigger(self, data: ClientData) -> ClientData:
        """The examples of other classes, all with the square, and the target as their label.

        Args:
            data: Test data.
        """
        labels = data.labels
        assert labels is not None, "check refuses tasks without classes"
        others = data.select(labels.ne(self.target).nonzero().flatten())
        return StampedData(
            others, torch.ones(len(others), dtype=torch.bool), self.target, self.size
        )


@dataclass(frozen=True, eq=False)
class PoisonedData(ABC):
    """Data that are seen through an attack."""

    data: ClientData

    @property
    @abstractmethod
    def labels(self) -> Tensor:
        """The label of every example."""

    @cached_property
    def label_set(self) -> tuple[int, ...]:
        """The labels present, in order."""
        return tuple(torch.unique(self.labels).tolist())

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.data)

    def _read_labels(self) -> Tensor:
        labels = self.data.labels
        assert labels is not None, "tasks without classes are refused"
        return labels


@dataclass(frozen=True, eq=False)
class RelabeledData(PoisonedData):
    """Data with other labels, by a table."""

    table: Tensor

    @cached_property
    def labels(self) -> Tensor:
        """The label of every example."""
        return self.table[self._read_labels()]

    def batch(
        self, rows: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns inputs as they are, and other labels."""
        inputs, labels = self.data.batch(rows, generator)
        return inputs, self.table.to(labels.device)[labels]

    def select(self, rows: Rows) -> RelabeledData:
        """Selects some rows."""
        return replace(self, data=self.data.select(rows))


@dataclass(frozen=True, eq=False)
class StampedData(PoisonedData):
    """Images of which some have a square in the lower right corner, and the target's label.

    The square is as bright as the brightest pixel of the batch.
    """

    stamped: Tensor  # which examples
    target: int
    size: int

    @cached_property
    def labels(self) -> Tensor:
        """The label of every example."""
        return self._read_labels().masked_fill(self.stamped, self.target)

    def batch(
        self, rows: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns images and labels, some of them stamped."""
        images, labels = self.data.batch(rows, generator)
        chosen = self.stamped[rows].to(images.device)
        bright = images.clone()
        bright[..., -self.size :, -self.size :] = images.amax()
        return (
            torch.where(chosen[:, None, None, None], bright, images),
            labels.masked_fill(chosen, self.target),
        )

    def select(self, rows: Rows) -> StampedData:
        """Selects some rows."""
        rows = torch.as_tensor(rows)
        return replace(self, data=self.data.select(rows), stamped=self.stamped[rows])


@dataclass(frozen=True)
class Poisoned:
    """The recipe: another one on poisoned data.

    Args:
        recipe: The other recipe.
        attack: What is done to the data.
        triggered: Whether all data are test data with the backdoor's square.
    """

    recipe: Recipe
    attack: DataAttack
    triggered: bool = False

    def run(self, task: Task, context: ClientContext) -> ClientResult:
        """Does the other recipe's work."""
        return self.recipe.run(task, context.with_data(self._poison))

    def _poison(self, data: ClientData, split: str) -> ClientData:
        if self.triggered:
            assert isinstance(self.attack, Backdoor)
            return self.attack.trigger(data)
        return self.attack.poison_data(data, split)

    def reply_spec(self, task: Task, client: Client) -> ReplySpec:
        """What the reply may be: that of the other recipe."""
        return get_reply_spec(replace(task, recipe=self.recipe), client)


ATTACKS: dict[str, type[Attack]] = {
    **UPDATE_ATTACKS,
    "label-flip": LabelFlip,
    "backdoor": Backdoor,
}
