"""Server optimizers: the mean of a round's changes is taken for a gradient.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan. "Adaptive Federated Optimization."
ICLR 2021, Algorithm 2 (FedAdagrad, FedYogi, FedAdam). FedAvgM is of Hsu, Qi, Brown. "Measuring the
Effects of Non-Identical Data Distribution for Federated Visual Classification." 2019.

Symbols of the paper -> names here: x_t -> state.params, Δ_t -> change, η -> lr, m_t -> momentum,
v_t -> variance, β_1, β_2, τ -> beta1, beta2, tau. As in the paper there is no bias correction, and
v_{-1} = τ².

Clients hold different cells, so every cell is optimized for itself: its change is the mean over the
clients that held it, less the server's value. A cell that no client held in a round keeps its value
and its moments (docs/decisions/0010-server-update.md says why). Only weights that training moves
are optimized. Running statistics, other buffers and cells that are not finite take the mean.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedquilt.federation.aggregation.parts import Aggregate, ServerUpdate
from fedquilt.federation.constants import keep_constants
from fedquilt.federation.state import Setup, State
from fedquilt.ranges import BelowOne, Positive, check_fields
from fedquilt.structure.cut import Params

PREFIX = "server_optimizer"  # of the names of moments among the server's tensors


@dataclass(frozen=True)
class ServerOptimizer(ServerUpdate):
    """What all server optimizers have in common: the cells they move, and where moments are kept.

    A subclass says what its moments start from and how one step goes.

    Args:
        lr: The server's learning rate η.

    >>> from dataclasses import dataclass
    >>> import fedquilt as fq
    >>> @dataclass(frozen=True)
    ... class SignSGD(fq.ServerOptimizer):
    ...     @property
    ...     def initial_moments(self):
    ...         return {}
    ...
    ...     def step(self, change, moments):
    ...         return self.lr * change.sign(), {}
    >>> fq.HeteroFL(server_optimizer=SignSGD(lr=0.1)).server_optimizer
    SignSGD(lr=0.1)
    """

    lr: Positive = 1.0

    def __post_init__(self) -> None:
        """Refuses settings that are not of their types, or out of range."""
        check_fields(self)

    @property
    @abstractmethod
    def initial_moments(self) -> Mapping[str, float]:
        """The value that every cell of each moment starts from."""

    @abstractmethod
    def step(self, change: Tensor, moments: Params) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes one step of a tensor.

        Args:
            change: The mean of the clients' values, less the server's.
            moments: The tensor's moments after its last step.

        Returns:
            What is added to the server's values, and the moments after this step.
        """

    def apply(self, setup: Setup, state: State, aggregate: Aggregate) -> State:
        """Moves every cell that a client trained, and its moments."""
        params, tensors = dict(aggregate.params), dict(state.server_tensors)
        for name in _list_optimized(setup, state, aggregate):
            old, mean = _get_old(state.params, name), aggregate.params[name]
            keys = {moment: f"{PREFIX}/{moment}/{name}" for moment in self.initial_moments}
            kind = torch.promote_types(old.dtype, torch.float32)
            before = {
                moment: tensors.get(keys[moment], torch.full_like(old, start, dtype=kind))
                for moment, start in self.initial_moments.items()
            }
            cells = aggregate.trained(name) & old.isfinite()
            step, after = self.step(mean.to(kind) - old.to(kind), before)
            params[name] = torch.where(cells, (old.to(kind) + step).to(old.dtype), mean)
            for moment, key in keys.items():
                tensors[key] = torch.where(cells, after[moment], before[moment])
        return replace(state, params=params, server_tensors=tensors)


@dataclass(frozen=True)
class ServerSGD(ServerOptimizer):
    """Goes ``lr`` of the way to the mean: x + η Δ. With η = 1 that is the mean itself.

    >>> change = torch.tensor([2.0])
    >>> ServerSGD(lr=0.5).step(change, {})[0]
    tensor([1.])
    """

    @property
    def keeps_aggregate(self) -> bool:
        """Whether the learning rate is 1."""
        return self.lr == 1

    @property
    def initial_moments(self) -> Mapping[str, float]:
        """There are none."""
        return {}

    def step(self, change: Tensor, moments: Params) -> tuple[Tensor, dict[str, Tensor]]:
        """η Δ."""
        return self.lr * change, {}

    def apply(self, setup: Setup, state: State, aggregate: Aggregate) -> State:
        """Interpolates, so that no rounding comes in where nothing changed."""
        params = dict(aggregate.params)
        for name in () if self.keeps_aggregate else _list_optimized(setup, state, aggregate):
            old = _get_old(state.params, name)
            params[name] = keep_constants(torch.lerp(old, params[name], self.lr), old)
        return replace(state, params=params)


TAKE_MEAN = ServerSGD()  # the default


