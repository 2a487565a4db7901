"""APFL: every client has an architecture of its own, found on its data and within its budget.

Luo, Chen, Li, Feng. "Architecture Personalization in Resource-constrained Federated Learning."
NeurIPS 2021 workshop. Two parts, each of use alone: FedCS finds the architectures, FedPA trains
them.

Symbols of the paper -> names here: w -> state.params, θ_k or z_k -> state.chosen_subnets[k],
B_k -> client.budget, T -> rounds of the warm-up, T' -> setup.rounds, M -> fraction, S -> nets,
R -> ratio, E, γ -> local_training.epochs, .lr.

What the paper leaves open, and what was chosen, is in docs/methods/apfl.md.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from fedquilt.errors import BudgetError, ConfigError, UpdateError
from fedquilt.federation.aggregation import (
    TAKE_MEAN,
    Aggregate,
    AggregationPipeline,
    FullMean,
    ServerOptimizer,
    ServerUpdate,
    Validator,
    chain,
)
from fedquilt.federation.chosen import ChosenSubnets
from fedquilt.federation.client import PERSONAL, Client, Task, Update, derive_seed
from fedquilt.federation.state import Phase, Setup, State, cache_per_setup
from fedquilt.federation.tasks import plan_each
from fedquilt.methods.affordability import (
    list_able_clients,
    list_richest_clients,
    list_unable_budgets,
)
from fedquilt.methods.base import BaseMethod, initial_state
from fedquilt.ranges import Fraction
from fedquilt.structure.budget import fit_budget
from fedquilt.structure.cost import CostTable
from fedquilt.structure.structure import TRACKED, Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.sandwich import Redraw, Sandwich
from fedquilt.training.search import Limits, Search
from fedquilt.training.settings import LocalTraining

HOME = (TRACKED,)  # Sec. 4.2: stay on the client
LOCAL_TRAINING = LocalTraining(
    lr=0.05, momentum=0.9, weight_decay=5e-4, epochs=1, batch_size=64, max_grad_norm=None
)


@dataclass(frozen=True)
class FedPA(BaseMethod):
    """Algorithm 3: clients train subnets of their own, and the server averages them.

    Each cell is averaged over all clients of a round; one that does not hold it counts as the
    server's value (``FullMean``). ``aggregator=Mean()`` averages over a cell's holders alone.

    ``subnets`` are the clients', in their order. Without them each has the widest uniform net that
    its budget allows, which is the paper's baseline FedUniform. Groups that ``whole`` names, by
    patterns, are cut in none (the paper: the inputs of the classifier). Statistics of batch
    normalization stay on the client. The global model has the channels that at least ``holders``
    clients have; its own statistics are asked for at the end, as means over clients, unless
    ``query_statistics`` is false: then nothing leaves a client, and there is no global model.

    Args:
        local_training: Settings of local training.
        fraction: Fraction of the clients that take part in a round.
        whole: Patterns of layers that are never cut.
        holders: Number of clients that must have a channel of the global model.
        subnets: The subnet of each client; None: by its budget.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(24, 4), torch.arange(24) % 3)
    >>> clients = fq.make_clients(data, test=data, count=4, budgets=(1.0, 0.5))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> run = fq.train(model, data[0][:1], fq.FedPA(), clients, rounds=1, workers=0)
    >>> [record.bytes_sent for record in run.client_records[0]]  # clients train what they afford
    [268, 268, 140, 140]
    """

    local_training: LocalTraining = field(default_factory=lambda: LOCAL_TRAINING)
    fraction: Fraction = 1.0
    whole: tuple[str, ...] = ()
    holders: int = 1
    subnets: tuple[Subnet, ...] | None = None
    is_personal = True

    @property
    def local_params(self) -> tuple[str, ...]:
        """Statistics."""
        return HOME

    def start(self, setup: Setup) -> State:
        """Line 1: w⁰, and everybody's architecture."""
        if self.subnets is not None and len(self.subnets) != len(setup.clients):
            raise ConfigError(
                f"there are {len(setup.clients)} clients and {len(self.subnets)} subnets; give "
                "one for each client, in their order"
            )
        given = zip(setup.registry.ids, self.subnets or (), strict=self.subnets is not None)
        own = {client: with_private_statistics(subnet) for client, subnet in given}
        return replace(initial_state(setup), chosen_subnets=self.assign(setup, own))

    def assign(self, setup: Setup, own: Mapping[int, Subnet]) -> ChosenSubnets:
        """The subnets of all clients: their own, or those of FedUniform."""
        uniform = {
            client.budget: with_private_statistics(self.uniform(setup, client))
            for client in setup.registry.one_per_budget
        }
        return ChosenSubnets(setup.registry, uniform, own)

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> Sequence[Task]:
        """Line 3: w ⊙ z_m for every sampled client."""
        return plan_each(cohort, lambda client: self._training(setup, state, client, state.round))

    def _training(self, setup: Setup, state: State, client: Client, round: int) -> Task:
        """Lines 4-7: E' epochs of SGD on the client's own architecture."""
        recipe = LocalSGD(
            self.local_training,
            lr=self.local_training.lr_at(round, setup.rounds),
            labels=client.labels,
            local_params=self.local_params,
            weight=client.num_examples,
        )
        subnet = self.architecture(setup, state, client)
        seed = derive_seed(setup.seed, state.round, client.id)
        return Task(client.id, (subnet,), state.params, recipe, seed)

    def training_aggregation(self, setup: Setup, phase: str) -> AggregationPipeline:
        """Lines 5 and 10: the mean over all clients of the round, by n_m / n^(t)."""
        return chain(FullMean(), self.server_optimizer)

    def architecture(self, setup: Setup, state: State, client: Client) -> Subnet:
        """A client's own net; that of FedUniform, if it has found none."""
        return state.chosen_subnets.get(client.id) or with_private_statistics(
            self.uniform(setup, client)
        )

    def uniform(self, setup: Setup, client: Client) -> Subnet:
        """The widest net of one width for all layers within the client's budget."""
        fixed = without_width_groups(setup.structure, self.whole)

        def shaped(subnet: Subnet) -> Subnet:
            cut = tuple(pair for pair in subnet.kept if pair[0] not in fixed)
            return replace(subnet, kept=cut).excluding(*self.local_params)

        return fit_budget(setup.model, setup.structure, client.budget, setup.example, shape=shaped)[
            1
        ]

    def ensemble(self, setup: Setup, state: State, width: float) -> tuple[Subnet, ...]:
        """That part of the super-network, at a width, which some clients hold.

        Channels that no architecture has were never trained.
        """
        free = setup.structure.cut_groups(without_width_groups(setup.structure, self.whole))
        subnet = setup.structure.subnet(dict.fromkeys(free, width))
        if state.chosen_subnets:
            holders = min(self.holders, len(state.chosen_subnets))
            subnet = subnet.shared_by(*state.chosen_subnets.values(), holders=holders)
        return (subnet,)


