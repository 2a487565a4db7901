"""Blocks that are found, or ruled out, by watching the model at work on its example.

Members of a stack (a ``ModuleList`` or ``Sequential``) may be residual as a whole where no sum
could be read in their code: many libraries write layers that torch.fx cannot follow. And a sum of
two weighted sides is residual only if one of them changes the shape, as a projection does.
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

from fedquilt.structure.blocks import (
    Block,
    first_input,
    named_blocks,
    residual_branches,
    shared_tensors,
    whole_block,
)
from fedquilt.structure.code import all_tensors, code_of, compiled, has_code, is_in, join
from fedquilt.structure.sums import Branch, is_matrix, sums_of

STACKS = (nn.ModuleList, nn.Sequential)
Run = Callable[[nn.Module], object]  # a model, on its example


def block_candidates(model: nn.Module) -> tuple[list[tuple[str, Branch]], list[str]]:
    """What may be blocks, by the model's code alone: branches of sums, and members of stacks."""
    branches = residual_branches(model)
    return branches, _stack_members(model, branches)


def blocks_at_work(
    model: nn.Module, branches: Sequence[tuple[str, Branch]], members: Sequence[str], run: Run
) -> dict[str, Block]:
    """The candidates that are blocks when the model runs; it is left as it was."""
    needed = _without_equals(model, branches, run)
    return {**named_blocks(needed), **_stacked_blocks(model, members, run)}


def _without_equals(
    model: nn.Module, found: Sequence[tuple[str, Branch]], run: Run
) -> list[tuple[str, Branch]]:
    """The branches whose shortcut has no matrices, or without which shapes would not fit."""
    keeps_shape: dict[tuple[str, int], bool] = {}
    watched: dict[str, list[int]] = {}
    for path, branch in found:
        if branch.is_projected:
            watched.setdefault(path, []).append(branch.number)
    with ExitStack() as stack:
        for path, numbers in watched.items():
            module = model.get_submodule(path)
            forward = _comparing(module, path, numbers, keeps_shape)
            module.forward = types.MethodType(forward, module)
            stack.callback(vars(module).pop, "forward")
        if watched:
            run(model)
    return [(path, b) for path, b in found if not keeps_shape.get((path, b.number), b.is_projected)]


def _comparing(
    module: nn.Module, path: str, numbers: Sequence[int], keeps_shape: dict[tuple[str, int], bool]
) -> Callable[..., Any]:
    """The module's code, which also notes whether its sums have the shape of what they are of."""
    graph = code_of(module, training=False)
    sums = sums_of(graph)
    (output,) = (node for node in graph.nodes if node.op == "output")
    output.args = ((output.args[0], [(sums[n].node, sums[n].starts()) for n in numbers]),)
    code = compiled(graph)

    @functools.wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            result, seen = code(self, *args, **kwargs)
        except Exception:  # it is called otherwise than its code was read
            keeps_shape.update(dict.fromkeys(((path, number) for number in numbers), True))
            return type(self).forward(self, *args, **kwargs)
        for number, (total, starts) in zip(numbers, seen, strict=True):
            shapes = [getattr(start, "shape", None) for start in starts]
            keeps_shape[path, number] = total.shape in shapes
        return result

    return forward


def _stack_members(model: nn.Module, branches: Sequence[tuple[str, Branch]]) -> list[str]:
    """Members of stacks, several of one class, with code and weights of their own.

    Not those in which sums were read, nor parts of branches.
    """
    branched = {join(path, name) for path, branch in branches for name in branch.tensors}
    known = shared_tensors(model) | branched
    return [
        join(path, name)
        for path, stack in model.named_modules()
        if isinstance(stack, STACKS)
        for kinds in [Counter(map(type, stack))]
        for name, member in stack.named_children()
        if kinds[type(member)] > 1
        and has_code(member)
        and any(map(is_matrix, member.parameters()))
        and known.isdisjoint(join(join(path, name), tensor) for tensor in all_tensors(member))
    ]


def _stacked_blocks(model: nn.Module, members: Sequence[str], run: Run) -> dict[str, Block]:
    """The members that are residual as a whole, the innermost of those in one another.

    Such a one gives what has the shape of its first input, and still depends on it when all its
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
        path: replace(whole_block(path, model), returns=trial.returns)
        for path, trial in passed.items()
        if not any(other != path and is_in(other, path) for other in passed)
    }


class _Trial:
    """A hook that watches whether a module could be left out as a whole."""

    def __init__(self) -> None:
        self.calls: list[bool] = []
        self.returns: int | None = None
        self._is_running = False  # the trial itself calls the module

    @property
    def is_passed(self) -> bool:
        """Whether every call would allow it, and there was one."""
        return bool(self.calls) and all(self.calls)

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self._is_running:
            return
        self._is_running = True
        try:
            is_alike, self.returns = answers_alike(first_input(args, kwargs), output)
            self.calls.append(is_alike and _is_residual(module, args, kwargs))
        finally:
            self._is_running = False


def answers_alike(given: Any, output: Any) -> tuple[bool, int | None]:
    """Whether an output has the shape of an input; and if it is a tuple of nothing else, how long.

    >>> answers_alike(torch.zeros(3), (torch.ones(3), None))
    (True, 2)
    """
    length = None
    if isinstance(output, tuple) and output and all(other is None for other in output[1:]):
        output, length = output[0], len(output)
    are_tensors = isinstance(given, Tensor) and isinstance(output, Tensor)
    return are_tensors and given.shape == output.shape, length


def _is_residual(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the output depends on the first input when all matrices are zero."""
    x = first_input(args, kwargs)
    if not x.is_floating_point():
        return False
    zeros = {
        name: tensor.new_zeros(()).expand(tensor.shape)
        for name, tensor in module.named_parameters()
        if is_matrix(tensor)
    }
    answers = []
    for other in (x, x.roll(1, -1)):  # the same values elsewhere
        given = (other, *args[1:]) if args else ()
        named = kwargs if args else {**kwargs, next(iter(kwargs)): other}
        try:
            output = functional_call(module, zeros, given, dict(named))
        except Exception:  # a module that looks at values may not like these
            return False
        answers.append(output[0] if isinstance(output, tuple) else output)
    return not torch.equal(*answers)
