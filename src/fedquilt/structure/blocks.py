"""Blocks that may be skipped: the branches of residual sums, found in any module's own code.

A module that computes ``x + F(x)`` somewhere in its ``forward`` has a block F there. Its code is
read symbolically (torch.fx, each child opaque), so no class or layer name matters. A skipped block
is gone: the sum is replaced by its shortcut, and the layers of F are neither computed nor stored.
A block with a step computes ``x + s · F(x)``.
"""

from __future__ import annotations

import fnmatch
import functools
import math
import operator
import types
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedquilt.errors import StructureError
from fedquilt.structure.code import (
    TRANSFORMERS,
    all_tensors,
    code_of,
    compiled,
    has_code,
    is_in,
    join,
    likeness,
    parts_of,
    unused,
)
from fedquilt.structure.sums import Branch, Sum, branches_of, sums_of

WHOLE_MODULE = -1
BY_MODULE = -2


@dataclass(frozen=True)
class Block:
    """A branch that may be skipped, and the tensors that are gone with it.

    ``module`` makes the sum: ``number`` of those in its code whose two sides come from one place,
    and the branch is its left (0) or right (1) ``side``. Or the module is a block as a whole
    (``WHOLE_MODULE``), one of a stack or declared by the user: skipped, it gives back its first
    input; if it ``returns`` a tuple of so many, with nothing else in it. Or it knows itself how to
    do without the part (``BY_MODULE``): its ``leave_out(name)`` is called. ``step`` names the
    tensor that the branch is multiplied by, if there is one.
    """

    name: str
    module: str
    number: int
    tensors: tuple[str, ...]
    step: str | None = None
    side: int = 0
    returns: int | None = None


def residual_blocks(model: nn.Module) -> dict[str, Block]:
    """The blocks of all residual sums, in the model's order.

    >>> class Double(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.conv = nn.Conv2d(4, 4, 1)
    ...
    ...     def forward(self, x):
    ...         return x + self.conv(x).relu()
    >>> residual_blocks(nn.Sequential(Double(), Double()))["1"].tensors
    ('1.conv.weight', '1.conv.bias')
    """
    return named_blocks(residual_branches(model))


def residual_branches(model: nn.Module) -> list[tuple[str, Branch]]:
    """The branches of all residual sums, each with the path of its module."""
    shared = shared_tensors(model)
    known: dict[Any, list[Branch]] = {}  # modules that are alike are read once
    found: list[tuple[str, Branch]] = []
    for path, module in model.named_modules():
        key = likeness(module) if has_code(module) else type(module)
        branches = known[key] if key in known else branches_of(module)
        if key is not None:
            known[key] = branches
        found += [
            (path, branch)
            for branch in branches
            if shared.isdisjoint(join(path, name) for name in branch.tensors)
        ]
    return found


def named_blocks(found: Sequence[tuple[str, Branch]]) -> dict[str, Block]:
    """Blocks by name: their module's, or if it has several (or is the root) their branch's."""
    counts = Counter(path for path, _ in found)
    alone = {path for path, count in counts.items() if path and count == 1}
    blocks: dict[str, Block] = {}
    for path, branch in found:
        name = path if path in alone else join(path, branch.end)
        while name in blocks or (name in alone and name != path):
            name = f"{name}_sum"  # a branch that ends with a block
        tensors = tuple(join(path, tensor) for tensor in branch.tensors)
        blocks[name] = Block(name, path, branch.number, tensors, side=branch.side)
    return blocks


def chosen_blocks(model: nn.Module, patterns: Sequence[str]) -> dict[str, Block]:
    """The blocks that the patterns name: residual ones, else modules as a whole."""
    known = residual_blocks(model)
    modules = dict(model.named_modules())
    chosen: dict[str, Block] = {}
    for pattern in patterns:
        names = fnmatch.filter(known, pattern)
        whole = [] if names else _outermost(fnmatch.filter([n for n in modules if n], pattern))
        if not names and not whole:
            raise StructureError(
                f"blocks names '{pattern}', which is no module and no residual block of the model; "
                f"its residual blocks are: {', '.join(known) or 'none'}"
            )
        chosen |= {name: known[name] for name in names}
        chosen |= {name: whole_block(name, model) for name in whole}
    order = {name: i for i, name in enumerate(modules)}
    return dict(sorted(chosen.items(), key=lambda item: (order[item[1].module], item[1].number)))


def _outermost(names: Sequence[str]) -> list[str]:
    return [n for n in names if not any(n != other and is_in(n, other) for other in names)]


def whole_block(name: str, model: nn.Module) -> Block:
    """A module as a block of its own, all of its tensors with it."""
    every = all_tensors(model)
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


def step_name(block: Block, blocks: Iterable[Block]) -> str:
    """The name of a block's step: ``step``, or after the branch where a module has several."""
    alone = sum(other.module == block.module for other in blocks) == 1
    branch = block.name[len(block.module) :].strip(".").replace(".", "_")
    return join(block.module, "step" if alone else f"{branch}_step")


