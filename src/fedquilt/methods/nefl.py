"""NeFL: submodels nested in width and in depth, with normalization and steps of their own.

Kang, Cha, Shin, Lee, Kang. "NeFL: Nested Federated Learning for Heterogeneous Clients." 2023.

Symbols of the paper -> names here: F_k -> submodels[γ_k], θ_c -> state.params, θ_ic,k -> the
tensors that submodel k owns (``name@γ_k``), s_j -> the step of a block, M -> clients,
E -> local_training.epochs, N_s -> len(sizes). Algorithm 2 is the default aggregation: NeFedAvg for
what is shared, FedAvg for each submodel's own.

What the paper leaves open, and where we differ from the public code, is in docs/methods/nefl.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedquilt.errors import ConfigError
from fedquilt.federation.client import Client, Task, derive_seed
from fedquilt.federation.state import Setup, State
from fedquilt.federation.tasks import plan_each
from fedquilt.methods import nefl_tables, submodels
from fedquilt.methods.affordability import filter_affordable
from fedquilt.methods.base import BaseMethod, initial_state
from fedquilt.ranges import Fraction
from fedquilt.structure.derive import add_block_steps
from fedquilt.structure.structure import NORMS, STATISTICS, STEPS, Structure, cache_per_structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.settings import LocalTraining


@dataclass(frozen=True)
class NeFL(BaseMethod):
    """Submodels of several sizes; what they share is averaged, the rest is each one's own.

    ``scaling`` makes the submodels of the ``gammas`` (fractions of the parameters): ``W`` by width,
    ``D`` by depth, ``WD`` by both, ``prefix`` by leaving out the net's last blocks (the form of
    DepthFL that the paper compares with). By default the gammas are the clients' budgets, or the
    paper's where those are physical limits. ``table`` takes submodels from the paper's tables.
    ``steps`` are ``learned``, ``constant`` (the paper's N/L) or there are ``none``; they start at
    1, or with ``step_start="ode"`` (D_O) grow by the number of blocks skipped right behind.
    ``private_params`` names the inconsistent tensors. With ``assignment="dynamic"`` a client
    trains, in each round, a submodel drawn from ``tier_range`` tiers below its own to as many
    above. Without ``tracks_statistics``, clients are asked for those of every submodel when
    training is over, as in HeteroFL.

    Args:
        local_training: Settings of local training.
        fraction: Fraction of the clients that take part in a round.
        scaling: How submodels get smaller: W by width, D by depth, WD by both, prefix by the last
            blocks.
        gammas: Sizes as fractions of the parameters; None: the budgets, or those of the paper.
        tolerance: How far the parameters of a submodel may be off its size.
        table: Name of a table of the paper that the submodels are taken from; None: they are
            searched.
        steps: Step sizes of the blocks: learned, constant or none.
        step_start: Where step sizes start: one, or ode for larger ones before skipped blocks.
        private_params: Patterns of tensors that each submodel has for itself.
        assignment: dynamic: a submodel near its own is drawn for a client; fixed: its own.
        tier_range: How many tiers below and above its own are drawn from.
        tracks_statistics: Whether the statistics of batch normalization are trained like weights.
            If not, clients are asked for them at the end.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(24, 4), torch.arange(24) % 3)
    >>> clients = fq.make_clients(data, test=data, count=4, budgets=(1.0, 0.5))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> method = fq.NeFL(scaling="W", tolerance=0.05)
    >>> run = fq.train(model, data[0][:1], method, clients, rounds=1, workers=0)
    >>> [score.params for score in run.scores]  # the whole net, and half of it
    [67, 35]
    """

    local_training: LocalTraining = field(
        default_factory=lambda: LocalTraining(
            lr=0.1, momentum=0.0, weight_decay=0.0, epochs=5, batch_size=32, max_grad_norm=None
        )
    )
    fraction: Fraction | None = None
    scaling: Literal["W", "D", "WD", "prefix", "W small", "D small", "WD small"] = "WD"
    gammas: tuple[float, ...] | None = None
    tolerance: float = 0.02  # of a size, that the parameters of its submodel may be off
    table: str | None = None
    steps: Literal["learned", "constant", "none"] = "learned"
    step_start: Literal["one", "ode"] = "one"
    private_params: tuple[str, ...] = (NORMS, STEPS)
    assignment: Literal["dynamic", "fixed"] = "dynamic"
    tier_range: int = 2
    tracks_statistics: bool = True
    size_kind = "parameters"

    def __post_init__(self) -> None:
        """Refuses settings that make no sense."""
        super().__post_init__()
        if self.tier_range < 0:
            raise ConfigError(f"tier_range counts tiers, so it is 0 or more, got {self.tier_range}")
        if self.step_start == "ode" and self.steps == "none":
            raise ConfigError("step_start 'ode' needs steps; let them be learned or constant")

    def default_budgets(self, model: nn.Module) -> tuple[float, ...]:
        """The paper's five tiers, or the sizes that the settings name."""
        if self.table is not None:
            rows = nefl_tables.get_table(self.table, self.scaling)
            return tuple(sorted((row.size for row in rows), reverse=True))
        return tuple(sorted(self.gammas or nefl_tables.SIZES, reverse=True))

    def exceeds_budgets(self, setup: Setup) -> str | None:
        """With dynamic tiers clients also train submodels that are larger than their own."""
        reaching = setup.registry.count_with(
            c.budget
            for c in setup.registry.one_per_budget
            if max(self._list_near_tiers(setup, c)) > self._find_tier(setup, c)
        )
        if not reaching:
            return super().exceeds_budgets(setup)
        return (
            f"exceeds budgets: {reaching} of {len(setup.clients)} clients also train "
            "submodels above their own tier; method.assignment = 'fixed' keeps them below"
        )

    def prepare_model(self, setup: Setup) -> Setup:
        """Sec. 4.1.1: every block gets a step, Y_{j+1} = Y_j + s_j F(Y_j)."""
        if self.steps != "none" and setup.structure.blocks:
            learnable = self.steps == "learned"
            model, structure = add_block_steps(setup.model, setup.structure, learnable=learnable)
            setup = replace(setup, model=model, structure=structure)
        self._require_known_tensors(setup.structure)
        for client in setup.registry.one_per_budget:
            self._find_tier(setup, client)  # refuses whoever cannot afford any submodel
        return setup

    def _require_known_tensors(self, structure: Structure) -> None:
        for pattern in self.private_params:
            name = pattern.removeprefix("!")
            if not name.startswith(":") and not structure.match_names((name,)):
                raise ConfigError(
                    f"private_params has the pattern '{pattern}', which no tensor matches; named "
                    f"sets have a colon, such as {NORMS} and {STEPS}"
                )

    def start(self, setup: Setup) -> State:
        """θ_c, and θ_ic,k where a submodel does not start as the global model does (D_O)."""
        state = initial_state(setup)
        if self.step_start == "one":
            return state
        if not setup.structure.match_names((STEPS,)) <= setup.structure.match_names(
            self.private_params
        ):
            raise ConfigError(
                f"step_start 'ode' gives each submodel steps of its own, but private_params "
                f"is {self.private_params}; "
                f"add '{STEPS}' to it"
            )
        steps: dict[str, Tensor] = {}
        for subnet in self.submodels(setup).values():
            for name, value in enlarge_steps(setup.structure, subnet).items():
                steps[f"{name}@{subnet.owner}"] = torch.tensor(float(value))
        return replace(state, params={**state.params, **steps})

    @property
    def plans_by_budget(self) -> bool:
        """Unless submodels are drawn."""
        return self.assignment == "fixed"

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> Sequence[Task]:
        """Algorithm 1, lines 2-5: each client trains one of the submodels."""
        recipe = LocalSGD(
            self.local_training, lr=self.local_training.lr_at(state.round, setup.rounds)
        )

        def plan(client: Client) -> Task:
            return Task(
                client.id,
                (self._choose_submodel(setup, state.round, client),),
                state.params,
                recipe,
                derive_seed(setup.seed, state.round, client.id),
            )

        return plan_each(cohort, plan)

    def _choose_submodel(self, setup: Setup, round: int, client: Client) -> Subnet:
        return self.without_untracked(self.submodels(setup)[self.draw_size(setup, round, client)])

    def draw_size(self, setup: Setup, round: int, client: Client) -> float:
        """Appendix B.5: drawn uniformly from the tiers around the client's own."""
        if self.assignment == "fixed":
            return self._find_tier(setup, client)
        near = self._list_near_tiers(setup, client)
        draw = np.random.default_rng(derive_seed(setup.seed, round, client.id, 1))
        return near[int(draw.integers(len(near)))]

    def _find_tier(self, setup: Setup, client: Client) -> float:
        """The largest submodel that a client can afford."""
        return filter_affordable(setup, client, self.submodels(setup))[0]

    def _list_near_tiers(self, setup: Setup, client: Client) -> list[float]:
        """The submodels that a client may have to train, smallest first."""
        subnets = self.submodels(setup)
        sizes, own = sorted(subnets), self._find_tier(setup, client)
        if self.assignment == "fixed":
            return [own]
        tier = sizes.index(own)
        near = sizes[max(tier - self.tier_range, 0) : tier + self.tier_range + 1]
        if client.budget.is_width_alone:
            return near
        limits = replace(client, budget=replace(client.budget, width=1.0))
        affordable = filter_affordable(setup, limits, subnets)  # physical limits cannot be exceeded
        return [size for size in near if size in affordable]

    def sizes(self, setup: Setup) -> tuple[float, ...]:
        """γ of each submodel, largest first."""
        return tuple(sorted(self.submodels(setup), reverse=True))

    def ensemble(self, setup: Setup, state: State, width: float) -> tuple[Subnet, ...]:
        """The largest submodel that is not larger than asked."""
        subnets = self.submodels(setup)
        small_enough = [size for size in subnets if size <= width + 1e-9]
        if not small_enough:
            raise ConfigError(
                f"the smallest submodel has {min(subnets):g} of the parameters, asked was {width:g}"
            )
        return (subnets[max(small_enough)],)

    def submodels(self, setup: Setup) -> Mapping[float, Subnet]:
        """F_1 ... F_Ns by size, each with tensors of its own."""
        weights = frozenset(name for name, _ in setup.model.named_parameters())
        return _build_submodels(setup.structure, self, weights, self._choose_gammas(setup))

    def _choose_gammas(self, setup: Setup) -> tuple[float, ...]:
        if self.gammas is not None:
            return self.gammas
        budgets = setup.registry.budget_counts
        if not budgets or not all(budget.is_width_alone for budget in budgets):
            return nefl_tables.SIZES
        return tuple(sorted({budget.width for budget in budgets}))


