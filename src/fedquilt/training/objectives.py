"""What a client minimizes on one batch: accuracy, robustness, or every trade-off between them.

Adversarial training is Eq. 1 and Algorithm 4 of Split-Mix (Hong et al., ICLR 2022); once-for-all
training is Wang et al., NeurIPS 2020.

Symbols of the papers -> names here: λ_n -> share, x̃ -> near.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from fedquilt.data import ClientData
from fedquilt.errors import ConfigError
from fedquilt.learning.batch import Batch
from fedquilt.training.attack import PGD, Draws, frozen_model
from fedquilt.training.client_loss import ClientLoss, ClientLosses
from fedquilt.training.conditional import at_robustnesses
from fedquilt.training.dualnorm import at_robustness, on_path


class Objective(Protocol):
    """A frozen dataclass of plain settings that knows the loss of one batch."""

    def loss(
        self,
        module: nn.Module,
        batch: Batch,
        loss: ClientLoss,
        generator: torch.Generator,
    ) -> Tensor:
        """The loss to minimize; the module's modes and dials are afterwards as before.

        Args:
            module: The net that is trained.
            batch: Inputs and targets.
            loss: The task's loss, over the client's classes if it is masked.
            generator: For what the objective draws.
        """
        ...


class StackableObjective(Objective, Protocol):
    """An objective that knows the losses of several nets side by side as well."""

    stackable: bool

    def loss(
        self,
        module: nn.Module,
        batch: tuple[Any, Any],
        loss: ClientLoss | ClientLosses,
        generator: Draws,
    ) -> Tensor:
        """The loss to minimize, or that of each net.

        Args:
            module: The net that is trained, or what computes several.
            batch: Inputs and targets; of several nets with a first axis of nets.
            loss: The client's loss, or that of each net.
            generator: For what the objective draws, or that of each net.
        """
        ...


def is_stackable(objective: Objective) -> TypeGuard[StackableObjective]:
    """Whether an objective knows the losses of several nets side by side."""
    return getattr(objective, "stackable", False)


@dataclass(frozen=True)
class PlainLoss:
    """The task's loss on the examples as they are."""

    least = 0.0  # that it can be, if the task says no less
    stackable = True

    def loss(
        self,
        module: nn.Module,
        batch: tuple[Any, Any],
        loss: ClientLoss | ClientLosses,
        generator: Draws,
    ) -> Tensor:
        """The loss of one batch."""
        return loss.of_batch(module, batch)


@dataclass(frozen=True)
class Adversarial:
    """Adversarial training at one trade-off.

    Eq. 1: L = (1 − λ_n) CE(f(x), y) + λ_n max_{‖δ‖ ≤ ε} CE(f(x + δ), y). On a model with dual
    normalization this is Algorithm 4: the clean term uses the clean halves; the noise halves are
    used to find x + δ and for the second term. On any other model both terms use the same layers
    (FedAvg + AT). At ``share`` 0 nothing is attacked, at 1 nothing clean is looked at.

    The attack maximizes the cross entropy over all classes, as the public code does, even where
    the loss is over the client's own.
    """

    attack: PGD = field(default_factory=PGD)
    share: float = 0.5
    least = 0.0  # that the loss can be
    stackable = True

    def __post_init__(self) -> None:
        """Refuses a share outside of [0, 1]."""
        _check_share(self.share)

    def loss(
        self,
        module: nn.Module,
        batch: tuple[Any, Any],
        loss: ClientLoss | ClientLosses,
        generator: Draws,
    ) -> Tensor:
        """The loss of Eq. 1 on one batch."""
        return _adversarial_loss(self, 0.0, module, batch, loss, generator)


def _adversarial_loss(
    setting: Adversarial,
    clean_path: float | None,
    module: nn.Module,
    batch: tuple[Any, Any],
    loss: ClientLoss | ClientLosses,
    generator: Draws,
) -> Tensor:
    """Eq. 1, the lines of Algorithm 4 in their order."""
    x, y = batch
    terms: list[Tensor] = []
    if setting.share < 1:
        with on_path(module, clean_path):
            terms.append((1 - setting.share) * loss(module(x), y))
    if setting.share > 0:
        with on_path(module, 1.0):
            with frozen_model(module):
                near = setting.attack.perturb(module, x, y, generator)
            terms.append(setting.share * loss(module(near), y))
    return sum(terms[1:], terms[0])


