"""The code of one module, read symbolically with torch.fx: its children stay closed.

Code that cannot be told from its symbols is refused: choices by value or by chance, whatever is
kept from one call for the next, parts that run in another mode.
"""

from __future__ import annotations

import copy
import inspect
import operator
import random
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn


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


class _Shallow(fx.Tracer):
    """Reads the code of one module; what its children do is not looked into, but for the opened."""

    proxy_buffer_attributes = True  # what the code does to buffers is read, not done

    def __init__(self, opened: Collection[str] = ()) -> None:
        super().__init__()
        self._opened, self._modes = opened, _modes()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened

    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        if _modes() != self._modes:
            raise Unreadable("a part of it runs without gradients or in another precision")
        return super().create_proxy(*args, **kwargs)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        return self._nothing(obj) if _is_variadic(obj.node) else super().iter(obj)

    def keys(self, obj: fx.Proxy) -> Any:
        return self._nothing(obj) if _is_variadic(obj.node) else super().keys(obj)

    def _nothing(self, obj: fx.Proxy) -> Iterator[Any]:
        """Further arguments are read as left out, and refused if given."""
        self.create_proxy("call_function", _refuse, (obj,), {})
        return iter(())


def _modes() -> tuple[bool, ...]:
    autocast = (torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def _is_variadic(node: fx.Node) -> bool:
    return node.op == "placeholder" and str(node.target).startswith("*")


def _refuse(given: Collection[Any]) -> None:
    if given:
        raise TypeError("the code of this module was read without further arguments; give none")


def code_of(module: nn.Module, *, training: bool, opened: Collection[str] = ()) -> fx.Graph:
    """The code of a module, and of children that are opened, as it runs in training or in use.

    Arguments with a default are taken if the code only passes them on; others are read as left
    out, and refused if given.
    """
    if "forward" in vars(module):
        raise Unreadable("its forward is not that of its class")
    if type(module) is nn.TransformerEncoderLayer:
        return _read(module, opened, {}, training=training)
    fixed = _defaults(module)
    graph = _read(module, opened, fixed, training=training)
    for names in dict.fromkeys([tuple(fixed), *((name,) for name in fixed)]):  # all, or some
        others = {name: value for name, value in fixed.items() if name not in names}
        if len(others) == len(fixed):
            continue
        try:
            taking = _read(module, opened, others, training=training)
        except Unreadable:
            continue
        if _are_passed_on({name: fixed[name] for name in names}, taking, graph):
            graph, fixed = taking, others
    return graph


def _defaults(module: nn.Module) -> dict[str, Any]:
    found = inspect.signature(type(module).forward).parameters.values()
    return {p.name: p.default for p in found if p.default is None or isinstance(p.default, bool)}


def _are_passed_on(defaults: Mapping[str, Any], taking: fx.Graph, without: fx.Graph) -> bool:
    """Whether code that takes arguments is, with their defaults there, the code without them."""
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
    """What torch.fx adds to refuse other values than the default."""
    if node.target is operator.eq and node.users:
        return all(user.target is torch._assert for user in node.users)
    return getattr(node.target, "__name__", "") in ("_assert", "_assert_is_none")


def _read(
    module: nn.Module, opened: Collection[str], fixed: Mapping[str, Any], *, training: bool
) -> fx.Graph:
    parts: list[nn.Module] = []
    try:
        copied = _to_read(module, opened, parts)
        before = [_belongings(part) for part in parts]
        with _no_chance(), _mode(copied, training=training):
            graph = _Shallow(opened).trace(copied, concrete_args=dict(fixed) or None)
    except Exception as problem:
        raise Unreadable(str(problem)) from problem
    if [_belongings(part) for part in parts] != before:
        raise Unreadable("it keeps something from one call for the next, or makes tensors anew")
    renamed = {f"{name}_1": name for name in fixed}  # torch.fx has counted what is fixed
    for node in reversed(graph.nodes):
        if node.op == "placeholder":
            node.target = renamed.get(str(node.target), node.target)
        if not node.users and (node.op == "get_attr" or node.target in (getattr, operator.getitem)):
            graph.erase_node(node)  # such as a size that nobody needs
    return graph


def _to_read(
    module: nn.Module, opened: Collection[str], parts: list[nn.Module], path: str = ""
) -> nn.Module:
    """A copy of a module that its code may change; it shares its tensors and closed children."""
    is_plain_encoder = type(module) is nn.TransformerEncoderLayer
    kind = _PlainEncoderLayer if is_plain_encoder else type(module)
    copied: nn.Module = object.__new__(kind)
    for name, value in vars(module).items():
        vars(copied)[name] = copy.copy(value) if isinstance(value, CONTAINERS) else value
    for name, child in module.named_children():
        if join(path, name) in opened:
            copied._modules[name] = _to_read(child, opened, parts, join(path, name))
    parts.append(copied)
    return copied


def _belongings(module: nn.Module) -> dict[str, int]:
    return {
        name: len(value) if isinstance(value, CONTAINERS) else id(value)
        for name, value in vars(module).items()
    }


@contextmanager
def _mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """A module in training or in use, and afterwards as it was; code may ask its children, too."""
    before = {part: part.training for part in module.modules()}
    try:
        for part in before:
            part.training = training
        yield
    finally:
        for part, mode in before.items():
            part.training = mode


@contextmanager
def _no_chance() -> Iterator[None]:
    """Refuses code that draws random numbers while it is read: they would stay the same."""
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


def compiled(graph: fx.Graph) -> Callable[..., Any]:
    """The graph as a function of the module and its inputs."""
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(code.src, names)  # torch.fx's own rendering of the graph
    function: Callable[..., Any] = names["forward"]
    return function


def parts_of(graphs: Iterable[fx.Graph]) -> set[str]:
    """The children and tensors that code uses."""
    nodes = (node for graph in graphs for node in graph.nodes)
    return {str(node.target) for node in nodes if node.op in ("call_module", "get_attr")}


def unused(before: set[str], left: set[str]) -> list[str]:
    """Of what code used, what nothing needs that is left; a module's tensors before the module."""
    return [
        part
        for part in sorted(before - left, reverse=True)
        if not any(is_in(part, other) or is_in(other, part) for other in left)
    ]


class _NotPlain(Exception):
    """A value that cannot be compared."""


PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, type)
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


