"""Events as JSON records, and back: who took part in a round, with which subnets, and all metrics.

A record of a round has one column for each fact about its clients, in the order of their tasks.
Each subnet is there once, packed, and columns refer to it by its number.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from fedquilt.evaluation.clients import ClientRecord, ClientRecords
from fedquilt.federation.growing import ClientValues, GrowingColumn
from fedquilt.federation.validation import LOSS, MAX_LOSS
from fedquilt.runs.events import Evaluated, RoundDone
from fedquilt.structure.packing import pack_subnet, unpack_subnet
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.local_test import RIGHT, TESTED

DERIVED = ("local", "sent", "losses")  # that ``expand_record`` computes from columns
COLUMNS = "clients"
OPTIONAL = ("privacy", "secure")  # that most records do not have


def encode_event(event: RoundDone | Evaluated, structure: Structure) -> dict[str, Any]:
    """The record of an event, as JSON; without its time, which differs between equal runs."""
    if isinstance(event, Evaluated):
        record = asdict(replace(event, scores=()))
        record["scores"] = [score.to_json() for score in event.scores]
        if event.best_round is None:  # without selection
            del record["validation"], record["best_round"]
    else:
        derived: Any = {name: {} for name in DERIVED}
        record = asdict(replace(event, clients=(), scales=dict(event.scales), **derived))
        for name in DERIVED:
            del record[name]
        record[COLUMNS] = _encode_clients(ClientRecords.of(event.clients), structure)
        if not event.merging:  # as with the mean
            del record["merging"]
    del record["seconds"]
    return {name: value for name, value in record.items() if name not in OPTIONAL or value}


def expand_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with what follows from its columns: bytes, losses and local tests by client."""
    if not record.get(COLUMNS):
        return dict(record)
    columns = record[COLUMNS]
    failed = set(columns.get("failed", ()))
    valid = [client for row, client in enumerate(columns["id"]) if row not in failed]
    sizes = [size for row, size in enumerate(columns["bytes"]) if row not in failed]
    losses: ClientValues[float | None] = ClientValues()
    local: ClientValues[float] = ClientValues()
    for client, loss in zip(valid, _decode_metric(columns, LOSS), strict=True):
        if loss is not None:
            losses.add(client, _limit_loss(loss))
    tests = zip(_decode_metric(columns, RIGHT), _decode_metric(columns, TESTED), strict=True)
    for client, (right, tested) in zip(valid, tests, strict=True):
        if tested and right is not None:
            local.add(client, right / tested)
    sent = ClientValues(dict(zip(valid, sizes, strict=True)), kind="q")
    return {**record, "sent": sent, "losses": losses, "local": local}


def decode_clients(record: Mapping[str, Any], structure: Structure) -> Sequence[ClientRecord]:
    """What the clients of a round did; none in the record of an evaluation."""
    records = ClientRecords()
    if not record.get(COLUMNS):
        return records
    columns = record[COLUMNS]
    subnets = [unpack_subnet(base64.b64decode(text), structure) for text in columns["subnets"]]
    returned = columns.get("returned", columns["received"])

    def select(numbers: Sequence[int]) -> tuple[Subnet, ...]:
        return tuple(subnets[number] for number in numbers)

    for client, one, other, size, own in zip(
        columns["id"],
        columns["received"],
        returned,
        columns["bytes"],
        _decode_metrics(columns),
        strict=True,
    ):
        sent_back = () if own is None else select(other)
        records.append(ClientRecord(client, select(one), sent_back, size, own))
    return records


def _encode_clients(clients: ClientRecords, structure: Structure) -> dict[str, Any]:
    numbers: dict[str, int] = {}  # by packed form: one subnet may be written in several ways

    @cache
    def pack(subnet: Subnet) -> str:
        return base64.b64encode(pack_subnet(subnet, structure)).decode()

    def number(column: GrowingColumn[tuple[Subnet, ...]]) -> list[list[int]]:
        values = [
            [numbers.setdefault(pack(subnet), len(numbers)) for subnet in subnets]
            for subnets in column.values
        ]
        return [values[code] for code in column.codes]

    metrics = clients.metrics
    valid = [row for row, names in enumerate(metrics.names) if names is not None]
    columns: dict[str, Any] = {
        "id": clients.clients.tolist(),
        "received": number(clients.received),
        "bytes": clients.bytes_sent.tolist(),
    }
    returned = number(clients.returned)
    if any(columns["received"][row] != returned[row] for row in valid):
        columns["returned"] = returned
    if len(valid) < len(clients):
        columns["failed"] = [row for row, names in enumerate(metrics.names) if names is None]
    reported = [set(names) for names in metrics.names.values if names is not None]
    shared = set.intersection(*reported) if reported else set()
    columns["metrics"] = {
        name: [_encode_number(metrics.get(row, name)) for row in valid] for name in sorted(shared)
    }
    rest = {
        str(i): {
            n: _encode_number(v) for n, v in sorted((metrics[row] or {}).items()) if n not in shared
        }
        for i, row in enumerate(valid)
        if set(metrics.names[row] or ()) - shared
    }
    if rest:
        columns["other_metrics"] = rest
    columns["subnets"] = list(numbers)
    return columns


def _decode_metrics(columns: Mapping[str, Any]) -> Iterator[dict[str, float] | None]:
    """The metrics of each client; None where there was no valid answer."""
    failed = set(columns.get("failed", ()))
    others = columns.get("other_metrics", {})
    count = 0
    for row in range(len(columns["id"])):
        if row in failed:
            yield None
            continue
        own = {name: values[count] for name, values in columns["metrics"].items()}
        own |= others.get(str(count), {})
        yield {name: float(value) for name, value in own.items()}
        count += 1


def _decode_metric(columns: Mapping[str, Any], name: str) -> Iterator[float | None]:
    """One of the metrics of each client with a valid answer; None where it is not reported."""
    count = len(columns["id"]) - len(columns.get("failed", ()))
    shared, others = columns["metrics"].get(name), columns.get("other_metrics", {})
    for number in range(count):
        value = others.get(str(number), {}).get(name) if shared is None else shared[number]
        yield None if value is None else float(value)


def _encode_number(value: float) -> float | str:
    """Counts exactly, others with the digits that records need; as text if it is not finite.

    >>> [_encode_number(value) for value in (123456.0, 0.123456789, float("nan"))]
    [123456, 0.12346, 'nan']
    """
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.5g}")


def _limit_loss(loss: float) -> float | None:
    return loss if abs(loss) <= MAX_LOSS else None
