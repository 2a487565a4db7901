"""Residual sums in the code of a module: two sides that start at one value, one of them a branch.

The other side is a shortcut. It has no matrices, or fewer than the branch and only to change the
shape. Two sides with weights of one shape (RepVGG's convolutions, a layer and its low-rank update)
are not a residual sum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from fedquilt.structure.blocks.code import Unreadable, has_code, trace_code
from fedquilt.structure.blocks.paths import list_all_tensors

ADDITIONS = (operator.add, operator.iadd, torch.add)


IN_PLACE = ("iadd", "isub", "imul", "itruediv")


@dataclass(frozen=True)
class Branch:
    """A branch in a module's code, and the tensors (named within the module) that only it uses."""

    number: int
    side: int
    tensors: tuple[str, ...]
    end: str  # the last module or tensor with weights in it
    is_projected: bool = False  # the shortcut has matrices: it must be there to change the shape


def find_branches(module: nn.Module) -> list[Branch]:
    """Finds the branches of residual sums that a module has both in training and evaluation."""
    if not has_code(module):
        return []
    try:
        in_use, in_training = (find_sums(trace_code(module, training=t)) for t in (False, True))
    except Unreadable:
        return []
    if len(in_use) != len(in_training):
        return []
    branches = []
    for number, both in enumerate(zip(in_use, in_training, strict=True)):
        sides = {_find_branch_side(total, module) for total in both}
        if len(sides) == 1 and (side := sides.pop()) is not None:
            tensors = _list_private_tensors(both, side, module)
            if tensors:
                end = _find_end(both[0], side, module)
                is_projected = any(_find_lightest_path(t, 1 - side, module).matrices for t in both)
                branches.append(Branch(number, side, tensors, end, is_projected))
    return branches


def _list_private_tensors(totals: Iterable[Sum], side: int, module: nn.Module) -> tuple[str, ...]:
    """Names of tensors that only the branch uses, in all readings of the code."""
    within: dict[str, Tensor] = {}
    elsewhere: dict[str, Tensor] = {}
    for total in totals:
        inside = total.list_removable(side)
        if inside is None or any(_changes_another(n, inside, module) for n in inside):
            return ()
        within |= _list_tensors(inside, module)
        elsewhere |= _list_tensors(set(total.node.graph.nodes).difference(inside), module)
    used = {id(tensor) for tensor in elsewhere.values()}
    return tuple(name for name, tensor in within.items() if id(tensor) not in used)


def _changes_another(node: fx.Node, inside: Sequence[fx.Node], module: nn.Module) -> bool:
    """Whether a node changes a value outside in place, such as the shortcut."""
    if not node.all_input_nodes or node.all_input_nodes[0] in inside:
        return False
    if node.op == "call_module":
        return _is_in_place(module.get_submodule(str(node.target)))
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    return name.endswith("_") or name in IN_PLACE or bool(node.kwargs.get("inplace"))


def _is_in_place(module: nn.Module) -> bool:
    if isinstance(module, nn.Sequential) and len(module):
        return _is_in_place(module[0])
    return bool(getattr(module, "inplace", False))


def _find_end(total: Sum, side: int, module: nn.Module) -> str:
    inside = total.list_removable(side) or []
    calls = [n for n in inside if n.op == "call_module" and _list_tensors([n], module)]
    tensors = [n for n in inside if n.op == "get_attr"]
    return str((calls or tensors)[-1].target)


@dataclass(frozen=True)
class Sum:
    """A sum in a graph whose two sides come from one place."""

    node: fx.Node
    ends: tuple[fx.Node, fx.Node]
    data: frozenset[fx.Node]  # of the graph: what depends on the values of the input
    common: frozenset[fx.Node]  # what both sides come from
    alone: tuple[frozenset[fx.Node], frozenset[fx.Node]]  # what only one of them comes from

    def list_starts(self) -> list[fx.Node]:
        """The nodes at which both sides start."""
        either = self.alone[0] | self.alone[1]
        used = {before for node in either for before in _list_value_inputs(node)} | set(self.ends)
        return [n for n in self.node.graph.nodes if n in used & self.common & self.data]

    def list_removable(self, side: int) -> list[fx.Node] | None:
        """Nodes that can be removed with a side, in order; None if its results are used elsewhere.

        Sizes and tensors that other nodes use stay.
        """
        order = [n for n in self.node.graph.nodes if n in self.alone[side]]
        may_stay: set[fx.Node] = set()
        for n in order:
            known = all(i in may_stay or i not in self.alone[side] for i in n.all_input_nodes)
            if n.op == "placeholder" or (known and n not in self.data):
                may_stay.add(n)
        removable = dict.fromkeys(order)
        for n in reversed(order):
            is_used = any(user is not self.node and user not in removable for user in n.users)
            if is_used and n not in may_stay:
                return None
            if is_used or n.op == "placeholder":
                del removable[n]
        return list(removable)


