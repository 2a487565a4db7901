"""What may be cut in a model: width groups and the axes that follow them, and blocks."""

from __future__ import annotations

import copy
import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fedquilt.errors import StructureError
from fedquilt.structure.blocks import Block, first_of_each_stage, with_steps
from fedquilt.structure.channels import FROZEN, NO_REASON, NOT_FROZEN, Labels
from fedquilt.structure.computed import detach_computed
from fedquilt.structure.subnet import Subnet, prefix
from fedquilt.structure.supported import require_supported
from fedquilt.structure.trace import Choices, Example, Trace, follow, named_tensors

STATISTICS = ":statistics"  # running statistics of batch normalisation
TRACKED = ":tracked"  # the same, and how many batches they were taken from
NORMS = ":norms"  # batch normalisation: its statistics and its weights
STEPS = ":steps"  # what the branches of blocks are multiplied by
OUTPUTS = ":outputs"  # tensors with an axis of the classes
MOST_NAMES = 4  # of tensors, in a sentence


@dataclass(frozen=True)
class Group:
    """Channels that are cut together, wherever they appear."""

    name: str
    size: int
    is_cut: bool = True  # False: classes or tokens, which no width removes


@dataclass(frozen=True)
class Span:
    """Neighbouring positions of an axis that follow one group (or none: always kept)."""

    group: str | None
    channels: tuple[int, ...]  # the channel of each position


Axis = tuple[Span, ...]  # spans laid end to end; one span unless tensors are concatenated


@dataclass(frozen=True)
class Size:
    """A number in a module that is the size of an axis, or its square root's inverse or so."""

    module: str
    attribute: str
    item: int | None  # position in a tuple, None for a plain number
    axis: Axis
    power: float = 1.0

    @property
    def name(self) -> str:
        """The number's name: that of its module, and its own."""
        return f"{self.module}.{self.attribute}" if self.module else self.attribute

    def __str__(self) -> str:
        """What it is the size of.

        >>> str(Size("attention", "scale", None, (Span("qkv", (0, 1, 2, 3)),), -0.5))
        'attention.scale (4^-0.5 of qkv)'
        """
        item = "" if self.item is None else f"[{self.item}]"
        count = sum(len(span.channels) for span in self.axis)
        power = "" if self.power == 1 else f"^{self.power:g}"
        groups = dict.fromkeys(span.group for span in self.axis if span.group is not None)
        return f"{self.name}{item} ({count}{power} of {', '.join(groups)})"


@dataclass(frozen=True)
class Whole:
    """Axes that stay whole at every width, and the operation that is why."""

    operation: str  # through which channels could not be followed; "": the example runs none
    module: str  # that runs the operation
    axes: tuple[tuple[str, int], ...]  # tensors and their dimensions

    @property
    def reason(self) -> str:
        """Why, in words."""
        if not self.operation:
            return "not run on the example"
        where = f"module '{self.module}'" if self.module else "the model itself"
        return f"not followed through {self.operation} in {where}"

    def __str__(self) -> str:
        """The tensors, and why.

        >>> str(Whole("cumsum", "mixer", (("hidden.weight", 0), ("hidden.bias", 0))))
        "hidden.weight, hidden.bias (not followed through cumsum in module 'mixer')"
        """
        names = list(dict.fromkeys(name for name, _ in self.axes))
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        return f"{', '.join(names[:MOST_NAMES])}{more} ({self.reason})"


