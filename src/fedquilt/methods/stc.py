"""STC: sparse ternary compression of what goes up and of what comes down, with error feedback.

Sattler, Wiedemann, Müller, Samek. "Robust and Communication-Efficient Federated Learning from
Non-IID Data." IEEE TNNLS 2020. A baseline of ADDS (Sec. 4.1.2).

Symbols of the paper -> names here: W -> state.params, R -> state.server["residual"], ΔW -> change,
p_up, p_down -> sparsity_up, sparsity_down, I_t -> the cohort.

What the paper leaves open, and what was chosen, is in docs/methods/stc.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedquilt.errors import ConfigError, UpdateError
from fedquilt.federation.average import average
from fedquilt.federation.client import Client, Task, Update, called, seed_of
from fedquilt.federation.state import Setup, State
from fedquilt.methods.method import QUERY, Rounds, ignored_budgets
from fedquilt.ranges import Fraction
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.trace import named_tensors
from fedquilt.training.descent import Optimiser
from fedquilt.training.sgd import SGD
from fedquilt.training.ternary import (
    CODE,
    RESIDUAL,
    TernarySGD,
    added,
    compressed,
    flattened,
    moved,
    shaped,
    unmoved,
)

SYNCED = "synced"  # in memory: the last round at whose start a client had the server's weights


@dataclass(frozen=True)
class STC(Rounds):
    """One net for all, of which only codes travel.

    ``sparsity_up`` and ``sparsity_down`` are the shares of the weights that a client's and the
    server's codes change. A client gets the codes of all rounds that it missed; or the whole model,
    if it never had it or if that is shorter. Batches are normalised by themselves in training:
    running statistics are no sums of changes. They are asked for at the end.
    """

    optimiser: Optimiser = field(default_factory=lambda: Optimiser(clip=None))
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

    @property
    def tracks_statistics(self) -> bool:
        """They are no sums of changes."""
        return False

    def prepared(self, setup: Setup) -> Setup:
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
        return ignored_budgets(setup)

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> list[Task]:
        """Line 7: the codes that a client missed, or all weights."""
        synced, codes = synced_of(state), codes_of(state)
        missed = {
            since: {str(number): code for number, code in codes.items() if number >= since}
            for since in {synced[client.id] for client in cohort if client.id in synced}
        }
        return [
            Task(
                client.id,
                () if client.id in synced else (self.to_train(Subnet()),),
                missed[synced[client.id]] if client.id in synced else state.params,
                TernarySGD(
                    SGD(
                        self.optimiser,
                        lr=self.optimiser.rate(state.round, setup.rounds),
                        weight=client.num_examples,
                    ),
                    state.round,
                    self.sparsity_up,
                    self.sparsity_down,
                    self.to_train(Subnet()),
                ),
                seed_of(setup.seed, state.round, client.id),
            )
            for client in cohort
        ]

    def opened(self, setup: Setup, state: State, update: Update) -> Update:
        """Line 17: the change that a client's code means, as tensors."""
        who = called(update.client)
        if state.phase == QUERY:
            return update  # statistics, as they are
        if not update.subnets and not update.params:
            return update  # it lacks what codes are added to
        if update.subnets != (self.to_train(Subnet()),) or len(update.params) != 1:
            raise UpdateError(
                f"{who} sent {len(update.params)} sets of tensors of {update.subnets}; what was "
                "asked for is one code of the whole model"
            )
        (tensors,) = update.params
        if tensors.keys() != {CODE}:
            odd = sorted(tensors.keys() ^ {CODE})
            raise UpdateError(f"{who} sent other tensors than a code; they differ in: {odd[0]}")
        weights = self.weights(setup, state)
        change = unmoved(weights)
        try:
            added(change, tensors[CODE], self.sparsity_up)
        except ValueError as problem:
            raise UpdateError(
                f"{who} sent a code that {problem}; does it have the same model and sparsity?"
            ) from problem
        return replace(update, params=(shaped(change, weights),))

    def weights(self, setup: Setup, state: State) -> dict[str, Tensor]:
        """W: all that codes are of."""
        return {n: state.params[n] for n in setup.structure.names(self.to_train(Subnet()))}

    def merge_training(self, setup: Setup, state: State, updates: Iterable[Update]) -> State:
        """Lines 18-23: the mean of the changes and the residual, compressed and added."""
        synced = dict(synced_of(state))

        def noted() -> Iterator[Update]:
            for update in updates:
                if update.subnets:
                    synced[update.client] = state.round
                else:
                    synced.pop(update.client, None)
                yield update

        weights = self.weights(setup, state)
        nothing = shaped(unmoved(weights), weights)
        change = flattened(average(nothing, setup.structure, noted()))
        if RESIDUAL in state.server:
            change += state.server[RESIDUAL]
        code, residual = compressed(change, self.sparsity_down)
        codes = reaching({**codes_of(state), state.round: code}, weights)
        synced = {client: since for client, since in synced.items() if since in codes}
        oldest = min(synced.values(), default=state.round + 1)
        return replace(
            state,
            params={**state.params, **moved(weights, [code], self.sparsity_down)},
            memory={SYNCED: {str(client): since for client, since in synced.items()}},
            server={
                RESIDUAL: residual,
                **{f"{CODE}/{number}": codes[number] for number in codes if number >= oldest},
            },
        )


def synced_of(state: State) -> dict[int, int]:
    """For each client that codes are enough for, the first round whose code it lacks."""
    return {int(client): since for client, since in state.memory.get(SYNCED, {}).items()}


def codes_of(state: State) -> dict[int, Tensor]:
    """The server's codes by their rounds, in order."""
    names = (name.partition("/") for name in state.server)
    numbers = sorted(int(number) for what, _, number in names if what == CODE)
    return {number: state.server[f"{CODE}/{number}"] for number in numbers}


def reaching(codes: Mapping[int, Tensor], params: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """The latest codes, as many as are together shorter than the model itself."""
    room, found = sum(tensor.nbytes for tensor in params.values()), {}
    for number in sorted(codes, reverse=True):
        room -= codes[number].nbytes
        if room <= 0:
            break
        found[number] = codes[number]
    return dict(sorted(found.items()))
