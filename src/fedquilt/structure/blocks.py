"""Blocks that may be skipped: the branches of residual sums, found in any module's own code.

A module that computes ``x + F(x)`` somewhere in its ``forward`` has a block F there. Its code is
read symbolically (torch.fx, each child opaque), so no class or layer name matters. A skipped block
is gone: the sum is replaced by its shortcut, and the layers of F are neither computed nor stored.
A block with a step computes ``x + s · F(x)``.
"""

from __future__ import annotations

import fnmatch
import inspect
import math
import operator
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedquilt.errors import StructureError

WHOLE_MODULE = -1
BY_MODULE = -2


@dataclass(frozen=True)
class Block:
    """A branch that may be skipped, and the tensors that are gone with it.

    ``module`` makes the sum, its residual sum ``number``; or it is a block as a whole
    (``WHOLE_MODULE``), declared by the user: skipped, it gives back its first input; or it knows
    itself how to do without the part (``BY_MODULE``): its ``leave_out(name)`` is called. ``step``
    names the tensor that the branch is multiplied by, if there is one.
    """

    name: str
    module: str
    number: int
    tensors: tuple[str, ...]
    step: str | None = None


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
    shared = _shared_tensors(model)
    found: list[Block] = []
    for path, module in model.named_modules():
        try:
            sums = _sums_of(module)
        except _Unreadable:
            continue
        for number, total in enumerate(sums):
            names = tuple(_join(path, name) for name in _tensors_of(total, module))
            if shared.isdisjoint(names):
                last = total.last_module(module)
                name = path if len(sums) == 1 and path else _join(path, last)
                found.append(Block(name, path, number, names))
    return {block.name: block for block in found}


def chosen_blocks(model: nn.Module, patterns: Sequence[str]) -> dict[str, Block]:
    """The blocks that the patterns name: residual ones, else modules as a whole."""
    known = residual_blocks(model)
    modules = dict(model.named_modules())
    chosen: dict[str, Block] = {}
    for pattern in patterns:
        names = fnmatch.filter(known, pattern)
        whole = [] if names else fnmatch.filter([name for name in modules if name], pattern)
        if not names and not whole:
            raise StructureError(
                f"blocks names '{pattern}', which is no module and no residual block of the model; "
                f"its residual blocks are: {', '.join(known) or 'none'}"
            )
        chosen |= {name: known[name] for name in names}
        for name in whole:
            tensors = (*modules[name].named_parameters(), *modules[name].named_buffers())
            inside = tuple(_join(name, tensor) for tensor, _ in tensors)
            chosen[name] = Block(name, name, WHOLE_MODULE, inside)
    order = {name: i for i, name in enumerate(modules)}
    return dict(sorted(chosen.items(), key=lambda item: (order[item[1].module], item[1].number)))


def step_name(block: Block, blocks: Iterable[Block]) -> str:
    """The name of a block's step: ``step``, or after the branch where a module has several."""
    alone = sum(other.module == block.module for other in blocks) == 1
    branch = block.name[len(block.module) :].strip(".").replace(".", "_")
    return _join(block.module, "step" if alone else f"{branch}_step")


