"""Hostile clients, simulated: attacks on updates, to measure what defences are worth.

The updates of hostile clients are replaced when they have come back, before they are merged, so
that an attack is the same on every engine and at any number of workers. Some attackers know what
all honest clients of the round have sent: hostile clients are then asked last.

Every attack is about changes: what an update adds to the server's values. A hostile client sends
the cells of its own subnet. Attacks that use the honest updates use, for each cell, those that hold
it; where nobody does, the change is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedquilt.errors import ConfigError
from fedquilt.federation.aggregation.change_store import compute_changes
from fedquilt.federation.aggregation.transforms import replace_changes
from fedquilt.federation.client import Task, Update, derive_seed
from fedquilt.federation.rings import list_averaged
from fedquilt.federation.state import Setup, State
from fedquilt.federation.tasks import LazyTasks
from fedquilt.federation.update import validate_update
from fedquilt.ranges import Positive, check_fields
from fedquilt.structure.cut import global_name, index_cells, view_cells, write_cells
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet

WHO, NOISE = 13, 14  # streams of random numbers: who is hostile, and what noise is sent
Changes = Sequence[Mapping[str, Tensor]]  # the change of each tensor, for each subnet


@dataclass(frozen=True, kw_only=True)
class Attack:
    """Some hostile clients, and what they do; subclasses say what.

    Args:
        clients: The hostile clients: a fraction of all, who are drawn by the seed, or their
            numbers.

    >>> from dataclasses import dataclass
    >>> import torch, fedquilt as fq
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Lazy(fq.Attack):  # sends back what it got
    ...     def corrupt(self, changes, update, honest, seed):
    ...         return [{n: torch.zeros_like(t) for n, t in part.items()} for part in changes]
    >>> data = (torch.rand(12, 4), torch.arange(12) % 3)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> clients, attack = fq.make_clients(data, count=2), Lazy(clients=1.0)
    >>> run = fq.train(model, data[0][:1], "fedavg", clients, 1, workers=0, attacks=attack)
    >>> torch.equal(run.state.params["0.bias"], model[0].bias)
    True
    """

    clients: Annotated[float, Field(ge=0, le=1)] | tuple[int, ...] = 0.2

    needs_honest = False
    """Whether the attacker knows what honest clients have sent in the same round."""

    def __post_init__(self) -> None:
        """Refuses settings that are not of their types, or out of range."""
        check_fields(self)

    def list_hostile(self, setup: Setup) -> frozenset[int]:
        """The numbers of the hostile clients.

        Args:
            setup: What stays the same during the run.

        Raises:
            ConfigError: A number is not that of a client.
        """
        known = [client.id for client in setup.clients]
        if isinstance(self.clients, tuple):
            for number in self.clients:
                if number not in known:
                    raise ConfigError(
                        f"attacks.clients names clients by their numbers, and there is no {number}"
                    )
            return frozenset(self.clients)
        draw = np.random.default_rng(derive_seed(setup.seed, 0, 0, WHO))
        count = round(self.clients * len(known))
        return frozenset(known[i] for i in draw.permutation(len(known))[:count].tolist())

    def check(self, setup: Setup) -> None:
        """Raises a ConfigError if the attack has no meaning for a model or its data.

        Args:
            setup: What stays the same during the run.
        """

    def poison(self, task: Task) -> Task:
        """The task of a hostile client; attacks on data change what it trains on.

        Args:
            task: What an honest client would do.
        """
        return task

    def corrupt(
        self, changes: Changes, update: Update, honest: HonestChanges, seed: int
    ) -> Changes:
        """What a hostile client sends instead of its changes.

        Args:
            changes: What it would have sent.
            update: The update that they are of.
            honest: What is known of the honest updates of the round, if the attack needs it.
            seed: Of the client's random numbers in this round.
        """
        return changes


@dataclass(frozen=True, kw_only=True)
class SignFlip(Attack):
    """Sends the opposite of the change.

    Args:
        clients: The hostile clients: a fraction of all, or their numbers.
        scale: What the opposite is multiplied by.

    >>> import fedquilt as fq
    >>> fq.SignFlip(clients=(0, 3), scale=10.0).scale
    10.0
    """

    scale: Positive = 1.0

    def corrupt(
        self, changes: Changes, update: Update, honest: HonestChanges, seed: int
    ) -> Changes:
        """Multiplies by a negative number."""
        return _map_cells(lambda own: -self.scale * own, changes)


@dataclass(frozen=True, kw_only=True)
class ScaledUpdate(Attack):
    """Sends a multiple of the change, as in model replacement.

    Bagdasaryan, Veit, Hua, Estrin, Shmatikov. "How To Backdoor Federated Learning." AISTATS 2020.

    Args:
        clients: The hostile clients: a fraction of all, or their numbers.
        scale: What the change is multiplied by.

    >>> import fedquilt as fq
    >>> fq.ScaledUpdate(clients=0.1).scale
    10.0
    """

    scale: Positive = 10.0

    def corrupt(
        self, changes: Changes, update: Update, honest: HonestChanges, seed: int
    ) -> Changes:
        """Multiplies."""
        return _map_cells(lambda own: self.scale * own, changes)


@dataclass(frozen=True, kw_only=True)
class GaussianNoise(Attack):
    """Sends noise instead of a change.

    Args:
        clients: The hostile clients: a fraction of all, or their numbers.
        sigma: The standard deviation of the noise.

    >>> import fedquilt as fq
    >>> fq.GaussianNoise(clients=0.1).sigma
    1.0
    """

    sigma: Positive = 1.0

    def corrupt(
        self, changes: Changes, update: Update, honest: HonestChanges, seed: int
    ) -> Changes:
        """Draws the noise of every cell."""
        generator = torch.Generator().manual_seed(seed)

        def draw(own: Tensor) -> Tensor:
            return self.sigma * torch.randn(own.shape, generator=generator, dtype=own.dtype)

        return _map_cells(draw, changes)


@dataclass(frozen=True, kw_only=True)
class ALIE(Attack):
    """A little is enough: the honest mean, less a few honest standard deviations.

    Baruch, Baruch, Goldberg. "A Little Is Enough: Circumventing Defenses For Distributed Learning."
    NeurIPS 2019. Small enough in every cell to pass for honest.

    Args:
        clients: The hostile clients: a fraction of all, or their numbers.
        z: How many standard deviations.

    >>> import fedquilt as fq
    >>> fq.ALIE(clients=0.2).z
    1.5
    """

    z: Positive = 1.5
    needs_honest = True

    def corrupt(
        self, changes: Changes, update: Update, honest: HonestChanges, seed: int
    ) -> Changes:
        """Mean − z · standard deviation, cell by cell."""
        mean, deviation = honest.mean(update.subnets), honest.deviation(update.subnets)
        return _map_cells(lambda _, m, d: m - self.z * d, changes, mean, deviation)


@dataclass(frozen=True, kw_only=True)
class InnerProduct(Attack):
    """Inner-product manipulation (IPM): the honest mean, turned around.

    Xie, Koyejo, Gupta. "Fall of Empires: Breaking Byzantine-Tolerant SGD by Inner Product
    Manipulation." UAI 2019.

    Args:
        clients: The hostile clients: a fraction of all, or their numbers.
        epsilon: What the opposite of the mean is multiplied by.

    >>> import fedquilt as fq
    >>> fq.InnerProduct(clients=0.2).epsilon
    0.5
    """

    epsilon: Positive = 0.5
    needs_honest = True

    def corrupt(
        self, changes: Changes, update: Update, honest: HonestChanges, seed: int
    ) -> Changes:
        """−ε times the mean, cell by cell."""
        return _map_cells(lambda _, m: -self.epsilon * m, changes, honest.mean(update.subnets))


@dataclass(frozen=True, kw_only=True)
class Mimic(Attack):
    """All hostile clients copy one honest client, so that it counts several times.

    Karimireddy, He, Jaggi. "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing."
    ICLR 2022. The one is the first honest client of the round with the most cells.

    Args:
        clients: The hostile clients: a fraction of all, or their numbers.

    >>> import fedquilt as fq
    >>> fq.Mimic(clients=0.2).needs_honest
    True
    """

    needs_honest = True

    def corrupt(
        self, changes: Changes, update: Update, honest: HonestChanges, seed: int
    ) -> Changes:
        """The change of the one, where it has the cells."""
        return _map_cells(lambda _, copied: copied, changes, honest.largest(update.subnets))


def _map_cells(compute: Callable[..., Tensor], changes: Changes, *known: Changes) -> Changes:
    """Computes each tensor anew, from itself and what is known of its cells; its type stays."""
    return [
        {n: compute(t, *(one[n] for one in others)).to(t.dtype) for n, t in part.items()}
        for part, *others in zip(changes, *known, strict=True)
    ]


UPDATE_ATTACKS: dict[str, type[Attack]] = {
    "sign-flip": SignFlip,
    "scaled-update": ScaledUpdate,
    "gaussian-noise": GaussianNoise,
    "alie": ALIE,
    "ipm": InnerProduct,
    "mimic": Mimic,
}


@dataclass
class HonestChanges:
    """What the honest updates of a round say, cell by cell: sums, of which few are kept."""

    structure: Structure
    _counts: dict[str, Tensor] = field(default_factory=dict)
    _means: dict[str, Tensor] = field(default_factory=dict)
    _squares: dict[str, Tensor] = field(default_factory=dict)
    _largest: dict[str, Tensor] = field(default_factory=dict)
    _most: int = 0

    def add(self, subnets: Sequence[Subnet], changes: Changes) -> None:
        """Adds one honest update, by Welford's formula."""
        size = sum(t.numel() for part in changes for t in part.values())
        is_largest = size > self._most
        if is_largest:
            self._most, self._largest = size, {}
        for target, index, change in self._iterate(subnets, changes):
            shape = self.structure.shapes[target.partition("@")[0]]
            for sums in (self._counts, self._means, self._squares):
                if target not in sums:
                    sums[target] = torch.zeros(shape, dtype=torch.float64)
            count = view_cells(self._counts[target], index) + 1
            mean = view_cells(self._means[target], index)
            away = change.double() - mean
            mean = mean + away / count
            squares = view_cells(self._squares[target], index) + away * (change.double() - mean)
            write_cells(self._counts[target], index, count)
            write_cells(self._means[target], index, mean)
            write_cells(self._squares[target], index, squares)
            if is_largest:
                self._largest[target] = torch.zeros(shape, dtype=torch.float64)
                write_cells(self._largest[target], index, change.double())

    def mean(self, subnets: Sequence[Subnet]) -> list[dict[str, Tensor]]:
        """The mean change of each cell of some subnets."""
        return self._take(subnets, self._means)

    def deviation(self, subnets: Sequence[Subnet]) -> list[dict[str, Tensor]]:
        """The standard deviation of each cell of some subnets; zero where there is one update."""
        spread = {
            n: (t / (self._counts[n] - 1).clamp(min=1)).clamp(min=0).sqrt()
            for n, t in self._squares.items()
        }
        return self._take(subnets, spread)

    def largest(self, subnets: Sequence[Subnet]) -> list[dict[str, Tensor]]:
        """The change of the one client with the most cells."""
        return self._take(subnets, self._largest)

    def _take(
        self, subnets: Sequence[Subnet], tensors: Mapping[str, Tensor]
    ) -> list[dict[str, Tensor]]:
        taken = []
        for subnet in subnets:
            part = {}
            for name, index in index_cells(self.structure, subnet).items():
                whole = tensors.get(global_name(name, self.structure, subnet))
                if whole is None:
                    whole = torch.zeros(self.structure.shapes[name], dtype=torch.float64)
                part[name] = view_cells(whole, index)
            taken.append(part)
        return taken

    def _iterate(self, subnets: Sequence[Subnet], changes: Changes):  # type: ignore[no-untyped-def]
        for subnet, part in zip(subnets, changes, strict=True):
            where = index_cells(self.structure, subnet)
            for name, change in part.items():
                yield global_name(name, self.structure, subnet), where[name], change