@cache_per_structure(max_entries=64)
def _build_submodels(
    structure: Structure, method: NeFL, weights: frozenset[str], gammas: tuple[float, ...]
) -> Mapping[float, Subnet]:
    if method.table is not None:
        found = submodels.build_from_table(
            structure, nefl_tables.get_table(method.table, method.scaling)
        )
    else:
        weights -= structure.match_names((STEPS,))
        found = submodels.find_submodels(
            structure, weights, gammas, method.scaling, method.tolerance
        )
    own = (
        method.private_params if method.tracks_statistics else (*method.private_params, STATISTICS)
    )
    return {size: subnet.with_private(f"{size:g}", *own) for size, subnet in found.items()}


def enlarge_steps(structure: Structure, subnet: Subnet) -> dict[str, int]:
    """D_O: the step before blocks that are skipped grows by their number (Table 12).

    The blocks of one stage follow each other; a branch of one kind (attention, feed-forward) stands
    in for skipped branches of its own kind.
    """
    found: dict[str, int] = {}
    last: dict[tuple[str, int], str] = {}
    for block in structure.blocks.values():
        line = (block.module.rpartition(".")[0], block.number)
        if block.name not in subnet.skipped and block.step:
            found[block.step] = 1
            last[line] = block.step
        elif line in last:
            found[last[line]] += 1
    return found
