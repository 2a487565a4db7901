"""Checks that a structure must pass on the example before it is used.

1. Permuting the channels of a group, on every axis that follows it, leaves the output unchanged.
2. Built subnets run, forward and backward, and give outputs of the same shape.
3. Where nothing is computed across channels, a built subnet equals the masked supernet.
4. Tracing a built subnet gives the supernet's structure, cut: every axis means the same in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.errors import StructureError
from fedquilt.structure.cut import build_module, index_cells, list_positions
from fedquilt.structure.derive import narrow_structure
from fedquilt.structure.groups import Axis, count_leading
from fedquilt.structure.mask import mask_tensor
from fedquilt.structure.memory import is_large, trim_memory
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import Example, find_tensors, make_training_inputs, to_arguments
from fedquilt.structure.trace.readings import trace_once
from fedquilt.structure.trace.record import Choices, Trace
from fedquilt.structure.trace.sizes import find_mismatch
from fedquilt.structure.trace.tracer import suggest_fix
from fedquilt.structure.verify.probe import (
    Probe,
    copy_sharing_weights,
    drop_one,
    halve,
    is_close,
    make_half_probe,
    make_probe,
    run_model,
)
from fedquilt.structure.verify.shuffles import check_shuffles

WIDTHS = (0.5, 0.3)  # one that divides most sizes, one that divides few
LARGE_PART = 0.6  # of the channels of a large model: subnets are held beside it and its probe


def verify_structure(model: nn.Module, structure: Structure, example: Example) -> None:
    """Raises an error that names the place unless the structure fits the model."""
    _check_axes(structure)
    probe = make_probe(model, example)
    check_shuffles(structure, probe)
    check_subnets(structure, probe)
    check_training(model, structure, example, probe)


def check_subnets(structure: Structure, probe: Probe) -> Probe:
    """The probe of a subnet of half width.

    Raises unless subnets of several widths run and equal the masked model (checks 2 and 3).
    """
    has_large = is_large(probe.model)
    uneven = _draw_uneven_subnets(structure, LARGE_PART if has_large else 1.0)
    for subnet in (*uneven, *map(structure.subnet, WIDTHS)):
        outputs = run_subnet(structure, subnet, probe)
        if structure.is_exact:
            _check_masked(structure, subnet, probe, outputs)
        if has_large:
            trim_memory()  # of the built subnet
    small = make_half_probe(structure, probe)
    if not (structure.is_exact and probe.has_noise):  # the masked model does not say enough
        check_shuffles(narrow_structure(structure, small.counts), small)
    return small


def _draw_uneven_subnets(structure: Structure, largest: float) -> list[Subnet]:
    """Two subnets with random channels, of every group another fraction up to the largest."""
    generator = torch.Generator().manual_seed(3)

    def draw(size: int) -> list[int]:
        high = count_leading(size, largest)
        count = int(torch.randint(1, high + 1, (), generator=generator))
        return torch.randperm(size, generator=generator)[:count].tolist()

    sizes = {name: structure.groups[name].size for name in structure.cut_groups()}
    return [Subnet.from_channels({name: draw(n) for name, n in sizes.items()}) for _ in range(2)]


def _check_axes(structure: Structure) -> None:
    """Raises unless every axis of a group has all of its channels equally often."""
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


def run_subnet(structure: Structure, subnet: Subnet, probe: Probe) -> list[Tensor]:
    """The outputs of the built subnet; raises unless it runs and they have the model's shapes."""
    running: list[str] = [""]
    try:
        small = build_module(probe.model, structure, subnet)
        _track_modules(small, running)
        outputs = run_model(small, probe.inputs)
    except Exception as problem:
        where = running[-1]
        raise StructureError(
            f"a subnet of this model does not run: module '{where or type(probe.model).__name__}' "
            f"says: {problem}. It may hold a size in a number; {suggest_fix(where)}, or name the "
            "number with declare_structure(..., sizes=...)"
        ) from problem
    shapes = [[tuple(out.shape) for out in given] for given in (outputs, probe.outputs)]
    if shapes[0] != shapes[1]:
        raise StructureError(
            f"a subnet of this model gives outputs of shape {shapes[0]}, the model itself "
            f"{shapes[1]}; give the axes with declare_structure(...)"
        )
    return outputs


