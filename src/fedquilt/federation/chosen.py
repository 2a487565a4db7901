"""The subnets that clients have as their own, where very many clients have one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedquilt.federation.columns import BlockColumn, CodedColumn
from fedquilt.federation.registry import ClientRegistry
from fedquilt.structure.budget import Budget
from fedquilt.structure.subnet import Subnet


def encode_chosen(chosen: Mapping[int, Subnet]) -> dict[str, Any]:
    """The subnets of clients as a JSON object; where all have one, what they share is there once.

    ``ChosenSubnets.decode`` makes the subnets again.
    """
    if isinstance(chosen, ChosenSubnets):
        return chosen.encode()
    return {str(client): subnet.encode().decode() for client, subnet in chosen.items()}


class ChosenSubnets(Mapping[int, Subnet]):
    """A subnet for every registered client: that of its budget, unless it has another one.

    Args:
        registry: The clients.
        by_budget: The subnet of each budget.
        own: The subnets of clients that have others.

    >>> import fedquilt as fq
    >>> clients = ClientRegistry.of([fq.Client(0, 5), fq.Client(3, 5, budget=Budget(0.5))])
    >>> whole, half = Subnet(), Subnet((("hidden", 2),))
    >>> ChosenSubnets(clients, {Budget(): whole, Budget(0.5): half})[3].kept
    (('hidden', 2),)
    """

    def __init__(
        self,
        registry: ClientRegistry,
        by_budget: Mapping[Budget, Subnet],
        own: Mapping[int, Subnet] = {},
    ) -> None:
        self._registry, self._own = registry, own
        self._column: CodedColumn[Subnet] = registry.budgets.map(by_budget.__getitem__)

    def encode(self) -> dict[str, Any]:
        """As a JSON object: what clients share is there once, and where it changes."""
        own = {client: subnet for client, subnet in self._own.items() if client in self}
        return {
            "ids": None if isinstance(self._registry.ids, range) else [*self._registry.by_id],
            "count": len(self),
            "subnets": [subnet.encode().decode() for subnet in self._column.values],
            "blocks": self._list_blocks(),
            "own": {str(client): subnet.encode().decode() for client, subnet in own.items()},
        }

    def _list_blocks(self) -> list[tuple[int, int]]:
        """Where neighbours begin to have another subnet, and which."""
        column = self._column
        if isinstance(column, BlockColumn):
            pairs = zip(column.starts.tolist(), column.block_codes.tolist(), strict=False)
            return [*pairs]
        starts = [0, *(np.flatnonzero(np.diff(column.codes)) + 1).tolist()]
        return [(start, int(column.codes[start])) for start in starts[: len(column)]]

    @staticmethod
    def decode(document: Mapping[str, Any]) -> Mapping[int, Subnet]:
        """The subnets in a JSON object, of ``encode`` or one entry for each client."""
        if "blocks" not in document:
            return {int(c): Subnet.decode(text.encode()) for c, text in document.items()}
        subnets = [Subnet.decode(text.encode()) for text in document["subnets"]]
        ids, count = document["ids"], document["count"]
        starts = [*(start for start, _ in document["blocks"]), count]
        shared = BlockColumn(
            subnets,
            np.array([code for _, code in document["blocks"]], np.int64),
            np.array(starts, np.int64),
        )
        chosen = ChosenSubnets.__new__(ChosenSubnets)
        chosen._registry = ClientRegistry.of_numbers(range(count) if ids is None else ids)
        chosen._own = {int(c): Subnet.decode(t.encode()) for c, t in document["own"].items()}
        chosen._column = shared
        return chosen

    def __len__(self) -> int:
        return len(self._registry)

    def __iter__(self) -> Iterator[int]:
        return iter(self._registry.by_id)

    def __contains__(self, client: object) -> bool:
        return client in self._registry.by_id

    def __getitem__(self, client: int) -> Subnet:
        if client not in self:
            raise KeyError(client)
        return self._own.get(client) or self._column[self._registry.by_id.row(client)]
