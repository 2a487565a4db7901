"""What a user asks of differential privacy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from fedquilt.errors import ConfigError
from fedquilt.federation.state import Sampling
from fedquilt.ranges import Count, NotNegative, Positive, check_fields, check_value

Delta = Annotated[float, Field(gt=0, lt=1)]
Mechanism = Literal["central", "local"]
Clipping = Literal["flat", "rings", "adaptive"]


@dataclass(frozen=True)
class Privacy:
    """Differential privacy of a run: whom it protects, how much, and how.

    ``central``: the server adds noise to the sum of the clients' changes, and what is protected is
    whether a client took part, with all of its data. ``local``: every client adds the noise itself,
    so that the server need not be trusted.

    Give ``epsilon``, and the noise is found for the rounds of the run; or ``noise_multiplier``, and
    ε is what comes of it; or both, and the run stops before ε is exceeded.

    Args:
        epsilon: The privacy budget ε of the whole run; None: as the noise gives.
        delta: δ of the guarantee; None: 1 / N^1.1 for N registered clients.
        noise_multiplier: σ: the noise's standard deviation over the clipping norm; None: found.
        clip: C: the largest norm of a client's change.
        mechanism: central or local.
        clipping: flat: one norm for all; rings: one per ring of cells, so that small clients spend
            less; adaptive: a norm that follows a quantile of the clients'.
        quantile: With adaptive clipping, the fraction of clients whose change is not clipped.
        clip_lr: With adaptive clipping, how fast the norm moves.
        max_examples: Clients with fewer training examples count less, in proportion; None: all
            count the same.
        accountant: pld or rdp; None: pld, and rdp for cohorts of a fixed size.

    >>> import fedquilt as fq
    >>> fq.Privacy(epsilon=4.0, clip=0.5).mechanism
    'central'
    """

    epsilon: Positive | None = None
    delta: Delta | None = None
    noise_multiplier: NotNegative | None = None
    clip: Positive = 1.0
    mechanism: Mechanism = "central"
    clipping: Clipping = "flat"
    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5
    clip_lr: Positive = 0.2
    max_examples: Count | None = None
    accountant: Literal["pld", "rdp"] | None = None

    def __post_init__(self) -> None:
        """Refuses settings that are out of range, or that do not go together."""
        check_fields(self)
        if self.mechanism != "central" and self.clipping != "flat":
            raise ConfigError(
                f"clipping '{self.clipping}' is for the central mechanism, got "
                f"'{self.mechanism}'; leave out privacy.clipping"
            )

    @property
    def is_on(self) -> bool:
        """Whether there is any: a budget or a noise was given.

        >>> Privacy().is_on, Privacy(epsilon=1.0).is_on
        (False, True)
        """
        return self.epsilon is not None or self.noise_multiplier is not None

    def choose_delta(self, num_clients: int) -> float:
        """δ: as given, or below one over the number of clients.

        >>> round(Privacy(epsilon=1.0).choose_delta(1000), 6)
        0.000501
        """
        return self.delta or max(num_clients, 2) ** -1.1


def choose_sampling(sampling: Sampling | None, privacy: Privacy | None) -> Sampling:
    """How cohorts are drawn: as asked for; else as is best accounted for, if there is privacy.

    >>> choose_sampling(None, Privacy(epsilon=1.0)), choose_sampling(None, None)
    ('poisson', 'fixed')
    """
    if sampling is None:
        return "poisson" if privacy is not None and privacy.is_on else "fixed"
    check_value("sampling", sampling, Sampling)
    return sampling