@dataclass(frozen=True, eq=False)
class Structure:
    """Width groups of a model, which of them every axis follows, and blocks that may be skipped."""

    groups: Mapping[str, Group]
    axes: Mapping[str, tuple[Axis | None, ...]]  # of every tensor; None: an axis never cut
    shapes: Mapping[str, tuple[int, ...]]
    statistics: frozenset[str] = frozenset()
    classes: str | None = None  # the group of the model's outputs
    sizes: tuple[Size, ...] = ()
    is_exact: bool = True  # nothing is computed across channels: subnet = masked supernet
    channels_last: bool = False  # the model takes images laid out so in memory
    origin: Mapping[str, tuple[int, ...]] | None = None  # shapes in the net it was cut from
    blocks: Mapping[str, Block] = field(default_factory=dict)  # that may be skipped
    whole: tuple[Whole, ...] = ()  # axes of parameters that no width cuts, though it might have
    _names: dict[tuple[str, ...], frozenset[str]] = field(default_factory=dict, repr=False)

    @staticmethod
    def trace(
        model: nn.Module,
        example: Example,
        *,
        exclude: Sequence[str] = (),
        blocks: Sequence[str] | None = None,
        keep_numbers: Sequence[str] = (),
    ) -> Structure:
        """The structure of any model, found by following it on an example, and checked there.

        Attention is cut inside each head: the number of heads stays. Modules named in ``exclude``
        are shared whole. Plain numbers of modules that are widths follow them (``describe`` lists
        those), unless ``keep_numbers`` names them, by patterns: ``["encoder.max_len", "*.scale"]``.
        Blocks are the branches of residual sums, as far as they can be found; or
        those that ``blocks`` names, by patterns: residual ones, or modules that as a whole compute
        something to be added to their input.
        """
        from fedquilt.structure.check import found_structure

        require_supported(model)
        detach_computed(model)
        return found_structure(model, example, tuple(exclude), blocks, tuple(keep_numbers))

    @staticmethod
    def declare(
        model: nn.Module,
        axes: Mapping[str, Sequence[str | None]],
        *,
        sizes: Mapping[str, str] | None = None,
        classes: str | None = None,
        example: Example | None = None,
    ) -> Structure:
        """The structure as you state it, for a model that cannot be followed.

        ``axes`` names the width group (or None) of every dimension of the tensors that are cut;
        tensors it leaves out are shared whole. ``sizes`` maps plain numbers of modules to the
        group whose size they are: ``{"attention.head_dim": "head"}``. ``classes`` names the group
        of the outputs, which no width cuts. With an ``example`` the declaration is checked as a
        trace would be.

        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> axes = {"0.weight": ("h", None), "0.bias": ("h",), "2.weight": (None, "h")}
        >>> Structure.declare(net, axes).groups["h"]
        Group(name='h', size=8, is_cut=True)
        """
        require_supported(model)
        detach_computed(model)
        structure = _declared(model, axes, sizes or {}, classes)
        if example is not None:
            from fedquilt.structure.check import check
            from fedquilt.structure.layout import takes_channels_last

            check(model, structure, example)
            structure = replace(structure, channels_last=takes_channels_last(model, example))
        return structure

    def subnet(
        self,
        width: float | Mapping[str, float] = 1.0,
        channels: Mapping[str, Iterable[int]] | None = None,
        *,
        depth: float = 1.0,
        blocks: Sequence[str] | None = None,
    ) -> Subnet:
        """The first ⌈width · size⌉ channels of each group, or the listed channels; and some blocks.

        ``width`` is one fraction in (0, 1] for all groups, or one per group (others whole); groups
        in ``channels`` keep just those. ``depth`` keeps the blocks of the first ⌈depth · n⌉ of
        the n modules of each stage (each container of blocks); ``blocks`` keeps those that its
        patterns name.
        """
        chosen: dict[str, int] = {}
        widths = width if isinstance(width, Mapping) else dict.fromkeys(self.cut_groups(), width)
        for name, fraction in widths.items():
            group = self._group(name)
            count = leading(group.size, fraction)
            if count < group.size:
                chosen[name] = prefix(count)
        subnet = Subnet(tuple(sorted(chosen.items())))
        for name, some in (channels or {}).items():
            subnet = subnet.keeping(name, self._checked(name, some))
        kept = self._kept_blocks(depth, blocks)
        return subnet.skipping(*(name for name in self.blocks if name not in kept))

    def _kept_blocks(self, depth: float, blocks: Sequence[str] | None) -> set[str]:
        if depth < 1 and not self.blocks:
            raise StructureError(
                "no block of this model can be skipped, so it has no depth to cut; name some with "
                "Structure.trace(..., blocks=[...])"
            )
        kept = set(first_of_each_stage(self.blocks, depth))
        if blocks is not None:
            for pattern in blocks:
                if not fnmatch.filter(self.blocks, pattern):
                    raise StructureError(self._no_block(pattern))
            kept &= {name for word in blocks for name in fnmatch.filter(self.blocks, word)}
        return kept

    def _no_block(self, name: str) -> str:
        known = ", ".join(self.blocks) or "none"
        return f"the model has no block '{name}' that may be skipped; its blocks are: {known}"

    def with_steps(
        self, model: nn.Module, *, learnable: bool = True
    ) -> tuple[nn.Module, Structure]:
        """The model with a step of 1 for each block, and its structure: x + s · F(x).

        The steps take part in what is built from the two; the model alone does not use them.
        """
        stepped = copy.deepcopy(model)
        blocks = with_steps(stepped, self.blocks, learnable=learnable)
        steps = [block.step for block in blocks.values() if block.step]
        return stepped, replace(
            self,
            axes={**self.axes, **dict.fromkeys(steps, ())},
            shapes={**self.shapes, **dict.fromkeys(steps, ())},
            blocks=blocks,
            _names={},
        )

    def uncut(self, model: nn.Module) -> Structure:
        """The structure of a net that comes from this one and is never cut itself.

        The net may be narrower, and may have other layers of normalisation.
        """
        tensors = named_tensors(model)
        statistics = {
            id(buffer)
            for layer in model.modules()
            if isinstance(layer, _BatchNorm)
            for buffer in (layer.running_mean, layer.running_var)
        }
        return Structure(
            groups={},
            axes={name: (None,) * tensor.ndim for name, tensor in tensors.items()},
            shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
            statistics=frozenset(n for n, t in tensors.items() if id(t) in statistics),
            channels_last=self.channels_last,
            origin=self.origin or self.shapes,
        )

    def among(self, model: nn.Module) -> Structure:
        """The structure of the same net where some tensors are gone, such as statistics."""
        there = named_tensors(model)
        return replace(
            self,
            axes={name: axes for name, axes in self.axes.items() if name in there},
            shapes={name: shape for name, shape in self.shapes.items() if name in there},
            statistics=self.statistics & there.keys(),
            _names={},
        )

    def cut_groups(self, whole: Sequence[str] = ()) -> list[str]:
        """Names of the groups that a width cuts, but for those that stay whole."""
        return [g.name for g in self.groups.values() if g.is_cut and g.name not in whole]

    def kept(self, subnet: Subnet, group: str) -> int:
        """How many channels of a group a subnet keeps."""
        count = subnet.count(group)
        return self.groups[group].size if count is None else count

    def names(self, subnet: Subnet) -> list[str]:
        """Tensors that are part of a subnet, in the model's order."""
        left_out = self.matching(subnet.without) | self.gone(subnet)
        return [name for name in self.shapes if name not in left_out]

    def gone(self, subnet: Subnet) -> frozenset[str]:
        """Tensors of the blocks that a subnet skips."""
        skipped = [self.blocks[name] for name in subnet.skipped if name in self.blocks]
        steps = (block.step for block in skipped if block.step)
        return frozenset(steps).union(*(block.tensors for block in skipped))

    def matching(self, patterns: tuple[str, ...]) -> frozenset[str]:
        """Tensors that the patterns and named sets mean; ``!`` takes some out again."""
        if patterns not in self._names:
            found: set[str] = set()
            for pattern in patterns:
                word = pattern.removeprefix("!")
                meant = self._meant(word)
                found = found | meant if word == pattern else found - meant
            self._names[patterns] = frozenset(found)
        return self._names[patterns]

    def _meant(self, word: str) -> frozenset[str]:
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
                if classes is not None and any(follows(axis, classes) for axis in axes)
            )
        return frozenset(fnmatch.filter(self.shapes, word))

    def validate(self, subnet: Subnet) -> None:
        """Refuses a subnet that names groups, channels or blocks which are not here."""
        for name in subnet.skipped:
            if name not in self.blocks:
                raise StructureError(self._no_block(name))
        for name, mask in subnet.kept:
            size = self._group(name).size
            if mask == 0 or mask.bit_length() > size:
                raise StructureError(
                    f"group '{name}' has channels 0 to {size - 1}; a subnet keeps at least one of "
                    f"them, got {subnet}"
                )

    def describe(self) -> str:
        """The groups as text: name, channels, and the tensors that follow each.

        Then the plain numbers of modules that follow a width, what stays whole and why, and the
        blocks.
        """
        lines = []
        for group in self.groups.values():
            where = following(self)[group.name]
            kind = "" if group.is_cut else " (never cut)"
            lines.append(f"{group.name}: {group.size}{kind}: {', '.join(where)}")
        if self.sizes:
            numbers = ", ".join(str(size) for size in self.sizes)
            lines.append(f"numbers that follow a width: {numbers}")
        for whole in self.whole:
            axes = ", ".join(f"{name}[{dim}]" for name, dim in whole.axes)
            lines.append(f"whole at every width, {whole.reason}: {axes}")
        if self.blocks:
            lines.append(f"blocks that may be skipped: {', '.join(self.blocks)}")
        return "\n".join(lines)

    def _group(self, name: str) -> Group:
        if name not in self.groups:
            raise StructureError(
                f"the model has no width group '{name}'; its groups are: {', '.join(self.groups)}"
            )
        return self.groups[name]

    def _checked(self, name: str, channels: Iterable[int]) -> list[int]:
        size, listed = self._group(name).size, sorted(channels)
        if not listed or listed[0] < 0 or listed[-1] >= size or len(set(listed)) < len(listed):
            raise StructureError(
                f"group '{name}' has channels 0 to {size - 1}; give at least one of them and each "
                f"once, got {listed}"
            )
        return listed


