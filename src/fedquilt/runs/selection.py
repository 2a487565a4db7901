"""Model selection: the best round by validation data, and when to stop waiting for a better one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fedquilt.errors import ConfigError
from fedquilt.evaluation.scores import SizeScore
from fedquilt.evaluation.summary import summarize
from fedquilt.federation.state import State
from fedquilt.learning.metric import MetricInfo
from fedquilt.methods.method import Method
from fedquilt.ranges import Count, NotNegative, Share, check_fields
from fedquilt.runs.policies import Cadence
from fedquilt.training.attack import PGD


@dataclass(frozen=True)
class Selection:
    """Which round's model a run keeps, and whether it stops early.

    Models are compared by their metric on the data that clients hold back for validation, at every
    evaluation between rounds and after the last one. Only the last phase of a method counts:
    phases before it train another model.

    Args:
        keep: ``last``: the model of the last round. ``best``: the best one on validation data.
        patience: Evaluations in a row without a better model, after which the run stops; None: it
            goes on to the last round.
        min_delta: By how much a model must be better to count as better.
        over: What is compared if there are several sizes: their ``mean``, the ``worst``, or the
            value of the ``largest`` size.
        robust: The weight λ of values under the method's attack: models are compared by
            (1 − λ) · value + λ · value under attack. A robustness dial is at 0 for the first and at
            1 for the second.

    >>> import fedquilt as fq
    >>> fq.Selection(keep="best", patience=3)  # train(..., selection=...)
    Selection(keep='best', patience=3, min_delta=0.0, over='mean', robust=0.0)
    """

    keep: Literal["last", "best"] = "last"
    patience: Count | None = None
    min_delta: NotNegative = 0.0
    over: Literal["mean", "worst", "largest"] = "mean"
    robust: Share = 0.0

    def __post_init__(self) -> None:
        """Checks types and ranges."""
        check_fields(self)

    @property
    def is_on(self) -> bool:
        """Whether models are compared at all."""
        return self.keep == "best" or self.patience is not None

    def find_attack(self, method: Method) -> PGD | None:
        """The attack under which models are compared, too; None: there is none.

        Raises:
            ConfigError: The method trains against no attack.
        """
        if not (self.is_on and self.robust):
            return None
        if method.attack is None:
            raise ConfigError(
                f"{type(method).__name__} trains against no attack, so models cannot be selected "
                f"by values under one, got robust={self.robust:g}; leave out selection.robust"
            )
        return method.attack

    def check(self, cadence: Cadence, validators: Sequence[int], *, is_private: bool) -> None:
        """Refuses a selection that a run cannot make.

        Args:
            cadence: How often the run evaluates.
            validators: The clients that have validation data.
            is_private: Whether the run is differentially private.
        """
        if not self.is_on:
            return
        if is_private:
            raise ConfigError(
                "the choice of a round tells of clients' validation data, and no part of the "
                "privacy budget pays for it; leave out selection, or privacy"
            )
        if not validators:
            raise ConfigError(
                "a model is selected by validation data, and no client has any; hold some back: "
                "validation=0.1 in make_clients, data.validation in settings"
            )
        if not cadence.evaluate_every:
            raise ConfigError(
                "a model is selected among those that are evaluated, and evaluate_every is 0; "
                "evaluate every few rounds"
            )


def compute_score(scores: Sequence[SizeScore], selection: Selection) -> float | None:
    """The number that models are compared by; None if it is not known.

    Values under attack are those of the last point of the dial.
    """
    field = "worst" if selection.over == "worst" else "mean"  # the largest size is scored alone
    summary = summarize(scores)
    if summary is None:
        return None
    value: float = getattr(summary, field)
    if selection.robust:
        attacked = [
            replace(score, value=None, user_value=score.robust_value, local_value=None)
            for score in scores
            if score.robustness == scores[-1].robustness
        ]
        under_attack = summarize(attacked)
        if under_attack is None:
            return None
        robust: float = getattr(under_attack, field)
        value = (1 - selection.robust) * value + selection.robust * robust
    return value if math.isfinite(value) else None


def is_better(value: float, than: float, min_delta: float, metric: MetricInfo) -> bool:
    """Whether a score is better than another by more than ``min_delta``.

    >>> is_better(0.8, 0.7, 0.05, MetricInfo("accuracy"))
    True
    >>> is_better(0.8, 0.7, 0.05, MetricInfo("mae", higher_is_better=False))
    False
    """
    margin = min_delta if metric.higher_is_better else -min_delta
    return metric.is_better(value, than=than + margin)


@dataclass(frozen=True, eq=False)
class BestRound:
    """The best model so far: the state after its round, clients' states, and its score."""

    state: State
    client_versions: Mapping[int, int]
    score: float


@dataclass(frozen=True, eq=False)
class SelectionProgress:
    """What is known of the models so far.

    ``num_worse`` counts evaluations since the best one, ``round`` is the last that was compared.
    """

    best: BestRound | None = None
    num_worse: int = 0
    round: int = 0

    @property
    def best_round(self) -> int:
        """The round of the best model; 0 if no model had a score."""
        return 0 if self.best is None else self.best.state.round

    def compare(
        self,
        selection: Selection,
        state: State,
        client_versions: Mapping[int, int],
        score: float | None,
        metric: MetricInfo,
    ) -> SelectionProgress:
        """What is known after another model; one without a score is not better."""
        is_best = score is not None and (
            self.best is None or is_better(score, self.best.score, selection.min_delta, metric)
        )
        if is_best:
            assert score is not None
            best = BestRound(state, dict(client_versions), score)
            return SelectionProgress(best, 0, state.round)
        return replace(self, num_worse=self.num_worse + 1, round=state.round)

    def is_stopped(self, selection: Selection) -> bool:
        """Whether the run has waited long enough for a better model."""
        return selection.patience is not None and self.num_worse >= selection.patience