def _track_modules(model: nn.Module, running: list[str]) -> None:
    """Registers hooks that keep the names of the running modules, the innermost last."""

    def make_enter_hook(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, inputs: running.append(name)

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        running.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(make_enter_hook(name))
        module.register_forward_hook(leave)


def _check_masked(
    structure: Structure, subnet: Subnet, probe: Probe, outputs: Sequence[Tensor]
) -> None:
    where = index_cells(structure, subnet)
    whole = run_model(
        probe.model, probe.inputs, lambda n, t: mask_tensor(t, where[n], structure.axes[n])
    )
    if not is_close(outputs, whole):
        raise StructureError(
            "a subnet of this model does not compute what the model computes with the other "
            "channels masked out; exclude the modules that mix channels in an unusual way, or give "
            "the axes with declare_structure(...)"
        )


def check_retrace(
    model: nn.Module,
    structure: Structure,
    example: Example,
    exclude: tuple[str, ...],
    choices: Choices,
    probe: Probe,
) -> Trace:
    """The trace of a subnet; raises unless each axis means what it does in the model (check 4)."""
    differ: list[str] = []
    for count in (halve, drop_one):  # with one of them two sizes may be equal by chance
        sizes = {group: structure.groups[group].size for group in structure.cut_groups()}
        subnet = Subnet.from_channels({group: range(count(size)) for group, size in sizes.items()})
        run_subnet(structure, subnet, probe)
        small = build_module(model, structure, subnet)
        retraced, trace = trace_once(small, example, exclude, choices)
        differ = [
            name
            for name, axes in structure.axes.items()
            for axis, other in zip(axes, retraced.axes[name], strict=True)
            if _canonicalize(axis, structure, subnet) != _canonicalize(other, retraced, Subnet())
        ]
        if not differ:
            return trace
    raise StructureError(
        f"a subnet of this model reads '{differ[0]}' differently from the model itself; exclude "
        "the module around it, or give the axes with declare_structure(...)"
    )


def check_size_attributes(structure: Structure, whole: Trace, small: Trace) -> None:
    """Raises if a resized attribute changes anything but widths."""
    operation = find_mismatch(structure, whole, small) if structure.size_attributes else None
    if operation is not None:
        numbers = ", ".join(dict.fromkeys(size.name for size in structure.size_attributes))
        raise StructureError(
            f"numbers of this model look like widths and are none: with them set ({numbers}) the "
            f"operation {operation} does something else; name them with keep_numbers=[...]"
        )


def _canonicalize(axis: Axis | None, structure: Structure, subnet: Subnet) -> list[int] | None:
    """Numbers that are equal for positions of one channel, whatever the groups are called."""
    if axis is None:
        return None
    every: list[tuple[str, int] | None] = []
    for span in axis:
        group = span.group
        if group and structure.kept_count(subnet, group) > 1:
            every.extend((group, channel) for channel in span.channels)
        else:
            every.extend([None] * len(span.channels))
    index = list_positions(axis, subnet)
    kept = every[index] if isinstance(index, slice) else [every[i] for i in index.tolist()]
    if all(place is None for place in kept):
        return None
    order: dict[tuple[str, int], int] = {}
    return [-1 if place is None else order.setdefault(place, len(order)) for place in kept]


def check_training(
    model: nn.Module,
    structure: Structure,
    example: Example,
    probe: Probe,
    subnet: Subnet | None = None,
) -> None:
    """Raises unless the subnet can be trained on a batch on which the whole model can."""
    subnet = structure.subnet(WIDTHS[-1]) if subnet is None else subnet
    batches = zip(
        make_training_inputs(to_arguments(example)), make_training_inputs(probe.inputs), strict=True
    )
    for inputs, probe_inputs in batches:
        try:
            _run_backward(build_module(model, structure, subnet), inputs)
        except Exception as problem:
            try:
                _run_backward(copy_sharing_weights(probe.model), probe_inputs)
            except Exception:
                continue  # this model cannot be trained on such a batch at any width
            raise StructureError(
                f"a subnet of this model runs but cannot be trained: {problem}; exclude the "
                "modules that behave differently in training, or give the axes with "
                "declare_structure(...)"
            ) from problem
        return


def _run_backward(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        outputs = find_tensors(model.train()(*inputs))
        torch.stack([out.real.sum() for out in outputs if out.requires_grad]).sum().backward()
