"""All changes of a round, on disk: for rules that have to see every update at once.

Updates come one at a time and are moved to temporary files without names, which the system removes
with the process, however that ends. When all have come, their holders divide the model into rings,
and the changes are written ring by ring. They are then read in chunks, so memory does not grow with
the number of updates.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedquilt.federation import flat_tensors
from fedquilt.federation.client import Update
from fedquilt.federation.rings import Rings, find_rings, list_averaged
from fedquilt.federation.state import Setup, State
from fedquilt.structure.cut import view_subnet_tensors
from fedquilt.structure.subnet import Subnet

CHUNK_BYTES = 2**23  # of changes that are in memory at the same time


def compute_changes(
    setup: Setup, state: State, update: Update, names: frozenset[str]
) -> tuple[dict[str, Tensor], ...]:
    """What an update changes of the server's values, tensor by tensor; constants change by zero.

    Args:
        setup: What stays the same during the run.
        state: The state that the client was sent.
        update: A decoded update, with values.
        names: The tensors to compare, such as ``list_averaged(setup)``.
    """
    changes = []
    for subnet, new in zip(update.subnets, update.params, strict=True):
        old = view_subnet_tensors(state.params, setup.structure, subnet)
        changes.append({n: _subtract(new[n], t) for n, t in old.items() if n in names})
    return tuple(changes)


def _subtract(new: Tensor, old: Tensor) -> Tensor:
    change = new.sub(old)
    return change if bool(change.isfinite().all()) else change.masked_fill(~old.isfinite(), 0)


def move_to_disk(update: Update) -> Update:
    """The same update, with tensors that are mapped from a temporary file.

    The file has no name, so that the system removes it with the last tensor, or the process.
    """
    handle, name = tempfile.mkstemp(prefix="fedquilt-update-")
    os.close(handle)
    try:
        slots = flat_tensors.write_flat(Path(name), flat_tensors.join_parts(update.params))
        tensors = flat_tensors.read_flat(Path(name), slots)
    finally:
        Path(name).unlink(missing_ok=True)
    return replace(update, params=flat_tensors.split_parts(tensors, len(update.params)))


class ChangeStore:
    """Collects the updates of a round on disk; ``arrange`` divides their changes into rings.

    Args:
        setup: What stays the same during the run.
        state: The state that the clients of this round were sent.
    """

    def __init__(self, setup: Setup, state: State) -> None:
        self._setup, self._state = setup, state
        kinds = [t.dtype for t in state.params.values() if t.is_floating_point()]
        self._dtype = torch.float64 if torch.float64 in kinds else torch.float32
        self._updates: list[Update] = []

    def add(self, update: Update) -> None:
        """Writes one update to disk; its tensors may be thrown away afterwards."""
        self._updates.append(move_to_disk(update))

    def arrange(self) -> RingTable:
        """Writes the changes ring by ring, in the order of the clients' numbers; once."""
        updates = sorted(self._updates, key=lambda update: update.client)
        self._updates.clear()
        clients = [update.client for update in updates]
        holdings = [update.subnets for update in updates]
        known = {name.partition("@")[0] for name in self._state.params}
        names = list_averaged(self._setup) & known
        rings = find_rings(self._setup.structure, holdings, names)
        file, offsets = tempfile.TemporaryFile(), []  # noqa: SIM115  # the table closes it
        while updates:
            update = updates.pop(0)  # which unmaps its file
            changes = compute_changes(self._setup, self._state, update, names)
            offsets.append(file.tell())
            for vector in rings.gather(update.subnets, changes).values():
                file.write(vector.to(self._dtype).numpy().tobytes())
        file.flush()
        return RingTable(file, rings, clients, holdings, offsets, self._dtype)


def _read_numbers(file: IO[bytes], offset: int, count: int, dtype: torch.dtype) -> Tensor:
    kind = np.float64 if dtype == torch.float64 else np.float32
    size = count * kind().itemsize
    if sys.platform == "win32":
        file.seek(offset)
        data = file.read(size)
    else:
        data = os.pread(file.fileno(), size, offset)
    return torch.from_numpy(np.frombuffer(data, kind).copy())