def leading(size: int, width: float) -> int:
    """How many channels a width keeps: ⌈width · size⌉, at least one.

    >>> leading(64, 0.0625), leading(10, 0.3), leading(7, 1.0)
    (4, 3, 7)
    """
    if not 0 < width <= 1:
        raise StructureError(
            f"widths are fractions in (0, 1], got {width}; write 1/8 as 0.125, and 1 for the whole"
        )
    return max(1, math.ceil(round(width * size, 9)))  # 0.3 · 10 is a little more than 3


def follows(axis: Axis | None, group: str) -> bool:
    """Whether any position of an axis is a channel of the group."""
    return axis is not None and any(span.group == group for span in axis)


@lru_cache(maxsize=64)
def following(structure: Structure) -> Mapping[str, tuple[str, ...]]:
    """The tensors that have an axis of each group, in the model's order."""
    return {
        group: tuple(
            name
            for name, axes in structure.axes.items()
            if any(follows(axis, group) for axis in axes)
        )
        for group in structure.groups
    }


def structure_of(model: nn.Module, trace: Trace, sizes: tuple[Size, ...] = ()) -> Structure:
    """The groups that a trace has found."""
    tensors = named_tensors(model)
    roots = {
        (name, i): trace.channels.roots(labels)
        for name, dims in trace.tensors.items()
        for i, labels in enumerate(dims)
        if labels is not None
    }
    owner, groups = _grouped(roots, trace.channels.pinned())
    axes = {
        name: tuple(_axis(roots.get((name, i)), owner) for i in range(tensor.ndim))
        for name, tensor in tensors.items()
    }
    classes = None
    if trace.outputs is not None:
        first = owner.get(int(trace.channels.roots(trace.outputs)[0]))
        last = trace.channels.roots(trace.outputs)
        if first and [owner.get(int(c)) for c in last] == [(first[0], i) for i in range(len(last))]:
            classes = first[0]
    return Structure(
        groups,
        axes,
        {name: tuple(t.shape) for name, t in tensors.items()},
        trace.statistics,
        classes,
        sizes,
        not any(trace.across.values()),
        whole=tuple(_whole_axes(model, trace)),
    )


