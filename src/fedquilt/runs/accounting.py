"""The accounting of one round: which answers are valid, and what was sent and reported."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from fedquilt.errors import TrainingError
from fedquilt.evaluation.clients import ClientRecord, ClientRecords
from fedquilt.federation.aggregation import AggregationPipeline
from fedquilt.federation.client import Failure, Task, Update
from fedquilt.federation.growing import ClientValues
from fedquilt.federation.state import Setup, State
from fedquilt.federation.validation import EXAMPLES, LOSS, MAX_LOSS
from fedquilt.runs.events import Callback, ClientDone, SecureRound
from fedquilt.structure.cut import compute_shapes
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import named_tensors
from fedquilt.training.local_test import RIGHT, TESTED


class RoundAccounting:
    """Passes valid updates on, refuses others, and counts both."""

    def __init__(
        self,
        setup: Setup,
        state: State,
        callback: Callback,
        aggregation: AggregationPipeline,
        quorum: int,
    ) -> None:
        self._setup, self._state, self._callback = setup, state, callback
        self._aggregation, self.quorum = aggregation, quorum
        self.failures: list[Failure] = []
        self.num_accepted = 0
        self.bytes_down = self.bytes_up = 0
        self._loss = self._examples = 0.0
        self.local: ClientValues[float] = ClientValues()
        self.losses: ClientValues[float | None] = ClientValues()
        self.scales: ClientValues[float] = ClientValues()
        self.clients = ClientRecords()
        self.secure: SecureRound | None = None
        self._lost: str | None = None
        self.merging: dict[str, float] = {}  # numbers about the aggregation

    def filter_valid(
        self, tasks: Sequence[Task], results: Iterable[Update | Failure]
    ) -> Iterator[Update]:
        """Yields the valid updates as they come; at the end it is known what clients were sent."""
        for task, result in zip(tasks, results, strict=True):
            if not task.subnets:  # all tensors travel
                self.bytes_down += sum(tensor.nbytes for tensor in task.params.values())
            update = self._aggregation.accept(self._setup, self._state, task, result)
            if isinstance(update, Failure):
                self.failures.append(update)
                self.clients.append(ClientRecord(task.client, task.subnets))
                self._callback(ClientDone(update.client, update.reason))
                continue
            assert isinstance(result, Update)
            self.num_accepted += 1
            self._add_metrics(update)
            size = sum(t.nbytes for part in result.params for t in part.values())
            self.bytes_up += size
            self.clients.append(
                ClientRecord(task.client, task.subnets, update.subnets, size, update.metrics)
            )
            self._callback(ClientDone(update.client))
            yield update
        for subnets, count in self.clients.received.counts.items():
            self.bytes_down += count * sum(count_subnet_bytes(self._setup, s) for s in subnets)

    def _add_metrics(self, update: Update) -> None:
        """Adds what the client reports; a loss that is not finite is left out of the mean."""
        metrics = update.metrics
        if LOSS in metrics:
            is_number = abs(metrics[LOSS]) <= MAX_LOSS
            self.losses.add(update.client, _round_off(metrics[LOSS]) if is_number else None)
            if is_number:
                count = metrics.get(EXAMPLES, 1.0)  # a recipe of one's own may not count them
                self._loss += metrics[LOSS] * count
                self._examples += count
        statistics = [
            float(part[name].abs().max())
            for part in update.params
            for name in self._setup.structure.statistics & part.keys()
            if part[name].is_floating_point() and part[name].numel()
        ]
        if statistics:
            self.scales.add(update.client, _round_off(max(statistics)))
        if metrics.get(TESTED):
            self.local.add(update.client, metrics[RIGHT] / metrics[TESTED])

    def add_bytes(self, client: int, size: int) -> None:
        """Counts bytes that a client has sent beside its update."""
        self.bytes_up += size
        self.clients.add_bytes(client, size)

    def set_mean_loss(self, loss: float) -> None:
        """Takes the mean training loss, where single clients do not report theirs."""
        self._loss, self._examples = loss, 1.0

    def mark_lost(self, reason: str) -> None:
        """Says that the replies cannot be used, however many there are."""
        self._lost = reason

    @property
    def sent(self) -> ClientValues[int]:
        """The bytes that each client with a valid answer sent."""
        pairs = zip(self.clients.clients, self.clients.bytes_sent, strict=True)
        sent: ClientValues[int] = ClientValues(kind="q")
        for (client, size), names in zip(pairs, self.clients.metrics.names, strict=True):
            if names is not None:
                sent.add(client, size)
        return sent

    @property
    def has_enough(self) -> bool:
        """Whether there are as many valid answers as the quorum asks for."""
        return self.num_accepted >= self.quorum and self._lost is None

    def require_quorum(self, when: str) -> None:
        """Raises a TrainingError if there are fewer answers."""
        if self.num_accepted >= self.quorum and self._lost is not None:
            raise TrainingError(f"in {when} {self._lost}")
        if not self.has_enough:
            count = self.num_accepted
            who = f"{count} of {self.quorum} clients that are needed" if count else "no client"
            raise TrainingError(
                f"{who} gave a usable answer in {when}; {_describe_most_common(self.failures)}"
            )

    @property
    def loss(self) -> float | None:
        """Mean training loss over examples, if it is a number."""
        mean = self._loss / self._examples if self._examples else math.nan
        return mean if math.isfinite(mean) else None


def _round_off(value: float) -> float:
    """A number with the digits that records need."""
    return float(f"{value:.5g}")


def _describe_most_common(failures: Sequence[Failure]) -> str:
    """The first failure of the most common kind; failures of one kind differ only in numbers.

    >>> _describe_most_common([Failure(0, "tired"), Failure(1, "3 left"), Failure(2, "-0.5 left")])
    'client 1: 3 left (2 of 3 failed like this)'
    """
    kinds = [re.sub(r"-?\d[\d.]*", "#", failure.reason) for failure in failures]
    kind, count = Counter(kinds).most_common(1)[0]
    share = f" ({count} of {len(failures)} failed like this)" if len(failures) > 1 else ""
    return f"{failures[kinds.index(kind)]}{share}"


def count_subnet_bytes(setup: Setup, subnet: Subnet) -> int:
    """Bytes of a subnet's tensors, as they are sent."""
    item = {n: t.element_size() for n, t in named_tensors(setup.model).items()}
    return sum(
        math.prod(shape) * item[n] for n, shape in compute_shapes(setup.structure, subnet).items()
    )
