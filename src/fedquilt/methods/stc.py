"""STC: sparse ternary compression of what goes up and of what comes down, with error feedback.

Sattler, Wiedemann, Müller, Samek. "Robust and Communication-Efficient Federated Learning from
Non-IID Data." IEEE TNNLS 2020. A baseline of ADDS (Sec. 4.1.2).

Symbols of the paper -> names here: W -> state.params, R -> state.server_tensors["residual"], ΔW ->
change, p_up, p_down -> sparsity_up, sparsity_down, I_t -> the cohort.

What the paper leaves open, and what was chosen, is in docs/methods/stc.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedquilt.errors import ConfigError, UpdateError
from fedquilt.federation.aggregation import (
    Aggregate,
    AggregationPipeline,
    Aggregator,
    Decoder,
    Mean,
    ServerUpdate,
    chain,
)
from fedquilt.federation.client import Client, Task, Update, client_label, derive_seed
from fedquilt.federation.state import Setup, State
from fedquilt.federation.tasks import plan_each
from fedquilt.methods.affordability import describe_ignored_budgets
from fedquilt.methods.base import BaseMethod
from fedquilt.ranges import Fraction
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import named_tensors
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.settings import LocalTraining
from fedquilt.training.ternary import (
    CODE,
    RESIDUAL,
    TernarySGD,
    add_code,
    apply_codes,
    compress,
    flatten_weights,
    unflatten_weights,
    zero_change,
)

SYNCED = "synced"  # in memory: the last round at whose start a client had the server's weights


@dataclass(frozen=True)
class STC(BaseMethod):
    """One net for all, of which only codes travel.

    ``sparsity_up`` and ``sparsity_down`` are the shares of the weights that a client's and the
    server's codes change. A client gets the codes of all rounds that it missed; or the whole model,
    if it never had it or if that is shorter. Batches are normalized by themselves in training:
    running statistics are no sums of changes. They are asked for at the end.

    Args:
        local_training: Settings of local training.
        fraction: Fraction of the clients that take part in a round.
        sparsity_up: Fraction of the values that a client sends.
        sparsity_down: Fraction of the values that the server sends.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(24, 4), torch.arange(24) % 3)
    >>> clients = fq.make_clients(data, test=data, count=4, budgets=(1.0, 0.5))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> method = fq.STC(sparsity_up=0.1)
    >>> run = fq.train(model, data[0][:1], method, clients, rounds=1, workers=0)
    >>> max(record.bytes_sent for record in run.client_records[0]) < 67  # a byte for each weight
    True
    """

    local_training: LocalTraining = field(default_factory=lambda: LocalTraining(max_grad_norm=None))
    fraction: Fraction | None = None
    sparsity_up: float = 1 / 400
    sparsity_down: float = 1 / 400

    def __post_init__(self) -> None:
        """Refuses settings that make no sense."""
        super().__post_init__()
        for name in ("sparsity_up", "sparsity_down"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(
                    f"{name} is the share of the weights that a code changes, in (0, 1], such as "
                    f"0.0025, got {getattr(self, name)}"
                )

        self.refuse_server_optimizer("the server's step of STC is compressed, with error feedback")

    @property
    def reveals_data(self) -> str:
        """Which weights are in a code depends on the client's data."""
        return "a code says which weights a client's data move the most"

    @property
    def tracks_statistics(self) -> bool:
        """They are no sums of changes."""
        return False

    @property
    def whole(self) -> Subnet:
        """The net, as clients train it."""
        return self.without_untracked(Subnet())

    def prepare_model(self, setup: Setup) -> Setup:
        """The model as it is; refused if its weights are not of 32 bits."""
        for name, tensor in named_tensors(setup.model).items():
            if tensor.is_floating_point() and tensor.dtype != torch.float32:
                raise ConfigError(
                    f"codes are of float32 weights, and '{name}' is {tensor.dtype}; convert the "
                    "model with .float()"
                )
        return setup

    def exceeds_budgets(self, setup: Setup) -> str | None:
        """The whole net is trained, whatever clients can afford."""
        return describe_ignored_budgets(setup)

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> Sequence[Task]:
        """Line 7: the codes that a client missed, or all weights."""
        synced, codes = read_synced_rounds(state), read_codes(state)
        missed = {
            since: {str(number): code for number, code in codes.items() if number >= since}
            for since in {synced[client.id] for client in cohort if client.id in synced}
        }

        def plan(client: Client) -> Task:
            return Task(
                client.id,
                () if client.id in synced else (self.whole,),
                missed[synced[client.id]] if client.id in synced else state.params,
                TernarySGD(
                    LocalSGD(
                        self.local_training,
                        lr=self.local_training.lr_at(state.round, setup.rounds),
                        weight=client.num_examples,
                    ),
                    state.round,
                    self.sparsity_up,
                    self.sparsity_down,
                    self.whole,
                ),
                derive_seed(setup.seed, state.round, client.id),
            )

        return plan_each(cohort, plan)

    def training_aggregation(self, setup: Setup, phase: str) -> AggregationPipeline:
        """Lines 17-23: codes are decoded, their changes averaged, and the mean compressed."""
        return chain(
            TernaryDecoder(self.whole, self.sparsity_up),
            MeanChange(self.whole),
            ErrorFeedback(self.whole, self.sparsity_down),
        )


