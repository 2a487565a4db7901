"""A trace is not believed but checked, on the example, before anything is trained.

Four checks, which a wrong structure fails:

1. Shuffling the channels of a group, on every axis that follows it, leaves the output as it was.
2. Built subnets run, forwards and backwards, and give outputs of the same shape.
3. Where nothing is computed across channels, a built subnet equals the masked supernet.
4. Tracing a built subnet finds the supernet's structure, cut: every axis means the same in both.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.errors import StructureError, StructureWarning
from fedquilt.structure.blocks import (
    WHOLE_MODULE,
    Block,
    chosen_blocks,
    rewire,
)
from fedquilt.structure.cut import Index, build, cells, positions, put, shapes, view
from fedquilt.structure.groups import Axis, Span, Structure, follows, traced
from fedquilt.structure.layout import is_safe, takes_channels_last
from fedquilt.structure.numbers import require_numbers, unlike, with_numbers
from fedquilt.structure.operations import NOISE, base_name
from fedquilt.structure.stacks import answers_alike, block_candidates, blocks_at_work
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.trace import (
    Choices,
    Example,
    Interceptor,
    Trace,
    arguments,
    named_tensors,
    plain_kernels,
    remedy,
    tensors_in,
    training_inputs,
)

WIDTHS = (0.5, 0.3)  # one that divides most sizes, one that divides few
MOST_TRIES = 32  # for each way to settle the choices that a trace leaves open
LARGE = 2**24  # weights: a model that is checked as it is, since a copy in doubles is too much
MOST_CHANGED = 4  # tensors with other values that are there at once


def found_structure(
    model: nn.Module,
    example: Example,
    exclude: tuple[str, ...] = (),
    blocks: Sequence[str] | None = None,
    keep_numbers: tuple[str, ...] = (),
) -> Structure:
    """Traces a model; where a choice was open, takes the first that passes the check."""
    require_numbers(model, keep_numbers)
    probe: _Probe | None = None
    first: StructureError | None = None
    for choices, plain, trace in _traces(model, example, exclude):
        _require_something_to_cut(plain, model, exclude)
        sized = with_numbers(plain, trace, model, keep_numbers)
        for structure in itertools.islice(sized, MOST_TRIES):
            probe = probe or _probe(model, example)
            try:
                _check_subnets(structure, probe)
                _check_shuffles(structure, probe)
                _check_training(model, structure, example, probe)
                small = _check_trace_of_subnet(model, structure, example, exclude, choices, probe)
                _check_numbers(structure, trace, small)
            except StructureError as problem:
                first = first or problem
            else:
                small_probe = _half_probe(structure, probe)
                del probe  # it is as large as the model
                warn_of_whole(structure)
                is_last = _takes_channels_last(model, structure, example)
                structure = replace(structure, channels_last=is_last)
                return with_blocks(model, structure, example, blocks, small_probe)
    assert first is not None
    raise first


def _takes_channels_last(model: nn.Module, structure: Structure, example: Example) -> bool:
    """Tried on a subnet, which is quick, unless that is one that PyTorch does not survive."""
    small = build(model, structure, Subnet.of({g: range(n) for g, n in _halves(structure)}))
    return is_safe(model) and takes_channels_last(small if is_safe(small) else model, example)


def with_blocks(
    model: nn.Module,
    structure: Structure,
    example: Example,
    named: Sequence[str] | None = None,
    probe: _Probe | None = None,
) -> Structure:
    """The structure with the blocks that may be skipped.

    Those that were named must pass the check; of those that were found, modules of a class whose
    blocks do not pass are left alone. They are checked in a subnet, which is quick.
    """
    candidates = None if named is not None else block_candidates(model)
    if candidates is not None and not any(candidates):
        return structure
    probe = probe or _half_probe(structure, _probe(model, example))
    if candidates is None:
        blocks = chosen_blocks(model, named or ())
    else:
        blocks = blocks_at_work(probe.model, *candidates, lambda net: _outputs(net, probe.inputs))
    if not blocks:
        return structure
    alike: dict[tuple[type, int], dict[str, Block]] = {}
    for name, block in blocks.items():
        its_class = type(model.get_submodule(block.module))
        alike.setdefault((its_class, block.number), {})[name] = block
    try:
        return _blocks_checked(structure, blocks, model, example, probe)
    except StructureError:
        if named is not None:
            raise
    for kind in list(alike):
        try:
            _blocks_checked(structure, alike[kind], model, example, probe)
        except StructureError:
            del alike[kind]
    sound = {name for some in alike.values() for name in some}
    rest = {name: block for name, block in blocks.items() if name in sound}
    try:
        return _blocks_checked(structure, rest, model, example, probe)
    except StructureError:
        return structure  # each kind can be skipped, but not together


def _blocks_checked(
    structure: Structure,
    blocks: dict[str, Block],
    model: nn.Module,
    example: Example,
    probe: _Probe,
) -> Structure:
    """Raises unless branches can be told apart and left out, in use and in training.

    Branches times 1 leave the output as it was; without them it is that of branches times 0.
    """
    found = replace(structure, blocks=blocks, _names={})
    narrow = _narrowed(found, probe.counts)
    _check_declared(blocks, probe)
    one = _sharing(probe.model)
    several = [blocks, *([list(blocks)[::2]] if len(blocks) > 1 else [])]
    try:
        rewire(one, blocks, (), factors=dict.fromkeys(blocks, 1.0))
        same = _is_close(_outputs(one, probe.inputs), probe.outputs)
        for skipped in several if same else ():
            subnet = Subnet().skipping(*skipped)
            outputs = _running(narrow, subnet, probe)
            zeroed = _sharing(probe.model)
            rewire(zeroed, blocks, (), factors=dict.fromkeys(skipped, 0.0))
            same = same and _is_close(outputs, _outputs(zeroed, probe.inputs))
            gc.collect()  # a module with another forward refers to itself
    except StructureError:
        raise
    except Exception as problem:
        raise StructureError(
            f"the blocks {', '.join(blocks)} cannot be skipped: {problem}; name others"
        ) from problem
    if not same:
        raise StructureError(
            f"the blocks {', '.join(blocks)} cannot be skipped: without them the model does not "
            "compute what it does with their branches at zero; name others"
        )
    _check_training(model, found, example, probe, found.subnet(WIDTHS[-1]).skipping(*blocks))
    return found


def _check_declared(blocks: dict[str, Block], probe: _Probe) -> None:
    """What a module makes that is a block as a whole must be of the kind that it is given."""
    trial = _sharing(probe.model)

    def checking(name: str, returns: int | None) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            given = args[0] if args else next(iter(kwargs.values()), None)
            if answers_alike(given, output) != (True, returns):
                raise StructureError(
                    f"module '{name}' cannot be skipped: it makes {_kind(output)} of "
                    f"{_kind(given)}, and skipped it would give back what it was given; name "
                    "modules that keep the shape of their first input"
                )

        return hook

    for block in blocks.values():
        if block.number == WHOLE_MODULE:
            module = trial.get_submodule(block.module)
            hook = checking(block.name, block.returns)
            module.register_forward_hook(hook, with_kwargs=True)
    _outputs(trial, probe.inputs)


def _kind(value: Any) -> str:
    is_tensor = isinstance(value, Tensor)
    return f"a tensor of shape {tuple(value.shape)}" if is_tensor else f"a {type(value).__name__}"


def _traces(
    model: nn.Module, example: Example, exclude: tuple[str, ...]
) -> Iterator[tuple[Choices, Structure, Trace]]:
    """Ways to settle what a trace leaves open, those that leave most to cut first."""
    first, structure, trace = _with_splits(model, example, exclude)
    yield first, structure, trace
    for from_input in (False, True):
        choices = replace(first, one_number=True, from_input=from_input)
        yield choices, *traced(model, example, exclude, choices)
    for reshapes in _kinds_of_splits(model, trace):
        choices = replace(first, split_first=first.split_first ^ reshapes)
        yield choices, *traced(model, example, exclude, choices)


def _with_splits(
    model: nn.Module, example: Example, exclude: tuple[str, ...]
) -> tuple[Choices, Structure, Trace]:
    """Where channels last came to nothing they may come first: kept if more can then be cut."""
    choices = Choices()
    try:
        structure, trace = traced(model, example, exclude, choices)
    except StructureError:
        raise
    except Exception:
        _probe(model, example)  # says what is wrong with the example, if that is it
        raise
    frozen = [split for split in trace.splits if not trace.channels.is_cut(split.labels)]
    for reshapes in reversed(_kinds_of_splits(model, replace(trace, splits=frozen))):
        other = replace(choices, split_first=choices.split_first | reshapes)
        found, seen = traced(model, example, exclude, other)
        if _cut_channels(found) > _cut_channels(structure):
            choices, structure, trace = other, found, seen
    return choices, structure, trace


def _kinds_of_splits(model: nn.Module, trace: Trace) -> list[set[tuple[str, int]]]:
    """The reshapes that had a choice; those of one kind of module into the same sizes together."""
    alike: dict[tuple[type, tuple[int, ...]], set[tuple[str, int]]] = {}
    for split in trace.splits:
        kind = type(model.get_submodule(split.module))
        alike.setdefault((kind, split.sizes), set()).add((split.module, split.number))
    return list(alike.values())


def _cut_channels(structure: Structure) -> int:
    return sum(structure.groups[name].size for name in structure.cut_groups())


def _require_something_to_cut(
    structure: Structure, model: nn.Module, exclude: Sequence[str]
) -> None:
    if structure.cut_groups():
        return
    why, what_to_do = "every axis is tied to the input or the output", "add a hidden layer"
    if exclude:
        why, what_to_do = f"{why}, or excluded", "exclude less"
    if structure.whole:
        why = f"these axes stay whole: {'; '.join(map(str, structure.whole))}"
        what_to_do = "do without these operations, or run these layers on the example"
    raise StructureError(
        f"no channels of {type(model).__name__} can be cut: {why}; {what_to_do}, or give the axes "
        "with Structure.declare(...)"
    )


def warn_of_whole(structure: Structure) -> None:
    """Says which part of a model stays whole at every width, and why."""
    if not structure.whole:
        return
    kept, every = (
        sum(map(math.prod, shapes(structure, subnet).values()))
        for subnet in (structure.subnet(0.5), Subnet())
    )
    warnings.warn(
        f"a part of this model stays whole at every width, so that a subnet of half width keeps "
        f"{kept / every:.0%} of its weights: {'; '.join(map(str, structure.whole))}. "
        "Structure.describe() lists the axes; exclude modules if they are meant to stay whole",
        StructureWarning,
        stacklevel=4,
    )


def check(model: nn.Module, structure: Structure, example: Example) -> None:
    """Raises, naming the place, unless the structure is right for this model and example."""
    _check_axes(structure)
    probe = _probe(model, example)
    _check_shuffles(structure, probe)
    _check_subnets(structure, probe)
    _check_training(model, structure, example, probe)


@dataclass(frozen=True)
class _Probe:
    """A model whose channels all differ, inputs for it, and what it makes of them."""

    model: nn.Module
    inputs: tuple[Any, ...]
    outputs: list[Tensor]
    counts: Mapping[str, int] = field(default_factory=dict)  # of channels, where it is a subnet


def _check_subnets(structure: Structure, probe: _Probe) -> None:
    for subnet in (*_uneven(structure), *map(structure.subnet, WIDTHS)):
        outputs = _running(structure, subnet, probe)
        if structure.is_exact:
            _check_masked(structure, subnet, probe, outputs)
    if not structure.is_exact:  # its channels are as interchangeable, whatever numbers say
        small = _half_probe(structure, probe)
        _check_shuffles(_narrowed(structure, small.counts), small)


def _uneven(structure: Structure) -> list[Subnet]:
    """Some channels of every group, and another share of each."""
    generator = torch.Generator().manual_seed(3)

    def some(size: int) -> list[int]:
        count = int(torch.randint(1, size + 1, (), generator=generator))
        return torch.randperm(size, generator=generator)[:count].tolist()

    sizes = {name: structure.groups[name].size for name in structure.cut_groups()}
    return [Subnet.of({name: some(n) for name, n in sizes.items()}) for _ in range(2)]


def _probe(model: nn.Module, example: Example) -> _Probe:
    """In double precision (if it is not large) and on random inputs where it runs so."""
    problem: Exception | None = None
    is_large = sum(weight.numel() for weight in model.parameters()) > LARGE
    precisions = (False,) if is_large else (True, False)
    for double, inputs in itertools.product(precisions, (_random_like, arguments)):
        rough = _roughened(model, double=double)
        given = tuple(
            x.double() if double and isinstance(x, Tensor) and x.is_floating_point() else x
            for x in inputs(example)
        )
        try:
            expected = _outputs(rough, given)
        except Exception as failure:
            problem = failure
            continue
        if all(bool(out.isfinite().any()) for out in expected):
            return _Probe(rough, given, expected)
    raise StructureError(
        "the model does not run on its example to a finite output of tensors, so that nothing can "
        f"be checked; give an example on which it does ({problem or 'the output is not finite'})"
    ) from problem


def _roughened(model: nn.Module, *, double: bool) -> nn.Module:
    """A copy in which no two channels are alike."""
    rough = copy.deepcopy(model).eval()
    if double:
        rough = rough.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in named_tensors(rough).values():
            if tensor.is_floating_point():
                spread = tensor.abs().nan_to_num(0, 0, 0)  # -inf in a mask stays
                least = 0.1 if _is_flat(tensor) else 0.1 * spread.mean()
                if not isinstance(tensor, nn.Parameter) and not _is_flat(tensor):
                    least = 0.0  # zeros in a buffer may be a mask
                noise = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
                if isinstance(tensor, nn.Parameter) and tensor.ndim > 1 and not _is_flat(tensor):
                    noise.sub_(0.5)  # deep nets of positive weights end in infinity
                tensor.add_(noise.mul_(spread.add_(least)))
    return rough


def _is_flat(tensor: Tensor) -> bool:
    some = tensor.flatten()[:2]
    return bool((some == some[:1]).all()) and bool((tensor == some[:1]).all()) and len(some) > 0


def _random_like(example: Example) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for x in arguments(example)
    )


Changed = Callable[[str, Tensor], Tensor]  # the values of a tensor of a model in another's place


def _outputs(
    model: nn.Module, inputs: tuple[Any, ...], changed: Changed | None = None
) -> list[Tensor]:
    """All tensors that a model gives, without the noise it may draw; or with other tensors."""
    with torch.no_grad(), plain_kernels(), _Still(), torch.random.fork_rng(devices=[]):
        if changed is None:
            found = tensors_in(model(*inputs))
        else:
            with _Changing(model, changed):
                found = tensors_in(model(*inputs))
    if not found:
        raise StructureError("its output holds no tensors; give them as a tuple, list or dict")
    return found


class _Changing(Interceptor):
    """Other values in the place of a model's tensors, made where an operation takes one.

    So there are never more than a few of them: a second model would be as large as the first.
    """

    def __init__(self, model: nn.Module, changed: Changed) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in named_tensors(model).items()}
        self._changed, self._recent = changed, dict[str, Tensor]()
        self._written: dict[str, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_written = func._schema.is_mutable
        args = tuple(self._other(value, is_written=is_written) for value in args)
        named = {k: self._other(v, is_written=is_written) for k, v in (kwargs or {}).items()}
        return func(*args, **named)

    def _other(self, value: Any, *, is_written: bool) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._other(item, is_written=is_written) for item in value)
        name = self._names.get(id(value))
        return value if name is None else self._tensor(name, value, is_written=is_written)

    def _tensor(self, name: str, tensor: Tensor, *, is_written: bool) -> Tensor:
        if name in self._written:
            return self._written[name]
        if name not in self._recent:
            if len(self._recent) == MOST_CHANGED:
                del self._recent[next(iter(self._recent))]
            self._recent[name] = self._changed(name, tensor.detach())
        if is_written:
            self._written[name] = self._recent[name].clone()
            return self._written[name]
        return self._recent[name]


class _Still(Interceptor):
    """Noise is one constant, so that it is the same wherever channels lie."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if base_name(func) in NOISE and result.is_floating_point():
            result.fill_(0.5)
        return result


