"""Events as JSON records, and back: who took part in a round, with which subnets, and all metrics.

A record of a round has one column for each fact about its clients, in the order of their tasks.
Each subnet is there once, packed, and columns refer to it by its number.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from fedquilt.evaluation.clients import ClientRecord
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
        record = asdict(replace(event, clients=()))
        for name in DERIVED:
            del record[name]
        record[COLUMNS] = _encode_clients(event.clients, structure)
        if not event.merging:  # as with the mean
            del record["merging"]
    del record["seconds"]
    return {name: value for name, value in record.items() if name not in OPTIONAL or value}


def expand_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with what follows from its columns: bytes, losses and local tests by client."""
    if not record.get(COLUMNS):
        return dict(record)
    columns = record[COLUMNS]
    metrics = _decode_metrics(columns)
    valid = [client for client, own in zip(columns["id"], metrics, strict=True) if own is not None]
    known = {client: own for client, own in zip(columns["id"], metrics, strict=True) if own}
    sent = dict.fromkeys(valid, 0)
    for client, size in zip(columns["id"], columns["bytes"], strict=True):
        if client in sent:
            sent[client] += size
    return {
        **record,
        "sent": sent,
        "losses": {c: _limit_loss(own[LOSS]) for c, own in known.items() if LOSS in own},
        "local": {c: own[RIGHT] / own[TESTED] for c, own in known.items() if own.get(TESTED)},
    }


def decode_clients(record: Mapping[str, Any], structure: Structure) -> tuple[ClientRecord, ...]:
    """What the clients of a round did; none in the record of an evaluation."""
    if not record.get(COLUMNS):
        return ()
    columns = record[COLUMNS]
    subnets = [unpack_subnet(base64.b64decode(text), structure) for text in columns["subnets"]]
    returned = columns.get("returned", columns["received"])

    def select(numbers: Sequence[int]) -> tuple[Subnet, ...]:
        return tuple(subnets[number] for number in numbers)

    return tuple(
        ClientRecord(client, select(one), select(other if own is not None else ()), size, own)
        for client, one, other, size, own in zip(
            columns["id"],
            columns["received"],
            returned,
            columns["bytes"],
            _decode_metrics(columns),
            strict=True,
        )
    )


def _encode_clients(clients: Sequence[ClientRecord], structure: Structure) -> dict[str, Any]:
    numbers: dict[str, int] = {}  # by packed form: one subnet may be written in several ways

    @cache
    def pack(subnet: Subnet) -> str:
        return base64.b64encode(pack_subnet(subnet, structure)).decode()

    def number(subnets: Sequence[Subnet]) -> list[int]:
        return [numbers.setdefault(pack(subnet), len(numbers)) for subnet in subnets]

    valid = [client for client in clients if client.metrics is not None]
    columns: dict[str, Any] = {
        "id": [client.client for client in clients],
        "received": [number(client.received) for client in clients],
        "bytes": [client.bytes_sent for client in clients],
    }
    returned = [number(client.returned) for client in clients]
    pairs = zip(clients, columns["received"], returned, strict=True)
    if any(client.is_valid and one != other for client, one, other in pairs):
        columns["returned"] = returned
    if len(valid) < len(clients):
        columns["failed"] = [i for i, c in enumerate(clients) if c.metrics is None]
    reported = [client.metrics or {} for client in valid]
    shared = set.intersection(*map(set, reported)) if reported else set()
    columns["metrics"] = {
        name: [_encode_number(metrics[name]) for metrics in reported] for name in sorted(shared)
    }
    rest = {
        str(i): {n: _encode_number(v) for n, v in sorted(metrics.items()) if n not in shared}
        for i, metrics in enumerate(reported)
        if metrics.keys() - shared
    }
    if rest:
        columns["other_metrics"] = rest
    columns["subnets"] = list(numbers)
    return columns


def _decode_metrics(columns: Mapping[str, Any]) -> list[dict[str, float] | None]:
    """The metrics of each client; None where there was no valid answer."""
    failed = set(columns.get("failed", ()))
    others = columns.get("other_metrics", {})
    metrics: list[dict[str, float] | None] = []
    count = 0
    for position in range(len(columns["id"])):
        if position in failed:
            metrics.append(None)
            continue
        own = {name: values[count] for name, values in columns["metrics"].items()}
        own |= others.get(str(count), {})
        metrics.append({name: float(value) for name, value in own.items()})
        count += 1
    return metrics


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
