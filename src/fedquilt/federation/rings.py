"""Rings: the cells of the global model, divided by who holds them.

A *holding* is what one client, or all clients of a tier, hold: one subnet or several. Two cells are
in the same ring if they have the same holders. With nested widths, a ring is what lies between one
width and the next. Every cell is in one ring, also those that nobody holds.

All clients of a ring have the same cells of it, so whatever needs vectors of one length works ring
by ring: a median, a secure sum, a noise with a public denominator. The cells of a ring have one
order, which is the same for all its holders and for the server.

>>> import torch, fedquilt as fq
>>> from fedquilt.federation.rings import find_rings
>>> model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Linear(4, 1))
>>> structure = fq.trace_structure(model, torch.ones(1, 1))
>>> wide, narrow = (structure.subnet(1.0),), (structure.subnet(0.5),)
>>> rings = find_rings(structure, [wide, narrow, wide])  # three clients, two holdings
>>> [(ring.holders, ring.num_cells) for ring in rings]
[((0, 1), 7), ((0,), 6)]
>>> rings.count_holders({wide: 2, narrow: 1})  # clients that hold each ring
(3, 2)
>>> params = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
>>> tensors = (fq.copy_subnet_tensors(params, structure, narrow[0]),)
>>> vectors = rings.gather(narrow, tensors)  # by the number of the ring
>>> {ring: len(vector) for ring, vector in vectors.items()}
{0: 7}
>>> doubled = {ring: 2 * vector for ring, vector in vectors.items()}
>>> rings.scatter(narrow, doubled, tensors)[0]["0.bias"]
tensor([2., 2.])
>>> rings.scatter_global(doubled, params)["0.bias"]
tensor([2., 2., 1., 1.])
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedquilt.errors import StructureError
from fedquilt.federation.ring_layout import RingLayout, Vectors, lay_out
from fedquilt.federation.state import Setup
from fedquilt.structure.cut import (
    Index,
    Params,
    global_name,
    index_cells,
    view_cells,
)
from fedquilt.structure.structure import Structure, cache_per_structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import named_tensors

Holding = tuple[Subnet, ...]  # what one client holds; every cell at most once
Words = NDArray[np.uint64]  # sets of parts as bits; the last axis is of words of 64
BITS = 64
MAX_LAYOUTS = 16  # that are kept; each is as large as its holding


@dataclass(frozen=True)
class Ring:
    """The cells that the same holders have.

    Args:
        holders: The numbers of the holdings that have them, ascending.
        num_cells: How many cells there are.
    """

    holders: tuple[int, ...]
    num_cells: int


class Rings:
    """The rings of some holdings; made by ``find_rings``.

    A ring's number is its position: first the ring of most holders. Rings with the same number of
    holders are in the order of their holders.

    Args:
        structure: What the subnets are cut from.
        holdings: What is held, each once; a ring's ``holders`` are positions in it.
        names: The tensors that the rings divide, by their names without an owner.
    """

    def __init__(
        self, structure: Structure, holdings: Sequence[Holding], names: frozenset[str]
    ) -> None:
        self.holdings = tuple(holdings)
        self._numbers = {holding: number for number, holding in enumerate(self.holdings)}
        self._shapes: dict[str, tuple[int, ...]] = {}  # of the global tensors, in their order
        self._cells = [_index_holding(structure, holding, names) for holding in self.holdings]
        self._places = [_list_places(structure, holding, names) for holding in self.holdings]
        for name in (name for name in structure.shapes if name in names):
            owned = {g for cells in self._cells for g in cells if g.partition("@")[0] == name}
            for target in sorted({name} | owned):
                self._shapes[target] = structure.shapes[name]
        self._layouts: dict[int, RingLayout] = {}
        self._labels, self._rings = self._divide()

    def __len__(self) -> int:
        """How many rings there are."""
        return len(self._rings)

    def __getitem__(self, number: int) -> Ring:
        """A ring by its number."""
        return self._rings[number]

    def __iter__(self) -> Iterator[Ring]:
        """The rings in their order."""
        return iter(self._rings)

    @property
    def names(self) -> tuple[str, ...]:
        """The global names of the tensors that are divided, ``name@owner`` if private."""
        return tuple(self._shapes)

    @cached_property
    def common(self) -> int | None:
        """The number of the ring that every holding has; None if there is no such cell."""
        everyone = tuple(range(len(self.holdings)))
        numbers = [n for n, ring in enumerate(self) if ring.holders == everyone and everyone]
        return numbers[0] if numbers else None

    def find_holding(self, subnets: Sequence[Subnet]) -> int:
        """The number of a holding.

        Raises:
            StructureError: The rings were made without it.
        """
        number = self._numbers.get(tuple(subnets))
        if number is None:
            raise StructureError(
                f"rings know the holdings that they were made of; {tuple(subnets)} is another"
            )
        return number

    def label_cells(self, name: str) -> Tensor:
        """The number of the ring of every cell of a global tensor, as int32; read only."""
        return self._labels[name]

    def label_subnets(self, holding: Sequence[Subnet]) -> tuple[dict[str, Tensor], ...]:
        """The number of the ring of every cell of the holding's tensors, one dict per subnet.

        ``label == ring`` is the mask of a ring in a subnet's tensor.
        """
        number = self.find_holding(holding)
        labels: tuple[dict[str, Tensor], ...] = tuple({} for _ in self.holdings[number])
        for part, name, target in self._places[number]:
            labels[part][name] = view_cells(self._labels[target], self._cells[number][target])
        return labels

    def layout(self, holding: Sequence[Subnet]) -> RingLayout:
        """Where the rings of a holding lie among its tensors; the last few are kept."""
        number = self.find_holding(holding)
        layout = self._layouts.pop(number, None)
        if layout is None:
            rank = {target: i for i, target in enumerate(self._shapes)}
            places = sorted(self._places[number], key=lambda place: rank[place[2]])
            cells = self._cells[number]
            labels = [view_cells(self._labels[t], cells[t]).reshape(-1) for _, _, t in places]
            layout = lay_out(tuple(places), labels)
        if len(self._layouts) >= MAX_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        self._layouts[number] = layout
        return layout

    @cached_property
    def global_layout(self) -> RingLayout:
        """Where all rings lie among the global tensors; each is named as itself."""
        places = tuple((0, target, target) for target in self._shapes)
        return lay_out(places, [self._labels[target].reshape(-1) for target in self._shapes])

    def gather(self, holding: Sequence[Subnet], tensors: Sequence[Params]) -> dict[int, Tensor]:
        """Flattens a holding's tensors to one vector per ring, by the number of the ring.

        The vectors of a ring have the same cells in the same order for all holders. Tensors of
        different types are promoted to one.

        Args:
            holding: The subnets; one of ``holdings``.
            tensors: The tensors of each subnet.
        """
        return self.layout(holding).gather(tensors)

    def scatter(
        self, holding: Sequence[Subnet], vectors: Vectors, like: Sequence[Params]
    ) -> tuple[dict[str, Tensor], ...]:
        """Puts vectors back in the form of a holding's tensors; the inverse of ``gather``.

        Args:
            holding: The subnets; one of ``holdings``.
            vectors: Vectors of some rings or all.
            like: Tensors of the same shapes, which the other rings keep; they are not changed.
        """
        return self.layout(holding).scatter(vectors, like)

    def gather_global(self, params: Params) -> dict[int, Tensor]:
        """Flattens the global tensors to one vector per ring, in the order of ``gather``.

        A private tensor that is not there yet is read from the shared one.
        """
        return self.global_layout.gather([self._complete(params)])

    def scatter_global(self, vectors: Vectors, params: Params) -> dict[str, Tensor]:
        """The global tensors with the cells of the given rings replaced; nothing is changed.

        Private tensors that are not there yet are added if a ring of them is given. Tensors with no
        cell in the given rings are the given ones themselves.
        """
        whole = self._complete(params)
        (new,) = self.global_layout.scatter(vectors, [whole])
        moved = (
            target
            for target in self._shapes
            if not vectors.keys().isdisjoint(self._present[target])
        )
        return {**params, **{target: new[target] for target in moved}}

    def count_holders(self, population: Mapping[Holding, float]) -> tuple[float, ...]:
        """How many of a population hold each ring.

        With the numbers of registered clients these are public: they do not depend on who answers.

        Args:
            population: For each holding the number, or expected number, of clients that have it.
        """
        counts = [population.get(holding, 0) for holding in self.holdings]
        return tuple(sum(counts[holder] for holder in ring.holders) for ring in self)

    def spread(self, values: Sequence[float], name: str) -> Tensor:
        """A value per ring as a value per cell of a global tensor, such as a number of holders."""
        return torch.tensor(values)[self._labels[name].long()]

    def _complete(self, params: Params) -> dict[str, Tensor]:
        """The tensors that are divided; a missing private one is the shared one, or zero."""
        names = {t: t if t in params else t.partition("@")[0] for t in self._shapes}
        return {t: params.get(n, torch.zeros(self._shapes[t])) for t, n in names.items()}

    @cached_property
    def _present(self) -> Mapping[str, frozenset[int]]:
        """The rings that each global tensor has cells of."""
        return {
            target: frozenset(label.unique().tolist()) for target, label in self._labels.items()
        }

    def _divide(self) -> tuple[dict[str, Tensor], tuple[Ring, ...]]:
        """The ring of every cell, and the rings."""
        sets: dict[bytes, int] = {}  # of holders, as bits: their numbers in order of appearance
        counts: Counter[int] = Counter()
        labels: dict[str, NDArray[np.int32]] = {}
        for target, shape in self._shapes.items():
            table, classes = self._tabulate(target, shape)
            rows, first = _number_rows(table.reshape(-1, table.shape[-1]))
            numbers = [sets.setdefault(row.tobytes(), len(sets)) for row in first]
            small = np.array(numbers, np.int32)[rows].reshape(table.shape[:-1])
            labels[target] = small[np.ix_(*classes)] if classes else small
            counts.update(dict(enumerate(np.bincount(labels[target].ravel()).tolist())))
        rings = [Ring(self._list_bits(bits), counts[n]) for bits, n in sets.items()]
        order = sorted(range(len(rings)), key=lambda n: (-len(rings[n].holders), rings[n].holders))
        rank = np.empty(len(rings), np.int32)
        rank[order] = np.arange(len(rings), dtype=np.int32)
        final = {target: torch.as_tensor(rank[label]) for target, label in labels.items()}
        return final, tuple(rings[n] for n in order)

    def _tabulate(
        self, target: str, shape: tuple[int, ...]
    ) -> tuple[Words, list[NDArray[np.int64]]]:
        """The holders of a tensor's cells, where positions with the same holders are one class.

        A cell is held where its position is kept on every axis.

        Returns:
            A set of holders for each combination of classes, and the class of every position.
        """
        words = -(-max(len(self.holdings), 1) // BITS)
        held = [
            (n // BITS, np.uint64(1 << n % BITS), cells[target])
            for n, cells in enumerate(self._cells)
            if target in cells
        ]
        table = np.zeros(words, np.uint64)
        for word, bit, _ in held:
            table[word] |= bit
        classes = []
        for axis, size in enumerate(shape):
            sets = np.zeros((size, words), np.uint64)
            for word, bit, index in held:
                where = index[axis]
                sets[where if isinstance(where, slice) else where.numpy(), word] |= bit
            of_position, kinds = _number_rows(sets)
            classes.append(of_position)
            table = table[..., None, :] & kinds
        return table, classes

    def _list_bits(self, bits: bytes) -> tuple[int, ...]:
        number = int.from_bytes(np.frombuffer(bits, np.uint64).astype("<u8").tobytes(), "little")
        return tuple(n for n in range(len(self.holdings)) if number >> n & 1)


def find_rings(
    structure: Structure,
    holdings: Iterable[Sequence[Subnet]],
    names: Iterable[str] | None = None,
) -> Rings:
    """Divides the cells of the global model by who holds them.

    The result depends on the different holdings and their order alone, so it is cached: clients
    that come back with the same subnets cost nothing.

    Args:
        structure: What the subnets are cut from.
        holdings: The subnets of each client, or of each tier; the same may come several times.
        names: The tensors to divide, without owners; None: all. See ``list_averaged``.

    Raises:
        StructureError: A holding has a cell twice.
    """
    kept = structure.shapes.keys() if names is None else names
    return _find_rings(structure, tuple(dict.fromkeys(map(tuple, holdings))), frozenset(kept))


@cache_per_structure(max_entries=2)  # which may take many times the model
def _find_rings(
    structure: Structure, holdings: tuple[Holding, ...], names: frozenset[str]
) -> Rings:
    return Rings(structure, holdings, names)


def list_averaged(setup: Setup) -> frozenset[str]:
    """The names of the tensors that are averaged: those of floating-point numbers."""
    return frozenset(n for n, t in named_tensors(setup.model).items() if t.is_floating_point())


def _index_holding(
    structure: Structure, holding: Holding, names: frozenset[str]
) -> dict[str, tuple[Index, ...]]:
    """The cells of each global tensor that a holding has."""
    cells: dict[str, tuple[Index, ...]] = {}
    for subnet in holding:
        for name, index in index_cells(structure, subnet).items():
            if name not in names:
                continue
            target = global_name(name, structure, subnet)
            if target in cells:
                raise StructureError(
                    f"a client holds every cell once, and {holding} has '{target}' twice"
                )
            cells[target] = index
    return cells


def _list_places(
    structure: Structure, holding: Holding, names: frozenset[str]
) -> list[tuple[int, str, str]]:
    return [
        (part, name, global_name(name, structure, subnet))
        for part, subnet in enumerate(holding)
        for name in structure.tensor_names(subnet)
        if name in names
    ]


def _number_rows(rows: Words) -> tuple[NDArray[np.int64], Words]:
    """The number of each row among the different ones, and the different rows.

    >>> numbers, different = _number_rows(np.array([[3, 1], [3, 1], [0, 1]], np.uint64))
    >>> numbers.tolist(), different.tolist()
    ([1, 1, 0], [[0, 1], [3, 1]])
    """
    numbers = np.zeros(len(rows), np.int64)
    for column in rows.T:
        values, of_row = np.unique(column, return_inverse=True)
        _, numbers = np.unique(numbers * len(values) + of_row, return_inverse=True)
    _, first = np.unique(numbers, return_index=True)
    return numbers, rows[first]
