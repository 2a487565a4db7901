"""The settings of secure aggregation."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import Field

from fedquilt.errors import ConfigError
from fedquilt.federation.secure.quantization import Quantizer
from fedquilt.ranges import Count, Positive, check_fields


@dataclass(frozen=True)
class SecureAggregation:
    """How the server sums updates without seeing a single one.

    Args:
        threshold: Clients without whom nothing is opened: neither a client's masks, nor a part of
            the model that fewer of them have sent. The server and one client less learn no update.
        neighbors: Clients with whom each client shares masks, in each part of the model that it
            holds; None: all.
        clip: The largest change of a single weight in one round; larger changes are cut to it.
        rounding: How changes become integers: to the nearest one, or up or down by chance so that
            the mean is right.
        bits: The size of the integers that are summed, 32 or 64.

    >>> import fedquilt as fq
    >>> fq.SecureAggregation(threshold=5).bits
    32
    """

    threshold: Annotated[int, Field(ge=2)]
    neighbors: Count | None = None
    clip: Positive = 8.0
    rounding: Literal["nearest", "stochastic"] = "stochastic"
    bits: Literal[32, 64] = 32

    def __post_init__(self) -> None:
        """Refuses settings that are out of range or contradict each other."""
        check_fields(self)
        if self.neighbors is not None and self.neighbors < self.threshold:
            raise ConfigError(
                f"a client needs at least {self.threshold} neighbors, as many as the threshold, so "
                f"that its masks can be recovered, got neighbors = {self.neighbors}"
            )

    def make_quantizer(self, max_weight: float, num_clients: int) -> Quantizer:
        """What makes integers of the changes of a round."""
        return Quantizer(self.clip, max_weight, num_clients, self.rounding, self.bits)


def require_cryptography() -> None:
    """Raises a ConfigError if the package that the protocol needs is not installed."""
    if find_spec("cryptography") is None:
        raise ConfigError("secure aggregation needs an extra: pip install 'fedquilt[secure]'")
