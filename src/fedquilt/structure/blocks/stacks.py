"""Blocks that are found, or ruled out, by running the model on its example.

Members of a stack (a ``ModuleList`` or ``Sequential``) may be residual as a whole even if torch.fx
cannot read their code, as in many libraries. And a sum of two sides with weights is residual only
if one side changes the shape, as a projection does.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedquilt.structure.blocks.block import Block
from fedquilt.structure.blocks.code import compile_graph, has_code, trace_code
from fedquilt.structure.blocks.find import (
    find_residual_branches,
    find_shared_tensors,
    make_module_block,
    name_blocks,
)
from fedquilt.structure.blocks.paths import is_in, join_path, list_all_tensors
from fedquilt.structure.blocks.rewire import get_first_input
from fedquilt.structure.blocks.sums import Branch, find_sums, is_matrix

STACKS = (nn.ModuleList, nn.Sequential)


Run = Callable[[nn.Module], object]  # a model, on its example


def find_block_candidates(model: nn.Module) -> tuple[list[tuple[str, Branch]], list[str]]:
    """What may be blocks, by the model's code alone: branches of sums, and members of stacks."""
    branches = find_residual_branches(model)
    return branches, _list_stack_members(model, branches)


def find_working_blocks(
    model: nn.Module, branches: Sequence[tuple[str, Branch]], members: Sequence[str], run: Run
) -> dict[str, Block]:
    """The candidates that turn out to be blocks when the model runs. The model is not changed."""
    residual = _drop_equal_sums(model, branches, run)
    return {**name_blocks(residual), **_find_stacked_blocks(model, members, run)}


def _drop_equal_sums(
    model: nn.Module, branches: Sequence[tuple[str, Branch]], run: Run
) -> list[tuple[str, Branch]]:
    """The branches whose shortcut has no matrices, or needs them to change the shape."""
    keeps_shape: dict[tuple[str, int], bool] = {}
    watched: dict[str, list[int]] = {}
    for path, branch in branches:
        if branch.is_projected:
            watched.setdefault(path, []).append(branch.number)
    with ExitStack() as stack:
        for path, numbers in watched.items():
            module = model.get_submodule(path)
            forward = _make_comparing_forward(module, path, numbers, keeps_shape)
            module.forward = types.MethodType(forward, module)
            stack.callback(vars(module).pop, "forward")
        if watched:
            run(model)
    return [
        (path, branch)
        for path, branch in branches
        if not keeps_shape.get((path, branch.number), branch.is_projected)
    ]


def _make_comparing_forward(
    module: nn.Module, path: str, numbers: Sequence[int], keeps_shape: dict[tuple[str, int], bool]
) -> Callable[..., Any]:
    """A forward of the module that also notes whether its sums keep the shape of their start."""
    graph = trace_code(module, training=False)
    sums = find_sums(graph)
    (output,) = (node for node in graph.nodes if node.op == "output")
    output.args = ((output.args[0], [(sums[n].node, sums[n].list_starts()) for n in numbers]),)
    code = compile_graph(graph)

    @functools.wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            result, seen = code(self, *args, **kwargs)
        except Exception:  # the call does not fit the code as it was read
            keeps_shape.update(dict.fromkeys(((path, number) for number in numbers), True))
            return type(self).forward(self, *args, **kwargs)
        for number, (total, starts) in zip(numbers, seen, strict=True):
            shapes = [getattr(start, "shape", None) for start in starts]
            keeps_shape[path, number] = total.shape in shapes
        return result

    return forward


def _list_stack_members(model: nn.Module, branches: Sequence[tuple[str, Branch]]) -> list[str]:
    """Members of stacks that may be blocks: several of one class, with code and own weights.

    Members with residual sums, and parts of branches, are left out.
    """
    branched = {join_path(path, name) for path, branch in branches for name in branch.tensors}
    known = find_shared_tensors(model) | branched
    return [
        join_path(path, name)
        for path, stack in model.named_modules()
        if isinstance(stack, STACKS)
        for kinds in [Counter(map(type, stack))]
        for name, member in stack.named_children()
        if kinds[type(member)] > 1
        and has_code(member)
        and any(map(is_matrix, member.parameters()))
        and known.isdisjoint(
            join_path(join_path(path, name), tensor) for tensor in list_all_tensors(member)
        )
    ]


def _find_stacked_blocks(model: nn.Module, members: Sequence[str], run: Run) -> dict[str, Block]:
    """The members that are residual as a whole; of nested ones the innermost.

    The output of such a member has the shape of its first input, and depends on it even when all
    matrices are zero.
    """
    trials = {path: _Trial() for path in members}
    with ExitStack() as stack:
        for path, trial in trials.items():
            hook = model.get_submodule(path).register_forward_hook(trial, with_kwargs=True)
            stack.callback(hook.remove)
        if trials:
            run(model)
    passed = {path: trial for path, trial in trials.items() if trial.is_passed}
    return {
        path: replace(make_module_block(path, model), returns=trial.returns)
        for path, trial in passed.items()
        if not any(other != path and is_in(other, path) for other in passed)
    }


class _Trial:
    """A forward hook that finds out whether a module could be skipped as a whole."""

    def __init__(self) -> None:
        self.calls: list[bool] = []
        self.returns: int | None = None
        self._is_running = False  # the trial itself calls the module

    @property
    def is_passed(self) -> bool:
        """Whether there were calls, and each of them would allow it."""
        return bool(self.calls) and all(self.calls)

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self._is_running:
            return
        self._is_running = True
        try:
            is_alike, self.returns = preserves_shape(get_first_input(args, kwargs), output)
            self.calls.append(is_alike and _is_residual(module, args, kwargs))
        finally:
            self._is_running = False


def preserves_shape(given: Any, output: Any) -> tuple[bool, int | None]:
    """Whether an output has the shape of an input, and its length if it is a tuple with Nones.

    >>> preserves_shape(torch.zeros(3), (torch.ones(3), None))
    (True, 2)
    """
    length = None
    if isinstance(output, tuple) and output and all(other is None for other in output[1:]):
        output, length = output[0], len(output)
    are_tensors = isinstance(given, Tensor) and isinstance(output, Tensor)
    return are_tensors and given.shape == output.shape, length


def _is_residual(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the output depends on the first input when all matrices are zero."""
    x = get_first_input(args, kwargs)
    if not x.is_floating_point():
        return False
    zeros = {
        name: tensor.new_zeros(()).expand(tensor.shape)
        for name, tensor in module.named_parameters()
        if is_matrix(tensor)
    }
    outputs = []
    for other in (x, x.roll(1, -1)):  # the same values in other positions
        given = (other, *args[1:]) if args else ()
        named = kwargs if args else {**kwargs, next(iter(kwargs)): other}
        try:
            output = functional_call(module, zeros, given, dict(named))
        except Exception:  # a module may reject these values
            return False
        outputs.append(output[0] if isinstance(output, tuple) else output)
    return not torch.equal(*outputs)
