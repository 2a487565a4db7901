"""Modules of any size out of a finished model: which subnets they are made of, and how."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fedquilt.customize.ensemble import Ensemble
from fedquilt.customize.info import SubnetInfo, attach_info
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.evaluation.accuracy import compute_ensemble_cost
from fedquilt.federation.state import Setup, State
from fedquilt.methods.method import Method, shares_weights
from fedquilt.structure.budget import Budget, fit_budget
from fedquilt.structure.cut import build_module, global_name, load_tensors
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import named_tensors
from fedquilt.training.dualnorm import NO_DIAL, has_dial, set_robustness, validate_robustness
from fedquilt.training.scaler import fold_scale
from fedquilt.training.tracking import needs_batches, without_running_stats

UNTRAINED = (
    "no client trained a model of size {0:g}, which may answer no better than chance; the smallest "
    "that was trained is {1:g}"
)
NEEDS_BATCHES = (
    "this model normalises every batch by itself, so that its answer to an example depends on the "
    "others in the batch; train with query_statistics (the default), and with layers whose "
    "track_running_stats is true"
)


@dataclass(frozen=True, eq=False)
class FinishedModel:
    """A finished state, with what is needed to cut modules out of it."""

    setup: Setup
    method: Method
    state: State

    def customize(self, budget: Budget | None, robustness: float | None) -> nn.Module:
        """A module of the budget's width, or within its limits; None: the largest."""
        self._require_shared()
        sizes = self.method.sizes(self.setup)
        robustness = self.choose_robustness(robustness)
        width = self._choose_width(budget or Budget(max(sizes)))
        subnets = self.method.ensemble(self.setup, self.state, width)
        nets = [self._build(subnet) for subnet in subnets]
        if width < min(sizes) - 1e-9:
            warnings.warn(UNTRAINED.format(width, min(sizes)), stacklevel=3)
        if not self.method.has_statistics(self.setup):
            nets = [without_running_stats(net) for net in nets]
        if any(map(needs_batches, nets)):
            warnings.warn(NEEDS_BATCHES, stacklevel=3)
        module = nets[0]
        if len(self.method.ensemble(self.setup, self.state, max(sizes))) > 1:
            module = Ensemble(nets, base=min(sizes))
            width = module.width
        if robustness is not None:
            set_robustness(module, robustness)
        attach_info(module, SubnetInfo(self.setup.example, width, robustness))
        return module.eval()

    def customize_for_client(
        self, client: int, read_state: Callable[[], Mapping[str, Tensor]]
    ) -> nn.Module:
        """The net that a client chose for itself; ``read_state`` reads what the client keeps."""
        self._require_shared()
        structure, chosen = self.setup.structure, self.state.chosen_subnets
        if client not in chosen:
            others = f"those that have are {sorted(chosen)}" if chosen else "no client has one"
            raise ConfigError(f"client {client} has no net of its own; {others}")
        subnet = chosen[client]
        module = self._build(subnet)
        names = {n: global_name(n, structure, subnet) for n in named_tensors(module)}
        private = {n: source for n, source in names.items() if source != n}
        tensors = read_state()
        for name, source in private.items():
            if name in structure.statistics and source not in tensors:
                raise ConfigError(
                    f"client {client} has no statistics of its own net ('{name}' is missing); "
                    "they are computed when a run ends, unless query_statistics is false"
                )
        load_tensors(module, {n: tensors[s] for n, s in private.items() if s in tensors})
        attach_info(module, SubnetInfo(self.setup.example, 1.0))
        return module.eval()

    def choose_robustness(self, robustness: float | None) -> float | None:
        """The robustness that was asked for, 0 by default; None if the model has no such dial."""
        if has_dial(self.setup.model):
            return validate_robustness(robustness or 0.0)
        if robustness is not None:
            raise ConfigError(NO_DIAL)
        return None

    def _require_shared(self) -> None:
        if not shares_weights(self.setup, self.method):
            raise ConfigError(
                "this method's models stay on the clients, so there is none to take away; "
                "train with a method that shares its model, such as heterofl"
            )

    def _build(self, subnet: Subnet) -> nn.Module:
        """A subnet as a module, as it was trained: with the scale of its outputs."""
        setup = self.setup
        module = build_module(setup.model, setup.structure, subnet, self._select_tensors(subnet))
        if self.method.scales_outputs:
            return fold_scale(module, setup.structure, setup.example)
        return module

    def _select_tensors(self, subnet: Subnet) -> dict[str, Tensor]:
        """The global tensors that a subnet is cut from; others are not read from the disk."""
        structure, params = self.setup.structure, self.state.params
        dropped = structure.dropped_tensors(subnet)
        names = {
            name: global_name(name, structure, subnet)
            for name in structure.shapes
            if name not in dropped
        }
        wanted = (own if own in params else name for name, own in names.items())
        return {name: params[name] for name in wanted if name in params}

    def _choose_width(self, budget: Budget) -> float:
        """The largest trained size within limits, or else the widest of all that fits."""
        if budget.is_width_alone:
            return budget.width
        setup = self.setup
        for width in self.method.sizes(setup):
            cost = compute_ensemble_cost(setup, self.method.ensemble(setup, self.state, width))
            if width <= budget.width and budget.allows(cost):
                return width
        width = fit_budget(setup.model, setup.structure, budget, setup.example)[0]
        try:
            cost = compute_ensemble_cost(setup, self.method.ensemble(setup, self.state, width))
        except ConfigError as problem:  # a method without a model that small
            raise BudgetError(f"no size meets {budget}: {problem}") from problem
        if not budget.allows(cost):
            raise BudgetError(f"no size meets {budget}; the one nearest to it costs {cost}")
        return width
