"""What a comparison tells its callbacks while it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedquilt.comparison.results import TrialResult
from fedquilt.comparison.trial import Trial


@dataclass(frozen=True)
class TrialsQueued:
    """A batch of runs starts: ``num_done`` of ``num_trials`` are there already."""

    purpose: str
    num_trials: int
    num_done: int


@dataclass(frozen=True)
class TrialProgress:
    """A run has done a round."""

    trial: Trial
    round: int
    total: int


@dataclass(frozen=True)
class TrialDone:
    """A run is finished."""

    trial: Trial
    result: TrialResult
    num_left: int


@dataclass(frozen=True)
class TrialFailed:
    """A run has failed; the others go on."""

    trial: Trial
    problem: str
    num_left: int


@dataclass(frozen=True)
class VariantLeftOut:
    """A variant is not compared, because it does not fit; ``reason`` is in its own words."""

    variant: str
    reason: str


ComparisonEvent = TrialsQueued | TrialProgress | TrialDone | TrialFailed | VariantLeftOut
ComparisonCallback = Callable[[ComparisonEvent], None]


def ignore_events(event: ComparisonEvent) -> None:
    """Does nothing."""
