"""Split-Mix: a wide net is split into slim bases that every client can train, and mixed in use.

Hong, Wang, Wang, Zhou. "Efficient Split-Mix Federated Learning for On-Demand and In-Situ
Customization." ICLR 2022.

Symbols of the paper -> names here: r -> base, M = ⌊1/r⌋ -> num_bases, w_{i,r} -> tensors named
``name@i`` in state.params, R_k -> client.budget, P and p -> the deck and memory["visits"],
T, E, η_t -> setup.rounds, optimiser.epochs, optimiser.rate, λ -> robustness, λ_n -> share.

Choices that the paper leaves open, and where the public code differs, are in
docs/methods/splitmix.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from fedquilt.errors import BudgetError, ConfigError
from fedquilt.federation.client import Client, Task, Update, seed_of
from fedquilt.federation.mix import LEVELS
from fedquilt.federation.state import Phase, Setup, State
from fedquilt.methods.method import Rounds, SizeKind, merged
from fedquilt.ranges import Fraction
from fedquilt.structure.budget import Budget, times
from fedquilt.structure.cost import cost
from fedquilt.structure.cut import build
from fedquilt.structure.groups import STATISTICS
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.trace import named_tensors
from fedquilt.training.attack import PGD
from fedquilt.training.descent import Optimiser, is_quicker_together
from fedquilt.training.dualnorm import dual
from fedquilt.training.evaluate import Evaluate
from fedquilt.training.initial import redrawn, rescaled
from fedquilt.training.objectives import Adversarial, Objective, Plain
from fedquilt.training.sgd import SGD
from fedquilt.training.statistics import Statistics
from fedquilt.training.tracking import untracked

BNStatistics = Literal["batch", "post", "tracked", "local"]


@dataclass(frozen=True)
class SplitMix(Rounds):
    """Slim bases, dealt to clients by their budgets, averaged each on its own.

    ``base`` is the width r of a base. ``statistics`` is what batch normalisation uses in training
    (Table 4): each batch's own (``batch``); the same, and then 20 passes over clients' data at the
    end (``post``); tracked and averaged (``tracked``), or tracked and kept on clients (``local``).
    By default ``batch``, and ``tracked`` for a robust model, whose two kinds of statistics must not
    mix. A model that is taken away always has statistics: unless they are tracked on the server,
    clients are asked for those of every base at the end. ``rescale_layer`` is on by default where
    it helps, with ``post``.

    ``robust`` trains every base with two kinds of normalisation, for clean and for attacked
    inputs (Algorithm 4). Every base is drawn by its layers' ``reset_parameters``; values of the
    model that these would not draw are lost, with a warning. ``sort`` orders the bases by
    validation accuracy at the end.
    ``together`` trains a client's bases in one pass instead of one after another; None:
    whichever is clearly quicker, tried once when the run starts.
    """

    optimiser: Optimiser = field(default_factory=lambda: Optimiser(clip=None))
    fraction: Fraction = 1.0
    base: float = 0.125
    statistics: BNStatistics | None = None
    rescale_init: bool = True
    rescale_layer: bool | None = None
    masked: bool = True
    sort: bool = False
    robust: bool = False
    share: float = 0.5
    epsilon: float = 8 / 255
    steps: int = 7
    together: bool | None = None

    def __post_init__(self) -> None:
        """Refuses what makes no sense, and warns of what the paper shows to collapse."""
        super().__post_init__()
        if not 0 < self.base <= 1:
            raise ConfigError(f"the base is a width in (0, 1], got {self.base}; 1/8 is 0.125")
        if self.sort and self.kind == "local":
            raise ConfigError(
                "sort gives bases other numbers, but statistics that are 'local' stay on clients "
                "under the old ones; leave sort off, or use statistics batch, post or tracked"
            )
        if self.rescale_layer and self.kind in ("tracked", "local"):
            warnings.warn(
                f"rescale_layer with statistics that are tracked ('{self.kind}') collapses to "
                "chance in the paper (Table 4); leave it off, or use statistics batch or post",
                stacklevel=3,
            )

    @property
    def starts_anew(self) -> bool:
        """Every base is drawn."""
        return True

    @property
    def kind(self) -> BNStatistics:
        """What batch normalisation uses: as told, or as the paper advises."""
        return self.statistics or ("tracked" if self.robust else "batch")

    @property
    def scales_outputs(self) -> bool:
        """Whether layers' outputs are rescaled: as told, or as Table 4 advises."""
        return self.kind == "post" if self.rescale_layer is None else self.rescale_layer

    @property
    def size_kind(self) -> SizeKind:
        """A size is a number of bases, as a fraction of all."""
        return "bases"

    def usual_budgets(self, model: nn.Module) -> tuple[float, ...]:
        """The whole, a half, and so on down to one base (Sec. 5)."""
        return tuple(width for width in LEVELS.values() if times(width, self.base)) or (1.0,)

    def exceeds_budgets(self, setup: Setup) -> str | None:
        """Nobody trains more bases than its budget allows."""
        return None

    @property
    def num_bases(self) -> int:
        """M = ⌊1/r⌋."""
        return times(1.0, self.base)

    @property
    def home(self) -> tuple[str, ...]:
        """Statistics that are tracked locally stay on the client."""
        return (STATISTICS,) if self.kind == "local" else ()

    @property
    def tracks_statistics(self) -> bool:
        """As the settings say."""
        return self.kind in ("tracked", "local")

    @property
    def statistics_recipe(self) -> Statistics:
        """One pass; where the paper estimates statistics afterwards, 20 with training's batches."""
        recipe = replace(super().statistics_recipe, attack=self.attack)
        if self.kind != "post":
            return recipe
        return replace(recipe, batch_size=self.optimiser.batch_size, epochs=20)

    @property
    def attack(self) -> PGD | None:
        """What a robust model is trained against."""
        return PGD(epsilon=self.epsilon, steps=self.steps) if self.robust else None

    @property
    def objective(self) -> Objective:
        """Cross entropy, or Eq. 1 by Algorithm 4."""
        return Plain() if self.attack is None else Adversarial(self.attack, self.share)

    def prepared(self, setup: Setup) -> Setup:
        """The net is one base; clients' budgets become the number of bases that they can train."""
        net = build(setup.model, setup.structure, setup.structure.subnet(self.base))
        net = dual(net) if self.robust else net
        slim = replace(setup, model=net, structure=setup.structure.uncut(net))
        clients = tuple(
            replace(c, budget=Budget(self._width(self._affordable(slim, c)))) for c in setup.clients
        )
        return replace(slim, clients=clients)

    def _affordable(self, slim: Setup, client: Client) -> int:
        """⌊R_k/r⌋, or as many bases as a budget's other limits allow, M at most."""
        budget = client.budget
        count = min(self.num_bases, times(budget.width, self.base))
        if not budget.is_width_alone:
            price = cost(slim.model, slim.structure, Subnet(), slim.example)
            total = price
            for number in range(1, count + 1):
                if not budget.allows(total):
                    count = number - 1
                    break
                total = total + price
        if count < 1:
            raise BudgetError(
                f"client {client.id} cannot train even one base of width {self.base:g} within "
                f"{budget}; choose a smaller method.base"
            )
        return count

    def phases(self, setup: Setup) -> tuple[Phase, ...]:
        """Rounds of training; then statistics and, if asked for, the order of the bases."""
        phases = super().phases(setup)
        return (*phases, Phase("sort", 1, 1.0, is_closing=True)) if self.sort else phases

    def start(self, setup: Setup) -> State:
        """Algorithm 1, line 1: M bases that are initialised independently; the deck is new."""
        params: dict[str, Tensor] = {}
        for i in range(self.num_bases):
            net = redrawn(setup.model, seed_of(setup.seed, 0, i, 1))
            if self.rescale_init:
                rescaled(net, setup.structure)
            params |= {f"{n}@{i}": t.detach().clone() for n, t in named_tensors(net).items()}
        memory = {"visits": 0, "together": self._together(setup)}
        return State(round=0, phase="", params=params, memory=memory)

    def _together(self, setup: Setup) -> bool:
        if self.together is not None or self.robust or self.num_bases == 1:
            return bool(self.together) and not self.robust
        model = setup.model if self.tracks_statistics else untracked(setup.model)
        return is_quicker_together(model, setup.example, self.num_bases, self.optimiser.batch_size)

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> list[Task]:
        """Algorithm 1, lines 4 to 6: sample base models for each client, and what it does."""
        if state.phase == "train":
            return [self._training(setup, state, c, i) for i, c in enumerate(cohort)]
        every = tuple(self.bases(range(self.num_bases)))
        recipe = Evaluate(split="validation", home=self.home, scale=self.scales_outputs)
        return [
            Task(c.id, every, state.params, recipe, seed_of(setup.seed, state.round, c.id))
            for c in cohort
        ]

    def _training(self, setup: Setup, state: State, client: Client, position: int) -> Task:
        chosen = self.sampled(setup, state, client, state.memory["visits"] + position)
        subnets = [self.to_train(subnet.leaving(*self.home)) for subnet in self.bases(chosen)]
        recipe = SGD(
            self.optimiser,
            lr=self.optimiser.rate(state.round, setup.rounds),
            labels=client.labels,
            masked=self.masked,
            scale=self.scales_outputs,
            home=self.home,
            weight=client.num_examples,
            objective=self.objective,
            together=state.memory["together"],
        )
        seed = seed_of(setup.seed, state.round, client.id)
        return Task(client.id, tuple(subnets), state.params, recipe, seed)

    def sampled(self, setup: Setup, state: State, client: Client, visit: int) -> list[int]:
        """Algorithm 2: the deck's next base, and others drawn without replacement."""
        count = times(client.budget.width, self.base)
        first = deck(setup.seed, visit // self.num_bases, self.num_bases)[visit % self.num_bases]
        others = [i for i in range(self.num_bases) if i != first]
        draw = np.random.default_rng(seed_of(setup.seed, state.round, client.id, 2))
        return sorted([first, *draw.permutation(others)[: count - 1].tolist()])

    def bases(self, numbers: Iterable[int]) -> list[Subnet]:
        """Bases as subnets all of whose tensors are their own."""
        return [Subnet().owning(str(i), "*") for i in numbers]

    def merge_training(self, setup: Setup, state: State, updates: Iterable[Update]) -> State:
        """Algorithm 1, lines 7 and 8: each base is averaged over its clients, by their data."""
        if state.phase == "sort":
            return replace(state, params=self._sorted(state, updates))
        result = merged(setup, state, updates)
        if state.phase != "train":
            return result
        asked = self.phases(setup)[0].cohort_size(len(setup.clients))
        memory: dict[str, Any] = {**state.memory, "visits": state.memory["visits"] + asked}
        return replace(result, memory=memory)

    def _sorted(self, state: State, updates: Iterable[Update]) -> dict[str, Tensor]:
        """Algorithm 1, line 9: bases in the descending order of validation accuracy."""
        hits = [0.0] * self.num_bases
        for update in updates:
            for i in range(self.num_bases):
                hits[i] += update.metrics[f"hits:{i}"]
        order = sorted(range(self.num_bases), key=lambda i: -hits[i])
        place = {str(old): new for new, old in enumerate(order)}
        renamed = {}
        for name, tensor in state.params.items():
            plain, _, owner = name.rpartition("@")
            renamed[f"{plain}@{place[owner]}"] = tensor
        return renamed

    def sizes(self, setup: Setup) -> tuple[float, ...]:
        """Every number of bases is a size, the largest first."""
        return tuple(self._width(k) for k in range(self.num_bases, 0, -1))

    def _width(self, count: int) -> float:
        return min(1.0, count * self.base)  # six bases of 0.16666666667 are the whole

    def mix(self, setup: Setup, state: State, width: float) -> tuple[Subnet, ...]:
        """Algorithm 1, line 11: the mean of the logits of the first ⌊R/r⌋ bases."""
        count = min(self.num_bases, times(width, self.base))
        if count < 1:
            raise ConfigError(
                f"the narrowest net is one base of width {self.base:g}, got width {width:g}"
            )
        return tuple(self.bases(range(count)))


def deck(seed: int, number: int, size: int) -> list[int]:
    """The bases in the order of the deck's next shuffle (Algorithm 2, line 1)."""
    shuffled = np.random.default_rng(seed_of(seed, number, size, 3)).permutation(size)
    return [int(i) for i in shuffled]
