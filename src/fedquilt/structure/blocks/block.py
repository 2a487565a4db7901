"""Blocks that may be skipped, as data, and which of them a depth keeps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fedquilt.errors import StructureError

WHOLE_MODULE = -1


BY_MODULE = -2


@dataclass(frozen=True)
class Block:
    """A part of a model that may be skipped.

    Args:
        name: the name of the block.
        module: the module that computes the residual sum, or is the block.
        number: which residual sum of the module's code. ``WHOLE_MODULE``: the module as a whole is
            the block; skipped, it returns its first input. ``BY_MODULE``: the module drops the part
            itself, with ``drop_exit(name)``.
        tensors: names of the tensors that only the block uses.
        step: name of the tensor that the branch is multiplied by, if there is one.
        side: which side of the sum is the branch: left (0) or right (1).
        returns: the length of the tuple that the module returns: its output, and then Nones.
    """

    name: str
    module: str
    number: int
    tensors: tuple[str, ...]
    step: str | None = None
    side: int = 0
    returns: int | None = None


def group_by_stage(blocks: Iterable[Block]) -> dict[str, dict[str, list[str]]]:
    """Names of blocks by stage (a container of modules) and by module, in order.

    >>> names = ["layer1.0", "layer1.1", "layer2.0"]
    >>> group_by_stage(Block(name, name, 0, ()) for name in names)["layer1"]
    {'layer1.0': ['layer1.0'], 'layer1.1': ['layer1.1']}
    """
    stages: dict[str, dict[str, list[str]]] = {}
    for block in blocks:
        modules = stages.setdefault(block.module.rpartition(".")[0], {})
        modules.setdefault(block.module, []).append(block.name)
    return stages


def select_first_modules(blocks: Mapping[str, Block], depth: float) -> list[str]:
    """The blocks of the first ⌈depth · n⌉ modules of every stage.

    >>> names = ["layer1.0", "layer1.1", "layer1.2", "layer2.0"]
    >>> select_first_modules({name: Block(name, name, 0, ()) for name in names}, 0.5)
    ['layer1.0', 'layer1.1', 'layer2.0']
    """
    if not 0 < depth <= 1:
        raise StructureError(f"depths are fractions in (0, 1], got {depth}; 1 keeps every block")
    return [
        name
        for stage in group_by_stage(blocks.values()).values()
        for names in list(stage.values())[: max(1, math.ceil(round(depth * len(stage), 9)))]
        for name in names
    ]