@dataclass(frozen=True)
class FedAvgM(ServerOptimizer):
    """Momentum: m <- β m + Δ, x <- x + η m.

    Args:
        lr: The server's learning rate η.
        momentum: β.

    >>> change, moments = torch.tensor([2.0]), {"momentum": torch.tensor([4.0])}
    >>> FedAvgM(momentum=0.5).step(change, moments)[0]
    tensor([4.])
    """

    momentum: BelowOne = 0.9

    @property
    def initial_moments(self) -> Mapping[str, float]:
        """m = 0."""
        return {"momentum": 0.0}

    def step(self, change: Tensor, moments: Params) -> tuple[Tensor, dict[str, Tensor]]:
        """η m."""
        momentum = self.momentum * moments["momentum"] + change
        return self.lr * momentum, {"momentum": momentum}


@dataclass(frozen=True)
class AdaptiveOptimizer(ServerOptimizer):
    """Algorithm 2: m <- β_1 m + (1 − β_1) Δ, x <- x + η m / (√v + τ); subclasses differ in v."""

    lr: Positive = 0.01
    beta1: BelowOne = 0.9
    tau: Positive = 1e-3

    @property
    def initial_moments(self) -> Mapping[str, float]:
        """m = 0 and v = τ²."""
        return {"momentum": 0.0, "variance": self.tau**2}

    @abstractmethod
    def update_variance(self, variance: Tensor, square: Tensor) -> Tensor:
        """v_t of v_{t-1} and Δ²."""

    def step(self, change: Tensor, moments: Params) -> tuple[Tensor, dict[str, Tensor]]:
        """η m / (√v + τ)."""
        momentum = self.beta1 * moments["momentum"] + (1 - self.beta1) * change
        variance = self.update_variance(moments["variance"], change.square())
        step = self.lr * momentum / (variance.sqrt() + self.tau)
        return step, {"momentum": momentum, "variance": variance}


@dataclass(frozen=True)
class FedAdagrad(AdaptiveOptimizer):
    """Adagrad on the server: steps shrink with the sum of all squared changes.

    v <- v + Δ². The paper's experiments use no momentum with it, so β_1 is 0 by default.

    Args:
        lr: The server's learning rate η.
        beta1: The decay of m.
        tau: How adaptive it is: the smaller, the more.

    >>> change, moments = torch.tensor([3.0]), {"momentum": 0.0, "variance": torch.tensor([16.0])}
    >>> FedAdagrad(lr=1.0).step(change, moments)[1]["variance"]
    tensor([25.])
    """

    beta1: BelowOne = 0.0

    def update_variance(self, variance: Tensor, square: Tensor) -> Tensor:
        """The sum of all squares."""
        return variance + square


@dataclass(frozen=True)
class FedAdam(AdaptiveOptimizer):
    """Adam on the server: steps along the clients' mean change, scaled by its recent size.

    v <- β_2 v + (1 − β_2) Δ² (Reddi et al., 2021, Algorithm 2).

    Args:
        lr: The server's learning rate η.
        beta1: The decay of m.
        tau: How adaptive it is: the smaller, the more.
        beta2: The decay of v.

    >>> change, moments = torch.tensor([4.0]), {"momentum": 0.0, "variance": torch.tensor([0.0])}
    >>> FedAdam(beta2=0.5).step(change, moments)[1]["variance"]
    tensor([8.])
    >>> import fedquilt as fq
    >>> fq.HeteroFL(server_optimizer=FedAdam(lr=0.02)).server_optimizer.lr
    0.02
    """

    beta2: BelowOne = 0.99

    def update_variance(self, variance: Tensor, square: Tensor) -> Tensor:
        """A moving average."""
        return self.beta2 * variance + (1 - self.beta2) * square


@dataclass(frozen=True)
class FedYogi(AdaptiveOptimizer):
    """Yogi on the server: like Adam, but v grows and shrinks by bounded steps.

    v <- v − (1 − β_2) Δ² sign(v − Δ²) (Reddi et al., 2021, Algorithm 2).

    Args:
        lr: The server's learning rate η.
        beta1: The decay of m.
        tau: How adaptive it is: the smaller, the more.
        beta2: The decay of v.

    >>> change, moments = torch.tensor([1.0]), {"momentum": 0.0, "variance": torch.tensor([4.0])}
    >>> FedYogi(beta2=0.5).step(change, moments)[1]["variance"]
    tensor([3.5000])
    """

    beta2: BelowOne = 0.99

    def update_variance(self, variance: Tensor, square: Tensor) -> Tensor:
        """A step whose size does not depend on v."""
        return variance - (1 - self.beta2) * square * torch.sign(variance - square)


SERVER_OPTIMIZERS: dict[str, type[ServerOptimizer]] = {
    "sgd": ServerSGD,
    "fedavgm": FedAvgM,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
}


def _list_optimized(setup: Setup, state: State, aggregate: Aggregate) -> list[str]:
    """The global names of weights that training moves and that came back in this round."""
    weights = {name for name, weight in setup.model.named_parameters() if weight.requires_grad}
    return [
        name
        for name, mean in aggregate.params.items()
        if name.partition("@")[0] in weights and mean is not _get_old(state.params, name)
    ]


def _get_old(params: Params, name: str) -> Tensor:
    """The server's tensor; one that its owner has not trained yet is the shared one."""
    old = params.get(name)
    return params[name.partition("@")[0]] if old is None else old
