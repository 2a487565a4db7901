"""Budgets of clients, and the widest subnet within one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Real

from torch import nn

from fedquilt.errors import BudgetError
from fedquilt.structure.cost import Cost, compute_cost
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import Example


def count_multiples(width: float, base: float) -> int:
    """How many bases fit into a width: ⌊width / base⌋, where 2.9999999 counts as 3.

    >>> count_multiples(1.0, 0.125), count_multiples(0.3, 0.1), count_multiples(0.1, 0.25)
    (8, 3, 0)
    """
    return int(width / base + 1e-9)


@dataclass(frozen=True)
class Budget:
    """What a client can afford: a width, physical limits, or both.

    Args:
        width: The largest fraction of the channels, in (0, 1].
        params: The largest number of parameters; None: no limit.
        macs: The largest number of multiply-accumulate operations per example; None: no limit.
        memory: The largest peak of a training step, in bytes; None: no limit.
        upload: The most that is sent one way, in bytes; None: no limit.

    >>> import fedquilt as fq
    >>> fq.Budget(width=0.5, params=100_000).params
    100000
    """

    width: float = 1.0
    params: int | None = None
    macs: int | None = None
    memory: int | None = None
    upload: int | None = None

    def __post_init__(self) -> None:
        """Raises for limits that are not positive numbers."""
        if not (isinstance(self.width, Real) and 0 < self.width <= 1):
            raise BudgetError(
                f"widths are fractions in (0, 1], got {self.width!r}; "
                "write 1/8 as 0.125, and 1 for the whole"
            )
        for field in fields(self)[1:]:
            limit = getattr(self, field.name)
            if limit is not None and not (isinstance(limit, Real) and limit > 0):
                raise BudgetError(f"the limit on {field.name} is a number above 0, got {limit!r}")

    def __str__(self) -> str:
        """The limits that are set.

        >>> str(Budget(0.5, params=1000))
        'Budget(width=0.5, params=1000)'
        """
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        listed = ", ".join(f"{name}={limit}" for name, limit in given.items() if limit is not None)
        return f"Budget({listed})"

    @property
    def limits(self) -> tuple[float, ...]:
        """All limits in the order of the fields, infinite where there is none.

        >>> Budget(0.5).limits < Budget(1.0, params=1000).limits < Budget(1.0).limits
        True
        """
        given = (getattr(self, f.name) for f in fields(self))
        return tuple(math.inf if limit is None else float(limit) for limit in given)

    @property
    def is_width_alone(self) -> bool:
        """Whether there are no physical limits."""
        return all(getattr(self, f.name) is None for f in fields(self)[1:])

    def allows(self, price: Cost) -> bool:
        """Whether a cost is within every limit."""
        pairs = (
            (self.params, price.params),
            (self.macs, price.macs),
            (self.memory, price.memory),
            (self.upload, price.bytes),
        )
        return all(limit is None or spent <= limit for limit, spent in pairs)


def fit_budget(
    model: nn.Module,
    structure: Structure,
    budget: Budget,
    example: Example,
    *,
    batch_size: int = 10,
    optimizer_tensors: int = 1,
    shape: Callable[[Subnet], Subnet] = lambda subnet: subnet,
) -> tuple[float, Subnet]:
    """Finds the widest subnet within the budget.

    Costs grow with width, so bisection over the widths at which some group gains a channel
    finds it.

    Args:
        model: The whole model.
        structure: What can be cut in it.
        budget: The limits.
        example: An input of the model.
        batch_size: The size of the batches that the memory of a step is computed for.
        optimizer_tensors: What an optimizer keeps of each weight: 1 of momentum, 2 of Adam.
        shape: Turns a plain subnet into the one that would be sent.

    Returns:
        The width, and the subnet.

    >>> import torch, fedquilt as fq
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> structure = fq.trace_structure(model, torch.zeros(1, 4))
    >>> fq.fit_budget(model, structure, fq.Budget(params=40), torch.zeros(1, 4))
    (0.5, Subnet(0: first 4))
    """
    if budget.is_width_alone:
        return budget.width, shape(structure.subnet(budget.width))
    sizes = {structure.groups[name].size for name in structure.cut_groups()}
    steps = sorted({k / n for n in sizes for k in range(1, n + 1) if k / n <= budget.width})

    def price(width: float) -> Cost:
        return compute_cost(
            model,
            structure,
            shape(structure.subnet(width)),
            example,
            batch_size=batch_size,
            optimizer_tensors=optimizer_tensors,
        )

    low, high = -1, len(steps)  # steps[low] fits, steps[high] does not
    while high - low > 1:
        middle = (low + high) // 2
        if budget.allows(price(steps[middle])):
            low = middle
        else:
            high = middle
    if low < 0:
        smallest = price(steps[0]) if steps else price(budget.width)
        raise BudgetError(f"no subnet meets {budget}; the smallest possible costs {smallest}")
    return steps[low], shape(structure.subnet(steps[low]))
