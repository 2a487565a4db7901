"""The subnets that clients have as their own, where very many clients have one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fedquilt.federation.columns import CodedColumn
from fedquilt.federation.registry import ClientRegistry
from fedquilt.structure.budget import Budget
from fedquilt.structure.subnet import Subnet


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