class RoundAttack:
    """An attack in one round: looks at honest updates, and replaces those of hostile clients.

    Args:
        attack: What hostile clients do.
        hostile: Their numbers.
        setup: What stays the same during the run.
        state: The state that the clients of this round were sent.
        gives_changes: Whether updates are changes already, not values.
    """

    def __init__(
        self,
        attack: Attack,
        hostile: frozenset[int],
        setup: Setup,
        state: State,
        *,
        gives_changes: bool,
    ) -> None:
        self._attack, self._hostile, self._setup = attack, hostile, setup
        self._state, self._gives_changes = state, gives_changes
        self._honest = HonestChanges(setup.structure)

    def plan(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """The tasks of the round: hostile clients' are poisoned, and last if they wait for all."""
        order: Sequence[int] = range(len(tasks))
        if self._attack.needs_honest:
            hostile = np.array([task.client in self._hostile for task in tasks], dtype=bool)
            order = np.argsort(hostile, kind="stable").tolist()

        def plan(row: int) -> Task:
            task = tasks[order[row]]
            return self._attack.poison(task) if task.client in self._hostile else task

        return LazyTasks(len(tasks), plan)

    def intercept(self, update: Update) -> Update:
        """The update that is merged."""
        is_hostile = update.client in self._hostile
        if not update.subnets or not (is_hostile or self._attack.needs_honest):
            return update
        changes = self._compute_changes(update)
        if not is_hostile:
            self._honest.add(update.subnets, changes)
            return update
        seed = derive_seed(self._setup.seed, self._state.round, update.client, NOISE)
        corrupted = self._attack.corrupt(changes, update, self._honest, seed)
        if corrupted is changes:
            return update
        if self._gives_changes:
            parts = zip(update.params, corrupted, strict=True)
            return replace(update, params=tuple({**sent, **part} for sent, part in parts))
        return replace_changes(self._setup, self._state, update, corrupted)

    def validate(self, update: Update) -> None:
        """Raises an UpdateError if a server would not accept what a hostile client sends."""
        if update.client in self._hostile and not self._gives_changes:
            validate_update(update, self._setup.structure, self._state.params)

    def _compute_changes(self, update: Update) -> Changes:
        names = list_averaged(self._setup)
        if self._gives_changes:
            return [{n: t for n, t in part.items() if n in names} for part in update.params]
        return compute_changes(self._setup, self._state, update, names)
