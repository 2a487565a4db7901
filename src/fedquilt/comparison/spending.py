"""What a run has spent by each round: bytes, client MACs, and seconds on simulated devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

from fedquilt.engines.client_work import describe_work
from fedquilt.engines.counting import MacCounts
from fedquilt.evaluation.clients import ClientRecord
from fedquilt.federation.client import EVERYONE, Client
from fedquilt.federation.state import Setup
from fedquilt.ranges import Positive, check_fields
from fedquilt.runs.accounting import count_subnet_bytes
from fedquilt.settings.compare import BYTES_PER_SECOND, MACS_PER_SECOND
from fedquilt.structure.budget import Budget, fit_budget
from fedquilt.structure.cost import compute_cost
from fedquilt.structure.subnet import Subnet


@dataclass(frozen=True)
class Device:
    """How fast the simulated devices are.

    A client's device computes as fast as its budget is large: it needs as long for an example of
    the largest subnet that it can afford as a device without limits needs for the whole model.

    Args:
        macs_per_second: MACs that a device without limits computes in a second.
        bytes_per_second: Bytes that a device sends or receives in a second.

    >>> Device(macs_per_second=2e9).bytes_per_second
    1000000.0
    """

    macs_per_second: Positive = MACS_PER_SECOND
    bytes_per_second: Positive = BYTES_PER_SECOND

    def __post_init__(self) -> None:
        """Checks types and ranges."""
        check_fields(self)


@dataclass(frozen=True)
class Spending:
    """What was spent: sums over clients, but for the seconds, which are those of the slowest.

    Args:
        bytes_down: Bytes that clients received.
        bytes_up: Bytes that clients sent.
        macs: MACs of clients' training.
        seconds: Simulated seconds; a round takes as long as its slowest client.
    """

    bytes_down: float = 0.0
    bytes_up: float = 0.0
    macs: float = 0.0
    seconds: float = 0.0

    @property
    def bytes(self) -> float:
        """Bytes both ways."""
        return self.bytes_down + self.bytes_up

    def __add__(self, other: Spending) -> Spending:
        """One after the other."""
        return Spending(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def beside(self, other: Spending) -> Spending:
        """Both at the same time: the slower one decides how long it takes."""
        total = self + other
        seconds = max(self.seconds, other.seconds)
        return Spending(total.bytes_down, total.bytes_up, total.macs, seconds)


class SpendingMeter:
    """Computes what clients spend, from records of what they received and sent.

    Args:
        setup: What the run is about, with the prepared model.
        user_setup: The same with the model that was given, which budgets are about.
        counts: The MACs of each kind of work.
        device: How fast the clients' devices are.
    """

    def __init__(self, setup: Setup, user_setup: Setup, counts: MacCounts, device: Device) -> None:
        self._setup, self._user_setup = setup, user_setup
        self._counts, self._device = counts, device
        self._count_bytes = cache(lambda subnet: count_subnet_bytes(setup, subnet))
        self._describe_work = cache(lambda subnets: describe_work(setup.structure, subnets))
        self._fraction = cache(self._compute_fraction)

    def measure_round(
        self, phase: str, records: Sequence[ClientRecord], bytes_down: int
    ) -> Spending:
        """What the clients of a round spend together; ``bytes_down`` is what all received."""
        total = Spending()
        for record in records:
            received = sum(self._count_bytes(subnet) for subnet in record.received)
            if not record.received:  # a code, of which all clients received the same
                received = bytes_down // len(records)
            total = total.beside(self._measure_client(phase, record, received))
        return replace(total, bytes_down=bytes_down)

    def _measure_client(self, phase: str, record: ClientRecord, received: int) -> Spending:
        client = self._find_client(record.client)
        per_example = self._counts.find(phase, self._describe_work(record.received)) or 0.0
        macs = per_example * client.num_examples
        speed = self._device.macs_per_second * self._fraction(client.budget)
        travelled = received + record.bytes_sent
        seconds = macs / speed + travelled / self._device.bytes_per_second
        return Spending(received, record.bytes_sent, macs, seconds)

    def _find_client(self, number: int) -> Client:
        clients = self._setup.clients_by_id
        if number == EVERYONE:  # a server with all data, as fast as a device without limits
            return Client(EVERYONE, self._setup.registry.total_examples)
        return clients[number]

    def _compute_fraction(self, budget: Budget) -> float:
        """The part of the model's MACs that a budget allows."""
        setup = self._user_setup
        _, subnet = fit_budget(setup.model, setup.structure, budget, setup.example)
        part, whole = (
            compute_cost(setup.model, setup.structure, s, setup.example, memory=False).macs
            for s in (subnet, Subnet())
        )
        return part / max(whole, 1)
