"""Follow a model's operations on an example and find which positions form a channel."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode

from fedquilt.errors import StructureError
from fedquilt.structure.channels import Channels, Labels
from fedquilt.structure.operations import RESHAPES, Call, Dims, base_name, rule_for

Example = Tensor | tuple[Any, ...]


@dataclass(frozen=True)
class Choices:
    """What one forward pass leaves open, settled in one way."""

    split_first: frozenset[tuple[str, int]] = frozenset()
    """Reshapes (module, how many it made before) that split an axis with the channels first; the
    others have them last, as attention heads do."""
    one_number: bool = False
    """Axes of one size that a module reshapes have their size from one number: they are one."""
    from_input: bool = False
    """That number is the size of what the module was given."""


@dataclass(frozen=True)
class Split:
    """A reshape that had to choose which part of an axis carries its channels."""

    module: str
    number: int  # how many reshapes the module made before
    sizes: tuple[int, ...]  # of the parts
    labels: Labels  # of the axis


@dataclass
class Trace:
    """What following one forward pass has shown."""

    channels: Channels
    tensors: dict[str, Dims]  # labels of every parameter and buffer
    statistics: frozenset[str]  # running statistics of batch normalisation
    outputs: Labels | None  # labels of the last axis of the first output
    sizes: dict[str, list[tuple[int, Labels]]]  # labelled axes that each module met
    across: dict[str, list[Labels]]  # channels that each module computes across
    splits: list[Split] = field(default_factory=list)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; a tied tensor is listed once, under its first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def call_with(model: nn.Module, tensors: Mapping[str, Tensor], inputs: tuple[Any, ...]) -> Any:
    """What the model gives with other tensors than its own, which come under their first names.

    A tied one is replaced in all its places, each of them once: PyTorch's ``functional_call`` left
    to itself does so twice in a module that has two names, and cannot undo it.
    """
    first = {id(tensor): name for name, tensor in named_tensors(model).items()}
    filled = {}
    for path, module in model.named_modules():  # each under its first name
        how = {"recurse": False, "remove_duplicate": False}
        for own, tensor in (*module.named_parameters(**how), *module.named_buffers(**how)):
            if first[id(tensor)] in tensors:
                filled[f"{path}.{own}" if path else own] = tensors[first[id(tensor)]]
    return functional_call(model, filled, inputs, tie_weights=False)


def arguments(example: Example) -> tuple[Any, ...]:
    """The example as positional arguments of the model."""
    return example if isinstance(example, tuple) else (example,)


def follow(
    model: nn.Module, example: Example, exclude: Sequence[str] = (), choices: Choices | None = None
) -> Trace:
    """Runs the model on the example and ties what its operations make inseparable.

    It runs as in use and, where it can, as in training: a model may do more there. ``exclude``
    names modules that are never cut.
    """
    model = copy.deepcopy(model).eval()
    tracer = _Tracer(model, exclude, choices or Choices())
    watched = tracer.watching(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), plain_kernels(), watched:
        outputs = [tracer.run(arguments(example))]
        for inputs in training_inputs(arguments(example)):
            with suppress(Exception):  # not every model can be trained on such a batch
                outputs.append(tracer.run(inputs, training=True))
                break
    return tracer.result(outputs)


def training_inputs(inputs: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The inputs, and then twice as many: batch normalisation needs several to be trained."""
    yield inputs
    yield tuple(torch.cat([x, x]) if isinstance(x, Tensor) and x.ndim else x for x in inputs)


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Fused inference kernels off, so that the operations inside them can be seen."""
    fast = torch.backends.mha.get_fastpath_enabled()
    mkldnn = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(mkldnn)
        torch.backends.mha.set_fastpath_enabled(fast)


class _Tracer(TorchDispatchMode):
    def __init__(
        self,
        model: nn.Module,
        exclude: Sequence[str],
        choices: Choices,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
        self.channels = Channels()
        self.names = named_tensors(model)
        self.parameters = {id(t): name for name, t in self.names.items()}
        self.labels: dict[int, Dims] = {
            id(t): [self.channels.owned(size) for size in t.shape] for t in self.names.values()
        }
        self.alive: list[Tensor] = []  # ids stay unique while their tensors live
        self.data: set[int] = set()  # tensors that depend on the example
        self.touched: set[int] = set()
        self.statistics: set[int] = set()
        self.sizes: dict[str, list[tuple[int, Labels]]] = {}
        self.given: dict[str, list[tuple[int, Labels]]] = {}
        self.reshapes: Counter[str] = Counter()
        self.reshaped: dict[tuple[str, int], list[Labels]] = {}  # by module and size
        self.derived: list[tuple[Labels, list[Labels]]] = []  # reshaped axes, and what was given
        self.splits: list[Split] = []
        self.across: dict[str, list[Labels]] = {}
        self.places: list[tuple[Tensor, Labels]] = []
        self.stack: list[str] = [""]
        self.model, self.exclude, self.choices = model, exclude, choices
        self.refusal: StructureError | None = None
        for module in model.modules():
            self._freeze_kernel(module)
        for name, tensor in self.names.items():
            if any(name == e or name.startswith(f"{e}.") for e in exclude):
                self._freeze(tensor)

    def _freeze_kernel(self, module: nn.Module) -> None:
        """Known before it runs: what computes a convolution's weight may lay its axes together."""
        if isinstance(module, _ConvNd):
            rank = 2 + len(module.kernel_size)
            for tensor in (t for t in module.parameters() if t.ndim == rank):
                for labels in self.of(tensor)[2:]:
                    self.channels.freeze(labels)

    def run(self, inputs: tuple[Any, ...], *, training: bool = False) -> Any:
        """The model's output, followed."""
        self.stack = [""]
        self.data.update(id(x) for x in tensors_in(inputs))
        self.alive.extend(tensors_in(inputs))
        with self:
            return self.model.train(training)(*inputs)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Knows at every moment which module is running."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                before = module.register_forward_pre_hook(self._entering(name), with_kwargs=True)
                after = module.register_forward_hook(self._leaving(name))
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def _entering(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.stack.append(name)
            self.given[name] = []
            self._give(name, tensors_in((inputs, named)))

        return hook

    def _leaving(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            self.stack.pop()
            if name in self.exclude:
                for tensor in tensors_in(output):
                    self._freeze(tensor)
            self._give(self.stack[-1], tensors_in(output))

        return hook

    def _give(self, module: str, tensors: Sequence[Tensor]) -> None:
        """A module is given tensors by its caller or by the modules inside it."""
        if module in self.exclude:
            for tensor in tensors:
                self._freeze(tensor)
        sized = [pair for t in tensors for pair in _labelled(t, self.of(t))]
        self.given.setdefault(module, []).extend(sized)
        self.sizes.setdefault(module, []).extend(sized)

    def of(self, tensor: Tensor) -> Dims:
        """Labels of a tensor; one that nobody labelled is never cut."""
        return list(self.labels.get(id(tensor), [None] * tensor.ndim))

    def _freeze(self, tensor: Tensor) -> None:
        for labels in self.of(tensor):
            self.channels.freeze(labels)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        call = self._call(func, args, kwargs or {}, tuple(tensors_in(result)))
        for tensor in call.tensors():
            self.touched.add(id(tensor))
        if not call.outputs:
            return result
        rule = rule_for(func)
        if rule is None:
            self._refuse(func, call)
            dims: Sequence[Dims] = [[None] * out.ndim for out in call.outputs]
        else:
            dims = rule(call)
        self._note(call, dims)
        is_data = any(id(t) in self.data for t in call.tensors())
        for out, labels in zip(call.outputs, dims, strict=False):
            if is_data:
                self.data.add(id(out))
            if id(out) not in self.parameters:
                self.labels[id(out)] = list(labels)
                self.alive.append(out)
        return result

    def _call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[Tensor, ...]
    ) -> Call:
        names = [a.name for a in func._schema.arguments]
        bound = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
        bound.update(zip(names, args, strict=False))
        bound.update(kwargs)
        here = self.stack[-1]
        return Call(
            base_name(func),
            {name: bound[name] for name in names if name in bound},
            outputs,
            self.channels,
            self.of,
            lambda t: id(t) not in self.data,
            split_first=(here, self.reshapes[here]) in self.choices.split_first,
            equal_parts=self.choices.one_number,
        )

    def _note(self, call: Call, dims: Sequence[Dims]) -> None:
        here = self.stack[-1]
        self.statistics |= {id(t) for t in call.statistics}
        self.across.setdefault(here, []).extend(call.across)
        self.places.extend(call.places)
        seen = self.sizes.setdefault(here, [])
        for tensor, labels in [
            *((t, self.of(t)) for t in call.tensors()),
            *zip(call.outputs, dims, strict=False),
        ]:
            seen.extend(_labelled(tensor, labels))
        if call.name in RESHAPES:
            self._note_reshape(call, dims[0], here)

    def _note_reshape(self, call: Call, dims: Dims, here: str) -> None:
        for axis, sizes in call.splits:
            self.splits.append(Split(here, self.reshapes[here], sizes, axis))
        self.reshapes[here] += 1
        if type(self.model.get_submodule(here)).__module__.startswith("torch.nn.modules."):
            return  # PyTorch's own layers: what they demand is in _tie_layers
        for size, labels in _labelled(call.outputs[0], dims):
            self.reshaped.setdefault((here, size), []).append(labels)
        given = self.given.get(here, [])
        for size, labels in _labelled(call.tensors()[0], self.of(call.tensors()[0])):
            self.derived.append((labels, [other for n, other in given if size % n == 0]))

    def _tie_sizes(self) -> None:
        """Ties what must be of one size, as chosen; what is frozen by now has its own size."""
        if self.choices.one_number:
            for alike in self.reshaped.values():
                cut = [labels for labels in alike if self.channels.is_cut(labels)]
                for labels in cut[1:]:
                    self.channels.tie(cut[0], labels)
        if self.choices.from_input:
            for axis, given in self.derived:
                if not self.channels.is_cut(axis):
                    continue
                for labels in [g for g in given if self.channels.is_cut(g)] or given:
                    self.channels.fold(axis, len(axis) // len(labels))
                    self.channels.tie(labels, axis[: len(labels)])

    def _refuse(self, func: Any, call: Call) -> None:
        if any(self.channels.is_cut(labels) for t in call.tensors() for labels in self.of(t)):
            where = self.stack[-1]
            self.refusal = StructureError(
                f"module '{where or type(self.model).__name__}' uses the operation {call.name}, "
                f"through which channels cannot be followed; {remedy(where)}, or give the axes "
                "with Structure.declare(...)"
            )
            raise self.refusal

    def result(self, output: Any) -> Trace:
        """The trace, once the forward passes are over."""
        if self.refusal is not None:
            raise self.refusal
        _tie_layers(self)
        self._tie_sizes()
        for tensor in self.names.values():
            if id(tensor) not in self.touched:
                self._freeze(tensor)  # not used in this pass: shared whole
        outputs = list(tensors_in(output))
        self.touched.update(map(id, outputs))
        for tensor, channels in self.places:
            if id(tensor) in self.touched:
                self.channels.freeze(channels)  # it matters at which of them something is
        last: Labels | None = None
        for i, tensor in enumerate(outputs):
            dims = self.of(tensor)
            if i == 0 and dims:
                last = dims[-1]
            for labels in dims:
                self.channels.pin(labels)
        return Trace(
            self.channels,
            {name: self.of(tensor) for name, tensor in self.names.items()},
            frozenset(self.parameters[i] for i in self.statistics if i in self.parameters),
            last,
            self.sizes,
            self.across,
            self.splits,
        )


def remedy(module: str) -> str:
    """What to do about a module through which channels cannot be followed."""
    if not module:
        return "move it into a module of its own and exclude that"
    return f"exclude the module so that it is shared whole (exclude=['{module}'])"


def _labelled(tensor: Tensor, dims: Dims) -> list[tuple[int, Labels]]:
    return [(n, axis) for n, axis in zip(tensor.shape, dims, strict=False) if axis is not None]


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in an input or output: itself, or those in its lists, dicts and fields."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_in(item)]
    return []


def _tie_layers(tracer: _Tracer) -> None:
    """What PyTorch's own layers demand beyond their operations: one size for several axes."""
    of, channels = tracer.of, tracer.channels
    for module in tracer.model.modules():
        if isinstance(module, nn.MultiheadAttention):
            packed, width = module.in_proj_weight, module.embed_dim
            if packed is None:
                parts = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
                rows = [of(part)[0] for part in parts]
                columns = of(module.q_proj_weight)[1]
            else:
                whole = of(packed)
                rows = [None if whole[0] is None else whole[0][:width]]
                columns = whole[1]
            for row in rows:
                channels.tie(columns, row)
        elif isinstance(module, nn.RNNBase):
            weights = dict(module.named_parameters(recurse=False))
            states = [of(w)[1] for name, w in weights.items() if name.startswith("weight_hh")]
            for other in states[1:]:
                channels.tie(states[0], other)
            for name, weight in weights.items():
                if name.startswith("weight_hr"):
                    channels.freeze(of(weight)[1])  # PyTorch wants projections to be smaller