def find_sums(graph: fx.Graph) -> list[Sum]:
    """Finds sums whose sides both depend on the values, not only the sizes, of one node."""
    data: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or not data.isdisjoint(_list_value_inputs(node)):
            data.add(node)
    sums = []
    for node in graph.nodes:
        ends = _get_summands(node)
        if ends and data & _collect_ancestors(ends[0], _list_value_inputs) & _collect_ancestors(
            ends[1], _list_value_inputs
        ):
            left, right = (_collect_ancestors(end, lambda n: n.all_input_nodes) for end in ends)
            alone = frozenset(left - right), frozenset(right - left)
            sums.append(Sum(node, ends, frozenset(data), frozenset(left & right), alone))
    return sums


def _get_summands(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    is_sum = (node.op == "call_function" and node.target in ADDITIONS) or (
        node.op == "call_method" and node.target in ("add", "add_")
    )
    if not is_sum or len(node.args) != 2 or node.kwargs:
        return None
    left, right = node.args
    return (left, right) if isinstance(left, fx.Node) and isinstance(right, fx.Node) else None


def _list_value_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs of a node whose values it uses, not only their sizes."""
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    if node.target is getattr:
        return node.all_input_nodes if node.args[1] in ("T", "mT", "H", "mH", "data") else []
    if name in ("size", "dim", "numel") or name.startswith("new_") or name.endswith("_like"):
        return []
    if name == "to" or name.endswith("_as"):
        return node.all_input_nodes[:1]
    return node.all_input_nodes


def _collect_ancestors(
    node: fx.Node, inputs: Callable[[fx.Node], Iterable[fx.Node]]
) -> set[fx.Node]:
    """A node and everything that it is computed from."""
    ancestors, waiting = {node}, [node]
    while waiting:
        for before in inputs(waiting.pop()):
            if before not in ancestors:
                ancestors.add(before)
                waiting.append(before)
    return ancestors


@dataclass(frozen=True, order=True)
class _Weights:
    """A number of weights, and how many of their tensors are matrices."""

    count: int = 0
    matrices: int = 0

    def __add__(self, other: _Weights) -> _Weights:
        return _Weights(self.count + other.count, self.matrices + other.matrices)


def _find_branch_side(total: Sum, module: nn.Module) -> int | None:
    """The side that is the branch: its lightest path has more weights."""
    ways = [_find_lightest_path(total, side, module) for side in (0, 1)]
    weights = [
        (ways[side].count, _count_weights(total.alone[side], module).count) for side in (0, 1)
    ]
    if weights[0] == weights[1]:
        return None
    side = int(weights[1] > weights[0])
    is_shortcut = ways[1 - side].matrices == 0 or ways[1 - side].matrices < ways[side].matrices
    return side if is_shortcut else None


def _find_lightest_path(total: Sum, side: int, module: nn.Module) -> _Weights:
    """The fewest weights on a path from a common start to the end of one side."""
    lightest = dict.fromkeys(total.common & total.data, _Weights())
    for node in total.node.graph.nodes:
        if node in total.alone[side]:
            paths = [lightest[before] for before in _list_value_inputs(node) if before in lightest]
            beside = [before for before in node.all_input_nodes if before.op == "get_attr"]
            if paths:
                lightest[node] = min(paths) + _count_weights([node, *beside], module)
    return lightest[total.ends[side]]


def _count_weights(nodes: Iterable[fx.Node], module: nn.Module) -> _Weights:
    tensors = _list_tensors(nodes, module).values()
    return _Weights(sum(t.numel() for t in tensors), sum(map(is_matrix, tensors)))


def is_matrix(tensor: Tensor) -> bool:
    """Whether a tensor may mix channels: a scale or a bias has one axis, and others of size 1."""
    return sum(size > 1 for size in tensor.shape) > 1


def _list_tensors(nodes: Iterable[fx.Node], module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that nodes use, by name within the module."""
    tensors: dict[str, Tensor] = {}
    for node in nodes:
        target = str(node.target)
        if node.op == "call_module":
            tensors |= list_all_tensors(module.get_submodule(target), target)
        elif node.op == "get_attr":
            value = operator.attrgetter(target)(module)
            if isinstance(value, Tensor):
                tensors[target] = value
    return tensors