def _is_close(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(map(_is_close_tensor, left, right))


def _is_close_tensor(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or not torch.equal(left.isfinite(), right.isfinite()):
        return False
    left, right = left[right.isfinite()], right[right.isfinite()]
    tolerance = 1e-5 if right.dtype in (torch.float64, torch.complex128) else 1e-3
    distance = (left - right).abs() if right.is_floating_point() else (left != right).double()
    return bool((distance <= tolerance * right.abs().amax() + 1e-12).all()) if len(right) else True


def _check_axes(structure: Structure) -> None:
    """Every axis that follows a group has all of its channels, each as often as the others."""
    for name, axes in structure.axes.items():
        for axis, size in zip(axes, structure.shapes[name], strict=True):
            counts = Counter((s.group, c) for s in axis or () for c in s.channels)
            for group in {s.group for s in axis or () if s.group is not None}:
                often = {counts[group, c] for c in range(structure.groups[group].size)}
                if len(often) > 1 or counts.total() != size:
                    raise StructureError(
                        f"an axis of '{name}' has {size} positions, which are not as many for each "
                        f"of the {structure.groups[group].size} channels of group '{group}'; give "
                        "every channel its positions"
                    )


Order = Callable[[int], list[int]]


def _rotated(size: int) -> list[int]:
    return [*range(1, size), 0]


def _swapped(size: int) -> list[int]:
    return [1, 0, *range(2, size)] if size > 1 else [0]


def _check_shuffles(structure: Structure, probe: _Probe) -> None:
    """Two shuffles of which all others are made."""
    groups = structure.cut_groups()
    for order in (_rotated, _swapped):
        if _is_close(_shuffled_output(structure, groups, order, probe), probe.outputs):
            continue
        wrong = next(
            (
                group
                for group in groups
                if not _is_close(_shuffled_output(structure, [group], order, probe), probe.outputs)
            ),
            groups[0],
        )
        where = next(
            n for n, axes in structure.axes.items() if any(follows(a, wrong) for a in axes)
        )
        raise StructureError(
            f"the channels of group '{wrong}' are not interchangeable: something the trace cannot "
            f"see depends on their place; {remedy(where.rpartition('.')[0])}, or give the axes "
            "with Structure.declare(...)"
        )


def _half_probe(structure: Structure, probe: _Probe) -> _Probe:
    """The same of a subnet with half of the channels."""
    counts = dict(_halves(structure))
    small = build(probe.model, structure, Subnet.of({g: range(n) for g, n in counts.items()}))
    return _Probe(small, probe.inputs, _outputs(small, probe.inputs), counts)


def _halves(structure: Structure) -> list[tuple[str, int]]:
    """Half of the channels of every group, but two of them where there are two."""
    return [(name, _half(structure.groups[name].size)) for name in structure.cut_groups()]


def _narrowed(structure: Structure, counts: Mapping[str, int]) -> Structure:
    """The structure of the subnet that has the first channels of each group."""

    def first(span: Span) -> Span:
        count = counts.get(span.group) if span.group is not None else None
        kept = (c for c in span.channels if count is None or c < count)
        return replace(span, channels=tuple(kept))

    def narrow(axis: Axis) -> Axis:
        return tuple(map(first, axis))

    return replace(
        structure,
        groups={n: replace(g, size=counts.get(n, g.size)) for n, g in structure.groups.items()},
        axes={
            name: tuple(axis and narrow(axis) for axis in axes)
            for name, axes in structure.axes.items()
        },
        sizes=tuple(replace(size, axis=narrow(size.axis)) for size in structure.sizes),
        _names={},
    )


def _shuffled_output(
    structure: Structure, groups: Sequence[str], shuffle: Order, probe: _Probe
) -> list[Tensor]:
    order = {group: shuffle(structure.groups[group].size) for group in groups}

    def shuffled(name: str, value: Tensor) -> Tensor:
        for dim, axis in enumerate(structure.axes[name]):
            if axis is not None and any(s.group in order for s in axis):
                value = value.index_select(dim, _shuffled_positions(axis, order))
        return value

    return _outputs(probe.model, probe.inputs, shuffled)


def _shuffled_positions(axis: Axis, order: dict[str, list[int]]) -> Tensor:
    places: dict[tuple[str | None, int], list[int]] = {}
    offset = 0
    for span in axis:
        for i, channel in enumerate(span.channels):
            places.setdefault((span.group, channel), []).append(offset + i)
        offset += len(span.channels)
    source = list(range(offset))
    for (group, channel), here in places.items():
        if group in order:
            for a, b in zip(here, places[(group, order[group][channel])], strict=True):
                source[a] = b
    return torch.tensor(source)


def _running(structure: Structure, subnet: Subnet, probe: _Probe) -> list[Tensor]:
    """What the built subnet gives for the inputs."""
    running: list[str] = [""]
    try:
        small = build(probe.model, structure, subnet)
        _watch(small, running)
        outputs = _outputs(small, probe.inputs)
    except Exception as problem:
        where = running[-1]
        raise StructureError(
            f"a subnet of this model does not run: module '{where or type(probe.model).__name__}' "
            f"says: {problem}. It may hold a size in a number; {remedy(where)}, or name the number "
            "with Structure.declare(..., sizes=...)"
        ) from problem
    shapes = [[tuple(out.shape) for out in given] for given in (outputs, probe.outputs)]
    if shapes[0] != shapes[1]:
        raise StructureError(
            f"a subnet of this model gives outputs of shape {shapes[0]}, the model itself "
            f"{shapes[1]}; give the axes with Structure.declare(...)"
        )
    return outputs


def _watch(model: nn.Module, running: list[str]) -> None:
    """Keeps the names of the modules that are running, innermost last."""

    def entering(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, inputs: running.append(name)

    def leaving(module: nn.Module, inputs: Any, output: Any) -> None:
        running.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(entering(name))
        module.register_forward_hook(leaving)


def masked(model: nn.Module, structure: Structure, subnet: Subnet) -> nn.Module:
    """The full-size model in which every cell outside the subnet is zero, and skipped branches."""
    full = copy.deepcopy(model)
    rewire(full, structure.blocks, (), factors=dict.fromkeys(subnet.skipped, 0.0))
    where = cells(structure, Subnet(subnet.kept))
    with torch.no_grad():
        for name, tensor in named_tensors(full).items():
            tensor.copy_(_mask(tensor, where[name], structure.axes[name]))
    return full


def _mask(tensor: Tensor, where: tuple[Index, ...], axes: Sequence[Axis | None]) -> Tensor:
    """A tensor that is zero but for the cells given."""
    if all(axis is None for axis in axes):
        return tensor
    masked = torch.zeros_like(tensor)
    put(masked, where, view(tensor, where))
    return masked


def _check_masked(
    structure: Structure, subnet: Subnet, probe: _Probe, outputs: Sequence[Tensor]
) -> None:
    where = cells(structure, subnet)
    whole = _outputs(probe.model, probe.inputs, lambda n, t: _mask(t, where[n], structure.axes[n]))
    if not _is_close(outputs, whole):
        raise StructureError(
            "a subnet of this model does not compute what the model computes with the other "
            "channels masked out; exclude the modules that mix channels in an unusual way, or give "
            "the axes with Structure.declare(...)"
        )


def _check_trace_of_subnet(
    model: nn.Module,
    structure: Structure,
    example: Example,
    exclude: tuple[str, ...],
    choices: Choices,
    probe: _Probe,
) -> Trace:
    """The trace of a subnet of which every axis means what it does in the model."""
    differ: list[str] = []
    for some in (_half, _all_but_one):  # at one of them sizes may be equal by chance
        sizes = {group: structure.groups[group].size for group in structure.cut_groups()}
        subnet = Subnet.of({group: range(some(size)) for group, size in sizes.items()})
        _running(structure, subnet, probe)
        found, trace = traced(build(model, structure, subnet), example, exclude, choices)
        differ = [
            name
            for name, axes in structure.axes.items()
            for axis, seen in zip(axes, found.axes[name], strict=True)
            if _places(axis, structure, subnet) != _places(seen, found, Subnet())
        ]
        if not differ:
            return trace
    raise StructureError(
        f"a subnet of this model reads '{differ[0]}' differently from the model itself; exclude "
        "the module around it, or give the axes with Structure.declare(...)"
    )


def _check_numbers(structure: Structure, whole: Trace, small: Trace) -> None:
    """Numbers that were set must change nothing but widths."""
    operation = unlike(structure, whole, small) if structure.sizes else None
    if operation is not None:
        numbers = ", ".join(dict.fromkeys(size.name for size in structure.sizes))
        raise StructureError(
            f"numbers of this model look like widths and are none: with them set ({numbers}) the "
            f"operation {operation} does something else; name them with keep_numbers=[...]"
        )


def _half(size: int) -> int:
    return max(math.ceil(size / 2), min(2, size))  # one channel alone could belong to any axis


def _all_but_one(size: int) -> int:
    return max(size - 1, min(2, size))


def _places(axis: Axis | None, structure: Structure, subnet: Subnet) -> list[int] | None:
    """Which positions of a cut axis belong together, whatever the groups are called."""
    if axis is None:
        return None
    every = [
        (s.group, c) if s.group and structure.kept(subnet, s.group) > 1 else None
        for s in axis
        for c in s.channels
    ]
    index = positions(axis, subnet)
    kept = every[index] if isinstance(index, slice) else [every[i] for i in index.tolist()]
    if all(place is None for place in kept):
        return None
    order: dict[tuple[str, int], int] = {}
    return [-1 if place is None else order.setdefault(place, len(order)) for place in kept]


def _check_training(
    model: nn.Module,
    structure: Structure,
    example: Example,
    probe: _Probe,
    subnet: Subnet | None = None,
) -> None:
    """A step of training must be possible for the subnet where it is for the whole model."""
    subnet = structure.subnet(WIDTHS[-1]) if subnet is None else subnet
    batches = zip(training_inputs(arguments(example)), training_inputs(probe.inputs), strict=True)
    for inputs, rough in batches:
        try:
            _backward(build(model, structure, subnet), inputs)
        except Exception as problem:
            try:
                _backward(_sharing(probe.model), rough)
            except Exception:
                continue  # this model cannot be trained on such a batch at any width
            raise StructureError(
                f"a subnet of this model runs but cannot be trained: {problem}; exclude the "
                "modules that behave differently in training, or give the axes with "
                "Structure.declare(...)"
            ) from problem
        return


def _sharing(model: nn.Module) -> nn.Module:
    """A copy with the same weights in memory and buffers of its own, which training changes."""
    shared: dict[int, Any] = {
        id(weight): nn.Parameter(weight.detach(), weight.requires_grad)
        for weight in model.parameters()
    }
    return copy.deepcopy(model, shared)


def _backward(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        outputs = tensors_in(model.train()(*inputs))
        torch.stack([out.real.sum() for out in outputs if out.requires_grad]).sum().backward()