def likeness(module: nn.Module) -> Hashable | None:
    """What the code of a module can depend on: equal for modules that are alike; None: unknown."""
    seen: dict[int, int] = {}
    try:
        parts = tuple(
            (
                path,
                type(part),
                seen.setdefault(id(part), len(seen)),
                tuple(
                    (name, _plain(value))
                    for name, value in vars(part).items()
                    if name not in OF_EVERY_MODULE and (path or name != "training")
                ),
            )
            for path, part in module.named_modules(remove_duplicate=False)
        )
    except _NotPlain:
        return None
    tensors = tuple(
        (name, tuple(tensor.shape), seen.setdefault(id(tensor), len(seen)))
        for name, tensor in all_tensors(module).items()
    )
    return parts, tensors


def _plain(value: Any) -> Hashable:
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if not isinstance(value, (*PLAIN, *FUNCTIONS)):
        raise _NotPlain
    return type(value), value


def all_tensors(module: nn.Module, path: str = "") -> dict[str, Tensor]:
    """Parameters and buffers under all the names that they have."""
    return {
        **dict(module.named_parameters(path, remove_duplicate=False)),
        **dict(module.named_buffers(path, remove_duplicate=False)),
    }


def join(path: str, name: str) -> str:
    """The name of something inside a module."""
    return f"{path}.{name}" if path else name


def is_in(name: str, path: str) -> bool:
    """Whether a module or tensor is another one or inside it."""
    return not path or name == path or name.startswith(f"{path}.")