def with_private_statistics(subnet: Subnet) -> Subnet:
    """A client's architecture: what stays at home is that of this architecture alone."""
    return subnet.shape.with_private(PERSONAL, *HOME).excluding(*HOME)


def without_width_groups(structure: Structure, patterns: Sequence[str]) -> tuple[str, ...]:
    """The width groups that patterns name."""
    for pattern in patterns:
        if not fnmatch.filter(structure.cut_groups(), pattern):
            raise ConfigError(
                f"'{pattern}' stays whole but names no width group; they are: "
                f"{', '.join(structure.cut_groups())}"
            )
    return tuple(g for g in structure.cut_groups() if any(fnmatch.fnmatch(g, p) for p in patterns))


def fed_uniform(
    local_training: LocalTraining | None = None,
    fraction: float = 1.0,
    whole: tuple[str, ...] = (),
    holders: int = 1,
    server_optimizer: ServerOptimizer = TAKE_MEAN,
    query_fraction: float | None = None,
) -> FedPA:
    """FedUniform (Sec. 5.2): one width multiplier for each client, found by its budget.

    Args:
        local_training: Settings of local training; None: the defaults.
        fraction: Fraction of the clients that take part in a round.
        whole: Patterns of layers that are never cut.
        holders: Number of clients that must have a channel of the global model.
        server_optimizer: What the server makes of the mean; by default it takes the mean itself.
        query_fraction: Fraction of the clients that are asked for statistics; None: all.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(24, 4), torch.arange(24) % 3)
    >>> clients = fq.make_clients(data, test=data, count=4, budgets=(1.0, 0.5))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> run = fq.train(model, data[0][:1], fq.fed_uniform(), clients, rounds=1, workers=0)
    >>> [record.bytes_sent for record in run.client_records[0]]  # clients train what they afford
    [268, 268, 140, 140]
    """
    return FedPA(
        local_training or LOCAL_TRAINING,
        fraction,
        whole,
        holders,
        server_optimizer=server_optimizer,
        query_fraction=query_fraction,
    )