def with_steps(
    model: nn.Module, blocks: Mapping[str, Block], *, learnable: bool
) -> Mapping[str, Block]:
    """Puts a step of 1 into the module of every block, in place; the blocks that name them."""
    stepped = {}
    for name, block in blocks.items():
        step = step_name(block, blocks.values())
        module = model.get_submodule(block.module)
        attribute = step.rpartition(".")[2]
        if hasattr(module, attribute):
            raise StructureError(
                f"module '{block.module}' has something named '{attribute}' already, so its block "
                "cannot get a step of that name; rename it"
            )
        value = nn.Parameter(torch.ones(()), requires_grad=learnable)
        module.register_parameter(attribute, value)
        stepped[name] = replace(block, step=step)
    return stepped


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
    by_module: dict[str, list[Block]] = {}
    for block in blocks.values():
        if block.name in skipped or block.step or (factors and block.name in factors):
            by_module.setdefault(block.module, []).append(block)
    inmost_first = sorted(by_module, key=lambda path: -path.count(".") - bool(path))
    for path in inmost_first:
        module = model.get_submodule(path)
        for block in by_module[path]:
            if block.number == BY_MODULE:
                module.leave_out(block.name)  # type: ignore[operator]
        edits = [_edit(block, skipped, factors or {}) for block in by_module[path]]
        if by_module[path][0].number == WHOLE_MODULE:
            _rewire_whole(module, edits[0])
        elif by_module[path][0].number != BY_MODULE:
            _rewire_sums(module, edits)
        for block in by_module[path]:
            if block.name in skipped and block.step:
                module._parameters.pop(block.step.rpartition(".")[2], None)


@dataclass(frozen=True)
class _Edit:
    """What happens to one residual sum: its branch goes, or is multiplied."""

    number: int
    skip: bool
    factor: str | float | None  # the name of a tensor of the module, or a constant


def _edit(block: Block, skipped: Collection[str], factors: Mapping[str, float]) -> _Edit:
    attribute = block.step and block.step.rpartition(".")[2]
    return _Edit(block.number, block.name in skipped, factors.get(block.name, attribute))


class _Unreadable(Exception):
    """The code of a module cannot be read symbolically."""


@dataclass(frozen=True)
class _Sum:
    """A residual sum in the graph of a module's code."""

    node: fx.Node
    shortcut: fx.Node
    branch: fx.Node  # the end of it
    inside: frozenset[fx.Node]  # all of it

    def last_module(self, module: nn.Module) -> str:
        """The last child that the branch calls, to name it by."""
        calls = [n for n in self.node.graph.nodes if n in self.inside and n.op == "call_module"]
        weighted = [n for n in calls if any(True for _ in _child(module, n).parameters())]
        return str((weighted or calls)[-1].target) if calls else "branch"


def _sums_of(module: nn.Module) -> list[_Sum]:
    """The residual sums of a module's forward; the same ones in training and in use."""
    if not _has_code(module):
        return []
    in_use, in_training = (_sums(_graph(module, training=t), module) for t in (False, True))
    return in_use if len(in_use) == len(in_training) else []


def _has_code(module: nn.Module) -> bool:
    """Whether a module is not one of PyTorch's own layers, whose inside is theirs."""
    own = type(module).__module__.startswith("torch.nn.modules.")
    return not own or isinstance(module, nn.TransformerEncoderLayer)


class _Shallow(fx.Tracer):
    """Reads the code of one module; what its children do is not looked into."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _graph(module: nn.Module, *, training: bool) -> fx.Graph:
    """The code of a module as it runs in training or in use."""
    kind = type(module)
    plain = kind is nn.TransformerEncoderLayer
    if plain:
        module.__class__ = _PlainEncoderLayer
    before, module.training = module.training, training
    try:
        return _Shallow().trace(module, concrete_args=None if plain else _defaults(module))
    except Exception as problem:
        raise _Unreadable(str(problem)) from problem
    finally:
        module.training, module.__class__ = before, kind


def _defaults(module: nn.Module) -> dict[str, Any]:
    """Arguments that are left out in most calls: read as such, and refused if given."""
    found = inspect.signature(type(module).forward).parameters.values()
    return {p.name: p.default for p in found if p.default is None or isinstance(p.default, bool)}


class _PlainEncoderLayer(nn.TransformerEncoderLayer):
    """PyTorch's layer without its fast path, whose conditions cannot be read."""

    def forward(
        self,
        src: Any,
        src_mask: Any = None,
        src_key_padding_mask: Any = None,
        is_causal: Any = False,
    ) -> Any:
        x, masks = src, (src_mask, src_key_padding_mask, is_causal)
        if self.norm_first:
            x = x + self._sa_block(self.norm1(x), *masks)
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(x + self._sa_block(x, *masks))
        return self.norm2(x + self._ff_block(x))


