"""Removes or scales blocks of a model by giving its modules another ``forward``.

Without a block, the sum is replaced by its shortcut, and the layers of the branch are neither
computed nor stored. A block with a step computes ``x + s · F(x)``.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedquilt.errors import StructureError
from fedquilt.structure.blocks.block import BY_MODULE, WHOLE_MODULE, Block
from fedquilt.structure.blocks.code import (
    TRANSFORMERS,
    compile_graph,
    list_unused_parts,
    list_used_parts,
    trace_code,
)
from fedquilt.structure.blocks.code_key import make_code_key
from fedquilt.structure.blocks.paths import is_in, join_path, keep_outermost
from fedquilt.structure.blocks.sums import Sum, find_sums


def make_step_name(block: Block, blocks: Iterable[Block]) -> str:
    """The name of a block's step: ``step``, or after the branch if the module has several."""
    alone = sum(other.module == block.module for other in blocks) == 1
    branch = block.name[len(block.module) :].strip(".").replace(".", "_")
    return join_path(block.module, "step" if alone else f"{branch}_step")


def add_steps(
    model: nn.Module, blocks: Mapping[str, Block], *, learnable: bool
) -> Mapping[str, Block]:
    """Adds a step of 1 to the module of every block, in place; returns blocks with step names."""
    steps: dict[str, str] = {}
    for name, block in blocks.items():
        if block.number == BY_MODULE:
            continue  # not a branch, so it cannot be scaled
        steps[name] = make_step_name(block, blocks.values())
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
                *(steps[inner] for inner in steps if _is_dropped_with(blocks[inner], block)),
            ),
        )
        for name, block in blocks.items()
    }