@dataclass(frozen=True)
class OnceForAll:
    """Adversarial training at every trade-off: another λ for each batch, which the model is given.

    λ is drawn from ``shares`` for the batch, set in the ``conditional`` model, and weighs the terms
    of Eq. 1. The paper draws a λ for each example (``per_example``); one for the batch needs one
    pass of each kind. As there, whatever is trained for λ > 0 goes through the noise halves, clean
    or not: the half that the model uses for λ > 0 afterwards.
    """

    attack: PGD = field(default_factory=PGD)
    shares: tuple[float, ...] = (0.0, 0.2, 0.5, 0.8, 1.0)
    per_example: bool = False
    least = 0.0  # that the loss can be

    def __post_init__(self) -> None:
        """Refuses shares outside of [0, 1]."""
        if not self.shares:
            raise ConfigError("shares must name at least one trade-off, got none; try (0.0, 1.0)")
        for share in self.shares:
            _check_share(share)

    def loss(
        self,
        module: nn.Module,
        batch: Batch,
        loss: ClientLoss,
        generator: torch.Generator,
    ) -> Tensor:
        """The loss of Eq. 1 at trade-offs drawn for this batch, or for its examples."""
        if self.per_example:
            return self._loss_per_example(module, batch, loss, generator)
        drawn = torch.randint(len(self.shares), (), generator=generator, device=generator.device)
        setting = Adversarial(self.attack, self.shares[int(drawn)])
        with at_robustness(module, setting.share):
            return _adversarial_loss(setting, None, module, batch, loss, generator)

    def _loss_per_example(
        self, module: nn.Module, batch: Batch, loss: ClientLoss, generator: torch.Generator
    ) -> Tensor:
        """The mean over examples of (1 − λ) L(x) + λ L(x + δ), each with its own λ.

        Examples with λ = 0 have a pass by themselves, through the clean halves.
        """
        x, y = batch
        shares, loss = self._draw_shares(len(y), generator).to(y.device), loss.for_batch(y)
        is_clean = shares == 0
        terms: list[Tensor] = []

        def add(output: Tensor, rows: Tensor, weights: Tensor) -> None:
            for weight in weights.unique():
                part = weights == weight
                share = weight * part.sum() / len(y)
                terms.append(share * loss(output[part], y[rows][part]))

        if is_clean.any():
            with at_robustness(module, 0.0), on_path(module, 0.0):
                add(module(x[is_clean]), is_clean, 1 - shares[is_clean])
        if not is_clean.all():
            rows, own = ~is_clean, shares[~is_clean]
            with at_robustnesses(module, own):
                add(module(x[rows]), rows, 1 - own)
                with frozen_model(module):
                    near = self.attack.perturb(module, x[rows], y[rows], generator)
                add(module(near), rows, own)
        return torch.stack(terms).sum()

    def _draw_shares(self, count: int, generator: torch.Generator) -> Tensor:
        """A λ for each example; none is alone in its half, where it could not be normalized."""
        size = (count,)
        drawn = torch.randint(len(self.shares), size, generator=generator, device=generator.device)
        shares = torch.tensor(self.shares, device=generator.device)[drawn]
        for alone in (shares == 0, shares > 0):
            if count > 1 and alone.sum() == 1:
                return torch.where(alone, shares[~alone][0], shares)
        return shares


def bind_examples(objective: Objective, examples: ClientData) -> Objective:
    """The objective whose attack sees the pixels of these examples, however they are scaled."""
    if not isinstance(objective, (Adversarial, OnceForAll)):
        return objective
    return replace(objective, attack=objective.attack.for_examples(examples))


def _check_share(share: float) -> None:
    if not 0 <= share <= 1:
        raise ConfigError(
            f"the share of the adversarial loss must be in [0, 1], got {share}; 0 trains on clean "
            "examples only, 1 on attacked ones only"
        )