ADDITIONS = (operator.add, operator.iadd, torch.add)


def _sums(graph: fx.Graph, module: nn.Module) -> list[_Sum]:
    return [s for node in graph.nodes if (s := _residual(node, module)) is not None]


def _residual(node: fx.Node, module: nn.Module) -> _Sum | None:
    """A sum whose sides come from one place, where one side has the more weights."""
    is_sum = (node.op == "call_function" and node.target in ADDITIONS) or (
        node.op == "call_method" and node.target in ("add", "add_")
    )
    if not is_sum or len(node.args) != 2 or node.kwargs:
        return None
    left, right = node.args
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return None
    behind = _ancestors(left), _ancestors(right)
    common = behind[0] & behind[1]
    alone = [nodes - common for nodes in behind]
    weights = [sum(t.numel() for _, t in _parameters(nodes, module)) for nodes in alone]
    if not common or weights[0] == weights[1]:
        return None
    side = 0 if weights[0] > weights[1] else 1
    inside = frozenset(n for n in alone[side] if n.op != "placeholder")
    if any(user not in inside and user is not node for n in inside for user in n.users):
        return None  # what the branch computes is used elsewhere too
    ends = (left, right)
    return _Sum(node, ends[1 - side], ends[side], inside)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found, waiting = {node}, [node]
    while waiting:
        for before in waiting.pop().all_input_nodes:
            if before not in found:
                found.add(before)
                waiting.append(before)
    return found


def _child(module: nn.Module, node: fx.Node) -> nn.Module:
    return module.get_submodule(str(node.target))


