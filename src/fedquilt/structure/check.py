"""A trace is not believed but checked, on the example, before anything is trained.

Four checks, which a wrong structure fails:

1. Shuffling the channels of a group, on every axis that follows it, leaves the output as it was.
2. Built subnets run, forwards and backwards, and give outputs of the same shape.
3. Where nothing is computed across channels, a built subnet equals the masked supernet.
4. Tracing a built subnet finds the supernet's structure, cut: every axis means the same in both.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedquilt.errors import StructureError, StructureWarning
from fedquilt.structure.blocks import (
    WHOLE_MODULE,
    Block,
    chosen_blocks,
    rewire,
)
from fedquilt.structure.cut import build, cells, positions, put, shapes
from fedquilt.structure.groups import Axis, Span, Structure, follows, traced
from fedquilt.structure.layout import takes_channels_last
from fedquilt.structure.numbers import require_numbers, unlike, with_numbers
from fedquilt.structure.operations import NOISE, base_name
from fedquilt.structure.stacks import answers_alike, block_candidates, blocks_at_work
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.trace import (
    Choices,
    Example,
    Trace,
    arguments,
    call_with,
    named_tensors,
    plain_kernels,
    remedy,
    tensors_in,
    training_inputs,
)

WIDTHS = (0.5, 0.3)  # one that divides most sizes, one that divides few
MOST_TRIES = 32  # for each way to settle the choices that a trace leaves open


def traced_and_checked(
    model: nn.Module, example: Example, exclude: tuple[str, ...], keep_numbers: tuple[str, ...] = ()
) -> Structure:
    """Traces a model; where a choice was open, takes the first that passes the check."""
    require_numbers(model, keep_numbers)
    probe = _probe(model, example)
    first: StructureError | None = None
    for choices, plain, trace in _traces(model, example, exclude):
        _require_something_to_cut(plain, model, exclude)
        sized = with_numbers(plain, trace, model, keep_numbers)
        for structure in itertools.islice(sized, MOST_TRIES):
            try:
                _check_subnets(structure, probe)
                _check_shuffles(structure, probe)
                _check_training(model, structure, example)
                small = _check_trace_of_subnet(model, structure, example, exclude, choices, probe)
                _check_numbers(structure, trace, small)
            except StructureError as problem:
                first = first or problem
            else:
                return replace(structure, channels_last=takes_channels_last(model, example))
    assert first is not None
    raise first


def with_blocks(
    model: nn.Module, structure: Structure, example: Example, named: Sequence[str] | None = None
) -> Structure:
    """The structure with the blocks that may be skipped.

    Those that were named must pass the check; of those that were found, modules of a class whose
    blocks do not pass are left alone.
    """
    candidates = None if named is not None else block_candidates(model)
    if candidates is not None and not any(candidates):
        return structure
    probe = _probe(model, example)
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
    _check_declared(blocks, probe)
    one = copy.deepcopy(probe.model)
    several = [blocks, *([list(blocks)[::2]] if len(blocks) > 1 else [])]
    try:
        rewire(one, blocks, (), factors=dict.fromkeys(blocks, 1.0))
        same = _is_close(_outputs(one, probe.inputs), probe.outputs)
        for skipped in several if same else ():
            subnet = Subnet().skipping(*skipped)
            outputs = _running(found, subnet, probe)
            zeroed = masked(probe.model, found, subnet)
            same = same and _is_close(outputs, _outputs(zeroed, probe.inputs))
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
    _check_training(model, found, example, Subnet().skipping(*blocks))
    return found


def _check_declared(blocks: dict[str, Block], probe: _Probe) -> None:
    """What a module makes that is a block as a whole must be of the kind that it is given."""
    trial = copy.deepcopy(probe.model)

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
    structure, trace = traced(model, example, exclude, choices)
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
        stacklevel=3,
    )


def check(model: nn.Module, structure: Structure, example: Example) -> None:
    """Raises, naming the place, unless the structure is right for this model and example."""
    _check_axes(structure)
    probe = _probe(model, example)
    _check_shuffles(structure, probe)
    _check_subnets(structure, probe)
    _check_training(model, structure, example)


@dataclass(frozen=True)
class _Probe:
    """A model whose channels all differ, inputs for it, and what it makes of them."""

    model: nn.Module
    inputs: tuple[Any, ...]
    outputs: list[Tensor]


def _check_subnets(structure: Structure, probe: _Probe) -> None:
    for subnet in (*_uneven(structure), *map(structure.subnet, WIDTHS)):
        outputs = _running(structure, subnet, probe)
        if structure.is_exact:
            _check_masked(structure, subnet, probe, outputs)
    if not structure.is_exact:
        _check_shuffled_subnet(structure, probe)


def _uneven(structure: Structure) -> list[Subnet]:
    """Some channels of every group, and another share of each."""
    generator = torch.Generator().manual_seed(3)

    def some(size: int) -> list[int]:
        count = int(torch.randint(1, size + 1, (), generator=generator))
        return torch.randperm(size, generator=generator)[:count].tolist()

    sizes = {name: structure.groups[name].size for name in structure.cut_groups()}
    return [Subnet.of({name: some(n) for name, n in sizes.items()}) for _ in range(2)]


def _probe(model: nn.Module, example: Example) -> _Probe:
    """In double precision and on random inputs where the model runs so, else as it is."""
    problem: Exception | None = None
    for double, inputs in itertools.product((True, False), (_random_like, arguments)):
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
                tensor.add_((spread + least) * noise)
    return rough


def _is_flat(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and bool((tensor == tensor.flatten()[0]).all())


def _random_like(example: Example) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for x in arguments(example)
    )


def _outputs(model: Callable[..., Any], inputs: tuple[Any, ...]) -> list[Tensor]:
    """All tensors that a model gives, without the noise it may draw."""
    with torch.no_grad(), plain_kernels(), _still(), torch.random.fork_rng(devices=[]):
        found = tensors_in(model(*inputs))
    if not found:
        raise StructureError("its output holds no tensors; give them as a tuple, list or dict")
    return found


def _still() -> TorchDispatchMode:
    return _Still()  # type: ignore[no-untyped-call]  # PyTorch leaves its __init__ untyped


class _Still(TorchDispatchMode):
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


def _check_shuffled_subnet(structure: Structure, probe: _Probe) -> None:
    """A subnet's channels are interchangeable as the model's are, whatever is kept in numbers."""
    counts = {name: _half(structure.groups[name].size) for name in structure.cut_groups()}
    small = build(probe.model, structure, Subnet.of({n: range(k) for n, k in counts.items()}))
    outputs = _outputs(small, probe.inputs)
    _check_shuffles(_narrowed(structure, counts), _Probe(small, probe.inputs, outputs))


def _narrowed(structure: Structure, counts: Mapping[str, int]) -> Structure:
    """The structure of the subnet that has the first channels of each group."""

    def first(span: Span) -> Span:
        count = counts.get(span.group) if span.group is not None else None
        kept = (c for c in span.channels if count is None or c < count)
        return replace(span, channels=tuple(kept))

    return replace(
        structure,
        groups={n: replace(g, size=counts.get(n, g.size)) for n, g in structure.groups.items()},
        axes={
            name: tuple(axis and tuple(map(first, axis)) for axis in axes)
            for name, axes in structure.axes.items()
        },
        _names={},
    )


def _shuffled_output(
    structure: Structure, groups: Sequence[str], shuffle: Order, probe: _Probe
) -> list[Tensor]:
    order = {group: shuffle(structure.groups[group].size) for group in groups}
    tensors = named_tensors(probe.model)
    shuffled = {}
    for name, axes in structure.axes.items():
        value = tensors[name].detach()
        for dim, axis in enumerate(axes):
            if axis is not None and any(s.group in order for s in axis):
                value = value.index_select(dim, _shuffled_positions(axis, order))
        shuffled[name] = value
    return _outputs(lambda *x: call_with(probe.model, shuffled, x), probe.inputs)


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
            if tensor.ndim and any(axis is not None for axis in structure.axes[name]):
                keep = torch.zeros(tensor.shape, dtype=torch.bool)
                put(keep, where[name], True)
                tensor.masked_fill_(~keep, 0)
    return full


def _check_masked(
    structure: Structure, subnet: Subnet, probe: _Probe, outputs: Sequence[Tensor]
) -> None:
    whole = masked(probe.model, structure, subnet)
    if not _is_close(outputs, _outputs(whole, probe.inputs)):
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
    model: nn.Module, structure: Structure, example: Example, subnet: Subnet | None = None
) -> None:
    """A step of training must be possible for the subnet where it is for the whole model."""
    subnet = structure.subnet(WIDTHS[-1]) if subnet is None else subnet
    for inputs in training_inputs(arguments(example)):
        try:
            _backward(build(model, structure, subnet), inputs)
        except Exception as problem:
            try:
                _backward(copy.deepcopy(model), inputs)
            except Exception:
                continue  # this model cannot be trained on such a batch at any width
            raise StructureError(
                f"a subnet of this model runs but cannot be trained: {problem}; exclude the "
                "modules that behave differently in training, or give the axes with "
                "Structure.declare(...)"
            ) from problem
        return


def _backward(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        outputs = tensors_in(model.train()(*inputs))
        torch.stack([out.real.sum() for out in outputs if out.requires_grad]).sum().backward()