class RingTable:
    """The changes of a round by rings: a matrix for each ring, with a row for each update.

    Args:
        file: The changes of each update, ring by ring.
        rings: The rings of the updates.
        clients: The client of each update, in the order of their numbers.
        holdings: What each update holds.
        offsets: Where the rings of each update start in the file, in bytes.
        dtype: The type of the numbers in the file.
    """

    def __init__(
        self,
        file: IO[bytes],
        rings: Rings,
        clients: Sequence[int],
        holdings: Sequence[Sequence[Subnet]],
        offsets: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self.file, self.rings, self.dtype = file, rings, dtype
        self.clients = list(clients)
        self.offsets = np.array(offsets, np.int64)
        by_holding = np.zeros((len(rings.holdings), len(rings)), bool)
        for number, ring in enumerate(rings):
            by_holding[list(ring.holders), number] = True
        self.held = by_holding[
            [rings.find_holding(holding) for holding in holdings]
        ]  # (updates, rings)
        self.sizes = np.array([ring.num_cells for ring in rings], np.int64)

    def __enter__(self) -> RingTable:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def regions(self, *, join: bool) -> Iterator[Region]:
        """The rings that somebody holds, in their order.

        Args:
            join: Whether neighboring rings with equal numbers of updates come as one region, for
                rules that look at each cell by itself.
        """
        counts = self.held.sum(0)
        start, positions = 0, self.offsets.copy()
        while start < len(counts):
            stop = start + 1
            while join and stop < len(counts) and counts[stop] == counts[start]:
                stop += 1
            region = Region(self, range(start, stop), int(counts[start]), positions.copy())
            if region.num_updates:
                yield region
            cells = self.held[:, start:stop] @ self.sizes[start:stop]
            positions += cells * self.dtype.itemsize
            start = stop

    def region(self, ring: int) -> Region:
        """One ring."""
        before = self.held[:, :ring] @ self.sizes[:ring]
        positions = self.offsets + before * self.dtype.itemsize
        return Region(self, range(ring, ring + 1), int(self.held[:, ring].sum()), positions)


@dataclass(frozen=True, eq=False)
class Region:
    """Some rings with equal numbers of updates, as a matrix that is read in chunks of columns.

    Args:
        table: What it is a part of.
        rings: The numbers of its rings.
        num_updates: The number of updates that hold each of its cells: the rows of the matrix.
        positions: Where the region starts in the file for each update, in bytes.
    """

    table: RingTable
    rings: range
    num_updates: int
    positions: NDArray[np.int64]

    @property
    def num_cells(self) -> int:
        """The columns of the matrix."""
        return int(self.table.sizes[self.rings.start : self.rings.stop].sum())

    @property
    def rows(self) -> list[int]:
        """Of a single ring: the positions of its updates among all."""
        assert len(self.rings) == 1
        return [int(row) for row in self.table.held[:, self.rings.start].nonzero()[0]]

    def chunks(self) -> Iterator[Tensor]:
        """The matrix, some columns at a time."""
        width = max(1, CHUNK_BYTES // (self.table.dtype.itemsize * self.num_updates))
        read = self._read_single if len(self.rings) == 1 else self._read_several
        return read(width)

    def _read_single(self, width: int) -> Iterator[Tensor]:
        table, rows = self.table, self.rows
        for start in range(0, self.num_cells, width):
            count = min(width, self.num_cells - start)
            yield torch.stack([
                _read_numbers(
                    table.file,
                    int(self.positions[row]) + start * table.dtype.itemsize,
                    count,
                    table.dtype,
                )
                for row in rows
            ])  # fmt: skip

    def _read_several(self, width: int) -> Iterator[Tensor]:
        """A column's rows are its holders in their order; which they are differs by ring."""
        table, positions = self.table, self.positions.copy()
        ends = np.cumsum(table.sizes[self.rings.start : self.rings.stop])
        for start in range(0, self.num_cells, width):
            columns = np.arange(start, min(start + width, self.num_cells))
            ring = self.rings.start + np.searchsorted(ends, columns, side="right")
            held = torch.from_numpy(table.held[:, ring])
            rank = held.cumsum(0) - 1
            matrix = torch.empty(self.num_updates, len(columns), dtype=table.dtype)
            for row in range(len(table.clients)):
                (where,) = held[row].nonzero(as_tuple=True)
                numbers = _read_numbers(table.file, int(positions[row]), len(where), table.dtype)
                matrix[rank[row, where], where] = numbers
                positions[row] += len(where) * table.dtype.itemsize
            yield matrix

    def map_columns(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A number for each cell, from its column: ``function`` takes some columns at a time."""
        return torch.cat([function(chunk) for chunk in self.chunks()])

    def compute_products(self) -> Tensor:
        """The inner products of all rows, in double precision."""
        products = torch.zeros(self.num_updates, self.num_updates, dtype=torch.float64)
        for chunk in self.chunks():
            exact = chunk.double()
            products += exact @ exact.T
        return products

    def split(self, values: Tensor) -> dict[int, Tensor]:
        """A number for each cell, as a vector for each ring."""
        sizes = self.table.sizes[self.rings.start : self.rings.stop].tolist()
        return dict(zip(self.rings, values.split(sizes), strict=True))
