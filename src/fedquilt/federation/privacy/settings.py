"""What a user asks of differential privacy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from fedquilt.errors import ConfigError
from fedquilt.federation.client import Client
from fedquilt.federation.state import Sampling
from fedquilt.ranges import Count, NotNegative, Positive, check_fields, check_value

Delta = Annotated[float, Field(gt=0, lt=1)]
Mechanism = Literal["central", "local", "dp-sgd"]
Clipping = Literal["flat", "rings", "adaptive"]


@dataclass(frozen=True)
class Privacy:
    """Differential privacy of a run: whom it protects, how much, and how.

    ``central``: the server adds noise to the sum of the clients' changes, and what is protected is
    whether a client took part, with all of its data. ``local``: every client adds the noise itself,
    so that the server need not be trusted. ``dp-sgd``: every client trains with noise in each step,
    and what is protected is a single example of a client.

    Give ``epsilon``, and the noise is found for the rounds of the run; or ``noise_multiplier``, and
    ε is what comes of it; or both, and the run stops before ε is exceeded.

    Args:
        epsilon: The privacy budget ε of the whole run; None: as the noise gives.
        delta: δ of the guarantee; None: 1 / N^1.1 for N registered clients.
        noise_multiplier: σ: the noise's standard deviation over the clipping norm; None: found.
        clip: C: the largest norm of a client's change; with dp-sgd, of an example's gradient.
        mechanism: central, local or dp-sgd.
        clipping: flat: one norm for all; rings: one per ring of cells, so that small clients spend
            less; adaptive: a norm that follows a quantile of the clients'.
        quantile: With adaptive clipping, the fraction of clients whose change is not clipped.
        clip_lr: With adaptive clipping, how fast the norm moves.
        max_examples: Clients with fewer training examples count less, in proportion; None: all
            count the same.
        min_examples: With dp-sgd, the number of training examples that every client has at least.
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
    min_examples: Count | None = None
    accountant: Literal["pld", "rdp"] | None = None

    def __post_init__(self) -> None:
        """Refuses settings that are out of range, or that do not go together."""
        check_fields(self)
        if self.mechanism != "central" and self.clipping != "flat":
            raise ConfigError(
                f"clipping '{self.clipping}' is for the central mechanism, got "
                f"'{self.mechanism}'; leave out privacy.clipping"
            )
        if self.is_by_example != (self.min_examples is not None):
            raise ConfigError(
                "ε of dp-sgd depends on the least number of examples that a client has; give "
                "privacy.min_examples with it, and with nothing else"
            )
        if self.is_by_example and self.max_examples is not None:
            raise ConfigError(
                "max_examples bounds what a client counts for, and dp-sgd protects examples, not "
                "clients; leave out privacy.max_examples"
            )

    @property
    def is_by_example(self) -> bool:
        """Whether single examples are protected, not whole clients."""
        return self.mechanism == "dp-sgd"

    @property
    def is_central(self) -> bool:
        """Whether the server adds the noise."""
        return self.mechanism == "central"

    @property
    def is_on(self) -> bool:
        """Whether there is any: a budget or a noise was given.

        >>> Privacy().is_on, Privacy(epsilon=1.0).is_on
        (False, True)
        """
        return self.epsilon is not None or self.noise_multiplier is not None

    def choose_delta(self, num_clients: int) -> float:
        """δ: as given, or below one over the number of clients, or of examples.

        >>> round(Privacy(epsilon=1.0).choose_delta(1000), 6)
        0.000501
        """
        protected = num_clients * (self.min_examples or 1)
        return self.delta or max(protected, 2) ** -1.1


def choose_sampling(sampling: Sampling | None, privacy: Privacy | None) -> Sampling:
    """How cohorts are drawn: as asked for; else as is best accounted for, if there is privacy.

    >>> choose_sampling(None, Privacy(epsilon=1.0)), choose_sampling(None, None)
    ('poisson', 'fixed')
    """
    if sampling is None:
        return "poisson" if privacy is not None and privacy.is_on else "fixed"
    check_value("sampling", sampling, Sampling)
    return sampling


def hide_data(client: Client) -> Client:
    """A client as a private run knows it: without labels, number of examples, group and tests.

    >>> hide_data(Client(3, num_examples=120, labels=(0, 8))).labels
    ()
    """
    return Client(client.id, 1, budget=client.budget)
