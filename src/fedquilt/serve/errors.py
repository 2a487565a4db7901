"""Requests that cannot be answered."""

from __future__ import annotations

from fedquilt.errors import FedquiltError


class RequestError(FedquiltError):
    """A request that cannot be answered: the HTTP status, and a sentence for its sender.

    The sentence is written here, never taken from other errors: these may name paths of the server.
    """

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
