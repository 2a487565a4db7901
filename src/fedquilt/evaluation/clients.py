"""Client by client: what each one trained and sent, and which part of the model each group saw.

All of it comes from the records of a run; nothing is planned or trained again.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from fedquilt.data import ClientData
from fedquilt.evaluation.accuracy import compute_ensemble_cost
from fedquilt.federation.client import EVERYONE
from fedquilt.federation.columns import Column
from fedquilt.federation.growing import GrowingColumn, MetricsColumn
from fedquilt.federation.state import Setup
from fedquilt.structure.cut import compute_shapes, global_name, index_cells, write_cells
from fedquilt.structure.subnet import Subnet
from fedquilt.training.sampling import label_divergence


@dataclass(frozen=True)
class ClientRecord:
    """The part of one client in one round: what it received, returned and reported.

    A client whose answer was not valid has returned and reported nothing.
    """

    client: int
    received: tuple[Subnet, ...]
    returned: tuple[Subnet, ...] = ()
    bytes_sent: int = 0
    metrics: Mapping[str, float] | None = None  # None: no valid answer

    @property
    def is_valid(self) -> bool:
        """Whether the client's answer was merged."""
        return self.metrics is not None

    @property
    def trained(self) -> tuple[Subnet, ...]:
        """The subnets that the client worked on; those it returned where it received codes."""
        return self.received or self.returned


class ClientRecords(Column[ClientRecord]):
    """What all clients of a round did, as columns that grow while the round runs.

    >>> import fedquilt as fq
    >>> records = ClientRecords()
    >>> records.append(ClientRecord(4, (fq.Subnet(),), (fq.Subnet(),), 100, {"loss": 0.5}))
    >>> records[0].bytes_sent, records[0].metrics
    (100, {'loss': 0.5})
    """

    def __init__(self, records: Iterable[ClientRecord] = ()) -> None:
        self.clients, self.bytes_sent = array("q"), array("q")
        self.received: GrowingColumn[tuple[Subnet, ...]] = GrowingColumn()
        self.returned: GrowingColumn[tuple[Subnet, ...]] = GrowingColumn()
        self.metrics = MetricsColumn()
        for record in records:
            self.append(record)

    @classmethod
    def of(cls, records: Sequence[ClientRecord]) -> ClientRecords:
        """The columns of some records, which may be columns already."""
        return records if isinstance(records, ClientRecords) else cls(records)

    def append(self, record: ClientRecord) -> None:
        """Adds a client."""
        self.clients.append(record.client)
        self.bytes_sent.append(record.bytes_sent)
        self.received.append(record.received)
        self.returned.append(record.returned)
        self.metrics.append(record.metrics)

    def add_bytes(self, client: int, size: int) -> None:
        """Counts bytes that a client has sent beside its update."""
        self.bytes_sent[self.clients.index(client)] += size

    def __len__(self) -> int:
        return len(self.clients)

    def _get(self, row: int) -> ClientRecord:
        return ClientRecord(
            self.clients[row],
            self.received[row],
            self.returned[row],
            self.bytes_sent[row],
            self.metrics[row],
        )


@dataclass(frozen=True)
class ClientScore:
    """What a client did in a run, and the metric of its model; means are over its rounds."""

    client: int
    group: str  # where its data come from; may be empty
    budget: float  # the width that it can afford
    rounds: int  # in which its answer was valid
    params_per_round: float  # sent up
    bytes_per_round: float  # sent up, as they travelled
    params_received: float  # in a round
    macs: float  # forward, of one example, over all it trains
    value: float | None  # the metric of the largest model on its own test data


def compute_client_scores(
    setup: Setup, records: Iterable[ClientRecord], values: Mapping[int, float] | None = None
) -> list[ClientScore]:
    """One score per client of the setup, from the records of all training rounds.

    ``values`` are those of the metric on each client's own test data, if known.
    """
    own: dict[int, list[ClientRecord]] = {client: [] for client in setup.registry.numbers}
    for record in records:
        if record.is_valid and record.client in own:  # else data were gathered on the server
            own[record.client].append(record)

    @cache
    def count_params(subnets: tuple[Subnet, ...]) -> int:
        return _count_params(setup, subnets)

    @cache
    def count_macs(subnets: tuple[Subnet, ...]) -> int:
        return compute_ensemble_cost(setup, subnets, memory=False).macs if subnets else 0

    scores = []
    for client in setup.clients:
        rounds = own[client.id]
        count = max(len(rounds), 1)
        scores.append(
            ClientScore(
                client.id,
                client.group,
                client.budget.width,
                len(rounds),
                sum(count_params(record.returned) for record in rounds) / count,
                sum(record.bytes_sent for record in rounds) / count,
                sum(count_params(record.received) for record in rounds) / count,
                sum(count_macs(record.trained) for record in rounds) / count,
                (values or {}).get(client.id),
            )
        )
    return scores


def _count_params(setup: Setup, subnets: Sequence[Subnet]) -> int:
    weights = dict(setup.model.named_parameters())
    shapes = [
        pair for subnet in subnets for pair in compute_shapes(setup.structure, subnet).items()
    ]
    return sum(math.prod(shape) for name, shape in shapes if name in weights)


def compute_label_divergences(setup: Setup, data: Mapping[int, ClientData]) -> dict[int, float]:
    """How far the labels of each client are from uniform, in [0, 1] (ADDS, Sec. 4.1.4)."""
    classes = setup.structure.groups.get(setup.structure.classes or "")
    count = 1 if classes is None else classes.size
    return {
        client: label_divergence(np.bincount(np.asarray(own.labels).reshape(-1), minlength=count))
        for client, own in data.items()
        if len(own) and setup.task.has_classes
    }


def compute_trained_fractions(setup: Setup, records: Iterable[ClientRecord]) -> dict[str, float]:
    """For each group of clients, the fraction of all parameters that some of them ever trained."""
    registry = setup.registry
    seen: dict[str, set[Subnet]] = {group: set() for group in registry.groups.counts}
    everything: set[Subnet] = set()
    for record in records:
        trained_by = []
        if record.client == EVERYONE:
            trained_by = list(seen)
        elif record.client in registry.by_id:
            trained_by = [registry.groups[registry.by_id.row(record.client)]]
        for group in trained_by if record.is_valid else ():
            seen[group].update(record.trained)
        everything.update(record.trained)
    total = _count_covered(setup, everything)
    return {
        group: _count_covered(setup, subnets) / max(total, 1) for group, subnets in seen.items()
    }


def _count_covered(setup: Setup, subnets: set[Subnet]) -> int:
    """How many parameters are part of at least one of the subnets."""
    weights = dict(setup.model.named_parameters())
    masks: dict[str, Tensor] = {}
    for subnet in subnets:
        for name, where in index_cells(setup.structure, subnet).items():
            if name in weights:
                target = global_name(name, setup.structure, subnet)
                blank = torch.zeros(weights[name].shape, dtype=torch.bool)
                write_cells(masks.setdefault(target, blank), where, True)
    return sum(int(mask.sum()) for mask in masks.values())