def _whole_axes(model: nn.Module, trace: Trace) -> Iterator[Whole]:
    """Axes of parameters by the operation through which their channels could not be followed."""
    by_reason: dict[int, list[tuple[str, int]]] = {}
    why = trace.channels.reasons()
    for name, parameter in model.named_parameters():
        for dim, labels in enumerate(trace.tensors[name]):
            if labels is not None and parameter.shape[dim] > 1:
                reasons = why[labels]
                reasons = reasons[(reasons != NO_REASON) & (reasons != NOT_FROZEN)]
                if len(reasons):
                    by_reason.setdefault(int(reasons.min()), []).append((name, dim))
    for reason, axes in sorted(by_reason.items()):
        cause = trace.causes[reason - 1]
        yield Whole(cause.operation, cause.module, tuple(axes))
    parameters = dict(model.named_parameters())
    unused = [name for name in trace.unused if name in parameters]
    if unused:
        dims = [(name, dim) for name in unused for dim in range(parameters[name].ndim)]
        yield Whole("", "", tuple(dims))


Owner = dict[int, tuple[str, int]]  # representative -> (group, channel)


def _grouped(
    roots: Mapping[tuple[str, int], Labels], pinned: frozenset[int]
) -> tuple[Owner, dict[str, Group]]:
    """Channels that appear on the same axes equally often form a group, in order of appearance."""
    seen: dict[int, list[tuple[int, int]]] = {}
    for number, axis in enumerate(roots.values()):
        channels, first, counts = np.unique(axis, return_index=True, return_counts=True)
        order = np.argsort(first)
        for channel, count in zip(channels[order].tolist(), counts[order].tolist(), strict=True):
            if channel != FROZEN:
                seen.setdefault(channel, []).append((number, count))
    members: dict[tuple[bool, tuple[tuple[int, int], ...]], list[int]] = {}
    for channel, listed in seen.items():
        members.setdefault((channel in pinned, tuple(listed)), []).append(channel)
    names = list(roots)
    owner: Owner = {}
    groups: dict[str, Group] = {}
    for (is_pinned, places), alike in members.items():
        if len(alike) == 1 and not is_pinned:
            continue  # a single channel is never cut
        name = _fresh_name(names[places[0][0]][0], groups)
        groups[name] = Group(name, len(alike), not is_pinned)
        owner.update({channel: (name, i) for i, channel in enumerate(alike)})
    return owner, groups


