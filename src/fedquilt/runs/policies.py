"""How often a run saves and evaluates, and how many missing answers it tolerates."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedquilt.ranges import Count, NotNegative, Number, check_fields


@dataclass(frozen=True)
class Cadence:
    """How often a run evaluates and saves a checkpoint.

    Args:
        evaluate_every: Rounds between two evaluations; 0: only at the end.
        checkpoint_every: Rounds between two checkpoints; 0: only at the end.
        test_locally: Whether clients test their own models in every round, before they are merged.

    >>> import fedquilt as fq
    >>> fq.Cadence(evaluate_every=5)  # train(..., cadence=...)
    Cadence(evaluate_every=5, checkpoint_every=10, test_locally=False)
    """

    evaluate_every: Number = 0
    checkpoint_every: Number = 10
    test_locally: bool = False

    def __post_init__(self) -> None:
        """Checks types and ranges."""
        check_fields(self)


@dataclass(frozen=True)
class FaultPolicy:
    """How many missing answers a round tolerates.

    A round with fewer answers than the quorum is discarded and repeated. Closing phases follow the
    same rule.

    Args:
        quorum: The number of clients that have to answer; None: half of the clients of a round.
        attempts: How often a round is tried in all; then the run ends with an error.
        oversample: The fraction of clients that are asked beyond those needed. The round ends when
            enough have answered.
    """

    quorum: Count | None = None
    attempts: Count = 1
    oversample: NotNegative = 0.0

    def __post_init__(self) -> None:
        """Checks types and ranges."""
        check_fields(self)

    def required_replies(self, num_clients: int) -> int:
        """The number of answers below which a round of ``num_clients`` does not count.

        >>> [FaultPolicy().required_replies(count) for count in (1, 2, 3, 10)]
        [1, 1, 2, 5]
        >>> FaultPolicy(quorum=4).required_replies(3)
        3
        """
        half = math.ceil(num_clients / 2)
        return half if self.quorum is None else min(self.quorum, num_clients)
