"""APFL: every client has an architecture of its own, found on its data and within its budget.

Luo, Chen, Li, Feng. "Architecture Personalization in Resource-constrained Federated Learning."
NeurIPS 2021 workshop. Two parts, each of use alone: FedCS finds the architectures, FedPA trains
them.

Symbols of the paper -> names here: w -> state.params, θ_k or z_k -> state.chosen[k],
B_k -> client.budget, T -> rounds of the warm-up, T' -> setup.rounds, M -> fraction, S -> nets,
R -> ratio, E, γ -> optimiser.epochs, .lr.

What the paper leaves open, and what was chosen, is in docs/methods/apfl.md.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from fedquilt.errors import BudgetError, ConfigError, UpdateError
from fedquilt.federation.client import PERSONAL, Client, Task, Update, seed_of
from fedquilt.federation.state import Phase, Setup, State
from fedquilt.methods.method import Rounds, affordable, initial, merged, unable
from fedquilt.ranges import Fraction
from fedquilt.structure.budget import fit
from fedquilt.structure.cost import Prices, cost
from fedquilt.structure.groups import TRACKED, Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.descent import Optimiser
from fedquilt.training.sandwich import Sandwich
from fedquilt.training.search import Limits, Search
from fedquilt.training.sgd import SGD

HOME = (TRACKED,)  # Sec. 4.2: stay on the client
OPTIMISER = Optimiser(lr=0.05, momentum=0.9, weight_decay=5e-4, epochs=1, batch_size=64, clip=None)


@dataclass(frozen=True)
class FedPA(Rounds):
    """Algorithm 3: clients train subnets of their own; each cell is averaged over its holders.

    ``subnets`` are the clients', in their order. Without them each has the widest uniform net that
    its budget allows, which is the paper's baseline FedUniform. Groups that ``whole`` names, by
    patterns, are cut in none (the paper: the inputs of the classifier). Statistics of batch
    normalisation stay on the client. The global model has the channels that at least ``holders``
    clients have; its own statistics are asked for at the end, as means over clients, unless
    ``query_statistics`` is false: then nothing leaves a client, and there is no global model.
    """

    optimiser: Optimiser = field(default_factory=lambda: OPTIMISER)
    fraction: Fraction = 1.0
    whole: tuple[str, ...] = ()
    holders: int = 1
    subnets: tuple[Subnet, ...] | None = None
    is_personal = True

    @property
    def home(self) -> tuple[str, ...]:
        """Statistics."""
        return HOME

    def start(self, setup: Setup) -> State:
        """Line 1: w⁰, and everybody's architecture."""
        if self.subnets is not None and len(self.subnets) != len(setup.clients):
            raise ConfigError(
                f"there are {len(setup.clients)} clients and {len(self.subnets)} subnets; give "
                "one for each client, in their order"
            )
        given = self.subnets or tuple(self.uniform(setup, client) for client in setup.clients)
        pairs = zip(setup.clients, given, strict=True)
        return replace(initial(setup), chosen={client.id: mine(s) for client, s in pairs})

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> list[Task]:
        """Line 3: w ⊙ z_m for every sampled client."""
        return [self._training(setup, state, client, state.round) for client in cohort]

    def _training(self, setup: Setup, state: State, client: Client, round: int) -> Task:
        """Lines 4-7: E' epochs of SGD on the client's own architecture."""
        recipe = SGD(
            self.optimiser,
            lr=self.optimiser.rate(round, setup.rounds),
            labels=client.labels,
            home=self.home,
            weight=client.num_examples,
        )
        subnet = self.architecture(setup, state, client)
        seed = seed_of(setup.seed, state.round, client.id)
        return Task(client.id, (subnet,), state.params, recipe, seed)

    def architecture(self, setup: Setup, state: State, client: Client) -> Subnet:
        """A client's own net; that of FedUniform, if it has found none."""
        return state.chosen.get(client.id) or mine(self.uniform(setup, client))

    def uniform(self, setup: Setup, client: Client) -> Subnet:
        """The widest net of one width for all layers within the client's budget."""
        fixed = uncut(setup.structure, self.whole)

        def shaped(subnet: Subnet) -> Subnet:
            cut = tuple(pair for pair in subnet.kept if pair[0] not in fixed)
            return replace(subnet, kept=cut).leaving(*self.home)

        return fit(setup.model, setup.structure, client.budget, setup.example, shape=shaped)[1]

    def mix(self, setup: Setup, state: State, width: float) -> tuple[Subnet, ...]:
        """That part of the super-network, at a width, which some clients hold.

        Channels that no architecture has were never trained.
        """
        free = setup.structure.cut_groups(uncut(setup.structure, self.whole))
        subnet = setup.structure.subnet(dict.fromkeys(free, width))
        if state.chosen:
            holders = min(self.holders, len(state.chosen))
            subnet = subnet.within(*state.chosen.values(), holders=holders)
        return (subnet,)


