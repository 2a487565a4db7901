"""How often each part of the model was trained: a part are the cells that the same clients hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fedquilt.errors import FedquiltError
from fedquilt.evaluation.clients import ClientRecord
from fedquilt.federation.rings import find_rings
from fedquilt.structure.structure import Structure

NEGLIGIBLE = 1e-4  # of all cells: counters of normalization layers, which are not trained
MAX_HOLDINGS = 64  # different sets of subnets that parts are told apart by


@dataclass(frozen=True)
class PartCoverage:
    """A part of the model, and how often clients have trained it."""

    share: float  # of all cells
    trained: float  # times per round, in the mean
    times: int


@dataclass(frozen=True)
class Coverage:
    """All parts of a model, the most trained first, over the last rounds of a run."""

    parts: tuple[PartCoverage, ...]
    rounds: int  # that were counted


def compute_coverage(
    structure: Structure, rounds: Sequence[Sequence[ClientRecord]]
) -> Coverage | None:
    """How often each part was trained in the last rounds; None if nothing was.

    Methods that draw subnets anew in every round have very many parts. Then only the last rounds
    count, as many as have no more than ``MAX_HOLDINGS`` different subnets.
    """
    held: Counter[tuple[object, ...]] = Counter()
    counted = 0
    for clients in reversed(rounds):
        own = Counter(client.returned for client in clients if client.is_valid and client.returned)
        if held and len({*held, *own}) > MAX_HOLDINGS:
            break
        held.update(own)
        counted += 1
    if not held:
        return None
    try:
        weights = structure.shapes.keys() - structure.statistics
        rings = find_rings(structure, list(held), weights)  # type: ignore[arg-type]
    except FedquiltError:  # clients that hold a cell twice
        return None
    total = sum(ring.num_cells for ring in rings) or 1
    times = rings.count_holders(held)  # type: ignore[arg-type]
    parts = [
        PartCoverage(ring.num_cells / total, count / counted, int(count))
        for ring, count in zip(rings, times, strict=True)
        if ring.num_cells > (0 if count else NEGLIGIBLE * total)
    ]
    return Coverage(tuple(sorted(parts, key=lambda part: -part.times)), counted)
