"""The two ways to get the structure of a model: trace it on an example, or declare its axes."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from fedquilt.errors import StructureError, StructureWarning
from fedquilt.structure.computed import detach_computed
from fedquilt.structure.cut import build_module, compute_shapes
from fedquilt.structure.declare import build_declared
from fedquilt.structure.layout import is_safe, supports_channels_last
from fedquilt.structure.memory import is_large, release_freed_memory, trim_memory
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.supported import require_supported
from fedquilt.structure.tensors import Example
from fedquilt.structure.trace.readings import Reading, list_readings
from fedquilt.structure.trace.sizes import find_size_attributes, validate_patterns
from fedquilt.structure.verify.blocks import add_blocks
from fedquilt.structure.verify.checks import (
    check_retrace,
    check_size_attributes,
    check_subnets,
    check_training,
    verify_structure,
)
from fedquilt.structure.verify.probe import Probe, count_halves, make_probe
from fedquilt.structure.verify.shuffles import check_shuffles

MAX_TRIES = 32  # combinations of size attributes that are verified, for each reading of a trace


def trace_structure(
    model: nn.Module,
    example: Example,
    *,
    exclude: Sequence[str] = (),
    blocks: Sequence[str] | None = None,
    keep_numbers: Sequence[str] = (),
) -> Structure:
    """Finds the structure of a model by running it on an example, and verifies it there.

    Attention is cut inside each head: the number of heads stays.

    Args:
        model: any model of Python modules. It is left as it was.
        example: an input of the model, or a tuple of its positional arguments.
        exclude: names of modules that are never cut.
        blocks: patterns of the blocks that may be skipped: residual branches, or modules that as a
            whole add something to their input. By default all residual branches that are found.
        keep_numbers: patterns of module attributes that are not widths though they look like one,
            such as ``["encoder.max_len", "*.scale"]``. ``describe`` lists those that are followed.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> trace_structure(net, torch.zeros(1, 4)).cut_groups()
    ['0']
    """
    for name, names in (("exclude", exclude), ("blocks", blocks), ("keep_numbers", keep_numbers)):
        if isinstance(names, str):
            raise StructureError(f"{name} is a tuple of names, got '{names}'; write ('{names}',)")
    require_supported(model)
    detach_computed(model)
    try:
        return _find_structure(model, example, tuple(exclude), blocks, tuple(keep_numbers))
    finally:
        if is_large(model):
            release_freed_memory()


def declare_structure(
    model: nn.Module,
    axes: Mapping[str, Sequence[str | None]],
    *,
    sizes: Mapping[str, str] | None = None,
    classes: str | None = None,
    example: Example | None = None,
) -> Structure:
    """Makes a structure from axes that you state, for a model that cannot be traced.

    Args:
        model: the model.
        axes: the width group (or None) of every dimension of the tensors that are cut. Tensors
            that are not named stay whole.
        sizes: module attributes and the group whose size they are: ``{"attention.head_dim": "h"}``.
        classes: the group of the outputs, which no width cuts.
        example: an input of the model. With it the structure is verified as a traced one is.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> axes = {"0.weight": ("h", None), "0.bias": ("h",), "2.weight": (None, "h")}
    >>> declare_structure(net, axes).groups["h"]
    Group(name='h', size=8, is_cut=True)
    """
    require_supported(model)
    detach_computed(model)
    structure = build_declared(model, axes, sizes or {}, classes)
    if example is not None:
        verify_structure(model, structure, example)
        structure = replace(structure, channels_last=supports_channels_last(model, example))
    return structure


def _find_structure(
    model: nn.Module,
    example: Example,
    exclude: tuple[str, ...],
    blocks: Sequence[str] | None,
    keep_numbers: tuple[str, ...],
) -> Structure:
    """Returns the first reading of the model that passes all checks; raises the first problem."""
    validate_patterns(model, keep_numbers)
    probe: Probe | None = None
    first: StructureError | None = None
    for choices, plain, trace in _trace(model, example, exclude):
        _require_something_to_cut(plain, model, exclude)
        if is_large(model):
            release_freed_memory()  # of the copy that was traced
        sized = find_size_attributes(plain, trace, model, keep_numbers)
        for structure in itertools.islice(sized, MAX_TRIES):
            probe = probe or make_probe(model, example, share=trace.keeps_weights)
            try:
                small_probe = check_subnets(structure, probe)
                check_shuffles(structure, probe)
                _trim(model)
                check_training(model, structure, example, probe)
                _trim(model)
                small = check_retrace(model, structure, example, exclude, choices, probe)
                check_size_attributes(structure, trace, small)
            except StructureError as problem:
                first = first or problem
            else:
                del probe  # it is as large as the model
                _warn_of_uncut_axes(structure)
                is_last = _supports_channels_last(model, structure, example)
                structure = replace(structure, channels_last=is_last)
                _trim(model)
                return add_blocks(model, structure, example, blocks, small_probe)
    assert first is not None
    raise first


def _trim(model: nn.Module) -> None:
    """Gives back the memory of subnets that are no longer needed, if it matters."""
    if is_large(model):
        trim_memory()


def _trace(model: nn.Module, example: Example, exclude: tuple[str, ...]) -> Iterator[Reading]:
    try:
        yield from list_readings(model, example, exclude)
    except StructureError:
        raise
    except Exception:
        make_probe(model, example)  # says what is wrong with the example, if that is it
        raise


def _supports_channels_last(model: nn.Module, structure: Structure, example: Example) -> bool:
    """Tries channels last on a subnet, which is quick, unless PyTorch would crash on it."""
    small = build_module(
        model, structure, Subnet.from_channels({g: range(n) for g, n in count_halves(structure)})
    )
    return is_safe(model) and supports_channels_last(small if is_safe(small) else model, example)


def _require_something_to_cut(
    structure: Structure, model: nn.Module, exclude: Sequence[str]
) -> None:
    if structure.cut_groups():
        return
    why, what_to_do = "every axis is tied to the input or the output", "add a hidden layer"
    if exclude:
        why, what_to_do = f"{why}, or excluded", "exclude less"
    if structure.uncut_axes:
        why = f"these axes stay whole: {'; '.join(map(str, structure.uncut_axes))}"
        what_to_do = "do without these operations, or run these layers on the example"
    raise StructureError(
        f"no channels of {type(model).__name__} can be cut: {why}; {what_to_do}, or give the axes "
        "with declare_structure(...)"
    )


def _warn_of_uncut_axes(structure: Structure) -> None:
    """Warns which part of the model stays whole at every width, and why."""
    if not structure.uncut_axes:
        return
    kept, every = (
        sum(map(math.prod, compute_shapes(structure, subnet).values()))
        for subnet in (structure.subnet(0.5), Subnet())
    )
    warnings.warn(
        f"a part of this model stays whole at every width, so that a subnet of half width keeps "
        f"{kept / every:.0%} of its weights: {'; '.join(map(str, structure.uncut_axes))}. "
        "Structure.describe() lists the axes; exclude modules if they are meant to stay whole",
        StructureWarning,
        stacklevel=4,
    )