def with_steps(
    model: nn.Module, blocks: Mapping[str, Block], *, learnable: bool
) -> Mapping[str, Block]:
    """Puts a step of 1 into the module of every block, in place; the blocks that name them."""
    steps: dict[str, str] = {}
    for name, block in blocks.items():
        if block.number == BY_MODULE:
            continue  # it is no branch
        steps[name] = step_name(block, blocks.values())
        module = model.get_submodule(block.module)
        attribute = steps[name].rpartition(".")[2]
        if hasattr(module, attribute):
            raise StructureError(
                f"module '{block.module}' has something named '{attribute}' already, so its block "
                "cannot get a step of that name; rename it"
            )
        value = nn.Parameter(torch.ones(()), requires_grad=learnable)
        module.register_parameter(attribute, value)
    return {
        name: replace(
            block,
            step=steps.get(name),
            tensors=(
                *block.tensors,
                *(steps[inner] for inner in steps if _goes_with(blocks[inner], block)),
            ),
        )
        for name, block in blocks.items()
    }


def _goes_with(inner: Block, outer: Block) -> bool:
    """Whether one block is gone with another, in whose branch it lies."""
    if inner is outer or not set(inner.tensors) <= set(outer.tensors):
        return False
    if inner.module == outer.module:
        return outer.number == WHOLE_MODULE or WHOLE_MODULE < inner.number < outer.number
    return is_in(inner.module, outer.module)


def rewire(
    model: nn.Module,
    blocks: Mapping[str, Block],
    skipped: Collection[str],
    *,
    factors: Mapping[str, float] | None = None,
) -> None:
    """Gives the modules of blocks another forward, in place: without branches, or with steps.

    ``factors`` multiplies branches by constants instead, for comparison: a skipped block must
    compute what one with factor 0 does.
    """
    factors = factors or {}
    by_module: dict[str, list[Block]] = {}
    for block in blocks.values():
        if block.name in skipped or block.step or block.name in factors:
            by_module.setdefault(block.module, []).append(block)
    programs: dict[Hashable, _Program] = {}  # modules that are alike share one
    for path in sorted(by_module, key=lambda path: -path.count(".") - bool(path)):  # inmost first
        module = model.get_submodule(path)
        for block in by_module[path]:
            if block.number == BY_MODULE:
                module.leave_out(block.name)  # type: ignore[operator]
        of_sums = tuple(_edit(b, skipped, factors) for b in by_module[path] if b.number >= 0)
        if of_sums:
            _rewire_sums(module, of_sums, programs)
        for block in by_module[path]:
            if block.number == WHOLE_MODULE:
                _rewire_whole(module, _edit(block, skipped, factors))
    gone = {name for block in skipped for name in blocks[block].tensors}
    for name in gone.union(blocks[block].step or "" for block in skipped):
        _forget(model, name)
    for path, encoder in model.named_modules():
        first = join(path, "layers.0")
        if isinstance(encoder, nn.TransformerEncoder) and any(is_in(name, first) for name in gone):
            encoder.use_nested_tensor = False  # it would ask its first layer for all its tensors


@dataclass(frozen=True)
class _Edit:
    """What happens to one sum: its branch goes, or is multiplied."""

    number: int
    side: int
    skip: bool
    factor: str | float | None  # the name of a tensor of the module, or a constant
    returns: int | None = None


def _edit(block: Block, skipped: Collection[str], factors: Mapping[str, float]) -> _Edit:
    attribute = block.step and block.step.rpartition(".")[2]
    factor = factors.get(block.name, attribute)
    return _Edit(block.number, block.side, block.name in skipped, factor, block.returns)


def shared_tensors(model: nn.Module) -> frozenset[str]:
    """Names of tensors that have several: they cannot be gone with one block."""
    names: dict[int, list[str]] = {}
    for name, tensor in all_tensors(model).items():
        names.setdefault(id(tensor), []).append(name)
    return frozenset(name for alike in names.values() if len(alike) > 1 for name in alike)


@dataclass(frozen=True)
class _Program:
    """Another forward for a module, and what it does not need any more."""

    forward: Callable[..., Any]
    gone: tuple[str, ...]


def _rewire_sums(
    module: nn.Module, edits: tuple[_Edit, ...], programs: dict[Hashable, _Program]
) -> None:
    alike = likeness(module)
    program = programs.get((alike, edits)) if alike else None
    if program is None:
        program = programs[alike, edits] = _program(module, edits)
    module.forward = types.MethodType(program.forward, module)
    for part in program.gone:
        remove(module, part)


def _program(module: nn.Module, edits: Sequence[_Edit]) -> _Program:
    graphs = [code_of(module, training=training) for training in (True, False)]
    before = parts_of(graphs)
    for graph in graphs:
        _apply(edits, graph)
    in_training, in_use = (compiled(graph) for graph in graphs)

    @functools.wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (in_training if self.training else in_use)(self, *args, **kwargs)

    return _Program(forward, tuple(sorted(_outermost(unused(before, parts_of(graphs))))))


