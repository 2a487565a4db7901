"""Submodels in width and depth: those of NeFL's tables, and the search for one's own.

A submodel of size γ keeps γ of the parameters: leading channels, a fraction √γ_W of each group, so
that γ_W of the parameters stay, and some blocks, γ_D of the parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fedquilt.errors import ConfigError, unknown
from fedquilt.structure.blocks import by_stage
from fedquilt.structure.cut import shapes
from fedquilt.structure.groups import Structure
from fedquilt.structure.subnet import Subnet

SIZES = (0.2, 0.4, 0.6, 0.8, 1.0)
SMALL_SIZES = (0.04, 0.16, 0.36, 0.64, 1.0)
SCALINGS = ("W", "D", "WD", "prefix")
MOST_COUNTS = 20_000  # combinations of blocks per stage that are looked at


@dataclass(frozen=True)
class Row:
    """A line of NeFL's tables: γ_W, γ_D as printed, and the blocks of each stage (1: kept).

    ``is_restored``: the line is damaged in the text of the paper that we have; its blocks (and
    γ_W, if need be) are chosen here to give the γ that is printed.
    """

    size: float
    width: float  # γ_W
    depth: float  # γ_D
    blocks: str
    is_restored: bool = False


def _rows(*rows: tuple[float, float, float, str], restored: Sequence[int] = ()) -> tuple[Row, ...]:
    return tuple(Row(*row, is_restored=i in restored) for i, row in enumerate(rows))


def _first(*kept: int, of: Sequence[int]) -> str:
    return " ".join("1" * k + "0" * (n - k) for k, n in zip(kept, of, strict=True))


def _ends(first: int, of: Sequence[int]) -> str:
    """The first blocks of each stage and its last one (ResNet110, Table 14)."""
    return " ".join("1" * first + "0" * (n - first - 1) + "1" for n in of)


_R18, _R34, _R56, _R110 = (2, 2, 2, 2), (3, 4, 6, 3), (9, 9, 9), (18, 18, 18)
_WRN101, _VIT = (3, 4, 23, 3), (12,)

TABLES: Mapping[tuple[str, str], tuple[Row, ...]] = {
    # Table 10; its second row of D, 10 00 10 10 (γ_D 0.42), contradicts its γ_D and Table 8, whose
    # 6.68 M parameters and 102 M MACs on average this one gives
    ("resnet18", "D"): _rows(
        (0.2, 1, 0.20, "11 00 11 00"),
        (0.4, 1, 0.38, "11 11 00 10"),
        (0.6, 1, 0.57, "11 11 11 10"),
        (0.8, 1, 0.81, "10 11 00 11"),
        (1.0, 1, 1, "11 11 11 11"),
        restored=(1,),
    ),
    ("resnet18", "WD"): _rows(
        (0.2, 0.34, 0.58, "11 11 11 10"),
        (0.4, 0.4, 1, "11 11 11 11"),
        (0.6, 0.6, 1, "11 11 11 11"),
        (0.8, 0.8, 1, "11 11 11 11"),
        (1.0, 1, 1, "11 11 11 11"),
    ),
    # Table 11
    ("resnet34", "D"): _rows(
        (0.2, 1, 0.23, "100 1000 100000 100"),
        (0.4, 1, 0.39, "111 1111 110001 100"),
        (0.6, 1, 0.61, "111 1111 110001 101"),
        (0.8, 1, 0.81, "111 1001 110001 111"),
        (1.0, 1, 1, "111 1111 111111 111"),
    ),
    ("resnet34", "WD"): _rows(
        (0.2, 0.38, 0.53, "111 1001 100001 101"),
        (0.4, 0.63, 0.64, "111 1001 111001 101"),
        (0.6, 0.77, 0.78, "111 1111 111101 101"),
        (0.8, 0.90, 0.89, "111 1111 111001 111"),
        (1.0, 1, 1, "111 1111 111111 111"),
    ),
    # Table 12
    ("resnet56", "D"): _rows(
        (0.2, 1, 0.2, _first(2, 2, 2, of=_R56)),
        (0.4, 1, 0.4, _first(3, 3, 4, of=_R56)),
        (0.6, 1, 0.6, _first(4, 4, 6, of=_R56)),
        (0.8, 1, 0.8, _first(9, 8, 7, of=_R56)),
        (1.0, 1, 1, _first(*_R56, of=_R56)),
    ),
    ("resnet56", "WD"): _rows(
        (0.2, 0.46, 0.43, _first(4, 4, 4, of=_R56)),
        (0.4, 0.61, 0.66, _first(6, 6, 6, of=_R56)),
        (0.6, 0.77, 0.77, _first(7, 7, 7, of=_R56)),
        (0.8, 0.90, 0.89, _first(8, 8, 8, of=_R56)),
        (1.0, 1, 1, _first(*_R56, of=_R56)),
    ),
    # Table 13
    ("vit-b16", "D"): _rows(
        (0.5, 1, 0.5, _first(6, of=_VIT)),
        (0.75, 1, 0.75, _first(9, of=_VIT)),
        (1.0, 1, 1, _first(12, of=_VIT)),
    ),
    ("vit-b16", "W"): _rows(
        (0.5, 0.5, 1, _first(12, of=_VIT)),
        (0.75, 0.75, 1, _first(12, of=_VIT)),
        (1.0, 1, 1, _first(12, of=_VIT)),
    ),
    # Table 14
    ("resnet110", "D"): _rows(
        (0.2, 1, 0.20, _first(18, 4, 3, of=_R110)),
        (0.4, 1, 0.40, _first(18, 10, 6, of=_R110)),
        (0.6, 1, 0.60, _first(18, 13, 10, of=_R110)),
        (0.8, 1, 0.80, _first(18, 15, 14, of=_R110)),
        (1.0, 1, 1, _first(*_R110, of=_R110)),
        restored=(1, 2, 3),
    ),
    ("resnet110", "WD"): _rows(
        (0.2, 0.46, 0.44, _ends(7, _R110)),
        (0.4, 0.60, 0.66, _ends(11, _R110)),
        (0.6, 0.77, 0.77, _ends(13, _R110)),
        (0.8, 0.90, 0.89, _ends(15, _R110)),
        (1.0, 1, 1, _first(*_R110, of=_R110)),
        restored=(0, 2, 3),
    ),
    ("resnet110", "D small"): _rows(
        (0.04, 1, 0.04, _first(1, 1, 1, of=_R110)),
        (0.16, 1, 0.16, _first(3, 3, 3, of=_R110)),
        (0.36, 1, 0.36, _first(7, 9, 6, of=_R110)),
        (0.64, 1, 0.65, _first(12, 11, 12, of=_R110)),
        (1.0, 1, 1, _first(*_R110, of=_R110)),
        restored=(1, 2, 3),
    ),
    ("resnet110", "WD small"): _rows(
        (0.04, 0.26, 0.16, _first(3, 3, 3, of=_R110)),
        (0.16, 0.42, 0.38, _first(7, 7, 7, of=_R110)),
        (0.36, 0.60, 0.60, _first(11, 11, 11, of=_R110)),
        (0.64, 0.80, 0.80, _first(15, 15, 14, of=_R110)),
        (1.0, 1, 1, _first(*_R110, of=_R110)),
        restored=(0, 1, 2, 3),
    ),
    # Table 15, of which the text has two stages of the first row
    ("wideresnet101-2", "D"): _rows(
        (0.5, 1, 0.51, _first(3, 4, 9, 2, of=_WRN101)),
        (0.75, 1, 0.75, _first(3, 4, 14, 3, of=_WRN101)),
        (1.0, 1, 1, _first(*_WRN101, of=_WRN101)),
        restored=(0, 1),
    ),
}


def table(name: str, scaling: str) -> tuple[Row, ...]:
    """The rows of NeFL's table for a net: ``D``, ``WD``, or ``W``, which scales all alike.

    ``D small`` and so on are those of γ = 0.04 ... 1 (ResNet110, Table 9).
    """
    if scaling in ("W", "W small") and (name, scaling) not in TABLES:
        whole = TABLES[_known(name, scaling.replace("W", "D"))]
        return tuple(Row(row.size, row.size, 1, whole[-1].blocks) for row in whole)
    return TABLES[_known(name, scaling)]


def _known(name: str, scaling: str) -> tuple[str, str]:
    nets = sorted({net for net, _ in TABLES})
    if name not in nets:
        raise ConfigError(unknown("table of NeFL", name, nets))
    if (name, scaling) not in TABLES:
        known = {"W", *(kind for net, kind in TABLES if net == name)}
        raise ConfigError(unknown(f"scaling in NeFL's table of {name}", scaling, known))
    return name, scaling


def from_table(structure: Structure, rows: Sequence[Row]) -> dict[float, Subnet]:
    """The subnets of the rows of a table, in a net with as many blocks in each stage."""
    stages = _stages(structure)
    found = {}
    for row in rows:
        masks = row.blocks.split()
        if [len(mask) for mask in masks] != [len(stage) for stage in stages]:
            raise ConfigError(
                f"this table is for a net with {[len(mask) for mask in masks]} blocks in its "
                f"stages, but the model has {[len(stage) for stage in stages]}"
            )
        skipped = [
            name
            for stage, mask in zip(stages, masks, strict=True)
            for names, bit in zip(stage, mask, strict=True)
            for name in names
            if bit == "0"
        ]
        found[row.size] = structure.subnet(math.sqrt(row.width)).skipping(*skipped)
    return found


def find(
    structure: Structure,
    parameters: frozenset[str],
    sizes: Sequence[float],
    scaling: str,
    tolerance: float = 0.02,
) -> dict[float, Subnet]:
    """For each size a submodel with that fraction of the parameters, within 2 % of it.

    ``W`` cuts channels, ``D`` leaves out the last blocks of stages, ``WD`` does both as evenly as
    possible (γ_W = γ_D). ``prefix`` keeps the first blocks of the net, as near to the size as
    whole blocks come. ``parameters`` are the tensors that count.
    """
    if scaling not in SCALINGS:
        raise ConfigError(unknown("scaling", scaling, SCALINGS))
    for size in sizes:
        if not 0 < size <= 1:
            raise ConfigError(f"sizes are fractions of the parameters in (0, 1], got {size}")
    if scaling == "WD" and not structure.blocks:
        scaling = "W"  # γ_D can only be 1
    if scaling != "W" and not structure.blocks:
        raise ConfigError(
            f"scaling '{scaling}' leaves out blocks, but no block of this model can be skipped; "
            "use scaling 'W', or name blocks in model.blocks"
        )
    scale = _Scale(structure, parameters, tolerance)
    return {size: _found(scale, size, scaling) for size in sorted(set(sizes), reverse=True)}


@dataclass(frozen=True, eq=False)
class _Scale:
    """What weighs a submodel: its share of the parameters."""

    structure: Structure
    parameters: frozenset[str]
    tolerance: float  # of a size, that a submodel found for it may be off

    def is_near(self, share: float, size: float) -> bool:
        """Whether a share of the parameters is as good as the size."""
        return abs(share - size) <= self.tolerance * size

    def share(self, subnet: Subnet) -> float:
        """The fraction of the parameters that a submodel keeps."""
        return self._count(subnet) / self._count(Subnet())

    def _count(self, subnet: Subnet) -> int:
        whole = self.structure.shapes
        # thousands of choices of blocks are weighed: no cells are made for those of full width
        kept = shapes(self.structure, subnet) if subnet.kept else whole
        there = self.parameters - self.structure.gone(subnet)
        return sum(math.prod(kept[name]) for name in there)


def _found(scale: _Scale, size: float, scaling: str) -> Subnet:
    structure = scale.structure
    if size == 1:
        return Subnet()
    if scaling == "prefix":
        return min(_prefixes(structure), key=lambda subnet: abs(scale.share(subnet) - size))
    if scaling == "W":
        best = _narrowed(scale, (), size)
    elif scaling == "D":
        best = _shallow(scale, size)
    else:
        best = _balanced(scale, size)
    share = scale.share(best)
    if not scale.is_near(share, size):
        other = "" if scaling == "WD" else ", or scale by 'WD'"
        raise ConfigError(
            f"no submodel of scaling '{scaling}' has {size:g} of the parameters: the nearest has "
            f"{share:.3f}; allow a larger tolerance than {scale.tolerance:g}{other}"
        )
    return best


def _shallow(scale: _Scale, size: float) -> Subnet:
    """The nearest to a size, and of those that meet it the one with most of every stage."""
    best, least = Subnet(), (math.inf, 0.0, 0.0)
    for fewest, skipped in _shallower(scale.structure):
        subnet = Subnet().skipping(*skipped)
        share = scale.share(subnet)
        off = abs(share - size)
        rank = (0.0 if scale.is_near(share, size) else off, -fewest, off)
        if rank < least:
            best, least = subnet, rank
    return best


def _balanced(scale: _Scale, size: float) -> Subnet:
    """γ_W and γ_D as near to each other as they can be, of those that meet the size."""
    best, least = Subnet(), math.inf
    for skipped in _even_depths(scale.structure):
        depth = scale.share(Subnet().skipping(*skipped))
        if depth < size * (1 - scale.tolerance):
            continue
        subnet = _narrowed(scale, skipped, size)
        share = scale.share(subnet)
        uneven = abs(math.log(depth) - math.log(share / depth))
        if scale.is_near(share, size) and uneven < least:
            best, least = subnet, uneven
        elif math.isinf(least) and abs(share - size) < abs(scale.share(best) - size):
            best = subnet
    return best


def _narrowed(scale: _Scale, skipped: Sequence[str], size: float) -> Subnet:
    """The width at which a net with these blocks comes nearest to a size, by bisection."""
    structure = scale.structure
    counts = {structure.groups[name].size for name in structure.cut_groups()}
    steps = sorted({k / n for n in counts for k in range(1, n + 1)})

    def at(step: int) -> Subnet:
        return structure.subnet(steps[step]).skipping(*skipped)

    low, high = 0, len(steps) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if scale.share(at(middle)) <= size:
            low = middle
        else:
            high = middle
    nearest = min(at(low), at(high), key=lambda subnet: abs(scale.share(subnet) - size))
    if scale.is_near(scale.share(nearest), size):
        return nearest
    return _refined(scale, at(low), at(high), size)


def _refined(scale: _Scale, low: Subnet, high: Subnet, size: float) -> Subnet:
    """Between two widths, the wider one in some groups only: small nets are coarse.

    The largest step that stays below the size comes first, so that small ones fill what is left.
    """
    structure, subnet = scale.structure, low
    while True:
        wider = [
            subnet.keeping(name, range(structure.kept(high, name)))
            for name in structure.cut_groups()
            if structure.kept(subnet, name) < structure.kept(high, name)
        ]
        below = [some for some in wider if scale.share(subnet) < scale.share(some) <= size]
        if not below:
            return min([subnet, *wider], key=lambda some: abs(scale.share(some) - size))
        subnet = max(below, key=scale.share)


def _stages(structure: Structure) -> list[list[list[str]]]:
    return [list(stage.values()) for stage in by_stage(structure.blocks.values()).values()]


def _even_depths(structure: Structure) -> Iterator[list[str]]:
    """The last blocks of every stage left out, about the same fraction of each."""
    stages = _stages(structure)
    fractions = sorted({k / len(stage) for stage in stages for k in range(1, len(stage) + 1)})
    for fraction in reversed(fractions):
        kept = [max(1, math.ceil(round(fraction * len(stage), 9))) for stage in stages]
        yield _left_out(stages, kept)


def _shallower(structure: Structure) -> Iterator[tuple[float, list[str]]]:
    """The last blocks of every stage left out, in every combination if there are not too many.

    And the smallest fraction that is left of a stage.
    """
    stages = _stages(structure)
    if math.prod(len(stage) + 1 for stage in stages) > MOST_COUNTS:
        yield from ((1.0, skipped) for skipped in _even_depths(structure))
        return
    for kept in itertools.product(*(range(len(stage) + 1) for stage in stages)):
        fewest = min(count / len(stage) for count, stage in zip(kept, stages, strict=True))
        yield fewest, _left_out(stages, kept)


def _left_out(stages: list[list[list[str]]], kept: Sequence[int]) -> list[str]:
    return [
        name
        for stage, count in zip(stages, kept, strict=True)
        for names in stage[count:]
        for name in names
    ]


@lru_cache(maxsize=16)
def _prefixes(structure: Structure) -> tuple[Subnet, ...]:
    """The first blocks of the whole net, of each number."""
    modules = [names for stage in _stages(structure) for names in stage]
    return tuple(
        Subnet().skipping(*itertools.chain.from_iterable(modules[count:]))
        for count in range(1, len(modules) + 1)
    )
