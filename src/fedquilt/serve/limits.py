"""What one request may take from a server."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fedquilt.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """Limits that keep one user from harming others.

    Args:
        body_bytes: The size of a request.
        seconds: How long a request may take to arrive, and how long its answer may take.
        examples: The number of examples in a request.
        waiting: The number of examples that wait for the model; more are turned away.
        batch: The number of examples that the model answers at once.
        window: How long a batch waits for requests that are being read, in seconds.
        pixels: The number of pixels of an image, whatever the size of its file.

    >>> Limits(body_bytes=1_000_000).examples
    256
    """

    body_bytes: int = 8 * 2**20
    seconds: float = 10.0
    examples: int = 256
    waiting: int = 2048
    batch: int = 64
    window: float = 0.002
    pixels: int = 2**24

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (value >= 0 if field.name == "window" else value > 0):
                raise ConfigError(f"the limit '{field.name}' is a number above 0, got {value!r}")