@dataclass(frozen=True)
class TernaryDecoder(Decoder):
    """Line 17: the change of the weights of ``whole`` that a client's code means."""

    whole: Subnet
    sparsity: float
    is_linear = False
    gives_changes = True

    def decode(self, setup: Setup, state: State, update: Update) -> Update:
        """Decodes the one code of an update; a client without a copy of the weights sends none."""
        who = client_label(update.client)
        if not update.subnets and not update.params:
            return update
        if update.subnets != (self.whole,) or len(update.params) != 1:
            raise UpdateError(
                f"{who} sent {len(update.params)} sets of tensors of {update.subnets}; what was "
                "asked for is one code of the whole model"
            )
        (tensors,) = update.params
        if tensors.keys() != {CODE}:
            odd = sorted(tensors.keys() ^ {CODE})
            raise UpdateError(f"{who} sent other tensors than a code; they differ in: {odd[0]}")
        weights = select_weights(setup, state, self.whole)
        change = zero_change(weights)
        try:
            add_code(change, tensors[CODE], self.sparsity)
        except ValueError as problem:
            raise UpdateError(
                f"{who} sent a code that {problem}; does it have the same model and sparsity?"
            ) from problem
        return replace(update, params=(unflatten_weights(change, weights),))


@dataclass(frozen=True)
class MeanChange(Aggregator):
    """Line 18: the mean of the changes of the weights of ``whole``, or what takes its place."""

    whole: Subnet
    rule: Aggregator = field(default_factory=Mean)
    takes_changes = True

    def __post_init__(self) -> None:
        """States of itself what holds for the rule."""
        object.__setattr__(self, "is_linear", self.rule.is_linear)  # the dataclass is frozen
        object.__setattr__(self, "needs_all_updates", self.rule.needs_all_updates)

    def replaced_by(self, rule: Aggregator) -> Aggregator:
        """The same with another rule than the mean."""
        return replace(self, rule=rule)

    def aggregate(self, setup: Setup, state: State, updates: Iterable[Update]) -> Aggregate:
        """Averages from zero, instead of from the server's values."""
        weights = select_weights(setup, state, self.whole)
        nothing = unflatten_weights(zero_change(weights), weights)
        return self.rule.aggregate(setup, replace(state, params=nothing), updates)


@dataclass(frozen=True)
class ErrorFeedback(ServerUpdate):
    """Lines 18-23: the mean change and the residual are compressed; the code is added and kept.

    Also notes which clients have which of the server's weights, so that codes are enough for them.
    """

    whole: Subnet
    sparsity: float

    def apply(self, setup: Setup, state: State, aggregate: Aggregate) -> State:
        """Adds what the code says to the weights, and keeps the rest for later."""
        weights = select_weights(setup, state, self.whole)
        change = flatten_weights(aggregate.params)
        if RESIDUAL in state.server_tensors:
            change += state.server_tensors[RESIDUAL]
        code, residual = compress(change, self.sparsity)
        codes = keep_recent_codes({**read_codes(state), state.round: code}, weights)
        synced = read_synced_rounds(state)
        for reply in aggregate.replies:
            if reply.subnets:
                synced[reply.client] = state.round
            else:
                synced.pop(reply.client, None)
        synced = {client: since for client, since in synced.items() if since in codes}
        oldest = min(synced.values(), default=state.round + 1)
        return replace(
            state,
            params={**state.params, **apply_codes(weights, [code], self.sparsity)},
            method_state={SYNCED: {str(client): since for client, since in synced.items()}},
            server_tensors={
                RESIDUAL: residual,
                **{f"{CODE}/{number}": codes[number] for number in codes if number >= oldest},
            },
        )


def select_weights(setup: Setup, state: State, whole: Subnet) -> dict[str, Tensor]:
    """W: all that codes are of."""
    return {name: state.params[name] for name in setup.structure.tensor_names(whole)}


def read_synced_rounds(state: State) -> dict[int, int]:
    """For each client that codes are enough for, the first round whose code it lacks."""
    return {int(client): since for client, since in state.method_state.get(SYNCED, {}).items()}


def read_codes(state: State) -> dict[int, Tensor]:
    """The server's codes by their rounds, in order."""
    names = (name.partition("/") for name in state.server_tensors)
    numbers = sorted(int(number) for what, _, number in names if what == CODE)
    return {number: state.server_tensors[f"{CODE}/{number}"] for number in numbers}


def keep_recent_codes(
    codes: Mapping[int, Tensor], params: Mapping[str, Tensor]
) -> dict[int, Tensor]:
    """The latest codes, as many as are together shorter than the model itself."""
    room, found = sum(tensor.nbytes for tensor in params.values()), {}
    for number in sorted(codes, reverse=True):
        room -= codes[number].nbytes
        if room <= 0:
            break
        found[number] = codes[number]
    return dict(sorted(found.items()))
