"""Which blocks of a model can be skipped, verified on the example."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fedquilt.errors import StructureError
from fedquilt.structure.blocks.block import WHOLE_MODULE, Block
from fedquilt.structure.blocks.find import select_blocks
from fedquilt.structure.blocks.rewire import get_first_input, rewire
from fedquilt.structure.blocks.stacks import (
    find_block_candidates,
    find_working_blocks,
    preserves_shape,
)
from fedquilt.structure.derive import narrow_structure
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import Example
from fedquilt.structure.verify.checks import WIDTHS, check_training, run_subnet
from fedquilt.structure.verify.probe import (
    Probe,
    copy_sharing_weights,
    is_close,
    make_half_probe,
    make_probe,
    run_model,
)


def add_blocks(
    model: nn.Module,
    structure: Structure,
    example: Example,
    named: Sequence[str] | None = None,
    probe: Probe | None = None,
) -> Structure:
    """Adds the blocks that may be skipped to a structure.

    Named blocks must pass the checks. Of blocks that were found, those of a module class that does
    not pass are left out. They are checked in a subnet, which is quick.
    """
    candidates = None if named is not None else find_block_candidates(model)
    if candidates is not None and not any(candidates):
        return structure
    probe = probe or make_half_probe(structure, make_probe(model, example))
    if candidates is None:
        blocks = select_blocks(model, named or ())
    else:
        blocks = find_working_blocks(
            probe.model, *candidates, lambda net: run_model(net, probe.inputs)
        )
    if not blocks:
        return structure
    try:
        return _verify_blocks(structure, blocks, model, example, probe)
    except StructureError:
        if named is not None:
            raise
    sound = _select_sound(structure, blocks, model, example, probe)
    try:
        return _verify_blocks(structure, sound, model, example, probe)
    except StructureError:
        return structure  # each kind can be skipped, but not together


def _select_sound(
    structure: Structure, blocks: dict[str, Block], model: nn.Module, example: Example, probe: Probe
) -> dict[str, Block]:
    """The blocks that pass the checks together with those of the same module class."""
    kinds: dict[tuple[type, int], dict[str, Block]] = {}
    for name, block in blocks.items():
        kind = type(model.get_submodule(block.module))
        kinds.setdefault((kind, block.number), {})[name] = block
    sound: set[str] = set()
    for alike in kinds.values():
        with suppress(StructureError):
            _verify_blocks(structure, alike, model, example, probe)
            sound |= alike.keys()
    return {name: block for name, block in blocks.items() if name in sound}


def _verify_blocks(
    structure: Structure,
    blocks: dict[str, Block],
    model: nn.Module,
    example: Example,
    probe: Probe,
) -> Structure:
    """The structure with these blocks; raises unless they can be skipped, also in training.

    Branches times 1 must leave the output unchanged. Without the branches it must be that of
    branches times 0.
    """
    deep = replace(structure, blocks=blocks)
    narrow = narrow_structure(deep, probe.counts)
    _check_whole_modules(blocks, probe)
    scaled = copy_sharing_weights(probe.model)
    choices = [blocks, *([list(blocks)[::2]] if len(blocks) > 1 else [])]
    try:
        rewire(scaled, blocks, (), factors=dict.fromkeys(blocks, 1.0))
        same = is_close(run_model(scaled, probe.inputs), probe.outputs)
        for skipped in choices if same else ():
            subnet = Subnet().without_blocks(*skipped)
            outputs = run_subnet(narrow, subnet, probe)
            zeroed = copy_sharing_weights(probe.model)
            rewire(zeroed, blocks, (), factors=dict.fromkeys(skipped, 0.0))
            same = same and is_close(outputs, run_model(zeroed, probe.inputs))
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
    check_training(model, deep, example, probe, deep.subnet(WIDTHS[-1]).without_blocks(*blocks))
    return deep


def _check_whole_modules(blocks: dict[str, Block], probe: Probe) -> None:
    """Raises unless modules that are a block as a whole keep the shape of their first input."""
    trial = copy_sharing_weights(probe.model)

    def make_hook(name: str, returns: int | None) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            given = get_first_input(args, kwargs)
            if preserves_shape(given, output) != (True, returns):
                raise StructureError(
                    f"module '{name}' cannot be skipped: it makes {_describe_value(output)} of "
                    f"{_describe_value(given)}, and skipped it would give back what it was given; "
                    "name modules that keep the shape of their first input"
                )

        return hook

    for block in blocks.values():
        if block.number == WHOLE_MODULE:
            module = trial.get_submodule(block.module)
            hook = make_hook(block.name, block.returns)
            module.register_forward_hook(hook, with_kwargs=True)
    run_model(trial, probe.inputs)


def _describe_value(value: Any) -> str:
    is_tensor = isinstance(value, Tensor)
    return f"a tensor of shape {tuple(value.shape)}" if is_tensor else f"a {type(value).__name__}"