def _fresh_name(tensor: str, taken: Mapping[str, Group]) -> str:
    base = tensor.rpartition(".")[0] if tensor.endswith((".weight", ".bias")) else tensor
    name, number = base, 2
    while name in taken:
        name, number = f"{base}:{number}", number + 1
    return name


def _axis(roots: Labels | None, owner: Owner) -> Axis | None:
    if roots is None:
        return None
    places = [owner.get(int(c), (None, i)) for i, c in enumerate(roots)]
    if all(group is None for group, _ in places):
        return None
    return _spans(tuple(places))


@lru_cache(maxsize=1024)
def _spans(places: tuple[tuple[str | None, int], ...]) -> Axis:
    spans: list[Span] = []
    start = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end][0] != places[start][0]:
            run = places[start:end]
            spans.append(Span(run[0][0], tuple(channel for _, channel in run)))
            start = end
    return tuple(spans)


def axis_of(labels: Labels, trace: Trace, owner: Owner) -> Axis | None:
    """The axis that labels seen in a trace mean, given who owns the channels of its tensors."""
    return _axis(trace.channels.roots(labels), owner)


def owner_of(trace: Trace, structure: Structure) -> Owner:
    """The group and place there of every channel that a trace has found on a tensor."""
    owner: Owner = {}
    for name, dims in trace.tensors.items():
        for given, axis in zip(dims, structure.axes[name], strict=True):
            if given is not None and axis is not None:
                places = [(s.group, c) for s in axis for c in s.channels]
                for root, (group, channel) in zip(
                    trace.channels.roots(given).tolist(), places, strict=True
                ):
                    if group is not None:
                        owner[root] = (group, channel)
    return owner


def _declared(
    model: nn.Module,
    axes: Mapping[str, Sequence[str | None]],
    sizes: Mapping[str, str],
    classes: str | None,
) -> Structure:
    tensors = named_tensors(model)
    groups: dict[str, Group] = {}
    found: dict[str, tuple[Axis | None, ...]] = {n: (None,) * t.ndim for n, t in tensors.items()}
    for name, given in axes.items():
        if name not in tensors:
            raise StructureError(
                f"the model has no tensor '{name}'; its tensors are: {', '.join(tensors)}"
            )
        shape = tuple(tensors[name].shape)
        if len(given) != len(shape):
            raise StructureError(
                f"the axes {tuple(given)} of '{name}' name {len(given)} dimensions but the tensor "
                f"has shape {shape}; give one width group (or None) per dimension"
            )
        found[name] = tuple(_whole(g, n, name, groups) for g, n in zip(given, shape, strict=True))
    numbers = []
    for place, group in sizes.items():
        module, _, attribute = place.rpartition(".")
        if group not in groups:
            raise StructureError(f"sizes['{place}'] names group '{group}', which no axis follows")
        axis = (Span(group, tuple(range(groups[group].size))),)
        numbers.append(Size(module, attribute, None, axis))
    if classes is not None:
        if classes not in groups:
            raise StructureError(f"classes names group '{classes}', which no axis follows")
        groups[classes] = Group(classes, groups[classes].size, is_cut=False)
    shapes = {n: tuple(t.shape) for n, t in tensors.items()}
    return Structure(
        groups, found, shapes, _running_statistics(model), classes, tuple(numbers), is_exact=False
    )


def _running_statistics(model: nn.Module) -> frozenset[str]:
    names = {id(tensor): name for name, tensor in named_tensors(model).items()}
    return frozenset(
        names[id(statistic)]
        for layer in model.modules()
        if isinstance(layer, _NormBase)
        for statistic in (layer.running_mean, layer.running_var)
        if statistic is not None
    )


def _whole(group: str | None, size: int, tensor: str, groups: dict[str, Group]) -> Axis | None:
    if group is None:
        return None
    known = groups.setdefault(group, Group(group, size))
    if size % known.size:
        raise StructureError(
            f"group '{group}' has {known.size} channels but an axis of '{tensor}' has {size} "
            "positions; an axis has the same number of positions for every channel"
        )
    repeats = size // known.size  # as conv -> flatten -> linear lays them: a channel's together
    return (Span(group, tuple(c for c in range(known.size) for _ in range(repeats))),)


def traced(
    model: nn.Module,
    example: Example,
    exclude: tuple[str, ...],
    choices: Choices | None = None,
) -> tuple[Structure, Trace]:
    """The structure that one trace gives, not yet checked."""
    for name in exclude:
        if name not in dict(model.named_modules()):
            raise StructureError(f"exclude names module '{name}', which the model does not have")
    trace = follow(model, example, exclude, choices)
    return structure_of(model, trace), trace