def _apply(edits: Iterable[_Edit], graph: fx.Graph) -> None:
    sums = sums_of(graph)
    insides = {edit: sums[edit.number].inside(edit.side) for edit in edits}
    gone: set[fx.Node] = set()
    for edit in sorted(edits, key=lambda edit: -edit.number):  # a later one may rest on earlier
        total, inside = sums[edit.number], insides[edit]
        if total.node in gone:
            continue  # it lay in a branch that was skipped
        if edit.skip:
            assert inside is not None, "a block that others use was found"
            gone.update(inside)
            _bypass(graph, total, edit.side, inside)
        elif edit.factor is not None:
            _multiply(graph, total, edit.side, edit.factor)


def _bypass(graph: fx.Graph, total: Sum, side: int, inside: Sequence[fx.Node]) -> None:
    """The shortcut instead of the sum: a copy, as a sum is one, for what follows in place."""
    with graph.inserting_before(total.node):
        around = graph.call_function(torch.clone, (total.ends[1 - side],))
    total.node.replace_all_uses_with(around)
    graph.erase_node(total.node)
    for node in reversed(inside):
        graph.erase_node(node)


def _multiply(graph: fx.Graph, total: Sum, side: int, factor: str | float) -> None:
    """The branch times a factor."""
    with graph.inserting_before(total.node):
        by = graph.get_attr(factor) if isinstance(factor, str) else factor
        scaled = graph.call_function(operator.mul, (total.node.args[side], by))
    total.node.update_arg(side, scaled)


def remove(module: nn.Module, name: str) -> None:
    """A child or a tensor of a module is gone."""
    path, _, last = name.rpartition(".")
    parent = module.get_submodule(path)
    if isinstance(module, TRANSFORMERS):
        _empty(parent._modules.get(last))  # PyTorch's encoder asks its layers for their settings
        return
    for home in (parent._modules, parent._parameters, parent._buffers):
        home.pop(last, None)


def _empty(module: nn.Module | None) -> None:
    """A module keeps its settings but no tensors."""
    for part in [] if module is None else module.modules():
        for home in (part._parameters, part._buffers):
            home.update(dict.fromkeys(home))


def _forget(model: nn.Module, name: str) -> None:
    """A tensor is gone, if it is still there."""
    path, _, last = name.rpartition(".")
    try:
        parent = model.get_submodule(path)
    except AttributeError:
        return
    for home in (parent._parameters, parent._buffers):
        if last in home:
            home[last] = None


def _rewire_whole(module: nn.Module, edit: _Edit) -> None:
    """A block as a whole: its input if it is skipped, else x + s (B(x) - x)."""
    inner = getattr(vars(module).get("forward"), "__func__", type(module).forward)

    def answer(y: Tensor) -> Any:
        return y if edit.returns is None else (y, *[None] * (edit.returns - 1))

    def skipped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return answer(first_input(args, kwargs).clone())

    def stepped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x, y = first_input(args, kwargs), inner(self, *args, **kwargs)
        factor = getattr(self, edit.factor) if isinstance(edit.factor, str) else edit.factor
        return answer(x + factor * ((y if edit.returns is None else y[0]) - x))

    forward = functools.wraps(type(module).forward)(skipped if edit.skip else stepped)
    module.forward = types.MethodType(forward, module)
    if edit.skip:
        for home in (module._modules, module._parameters, module._buffers):
            home.clear()


def first_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a module was given first; None: nothing."""
    return args[0] if args else next(iter(kwargs.values()), None)


def by_stage(blocks: Iterable[Block]) -> dict[str, dict[str, list[str]]]:
    """The names of blocks by stage, which is a container of modules, and by module, in order.

    >>> names = ["layer1.0", "layer1.1", "layer2.0"]
    >>> by_stage(Block(name, name, 0, ()) for name in names)["layer1"]
    {'layer1.0': ['layer1.0'], 'layer1.1': ['layer1.1']}
    """
    found: dict[str, dict[str, list[str]]] = {}
    for block in blocks:
        modules = found.setdefault(block.module.rpartition(".")[0], {})
        modules.setdefault(block.module, []).append(block.name)
    return found


def first_of_each_stage(blocks: Mapping[str, Block], depth: float) -> list[str]:
    """The blocks of the first ⌈depth · n⌉ modules of every stage.

    >>> names = ["layer1.0", "layer1.1", "layer1.2", "layer2.0"]
    >>> first_of_each_stage({name: Block(name, name, 0, ()) for name in names}, 0.5)
    ['layer1.0', 'layer1.1', 'layer2.0']
    """
    if not 0 < depth <= 1:
        raise StructureError(f"depths are fractions in (0, 1], got {depth}; 1 keeps every block")
    return [
        name
        for stage in by_stage(blocks.values()).values()
        for names in list(stage.values())[: max(1, math.ceil(round(depth * len(stage), 9)))]
        for name in names
    ]
