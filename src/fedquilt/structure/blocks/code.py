"""Reads the code of one module symbolically with torch.fx; calls of its children stay opaque.

Code whose meaning depends on more than its symbols raises ``Unreadable``: branches on values or
random numbers, state kept from one call to the next, parts that run in another mode.
"""

from __future__ import annotations

import copy
import inspect
import operator
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from fedquilt.structure.blocks.paths import is_in, join_path


class Unreadable(Exception):
    """The code of a module cannot be read symbolically."""


CONTAINERS = (dict, list, set)
TRANSFORMERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)  # PyTorch's own


def has_code(module: nn.Module) -> bool:
    """Whether a module has Python code, and is not one of PyTorch's own layers."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    own = type(module).__module__.startswith("torch.nn.modules.")
    return not own or isinstance(module, TRANSFORMERS)


class _ShallowTracer(fx.Tracer):
    """Reads the code of one module. Calls of children stay opaque, except those ``opened``."""

    proxy_buffer_attributes = True  # operations on buffers are recorded, not executed

    def __init__(self, opened: Collection[str] = ()) -> None:
        super().__init__()
        self._opened, self._modes = opened, _get_modes()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened

    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        if _get_modes() != self._modes:
            raise Unreadable("a part of it runs without gradients or in another precision")
        return super().create_proxy(*args, **kwargs)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        return self._read_as_empty(obj) if _is_variadic(obj.node) else super().iter(obj)

    def keys(self, obj: fx.Proxy) -> Any:
        return self._read_as_empty(obj) if _is_variadic(obj.node) else super().keys(obj)

    def _read_as_empty(self, obj: fx.Proxy) -> Iterator[Any]:
        """Reads further arguments as absent; the compiled code raises if they are given."""
        self.create_proxy("call_function", _require_no_arguments, (obj,), {})
        return iter(())


def _get_modes() -> tuple[bool, ...]:
    autocast = (torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def _is_variadic(node: fx.Node) -> bool:
    return node.op == "placeholder" and str(node.target).startswith("*")


def _require_no_arguments(given: Collection[Any]) -> None:
    if given:
        raise TypeError("the code of this module was read without further arguments; give none")


def trace_code(module: nn.Module, *, training: bool, opened: Collection[str] = ()) -> fx.Graph:
    """Reads the code of a module and of opened children, as it runs in training or evaluation.

    Arguments with a default become inputs of the graph if the code only passes them on. Others are
    read as absent, and the compiled code raises if they are given.
    """
    if "forward" in vars(module):
        raise Unreadable("its forward is not that of its class")
    if type(module) is nn.TransformerEncoderLayer:
        return _trace_copy(module, opened, {}, training=training)
    fixed = _list_defaults(module)
    graph = _trace_copy(module, opened, fixed, training=training)
    for names in dict.fromkeys([tuple(fixed), *((name,) for name in fixed)]):  # all, or some
        others = {name: value for name, value in fixed.items() if name not in names}
        if len(others) == len(fixed):
            continue
        try:
            taking = _trace_copy(module, opened, others, training=training)
        except Unreadable:
            continue
        if _are_passed_on({name: fixed[name] for name in names}, taking, graph):
            graph, fixed = taking, others
    return graph


def _list_defaults(module: nn.Module) -> dict[str, Any]:
    parameters = inspect.signature(type(module).forward).parameters.values()
    return {
        p.name: p.default for p in parameters if p.default is None or isinstance(p.default, bool)
    }


def _are_passed_on(defaults: Mapping[str, Any], taking: fx.Graph, without: fx.Graph) -> bool:
    """Whether code with inputs for arguments equals the code without, once defaults are set."""
    left, right = ([n for n in g.nodes if not _is_assertion(n)] for g in (taking, without))
    if [(n.op, n.target) for n in left] != [(n.op, n.target) for n in right]:
        return False
    twins = dict(zip(left, right, strict=True))

    def twin(node: fx.Node) -> Any:
        is_default = node.op == "placeholder" and node.target in defaults
        return defaults[str(node.target)] if is_default else twins[node]

    return all(
        fx.map_arg((node.args, node.kwargs), twin) == (other.args, other.kwargs)
        for node, other in twins.items()
    )


def _is_assertion(node: fx.Node) -> bool:
    """Whether a node is what torch.fx adds to check that arguments have their default."""
    if node.target is operator.eq and node.users:
        return all(user.target is torch._assert for user in node.users)
    return getattr(node.target, "__name__", "") in ("_assert", "_assert_is_none")


def _trace_copy(
    module: nn.Module, opened: Collection[str], fixed: Mapping[str, Any], *, training: bool
) -> fx.Graph:
    parts: list[nn.Module] = []
    try:
        copied = _copy_for_tracing(module, opened, parts)
        before = [_snapshot_attributes(part) for part in parts]
        with _forbid_randomness(), _set_mode(copied, training=training):
            graph = _ShallowTracer(opened).trace(copied, concrete_args=dict(fixed) or None)
    except Exception as problem:
        raise Unreadable(str(problem)) from problem
    if [_snapshot_attributes(part) for part in parts] != before:
        raise Unreadable("it keeps something from one call for the next, or makes tensors anew")
    renamed = {f"{name}_1": name for name in fixed}  # torch.fx has counted what is fixed
    for node in reversed(graph.nodes):
        if node.op == "placeholder":
            node.target = renamed.get(str(node.target), node.target)
        if not node.users and (node.op == "get_attr" or node.target in (getattr, operator.getitem)):
            graph.erase_node(node)  # such as an unused size
    return graph


def _copy_for_tracing(
    module: nn.Module, opened: Collection[str], parts: list[nn.Module], path: str = ""
) -> nn.Module:
    """A copy of a module that its code may change; it shares tensors and opaque children."""
    is_plain_encoder = type(module) is nn.TransformerEncoderLayer
    kind = _PlainEncoderLayer if is_plain_encoder else type(module)
    copied: nn.Module = object.__new__(kind)
    for name, value in vars(module).items():
        vars(copied)[name] = copy.copy(value) if isinstance(value, CONTAINERS) else value
    for name, child in module.named_children():
        if join_path(path, name) in opened:
            copied._modules[name] = _copy_for_tracing(child, opened, parts, join_path(path, name))
    parts.append(copied)
    return copied


def _snapshot_attributes(module: nn.Module) -> dict[str, int]:
    return {
        name: len(value) if isinstance(value, CONTAINERS) else id(value)
        for name, value in vars(module).items()
    }


@contextmanager
def _set_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Sets the mode of a module and its children, and restores it afterwards."""
    before = {part: part.training for part in module.modules()}
    try:
        for part in before:
            part.training = training
        yield
    finally:
        for part, mode in before.items():
            part.training = mode