@dataclass(frozen=True)
class APFL(FedPA):
    """FedCS, then FedPA: warm-up of the super-network, search on every client, training.

    The warm-up takes ``warm_up`` of the rounds of training, besides them. It is done by the clients
    that can afford the whole net; where there are none (as in the paper's own settings) by those
    that can afford most, ``warm_up_by="richest"``, or the run is refused, ``"able"``. Training
    starts from the initial values, or with ``inherit`` from those of the warm-up. No layer gets
    narrower than ``smallest`` of it: by default 0.25, or the narrowest width that is a budget.

    Args:
        warm_up: Fraction of the rounds that warm up the supernet.
        warm_up_by: Who warms up if no client can afford the whole net: richest, those that afford
            most; able: none, and the run stops with an error.
        nets: Nets of each step of the warm-up.
        redraw: Whether the random widths of the warm-up are drawn for each epoch or each batch.
        by_group: Whether the search cuts whole width groups.
        smallest: Smallest width of a layer; None: 0.25, or the narrowest width that is a budget.
        ratio: Fraction of a layer that one step of the search cuts.
        search_examples: Examples that the search is measured on.
        lazy: Whether the search asks again only layers that may have changed.
        inherit: Whether clients go on from the weights of the warm-up.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(24, 4), torch.arange(24) % 3)
    >>> clients = fq.make_clients(data, test=data, count=4, budgets=(1.0, 0.5))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> run = fq.train(model, data[0][:1], fq.APFL(nets=2), clients, rounds=1, workers=0)
    >>> sorted(run.state.chosen_subnets)  # the clients that chose a subnet
    [0, 1, 2, 3]
    """

    subnets: None = None
    warm_up: float = 0.3
    warm_up_by: Literal["richest", "able"] = "richest"
    nets: int = 4
    redraw: Redraw = "epoch"
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

    reveals_data = "clients search for their architectures on their data, and send them"

    def phases(self, setup: Setup) -> tuple[Phase, ...]:
        """Figure 2."""
        able = list_able_clients(setup) or (
            list_richest_clients(setup) if self.warm_up_by == "richest" else ()
        )
        return (
            Phase("warm-up", self._rounds_before(setup) - 1, self.fraction, restrict_to=able),
            Phase("search", 1, 1.0),
            Phase("train", setup.rounds, self.fraction),
            *self.closing_phases(setup),
        )

    def exceeds_budgets(self, setup: Setup) -> str | None:
        """Everybody searches in the whole net, and the richest train it first."""
        poor = list_unable_budgets(setup, 1.0, Subnet())
        if not poor:
            return None
        trainers = self.phases(setup)[0].eligible(setup.registry).count_with(poor)
        first = f", {trainers} of them train it in the warm-up" if trainers else ""
        return (
            f"exceeds budgets: {setup.registry.count_with(poor)} of {len(setup.clients)} clients "
            f"search the whole net for channels{first}, and can afford less"
        )

    def _rounds_before(self, setup: Setup) -> int:
        """Rounds of warm-up and search."""
        return round(self.warm_up * setup.rounds) + 1

    def _smallest(self, setup: Setup) -> float:
        return self.smallest or min(0.25, *(b.width for b in setup.registry.budget_counts))

    def prepare_model(self, setup: Setup) -> Setup:
        """The user's model as it is; budgets that no architecture meets are refused."""
        setup.task.require_outputs("APFL's warm-up, in which nets learn from each other's outputs,")
        for client in setup.registry.one_per_budget:
            if client.budget.is_width_alone:
                continue
            try:
                self.limits(setup, client)
            except BudgetError as problem:
                raise BudgetError(f"client {client.id}: {problem}") from problem
        if self.warm_up_by == "able" and not list_able_clients(setup):
            raise BudgetError(
                "no client can afford the whole net, which the warm-up trains; let those that can "
                "afford most go beyond their budget for it, with warm_up_by = 'richest'"
            )
        return setup

    def start(self, setup: Setup) -> State:
        """Algorithm 1: w⁰; nobody has an architecture yet."""
        return initial_state(setup)

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> Sequence[Task]:
        """Lines 3-5 and 12 of Algorithm 1, and line 3 of Algorithm 3."""

        def plan(client: Client) -> Task:
            if state.phase == "train":
                round = state.round - self._rounds_before(setup)
                return self._training(setup, state, client, round)
            search = None if state.phase == "warm-up" else self._search(setup, client)
            work = search or self._sandwich(setup, state, client)
            seed, whole = derive_seed(setup.seed, state.round, client.id), Subnet()
            return Task(client.id, (whole.excluding(*HOME),), state.params, work, seed)

        return plan_each(cohort, plan)

    def _sandwich(self, setup: Setup, state: State, client: Client) -> Sandwich:
        """Algorithm 2: TrainingUSNet."""
        return Sandwich(
            self.local_training,
            lr=self.local_training.lr_at(state.round, self._rounds_before(setup)),
            nets=self.nets,
            redraw=self.redraw,
            smallest=self._smallest(setup),
            by_group=self.by_group,
            whole=without_width_groups(setup.structure, self.whole),
            weight=client.num_examples,
        )

    def limits(self, setup: Setup, client: Client) -> Limits:
        """What architectures of a client have to keep to; a BudgetError if none does."""
        return Limits.of(self._search(setup, client), _build_cost_table(setup), setup.structure)

    def _search(self, setup: Setup, client: Client) -> Search:
        """Lines 14-21: local channel pruning."""
        return Search(
            client.budget,
            ratio=self.ratio,
            smallest=self._smallest(setup),
            whole=without_width_groups(setup.structure, self.whole),
            local_params=self.local_params,
            examples=self.search_examples,
            lazy=self.lazy,
            metric=setup.task.metric.name,
        )

    def training_aggregation(self, setup: Setup, phase: str) -> AggregationPipeline:
        """Line 9: the mean, weighted by data. After the search: who has which architecture."""
        if phase != "search":
            return super().training_aggregation(setup, phase)
        return chain(WithinBudget(self), AssignArchitectures(self))


