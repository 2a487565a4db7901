"""The structure of a model: what may be cut in it, as data."""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from fedquilt.errors import StructureError
from fedquilt.structure.blocks.block import Block, select_first_modules
from fedquilt.structure.groups import (
    Axis,
    Group,
    SizeAttribute,
    UncutAxes,
    count_leading,
    has_group,
)
from fedquilt.structure.subnet import Subnet, prefix_mask

STATISTICS = ":statistics"  # running statistics of batch normalisation


TRACKED = ":tracked"  # the same, and how many batches they were taken from


NORMS = ":norms"  # batch normalisation: its statistics and its weights


STEPS = ":steps"  # what the branches of blocks are multiplied by


OUTPUTS = ":outputs"  # tensors with an axis of the classes


@dataclass(frozen=True, eq=False)
class Structure:
    """What may be cut in a model: its width groups, its axes, and blocks that may be skipped.

    Made by ``trace_structure`` or ``declare_structure``. Methods only select and describe.

    Args:
        groups: The width groups by name: channels that are kept or dropped together.
        axes: For each axis of every tensor the groups along it; None: an axis that is never cut.
        shapes: The shape of every tensor in the whole model.
        statistics: The names of the running statistics of normalization.
        classes: The group of the model's outputs, if it has one.
        size_attributes: Numbers of modules that follow a width, such as ``out_channels``.
        is_exact: Whether nothing is computed across channels: a subnet is the masked supernet.
        channels_last: Whether the model takes images in this memory format.
        origin: The shapes in the model that this one was cut from, if it was.
        blocks: The blocks that may be skipped, by name.
        uncut_axes: Axes of parameters that stay whole at every width, and why.

    >>> import torch, fedquilt as fq
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> structure = fq.trace_structure(model, torch.zeros(1, 4))
    >>> structure.cut_groups(), structure.groups["0"].size
    (['0'], 8)
    >>> structure.subnet(0.5)
    Subnet(0: first 4)
    """

    groups: Mapping[str, Group]
    axes: Mapping[str, tuple[Axis | None, ...]]  # of every tensor; None: an axis never cut
    shapes: Mapping[str, tuple[int, ...]]
    statistics: frozenset[str] = frozenset()
    classes: str | None = None  # the group of the model's outputs
    size_attributes: tuple[SizeAttribute, ...] = ()
    is_exact: bool = True  # nothing is computed across channels: subnet = masked supernet
    channels_last: bool = False  # the model takes images laid out so in memory
    origin: Mapping[str, tuple[int, ...]] | None = None  # shapes in the net it was cut from
    blocks: Mapping[str, Block] = field(default_factory=dict)  # that may be skipped
    uncut_axes: tuple[
        UncutAxes, ...
    ] = ()  # axes of parameters that no width cuts, though it might have
    _caches: dict[Callable[..., Any], Callable[..., Any]] = field(
        default_factory=dict, init=False, repr=False
    )  # see cache_per_structure

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the caches, which a copy or another process fills itself."""
        return {**vars(self), "_caches": {}}

    def subnet(
        self,
        width: float | Mapping[str, float] = 1.0,
        channels: Mapping[str, Iterable[int]] | None = None,
        *,
        depth: float = 1.0,
        blocks: Sequence[str] | None = None,
    ) -> Subnet:
        """A subnet: the first ⌈width · size⌉ channels of each group, or listed channels.

        Args:
            width: a fraction in (0, 1] for all groups, or one per group; others stay whole.
            channels: the channels to keep, for groups that do not keep leading ones.
            depth: keeps the blocks of the first ⌈depth · n⌉ of the n modules of each stage. A
                stage is a container of blocks.
            blocks: patterns of the blocks to keep; by default all.
        """
        if channels is None and blocks is None and not isinstance(width, Mapping):
            return _make_nested_subnet(self, float(width), depth)
        return self._make_subnet(width, channels or {}, depth, blocks)

    def _make_subnet(
        self,
        width: float | Mapping[str, float],
        channels: Mapping[str, Iterable[int]],
        depth: float,
        blocks: Sequence[str] | None,
    ) -> Subnet:
        chosen: dict[str, int] = {}
        widths = width if isinstance(width, Mapping) else dict.fromkeys(self.cut_groups(), width)
        for name, fraction in widths.items():
            group = self._get_group(name)
            count = count_leading(group.size, fraction)
            if count < group.size:
                chosen[name] = prefix_mask(count)
        subnet = Subnet(tuple(sorted(chosen.items())))
        for name, listed in channels.items():
            subnet = subnet.restricted_to(name, self._validate_channels(name, listed))
        kept = self._select_blocks(depth, blocks)
        return subnet.without_blocks(*(name for name in self.blocks if name not in kept))

    def _select_blocks(self, depth: float, blocks: Sequence[str] | None) -> set[str]:
        if depth < 1 and not self.blocks:
            raise StructureError(
                "no block of this model can be skipped, so it has no depth to cut; name some with "
                "trace_structure(..., blocks=[...])"
            )
        kept = set(select_first_modules(self.blocks, depth))
        if blocks is not None:
            for pattern in blocks:
                if not fnmatch.filter(self.blocks, pattern):
                    raise StructureError(self._describe_unknown_block(pattern))
            kept &= {name for word in blocks for name in fnmatch.filter(self.blocks, word)}
        return kept

    def _describe_unknown_block(self, name: str) -> str:
        known = ", ".join(self.blocks) or "none"
        return f"the model has no block '{name}' that may be skipped; its blocks are: {known}"

    def cut_groups(self, whole: Sequence[str] = ()) -> list[str]:
        """Names of the groups that a width cuts, except those in ``whole``."""
        return [g.name for g in self.groups.values() if g.is_cut and g.name not in whole]

    def kept_count(self, subnet: Subnet, group: str) -> int:
        """How many channels of a group a subnet keeps."""
        count = subnet.count(group)
        return self.groups[group].size if count is None else count

    def tensor_names(self, subnet: Subnet) -> list[str]:
        """Tensors that are part of a subnet, in the model's order."""
        left_out = self.match_names(subnet.excluded) | self.dropped_tensors(subnet)
        return [name for name in self.shapes if name not in left_out]

    def dropped_tensors(self, subnet: Subnet) -> frozenset[str]:
        """Tensors of the blocks that a subnet skips."""
        skipped = [self.blocks[name] for name in subnet.skipped if name in self.blocks]
        steps = (block.step for block in skipped if block.step)
        return frozenset(steps).union(*(block.tensors for block in skipped))

    def match_names(self, patterns: tuple[str, ...]) -> frozenset[str]:
        """Names of the tensors that the patterns select; ``!`` takes some out again.

        A pattern is a glob (``*.bias``) or one of the named sets (``:statistics``, ``:norms``).
        """
        return _match_names(self, patterns)

    def select_names(self, word: str) -> frozenset[str]:
        """Names of the tensors that one pattern or named set selects."""
        if word == STATISTICS:
            return self.statistics
        if word in (NORMS, TRACKED):
            layers = {name.rpartition(".")[0] for name in self.statistics}
            norms = frozenset(name for name in self.shapes if name.rpartition(".")[0] in layers)
            if word == NORMS:
                return norms
            counts = (n for n in norms if n.rpartition(".")[2] == "num_batches_tracked")
            return self.statistics.union(counts)
        if word == STEPS:
            return frozenset(b.step for b in self.blocks.values() if b.step)
        if word == OUTPUTS:
            classes = self.classes
            return frozenset(
                name
                for name, axes in self.axes.items()
                if classes is not None and any(has_group(axis, classes) for axis in axes)
            )
        return frozenset(fnmatch.filter(self.shapes, word))

    def validate(self, subnet: Subnet) -> None:
        """Raises for a subnet with groups, channels or blocks that the model does not have."""
        for name in subnet.skipped:
            if name not in self.blocks:
                raise StructureError(self._describe_unknown_block(name))
        for name, mask in subnet.kept:
            size = self._get_group(name).size
            if mask == 0 or mask.bit_length() > size:
                raise StructureError(
                    f"group '{name}' has channels 0 to {size - 1}; a subnet keeps at least one of "
                    f"them, got {subnet}"
                )

    def describe(self) -> str:
        """The structure as text: each group with its channels and tensors.

        Then module attributes that follow a width, axes that stay whole and why, and the blocks.
        """
        lines = []
        for group in self.groups.values():
            where = map_followers(self)[group.name]
            kind = "" if group.is_cut else " (never cut)"
            lines.append(f"{group.name}: {group.size}{kind}: {', '.join(where)}")
        if self.size_attributes:
            numbers = ", ".join(str(size) for size in self.size_attributes)
            lines.append(f"numbers that follow a width: {numbers}")
        for whole in self.uncut_axes:
            axes = ", ".join(f"{name}[{dim}]" for name, dim in whole.axes)
            lines.append(f"whole at every width, {whole.reason}: {axes}")
        if self.blocks:
            lines.append(f"blocks that may be skipped: {', '.join(self.blocks)}")
        return "\n".join(lines)

    def _get_group(self, name: str) -> Group:
        if name not in self.groups:
            raise StructureError(
                f"the model has no width group '{name}'; its groups are: {', '.join(self.groups)}"
            )
        return self.groups[name]

    def _validate_channels(self, name: str, channels: Iterable[int]) -> list[int]:
        size, listed = self._get_group(name).size, sorted(channels)
        if not listed or listed[0] < 0 or listed[-1] >= size or len(set(listed)) < len(listed):
            raise StructureError(
                f"group '{name}' has channels 0 to {size - 1}; give at least one of them and each "
                f"once, got {listed}"
            )
        return listed