def _parameters(nodes: Iterable[fx.Node], module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers that nodes use, by name within the module."""
    found: dict[str, Tensor] = {}
    for node in nodes:
        target = str(node.target)
        if node.op == "call_module":
            child = _child(module, node)
            for name, tensor in (*child.named_parameters(), *child.named_buffers()):
                found[_join(target, name)] = tensor
        elif node.op == "get_attr":
            value = operator.attrgetter(target)(module)
            if isinstance(value, Tensor):
                found[target] = value
    return list(found.items())


def _tensors_of(total: _Sum, module: nn.Module) -> list[str]:
    """Tensors that only the branch uses."""
    outside = [n for n in total.node.graph.nodes if n not in total.inside]
    used = {id(tensor) for _, tensor in _parameters(outside, module)}
    return [name for name, t in _parameters(_in_order(total), module) if id(t) not in used]


def _in_order(total: _Sum) -> list[fx.Node]:
    return [node for node in total.node.graph.nodes if node in total.inside]


def _shared_tensors(model: nn.Module) -> frozenset[str]:
    """Names of tensors that have several: they cannot be gone with one block."""
    names: dict[int, list[str]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), []).append(name)
    return frozenset(name for alike in names.values() if len(alike) > 1 for name in alike)


def _rewire_sums(module: nn.Module, edits: Sequence[_Edit]) -> None:
    graphs = [_graph(module, training=training) for training in (True, False)]
    gone: dict[fx.Node, None] = {}
    for graph in graphs:
        sums = _sums(graph, module)
        for edit in sorted(edits, key=lambda edit: -edit.number):  # a later one may rest on earlier
            total = sums[edit.number]
            if total.node in gone:
                continue  # it lay in a branch that was skipped
            if edit.skip:
                gone |= dict.fromkeys(_in_order(total))
                _bypass(graph, total, module)
            elif edit.factor is not None:
                _multiply(graph, total, edit.factor)
    in_training, in_use = (_compiled(graph) for graph in graphs)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (in_training if self.training else in_use)(self, *args, **kwargs)

    module.forward = types.MethodType(forward, module)
    left = {str(n.target) for g in graphs for n in g.nodes if n.op in ("call_module", "get_attr")}
    for node in gone:
        if node.op in ("call_module", "get_attr") and str(node.target) not in left:
            _remove(module, str(node.target))


def _bypass(graph: fx.Graph, total: _Sum, module: nn.Module) -> None:
    """The shortcut instead of the sum."""
    around = total.shortcut
    if any(_works_in_place(user, module) for user in total.node.users):
        with graph.inserting_after(total.node):  # what others still need must not change
            around = graph.call_function(torch.clone, (total.shortcut,))
    total.node.replace_all_uses_with(around, delete_user_cb=lambda user: user is not around)
    graph.erase_node(total.node)
    for node in reversed(_in_order(total)):
        graph.erase_node(node)


def _works_in_place(node: fx.Node, module: nn.Module) -> bool:
    if node.op == "call_module":
        return bool(getattr(_child(module, node), "inplace", False))
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    first_i = node.target in (operator.iadd, operator.imul, operator.isub, operator.itruediv)
    return first_i or str(name).endswith("_") or bool(node.kwargs.get("inplace"))


def _multiply(graph: fx.Graph, total: _Sum, factor: str | float) -> None:
    """The branch times a factor."""
    with graph.inserting_before(total.node):
        by = graph.get_attr(factor) if isinstance(factor, str) else factor
        scaled = graph.call_function(operator.mul, (total.branch, by))
    total.node.args = tuple(scaled if arg is total.branch else arg for arg in total.node.args)


def _compiled(graph: fx.Graph) -> Callable[..., Any]:
    """The graph as a function of the module and its inputs."""
    graph.lint()
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(code.src, names)  # torch.fx's own rendering of the graph
    function: Callable[..., Any] = names["forward"]
    return function


def _remove(module: nn.Module, name: str) -> None:
    """A child or a tensor of a module is gone."""
    path, _, last = name.rpartition(".")
    parent = module.get_submodule(path)
    if isinstance(module, nn.TransformerEncoderLayer):
        _empty(parent._modules[last])  # PyTorch's encoder asks its layers for their settings
        return
    for home in (parent._modules, parent._parameters, parent._buffers):
        home.pop(last, None)


def _empty(module: nn.Module | None) -> None:
    """A module keeps its settings but no tensors."""
    for part in [] if module is None else module.modules():
        for home in (part._parameters, part._buffers):
            home.update(dict.fromkeys(home))


def _rewire_whole(module: nn.Module, edit: _Edit) -> None:
    """A declared block: its input if it is skipped, else x + s (B(x) - x)."""
    inner = type(module).forward

    def skipped(self: nn.Module, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x

    def stepped(self: nn.Module, x: Any, *args: Any, **kwargs: Any) -> Any:
        factor = getattr(self, edit.factor) if isinstance(edit.factor, str) else edit.factor
        return x + factor * (inner(self, x, *args, **kwargs) - x)

    module.forward = types.MethodType(skipped if edit.skip else stepped, module)
    if edit.skip:
        for home in (module._modules, module._parameters, module._buffers):
            home.clear()


def first_of_each_stage(blocks: Mapping[str, Block], depth: float) -> list[str]:
    """The blocks of the first ⌈depth · n⌉ modules of every stage, which is a container of them.

    >>> names = ["layer1.0", "layer1.1", "layer1.2", "layer2.0"]
    >>> first_of_each_stage({name: Block(name, name, 0, ()) for name in names}, 0.5)
    ['layer1.0', 'layer1.1', 'layer2.0']
    """
    if not 0 < depth <= 1:
        raise StructureError(f"depths are fractions in (0, 1], got {depth}; 1 keeps every block")
    stages: dict[str, dict[str, None]] = {}
    for block in blocks.values():
        stages.setdefault(block.module.rpartition(".")[0], {})[block.module] = None
    kept = {
        module
        for stage in stages.values()
        for module in list(stage)[: max(1, math.ceil(round(depth * len(stage), 9)))]
    }
    return [block.name for block in blocks.values() if block.module in kept]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