def mine(subnet: Subnet) -> Subnet:
    """A client's architecture: what stays at home is that of this architecture alone."""
    return subnet.shape.owning(PERSONAL, *HOME).leaving(*HOME)


def uncut(structure: Structure, patterns: Sequence[str]) -> tuple[str, ...]:
    """The width groups that patterns name."""
    for pattern in patterns:
        if not fnmatch.filter(structure.cut_groups(), pattern):
            raise ConfigError(
                f"'{pattern}' stays whole but names no width group; they are: "
                f"{', '.join(structure.cut_groups())}"
            )
    return tuple(g for g in structure.cut_groups() if any(fnmatch.fnmatch(g, p) for p in patterns))


def fed_uniform(
    optimiser: Optimiser | None = None,
    fraction: float = 1.0,
    whole: tuple[str, ...] = (),
    holders: int = 1,
) -> FedPA:
    """FedUniform (Sec. 5.2): one width multiplier for each client, found by its budget."""
    return FedPA(optimiser or OPTIMISER, fraction, whole, holders)


@dataclass(frozen=True)
class APFL(FedPA):
    """FedCS, then FedPA: warm-up of the super-network, search on every client, training.

    The warm-up takes ``warm_up`` of the rounds of training, besides them. It is done by the clients
    that can afford the whole net; where there are none (as in the paper's own settings) by those
    that can afford most, ``warm_up_by="richest"``, or the run is refused, ``"able"``. Training
    starts from the initial values, or with ``inherit`` from those of the warm-up. No layer gets
    narrower than ``smallest`` of it: by default 0.25, or the narrowest width that is a budget.
    """

    subnets: None = None
    warm_up: float = 0.3
    warm_up_by: Literal["richest", "able"] = "richest"
    nets: int = 4
    by_group: bool = False
    smallest: float | None = None
    ratio: float = 0.1
    search_examples: int | None = 256
    lazy: bool = True
    inherit: bool = False

    def __post_init__(self) -> None:
        """Refuses settings that make no sense."""
        super().__post_init__()
        if self.warm_up < 0:
            raise ConfigError(
                f"the warm-up is a part of the rounds, at least 0, got {self.warm_up}"
            )
        if self.nets < 2:
            raise ConfigError(f"a sandwich has at least the largest and smallest, got {self.nets}")
        for name in ("smallest", "ratio"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ConfigError(f"{name} is a fraction in (0, 1), got {value}")

    def phases(self, setup: Setup) -> tuple[Phase, ...]:
        """Figure 2."""
        able = _able(setup) or (_richest(setup) if self.warm_up_by == "richest" else ())
        return (
            Phase("warm-up", self._rounds_before(setup) - 1, self.fraction, among=able),
            Phase("search", 1, 1.0),
            Phase("train", setup.rounds, self.fraction),
            *self.closing(setup),
        )

    def exceeds_budgets(self, setup: Setup) -> str | None:
        """Everybody searches in the whole net, and the richest train it first."""
        poor = {client.id for client in unable(setup, 1.0, Subnet())}
        if not poor:
            return None
        trainers = poor & set(self.phases(setup)[0].among or ())
        first = f", {len(trainers)} of them train it in the warm-up" if trainers else ""
        return (
            f"exceeds budgets: {len(poor)} of {len(setup.clients)} clients search the whole net "
            f"for channels{first}, and can afford less"
        )

    def _rounds_before(self, setup: Setup) -> int:
        """Rounds of warm-up and search."""
        return round(self.warm_up * setup.rounds) + 1

    def _smallest(self, setup: Setup) -> float:
        return self.smallest or min(0.25, *(client.budget.width for client in setup.clients))

    def prepared(self, setup: Setup) -> Setup:
        """The user's model as it is; budgets that no architecture meets are refused."""
        limited = [client for client in setup.clients if not client.budget.is_width_alone]
        if limited:
            prices = _prices(setup)
        for client in limited:
            try:
                Limits.of(self._search(setup, client), prices, setup.structure)
            except BudgetError as problem:
                raise BudgetError(f"client {client.id}: {problem}") from problem
        if self.warm_up_by == "able" and not _able(setup):
            raise BudgetError(
                "no client can afford the whole net, which the warm-up trains; let those that can "
                "afford most go beyond their budget for it, with warm_up_by = 'richest'"
            )
        return setup

    def start(self, setup: Setup) -> State:
        """Algorithm 1: w⁰; nobody has an architecture yet."""
        return initial(setup)

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> list[Task]:
        """Lines 3-5 and 12 of Algorithm 1, and line 3 of Algorithm 3."""
        if state.phase == "train":
            round = state.round - self._rounds_before(setup)
            return [self._training(setup, state, client, round) for client in cohort]
        return [
            Task(
                client.id,
                (Subnet().leaving(*self.home),),
                state.params,
                self._sandwich(setup, state, client)
                if state.phase == "warm-up"
                else self._search(setup, client),
                seed_of(setup.seed, state.round, client.id),
            )
            for client in cohort
        ]

    def _sandwich(self, setup: Setup, state: State, client: Client) -> Sandwich:
        """Algorithm 2: TrainingUSNet."""
        return Sandwich(
            self.optimiser,
            lr=self.optimiser.rate(state.round, self._rounds_before(setup)),
            nets=self.nets,
            smallest=self._smallest(setup),
            by_group=self.by_group,
            whole=uncut(setup.structure, self.whole),
            weight=client.num_examples,
        )

    def _search(self, setup: Setup, client: Client) -> Search:
        """Lines 14-21: local channel pruning."""
        return Search(
            client.budget,
            ratio=self.ratio,
            smallest=self._smallest(setup),
            whole=uncut(setup.structure, self.whole),
            home=self.home,
            examples=self.search_examples,
            lazy=self.lazy,
        )

    def opened(self, setup: Setup, state: State, update: Update) -> Update:
        """The update as it is; an architecture beyond its client's budget is refused."""
        client = next((c for c in setup.clients if c.id == update.client), None)
        if state.phase == "search" and client is not None and update.subnets:
            limits = Limits.of(self._search(setup, client), _prices(setup), setup.structure)
            if not limits.are_met(update.subnets[0].shape):
                raise UpdateError(
                    f"client {client.id} sent an architecture beyond its {client.budget}: it costs "
                    f"{_prices(setup)(update.subnets[0].shape)}"
                )
        return update

    def merge_training(self, setup: Setup, state: State, updates: Iterable[Update]) -> State:
        """Line 9: the mean, weighted by data. After the search: who has which architecture.

        A client whose search has failed has the uniform net of its budget.
        """
        if state.phase != "search":
            return merged(setup, state, updates)
        found = {update.client: mine(update.subnets[0]) for update in updates}
        state = replace(state, chosen={**state.chosen, **found})
        return replace(
            state,
            params=state.params if self.inherit else initial(setup).params,
            chosen={c.id: self.architecture(setup, state, c) for c in setup.clients},
        )


@lru_cache(maxsize=16)
def _prices(setup: Setup) -> Prices:
    """What architectures cost; statistics do not travel."""
    return Prices(setup.model, setup.structure, setup.example, home=HOME)


@lru_cache(maxsize=16)
def _able(setup: Setup) -> tuple[int, ...]:
    """Clients that can afford the whole net."""
    whole = cost(setup.model, setup.structure, Subnet(), setup.example)
    return tuple(c.id for c in setup.clients if c.budget.width >= 1 and c.budget.allows(whole))


@lru_cache(maxsize=16)
def _richest(setup: Setup) -> tuple[int, ...]:
    """Clients that can afford the widest uniform net of all."""
    widths = {budget: 0.0 for budget in {c.budget for c in setup.clients}}
    for client in setup.clients:
        widths[client.budget] = widths[client.budget] or affordable(setup, client)
    most = max(widths.values())
    return tuple(c.id for c in setup.clients if widths[c.budget] == most)