P = ParamSpec("P")
T = TypeVar("T")


def cache_per_structure(
    max_entries: int,
) -> Callable[[Callable[Concatenate[Structure, P], T]], Callable[Concatenate[Structure, P], T]]:
    """Caches a function of a structure and hashable arguments, on the structure itself.

    At most ``max_entries`` results are kept; the least recently used is dropped first. They live
    as long as the structure, and are neither copied nor pickled with it.
    """

    def decorate(
        function: Callable[Concatenate[Structure, P], T],
    ) -> Callable[Concatenate[Structure, P], T]:
        @wraps(function)
        def call(structure: Structure, /, *args: P.args, **kwargs: P.kwargs) -> T:
            cached = structure._caches.get(function)
            if cached is None:
                bound = _bind_weakly(function, structure)
                cached = structure._caches.setdefault(function, lru_cache(max_entries)(bound))
            result: T = cached(*args, **kwargs)
            return result

        return call

    return decorate


def _bind_weakly(
    function: Callable[Concatenate[Structure, P], T], structure: Structure
) -> Callable[P, T]:
    """The function for one structure, without a strong reference to it: that would be a cycle."""
    reference = weakref.ref(structure)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        owner = reference()
        assert owner is not None, "a cache is only used through its structure"
        return function(owner, *args, **kwargs)

    return call


@cache_per_structure(max_entries=256)
def _make_nested_subnet(structure: Structure, width: float, depth: float) -> Subnet:
    """A subnet that a round asks for with every client."""
    return structure._make_subnet(width, {}, depth, None)


@cache_per_structure(max_entries=256)
def _match_names(structure: Structure, patterns: tuple[str, ...]) -> frozenset[str]:
    names: frozenset[str] = frozenset()
    for pattern in patterns:
        word = pattern.removeprefix("!")
        selected = structure.select_names(word)
        names = names | selected if word == pattern else names - selected
    return names


@cache_per_structure(max_entries=1)
def map_followers(structure: Structure) -> Mapping[str, tuple[str, ...]]:
    """For each group the tensors with an axis of it, in the model's order."""
    return {
        group: tuple(
            name
            for name, axes in structure.axes.items()
            if any(has_group(axis, group) for axis in axes)
        )
        for group in structure.groups
    }