@contextmanager
def _forbid_randomness() -> Iterator[None]:
    """Raises if code draws random numbers while it is read: they would become constants."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
        same = torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
        if not same or not all(map(np.array_equal, np.random.get_state(), states[2])):
            raise Unreadable("it draws random numbers that do not depend on its input")
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


class _PlainEncoderLayer(nn.TransformerEncoderLayer):
    """PyTorch's layer without its fast path, whose conditions torch.fx cannot read."""

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


def compile_graph(graph: fx.Graph) -> Callable[..., Any]:
    """Compiles a graph to a function of the module and its inputs."""
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(code.src, names)  # torch.fx's own rendering of the graph
    function: Callable[..., Any] = names["forward"]
    return function


def list_used_parts(graphs: Iterable[fx.Graph]) -> set[str]:
    """Names of the children and tensors that code uses."""
    nodes = (node for graph in graphs for node in graph.nodes)
    return {str(node.target) for node in nodes if node.op in ("call_module", "get_attr")}


def list_unused_parts(before: set[str], left: set[str]) -> list[str]:
    """Names of used parts that are not needed any more; a module's tensors before the module."""
    return [
        part
        for part in sorted(before - left, reverse=True)
        if not any(is_in(part, other) or is_in(other, part) for other in left)
    ]
