"""Submodels in width and depth: those of NeFL's tables, and the search for one's own.

A submodel of size γ keeps γ of the parameters: leading channels, a fraction √γ_W of each group, so
that γ_W of the parameters stay, and some blocks, γ_D of the parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedquilt.errors import ConfigError, describe_unknown
from fedquilt.methods.nefl_tables import Row
from fedquilt.structure.blocks.block import group_by_stage
from fedquilt.structure.cut import compute_shapes
from fedquilt.structure.structure import Structure, cache_per_structure
from fedquilt.structure.subnet import Subnet

SCALINGS = ("W", "D", "WD", "prefix")
MAX_COUNTS = 20_000  # combinations of blocks per stage that are looked at


def build_from_table(structure: Structure, rows: Sequence[Row]) -> dict[float, Subnet]:
    """The subnets of the rows of a table, in a net with as many blocks in each stage."""
    stages = _list_stages(structure)
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
        found[row.size] = structure.subnet(math.sqrt(row.width)).without_blocks(*skipped)
    return found


def find_submodels(
    structure: Structure,
    parameters: frozenset[str],
    sizes: Sequence[float],
    scaling: str,
    tolerance: float = 0.02,
) -> dict[float, Subnet]:
    """For each size a submodel with that fraction of the parameters, within 2 % of it.

    ``W`` cuts channels, ``D`` leaves out the last blocks of stages, ``WD`` does both as evenly as
    possible (γ_W = γ_D). ``prefix`` keeps the first blocks of the net, as near to the size as
    whole blocks come. ``parameters`` are the tensors that count. No two sizes may be one submodel.
    """
    if scaling not in SCALINGS:
        raise ConfigError(describe_unknown("scaling", scaling, SCALINGS))
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
    found = {
        size: _find_submodel(scale, size, scaling) for size in sorted(set(sizes), reverse=True)
    }
    _refuse_equal(found, scaling)
    return found


def _refuse_equal(found: Mapping[float, Subnet], scaling: str) -> None:
    first: dict[Subnet, float] = {}
    for size, subnet in found.items():
        if subnet in first:
            raise ConfigError(
                f"sizes {size:g} and {first[subnet]:g} are the same submodel by scaling "
                f"'{scaling}'; leave out one of them, or choose another scaling"
            )
        first[subnet] = size


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
        kept = compute_shapes(self.structure, subnet) if subnet.kept else whole
        there = self.parameters - self.structure.dropped_tensors(subnet)
        return sum(math.prod(kept[name]) for name in there)


def _find_submodel(scale: _Scale, size: float, scaling: str) -> Subnet:
    structure = scale.structure
    if size == 1:
        return Subnet()
    if scaling == "prefix":
        return min(_list_prefixes(structure), key=lambda subnet: abs(scale.share(subnet) - size))
    if scaling == "W":
        best = _find_narrow(scale, (), size)
    elif scaling == "D":
        best = _find_shallow(scale, size)
    else:
        best = _find_balanced(scale, size)
    share = scale.share(best)
    if not scale.is_near(share, size):
        other = "" if scaling == "WD" else ", or scale by 'WD'"
        raise ConfigError(
            f"no submodel of scaling '{scaling}' has {size:g} of the parameters: the nearest has "
            f"{share:.3f}; allow a larger tolerance than {scale.tolerance:g}{other}"
        )
    return best


def _find_shallow(scale: _Scale, size: float) -> Subnet:
    """The nearest to a size, and of those that meet it the one with most of every stage."""
    best, least = Subnet(), (math.inf, 0.0, 0.0)
    for fewest, skipped in _list_shallower(scale.structure):
        subnet = Subnet().without_blocks(*skipped)
        share = scale.share(subnet)
        off = abs(share - size)
        rank = (0.0 if scale.is_near(share, size) else off, -fewest, off)
        if rank < least:
            best, least = subnet, rank
    return best


def _find_balanced(scale: _Scale, size: float) -> Subnet:
    """γ_W and γ_D as near to each other as they can be, of those that meet the size."""
    best, least = Subnet(), math.inf
    for skipped in _list_even_depths(scale.structure):
        depth = scale.share(Subnet().without_blocks(*skipped))
        if depth < size * (1 - scale.tolerance):
            continue
        subnet = _find_narrow(scale, skipped, size)
        share = scale.share(subnet)
        uneven = abs(math.log(depth) - math.log(share / depth))
        if scale.is_near(share, size) and uneven < least:
            best, least = subnet, uneven
        elif math.isinf(least) and abs(share - size) < abs(scale.share(best) - size):
            best = subnet
    return best


def _find_narrow(scale: _Scale, skipped: Sequence[str], size: float) -> Subnet:
    """The width at which a net with these blocks comes nearest to a size, by bisection."""
    structure = scale.structure
    counts = {structure.groups[name].size for name in structure.cut_groups()}
    steps = sorted({k / n for n in counts for k in range(1, n + 1)})

    def at(step: int) -> Subnet:
        return structure.subnet(steps[step]).without_blocks(*skipped)

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
    return _refine(scale, at(low), at(high), size)


def _refine(scale: _Scale, low: Subnet, high: Subnet, size: float) -> Subnet:
    """Between two widths, the wider one in some groups only: small nets are coarse.

    The largest step that stays below the size comes first, so that small ones fill what is left.
    """
    structure, subnet = scale.structure, low
    while True:
        wider = [
            subnet.restricted_to(name, range(structure.kept_count(high, name)))
            for name in structure.cut_groups()
            if structure.kept_count(subnet, name) < structure.kept_count(high, name)
        ]
        below = [some for some in wider if scale.share(subnet) < scale.share(some) <= size]
        if not below:
            return min([subnet, *wider], key=lambda some: abs(scale.share(some) - size))
        subnet = max(below, key=scale.share)


def _list_stages(structure: Structure) -> list[list[list[str]]]:
    return [list(stage.values()) for stage in group_by_stage(structure.blocks.values()).values()]


def _list_even_depths(structure: Structure) -> Iterator[list[str]]:
    """The last blocks of every stage left out, about the same fraction of each."""
    stages = _list_stages(structure)
    fractions = sorted({k / len(stage) for stage in stages for k in range(1, len(stage) + 1)})
    for fraction in reversed(fractions):
        kept = [max(1, math.ceil(round(fraction * len(stage), 9))) for stage in stages]
        yield _list_skipped(stages, kept)


def _list_shallower(structure: Structure) -> Iterator[tuple[float, list[str]]]:
    """The last blocks of every stage left out, in every combination if there are not too many.

    And the smallest fraction that is left of a stage.
    """
    stages = _list_stages(structure)
    if math.prod(len(stage) + 1 for stage in stages) > MAX_COUNTS:
        yield from ((1.0, skipped) for skipped in _list_even_depths(structure))
        return
    for kept in itertools.product(*(range(len(stage) + 1) for stage in stages)):
        fewest = min(count / len(stage) for count, stage in zip(kept, stages, strict=True))
        yield fewest, _list_skipped(stages, kept)


def _list_skipped(stages: list[list[list[str]]], kept: Sequence[int]) -> list[str]:
    return [
        name
        for stage, count in zip(stages, kept, strict=True)
        for names in stage[count:]
        for name in names
    ]


@cache_per_structure(max_entries=1)
def _list_prefixes(structure: Structure) -> tuple[Subnet, ...]:
    """The first blocks of the whole net, of each number."""
    modules = [names for stage in _list_stages(structure) for names in stage]
    return tuple(
        Subnet().without_blocks(*itertools.chain.from_iterable(modules[count:]))
        for count in range(1, len(modules) + 1)
    )