def _is_dropped_with(inner: Block, outer: Block) -> bool:
    """Whether one block is dropped with another because it is in its branch."""
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

    ``factors`` multiplies branches by constants, for comparison: without a block the model must
    compute what it does with factor 0.
    """
    factors = factors or {}
    by_module: dict[str, list[Block]] = {}
    for block in blocks.values():
        if block.name in skipped or block.step or block.name in factors:
            by_module.setdefault(block.module, []).append(block)
    programs: dict[Hashable, _Program] = {}  # modules with equal code share one
    for path in sorted(
        by_module, key=lambda path: -path.count(".") - bool(path)
    ):  # innermost first
        module = model.get_submodule(path)
        for block in by_module[path]:
            if block.number == BY_MODULE:
                module.drop_exit(block.name)  # type: ignore[operator]
        edits = tuple(_make_edit(b, skipped, factors) for b in by_module[path] if b.number >= 0)
        if edits:
            _rewire_sums(module, edits, programs)
        for block in by_module[path]:
            if block.number == WHOLE_MODULE:
                _rewire_module(module, _make_edit(block, skipped, factors))
    dropped = {name for block in skipped for name in blocks[block].tensors}
    for name in dropped.union(blocks[block].step or "" for block in skipped):
        _drop_tensor(model, name)
    for path, encoder in model.named_modules():
        first = join_path(path, "layers.0")
        if isinstance(encoder, nn.TransformerEncoder) and any(
            is_in(name, first) for name in dropped
        ):
            encoder.use_nested_tensor = False  # it would read all tensors of its first layer


@dataclass(frozen=True)
class _Edit:
    """What to do with one sum: remove its branch, or multiply it."""

    number: int
    side: int
    skip: bool
    factor: str | float | None  # the name of a tensor of the module, or a constant
    returns: int | None = None


def _make_edit(block: Block, skipped: Collection[str], factors: Mapping[str, float]) -> _Edit:
    attribute = block.step and block.step.rpartition(".")[2]
    factor = factors.get(block.name, attribute)
    return _Edit(block.number, block.side, block.name in skipped, factor, block.returns)


@dataclass(frozen=True)
class _Program:
    """Another forward for a module, and the names of parts that it does not need."""

    forward: Callable[..., Any]
    removed: tuple[str, ...]


def _rewire_sums(
    module: nn.Module, edits: tuple[_Edit, ...], programs: dict[Hashable, _Program]
) -> None:
    alike = make_code_key(module)
    program = programs.get((alike, edits)) if alike else None
    if program is None:
        program = programs[alike, edits] = _compile_program(module, edits)
    module.forward = types.MethodType(program.forward, module)
    for part in program.removed:
        remove_child(module, part)


def _compile_program(module: nn.Module, edits: Sequence[_Edit]) -> _Program:
    graphs = [trace_code(module, training=training) for training in (True, False)]
    before = list_used_parts(graphs)
    for graph in graphs:
        _apply_edits(edits, graph)
    in_training, in_use = (compile_graph(graph) for graph in graphs)

    @functools.wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (in_training if self.training else in_use)(self, *args, **kwargs)

    return _Program(
        forward, tuple(sorted(keep_outermost(list_unused_parts(before, list_used_parts(graphs)))))
    )


def _apply_edits(edits: Iterable[_Edit], graph: fx.Graph) -> None:
    sums = find_sums(graph)
    insides = {edit: sums[edit.number].list_removable(edit.side) for edit in edits}
    dropped: set[fx.Node] = set()
    for edit in sorted(edits, key=lambda edit: -edit.number):  # a later one may rest on earlier
        total, inside = sums[edit.number], insides[edit]
        if total.node in dropped:
            continue  # it lay in a branch that was skipped
        if edit.skip:
            assert inside is not None, "a block that others use was found"
            dropped.update(inside)
            _remove_branch(graph, total, edit.side, inside)
        elif edit.factor is not None:
            _scale_branch(graph, total, edit.side, edit.factor)


def _remove_branch(graph: fx.Graph, total: Sum, side: int, inside: Sequence[fx.Node]) -> None:
    """Replaces the sum by a copy of its shortcut, since in-place operations may follow."""
    with graph.inserting_before(total.node):
        around = graph.call_function(torch.clone, (total.ends[1 - side],))
    total.node.replace_all_uses_with(around)
    graph.erase_node(total.node)
    for node in reversed(inside):
        graph.erase_node(node)


def _scale_branch(graph: fx.Graph, total: Sum, side: int, factor: str | float) -> None:
    """Multiplies the branch by a factor."""
    with graph.inserting_before(total.node):
        by = graph.get_attr(factor) if isinstance(factor, str) else factor
        scaled = graph.call_function(operator.mul, (total.node.args[side], by))
    total.node.update_arg(side, scaled)


def remove_child(module: nn.Module, name: str) -> None:
    """Removes a child or a tensor of a module."""
    path, _, last = name.rpartition(".")
    parent = module.get_submodule(path)
    if isinstance(module, TRANSFORMERS):
        _drop_tensors(parent._modules.get(last))  # PyTorch's encoder reads their settings
        return
    for table in (parent._modules, parent._parameters, parent._buffers):
        table.pop(last, None)


def _drop_tensors(module: nn.Module | None) -> None:
    """Removes all tensors of a module but keeps its settings."""
    for part in [] if module is None else module.modules():
        for table in (part._parameters, part._buffers):
            table.update(dict.fromkeys(table))


def _drop_tensor(model: nn.Module, name: str) -> None:
    """Removes a tensor if it still exists."""
    path, _, last = name.rpartition(".")
    try:
        parent = model.get_submodule(path)
    except AttributeError:
        return
    for table in (parent._parameters, parent._buffers):
        if last in table:
            table[last] = None


def _rewire_module(module: nn.Module, edit: _Edit) -> None:
    """Makes a module that is a block return its input if skipped, else x + s (B(x) - x)."""
    inner = getattr(vars(module).get("forward"), "__func__", type(module).forward)

    def answer(y: Tensor) -> Any:
        return y if edit.returns is None else (y, *[None] * (edit.returns - 1))

    def skipped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return answer(get_first_input(args, kwargs).clone())

    def stepped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x, y = get_first_input(args, kwargs), inner(self, *args, **kwargs)
        factor = getattr(self, edit.factor) if isinstance(edit.factor, str) else edit.factor
        return answer(x + factor * ((y if edit.returns is None else y[0]) - x))

    forward = functools.wraps(type(module).forward)(skipped if edit.skip else stepped)
    module.forward = types.MethodType(forward, module)
    if edit.skip:
        for table in (module._modules, module._parameters, module._buffers):
            table.clear()


def get_first_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The first input of a call, positional or by name; None if there is none."""
    return args[0] if args else next(iter(kwargs.values()), None)
