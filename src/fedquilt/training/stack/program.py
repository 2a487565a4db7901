"""A model that computes several nets of its shape at once, checked against each net by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from fedquilt.learning.batch import stack_values, unstack_values
from fedquilt.structure.dispatch import Interceptor
from fedquilt.structure.layout import use_channels_last
from fedquilt.structure.tensors import (
    Example,
    call_with_tensors,
    find_tensors,
    map_tensors,
    named_tensors,
    to_arguments,
)
from fedquilt.training.attack import frozen_model
from fedquilt.training.scaler import OutputScale
from fedquilt.training.stack.layers import (
    Fold,
    Rule,
    StackedDropout,
    StackedScalar,
    Tensors,
    UnstackableError,
    find_rule,
    fold_input,
    unfold_output,
)

TOLERANCE = 1e-8  # of the largest value, in double precision
CHECKED_NETS, CHECKED_ROWS = 3, 4
Inputs = tuple[Any, ...]  # arguments of a model


class Program(Protocol):
    """What computes several nets at once, such as a ``StackedModel``."""

    def make_stack(self, tensors: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
        """Memory for the tensors of several nets, not filled."""
        ...

    def use(
        self, tensors: Mapping[str, Tensor], generators: Sequence[torch.Generator]
    ) -> nn.Module:
        """A module that computes the nets with these tensors, whose first axis is the nets.

        Each net draws from a generator of its own.
        """
        ...

    def stack(self, values: Sequence[Any]) -> Any:
        """Inputs or targets of all nets as one, or one value for all of them."""
        ...


class StackedModel(nn.Module):
    """A copy of a module whose layers compute several nets at once.

    Its own code runs as it is, on what is folded; hooks of the module are copied as well. Inputs
    and outputs have a first axis of nets. An input that is expanded along it is the same for all.

    Args:
        module: One of the nets.
        fold: How inputs and outputs are folded.
    """

    def __init__(self, module: nn.Module, fold: Fold) -> None:
        super().__init__()
        self.fold = fold
        self._copy = copy.deepcopy(module)
        self._count = 0
        names = {id(tensor): name for name, tensor in named_tensors(self._copy).items()}
        self._layers: list[tuple[_Layer, dict[str, str]]] = []
        self._scalars: list[tuple[StackedScalar, str]] = []
        self._dropouts: list[StackedDropout] = []
        self._is_linear: dict[str, bool] = {}  # whether only linear layers have the tensor
        for layer in self._copy.modules():
            tensors = {**layer._parameters, **layer._buffers}
            own = {name: tensor for name, tensor in tensors.items() if tensor is not None}
            known = {name: names[id(tensor)] for name, tensor in own.items()}
            for called in known.values():
                before = self._is_linear.get(called, True)
                self._is_linear[called] = before and isinstance(layer, nn.Linear)
            layer._parameters.clear()  # code that reads them fails
            layer._buffers.clear()
            layer._parameters |= {n: None for n in tensors if n not in own}
            if own and all(tensor.ndim == 0 for tensor in own.values()):
                for name, called in known.items():
                    self._scalars.append((StackedScalar(fold), called))
                    object.__setattr__(layer, name, self._scalars[-1][0])
            elif isinstance(layer, nn.Dropout) and type(layer).forward is nn.Dropout.forward:
                self._dropouts.append(StackedDropout(layer, fold))
                vars(layer)["forward"] = self._dropouts[-1]
            elif own:
                layer.forward = _Layer(layer, find_rule(layer, fold))
                self._layers.append((layer.forward, known))

    def make_stack(self, tensors: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
        """Memory for the tensors of several nets, not filled.

        The weights of linear layers lie as their gradients come, by input first: an optimizer takes
        half as long where both lie in the same way.

        Args:
            tensors: The tensors of one net by name.
            count: The number of nets.
        """
        stack = {}
        for name, tensor in tensors.items():
            if tensor.ndim == 2 and self._is_linear.get(name):
                stack[name] = tensor.detach().new_empty((count, *tensor.T.shape)).transpose(1, 2)
            else:
                stack[name] = tensor.detach().new_empty((count, *tensor.shape))
        return stack

    @property
    def draws(self) -> bool:
        """Whether nets draw random numbers."""
        return bool(self._dropouts)

    def use(
        self, tensors: Mapping[str, Tensor], generators: Sequence[torch.Generator]
    ) -> StackedModel:
        """The same with these tensors and generators of the nets from now on.

        Args:
            tensors: By name; the first axis is the nets.
            generators: What each net draws from.
        """
        self._count = len(next(iter(tensors.values())))
        for layer, names in self._layers:
            layer.count = self._count
            layer.own = {name: tensors[known] for name, known in names.items()}
        for scalar, name in self._scalars:
            scalar.values = tensors[name]
        for dropout in self._dropouts:
            dropout.generators = generators
        return self

    def forward(self, *inputs: Any) -> Any:
        """The output of all nets."""
        return self._map(unfold_output, self._copy(*self._map(fold_input, inputs)), self._count)

    def _map(self, change: Callable[..., Tensor], values: Any, *more: int) -> Any:
        leaves, form = tree_flatten(values)
        changed = [
            change(leaf, self.fold, *more) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        return tree_unflatten(changed, form)

    def stack(self, values: Sequence[Any]) -> Any:
        """Inputs or targets of all nets as one, so that folding them copies nothing.

        Args:
            values: Those of each net, or one value for all of them.
        """
        if len(values) == 1:
            return tree_map_only(Tensor, lambda x: x.expand(self._count, *x.shape), values[0])
        return stack_values(values, axis=1 if self.fold == "channels" else 0)


class _Layer:
    """The forward of a layer of all nets."""

    def __init__(self, layer: nn.Module, rule: Rule) -> None:
        self.layer, self.rule = layer, rule
        self.own: Tensors = {}
        self.count = 0

    def __call__(self, x: Tensor) -> Tensor:
        return self.rule(self.layer, self.own, x, self.count)


_PROGRAMS: WeakKeyDictionary[nn.Module, dict[Any, StackedModel | str]] = WeakKeyDictionary()


def find_program(
    module: nn.Module, make_inputs: Callable[[], Inputs], *, in_evaluation: bool = False
) -> StackedModel:
    """The model that computes several nets of a module's shape at once.

    It is made once for each module and its scaled layers, and checked on inputs like these:
    outputs, gradients and statistics of a few nets must be those of each net by itself.

    Args:
        module: One of the nets, in the mode in which it runs.
        make_inputs: Returns arguments of the module; it is called if there is no program yet.
        in_evaluation: Whether it runs in evaluation mode, too, as while it is attacked.

    Raises:
        UnstackableError: No way was found; the message says why.
    """
    known = _PROGRAMS.setdefault(module, {})
    scales = tuple(
        (path, hook.rate)
        for path, layer in module.named_modules()
        for hook in layer._forward_hooks.values()
        if isinstance(hook, OutputScale)
    )
    key = scales, in_evaluation
    if key not in known:
        known[key] = _make_program(module, make_inputs(), in_evaluation=in_evaluation)
    program = known[key]
    if isinstance(program, str):
        raise UnstackableError(program)
    return program


def can_stack(model: nn.Module, example: Example, *, channels_last: bool = False) -> bool:
    """Whether nets of this shape can train in one pass as they do one after another.

    Args:
        model: One of the nets.
        example: An input of it.
        channels_last: Whether images are kept by rows.
    """
    net = copy.deepcopy(model).train()
    if channels_last:
        use_channels_last(net)
    try:
        program = find_program(net, lambda: to_arguments(example))
    except UnstackableError:
        return False
    return not program.draws  # it would draw in another order than one after another


def _make_program(module: nn.Module, inputs: Inputs, *, in_evaluation: bool) -> StackedModel | str:
    """A program that passed the check, or the first reason why there is none."""
    has_images = any(isinstance(layer, _ConvNd) for layer in module.modules())
    folds: tuple[Fold, Fold] = ("channels", "rows") if has_images else ("rows", "channels")
    reasons = []
    for fold in folds:
        try:
            if not find_tensors(list(named_tensors(module).values())):
                raise UnstackableError("it has no tensors")
            program = StackedModel(module, fold)
            _check(program, module, inputs)
            if in_evaluation:
                with frozen_model(program), frozen_model(module):
                    _check(program, module, inputs)
        except UnstackableError as problem:
            reasons.append(str(problem))
        except Exception as problem:  # whatever a model may raise
            reasons.append(f"its code fails on a stack ({type(problem).__name__}: {problem})")
        else:
            return program
    return reasons[0]


def _check(program: StackedModel, module: nn.Module, inputs: Inputs) -> None:
    """Compares a few nets in one pass with each by itself, in double precision on the host."""
    generator = torch.Generator().manual_seed(0)
    own = {name: tensor.detach().cpu() for name, tensor in named_tensors(module).items()}
    nets = [{n: _vary(t, generator) for n, t in own.items()} for _ in range(CHECKED_NETS)]
    given = [
        map_tensors(lambda x, k=k: _vary_input(x.cpu(), k, generator), inputs)  # type: ignore[misc]
        for k in range(CHECKED_NETS)
    ]
    stack = {name: torch.stack([net[name] for net in nets]) for name in own}
    weights = [name for name, _ in module.named_parameters()]
    for tensors in (stack, *nets):
        for name in weights:
            tensors[name].requires_grad_()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        before = torch.get_rng_state()
        with _Watcher():
            draws = [torch.Generator().manual_seed(k) for k in range(CHECKED_NETS)]
            output = program.use(stack, draws)(*program.stack(given))
        outputs = unstack_values(output, CHECKED_NETS)
        if not before.equal(torch.get_rng_state()):
            raise UnstackableError("it draws random numbers")
        together = _differentiate(sum(map(_weigh, outputs)), stack, weights)
        reference = copy.deepcopy(module).cpu().double()
        for k, (net, arguments) in enumerate(zip(nets, given, strict=True)):
            torch.default_generator.manual_seed(k)
            expected = call_with_tensors(reference, net, arguments)
            alone = _differentiate(_weigh(expected), net, weights)
            pairs = [
                *zip(find_tensors(outputs[k]), find_tensors(expected), strict=True),
                *((None if t is None else t[k], a) for t, a in zip(together, alone, strict=True)),
                *((stack[n][k], t) for n, t in net.items() if n not in weights),
            ]
            if not all(_is_close(one, other) for one, other in pairs):
                raise UnstackableError("its code mixes values of different nets on a stack")


def _differentiate(loss: Any, tensors: Mapping[str, Tensor], names: list[str]) -> Any:
    return torch.autograd.grad(loss, [tensors[name] for name in names], allow_unused=True)


def _vary(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """A tensor of another net, near the given one; variances stay positive."""
    if not tensor.is_floating_point():
        return tensor.clone()
    noise = _draw(tensor, generator)
    return tensor.double() * (1 + 0.1 * noise.clamp(-3, 3)) + 0.01 * noise.abs()


def _vary_input(x: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """A few rows of a batch, other ones for each net."""
    if not x.ndim:
        return x.double() if x.is_floating_point() else x
    chosen = x[torch.arange(k, k + CHECKED_ROWS) % len(x)]
    if not x.is_floating_point():
        return chosen
    return chosen.double() + 0.1 * _draw(chosen, generator)


def _draw(tensor: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64)


def _weigh(output: Any) -> Tensor:
    """A number that depends on every entry of an output in its own way."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in find_tensors(output):
        if tensor.is_floating_point():
            weights = torch.linspace(0.5, 1.5, tensor.numel(), dtype=torch.float64)
            total = total + (tensor * weights.view(tensor.shape)).square().sum()
    return total


def _is_close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return one.equal(other)
    scale = max(float(other.detach().abs().max()) if other.numel() else 0.0, 1.0)
    return bool(((one - other).abs() <= TOLERANCE * scale).all())


class _Watcher(Interceptor):
    """Refuses what would be right for one net only: decisions by values."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        tags = func.tags
        if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
            raise UnstackableError(f"its code looks at values ({func})")
        return func(*args, **(kwargs or {}))