@dataclass(frozen=True)
class WithinBudget(Validator):
    """Refuses an architecture beyond its client's budget."""

    method: APFL

    def validate(self, setup: Setup, state: State, update: Update) -> None:
        """Prices the architecture that a client has found."""
        client = setup.clients_by_id.get(update.client)
        if client is None or not update.subnets:
            return
        architecture, prices = update.subnets[0].shape, _build_cost_table(setup)
        if not self.method.limits(setup, client).are_met(architecture):
            raise UpdateError(
                f"client {client.id} sent an architecture beyond its {client.budget}: it costs "
                f"{prices(architecture)}"
            )


@dataclass(frozen=True)
class AssignArchitectures(ServerUpdate):
    """Gives every client the architecture that it found, or the uniform one of its budget.

    Training starts from the initial values, and without moments, unless the method inherits those
    of the warm-up.
    """

    method: APFL
    reveals_data = True

    def apply(self, setup: Setup, state: State, aggregate: Aggregate) -> State:
        """Notes the architectures of all clients."""
        method = self.method
        replies = {r.client: with_private_statistics(r.subnets[0]) for r in aggregate.replies}
        chosen = method.assign(setup, {**state.chosen_subnets, **replies})
        state = replace(state, chosen_subnets=chosen)
        if method.inherit:
            return state
        return replace(state, params=initial_state(setup).params, server_tensors={})


@cache_per_setup
def _build_cost_table(setup: Setup) -> CostTable:
    """What architectures cost; statistics do not travel."""
    return CostTable(setup.model, setup.structure, setup.example, local_params=HOME)
