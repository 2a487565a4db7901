"""Finds residual blocks in the code of any module.

A module that computes ``x + F(x)`` somewhere in its ``forward`` has a block F there. Its code is
read symbolically (torch.fx, children as opaque calls), so no class or layer name matters.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from fedquilt.errors import StructureError
from fedquilt.structure.blocks.block import WHOLE_MODULE, Block
from fedquilt.structure.blocks.code import has_code
from fedquilt.structure.blocks.code_key import make_code_key
from fedquilt.structure.blocks.paths import is_in, join_path, keep_outermost, list_all_tensors
from fedquilt.structure.blocks.sums import Branch, find_branches


def find_residual_blocks(model: nn.Module) -> dict[str, Block]:
    """Finds the blocks of all residual sums, in the model's order.

    >>> class Double(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.conv = nn.Conv2d(4, 4, 1)
    ...
    ...     def forward(self, x):
    ...         return x + self.conv(x).relu()
    >>> find_residual_blocks(nn.Sequential(Double(), Double()))["1"].tensors
    ('1.conv.weight', '1.conv.bias')
    """
    return name_blocks(find_residual_branches(model))


def find_residual_branches(model: nn.Module) -> list[tuple[str, Branch]]:
    """Finds the branches of all residual sums, each with the path of its module."""
    shared = find_shared_tensors(model)
    known: dict[Any, list[Branch]] = {}  # modules that are alike are read once
    residual: list[tuple[str, Branch]] = []
    for path, module in model.named_modules():
        key = make_code_key(module) if has_code(module) else type(module)
        branches = known[key] if key in known else find_branches(module)
        if key is not None:
            known[key] = branches
        residual += [
            (path, branch)
            for branch in branches
            if shared.isdisjoint(join_path(path, name) for name in branch.tensors)
        ]
    return residual


def name_blocks(branches: Sequence[tuple[str, Branch]]) -> dict[str, Block]:
    """Names blocks after their module, or after their branch if the module has several."""
    counts = Counter(path for path, _ in branches)
    alone = {path for path, count in counts.items() if path and count == 1}
    blocks: dict[str, Block] = {}
    for path, branch in branches:
        name = path if path in alone else join_path(path, branch.end)
        while name in blocks or (name in alone and name != path):
            name = f"{name}_sum"  # a branch that ends with a block
        tensors = tuple(join_path(path, tensor) for tensor in branch.tensors)
        blocks[name] = Block(name, path, branch.number, tensors, side=branch.side)
    return blocks


def select_blocks(model: nn.Module, patterns: Sequence[str]) -> dict[str, Block]:
    """Selects the blocks that patterns name: residual ones, else modules as a whole."""
    known = find_residual_blocks(model)
    modules = dict(model.named_modules())
    chosen: dict[str, Block] = {}
    for pattern in patterns:
        names = fnmatch.filter(known, pattern)
        whole = [] if names else keep_outermost(fnmatch.filter([n for n in modules if n], pattern))
        if not names and not whole:
            raise StructureError(
                f"blocks names '{pattern}', which is no module and no residual block of the model; "
                f"its residual blocks are: {', '.join(known) or 'none'}"
            )
        chosen |= {name: known[name] for name in names}
        chosen |= {name: make_module_block(name, model) for name in whole}
    order = {name: i for i, name in enumerate(modules)}
    return dict(sorted(chosen.items(), key=lambda item: (order[item[1].module], item[1].number)))


def make_module_block(name: str, model: nn.Module) -> Block:
    """Makes a block of a whole module, with all of its tensors."""
    every = list_all_tensors(model)
    inside = {tensor: value for tensor, value in every.items() if is_in(tensor, name)}
    others = {id(value): tensor for tensor, value in every.items() if tensor not in inside}
    for tensor, value in inside.items():
        if id(value) in others:
            raise StructureError(
                f"module '{name}' shares '{tensor}' with '{others[id(value)]}', so it cannot be "
                "skipped; name modules with weights of their own"
            )
    names = {id(value): tensor for tensor, value in reversed(inside.items())}  # one for each
    return Block(name, name, WHOLE_MODULE, tuple(n for n in inside if n in names.values()))


def find_shared_tensors(model: nn.Module) -> frozenset[str]:
    """All names of tensors with several names: such a tensor belongs to no single block."""
    names: dict[int, list[str]] = {}
    for name, tensor in list_all_tensors(model).items():
        names.setdefault(id(tensor), []).append(name)
    return frozenset(name for alike in names.values() if len(alike) > 1 for name in alike)
