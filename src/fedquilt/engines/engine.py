"""What every engine offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from fedquilt.federation.client import Failure, Task, Update

Tell = Callable[[int, float], None]  # a client, and the share of its work that is done


def nobody(client: int, done: float) -> None:
    """Hears how far a client is, and does nothing."""


class Engine(Protocol):
    """Takes tasks, yields what came of each, in the order of the tasks and lazily.

    Order is part of the contract, because sums of floating-point numbers depend on it. What clients
    keep between rounds is known by a version for each client; the files behind it are the engine's.

    Whoever wants to know how far clients are, while they work, sets ``tell``. It is called from
    within ``run``, a few times a second at most for each client at work, and never after the
    client's result came out. Shares rise, unless the work was lost and is done again. An engine
    need not call it.
    """

    tell: Tell

    def run(
        self, tasks: Sequence[Task], *, enough: int | None = None
    ) -> Iterator[Update | Failure]:
        """Does the tasks; once there are ``enough`` updates it need not wait for others."""
        ...

    def kept(self) -> Mapping[int, int]:
        """The version of what each client keeps."""
        ...

    def restore(self, kept: Mapping[int, int]) -> None:
        """Goes back to these versions; a DamageError says which of them is not what it was."""
        ...

    def forget_others(self, *used: Mapping[int, int]) -> None:
        """Removes what clients kept in versions that none of these uses."""
        ...

    def close(self) -> None:
        """Ends all workers."""
        ...
