"""Follow a model's operations on an example and find which positions form a channel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedquilt.errors import StructureError
from fedquilt.structure.channels import Channels, Labels
from fedquilt.structure.operations import Call, Dims, base_name, rule_for

Example = Tensor | tuple[Any, ...]


@dataclass
class Trace:
    """What following one forward pass has shown."""

    channels: Channels
    tensors: dict[str, Dims]  # labels of every parameter and buffer
    statistics: frozenset[str]  # running statistics of batch normalisation
    outputs: Labels | None  # labels of the last axis of the first output
    sizes: dict[str, list[tuple[int, Labels]]]  # labelled axes that each module met
    across: bool  # something is computed across channels
    splits: list[tuple[str, Labels]] = field(default_factory=list)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; a tied tensor is listed once, under its first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def arguments(example: Example) -> tuple[Any, ...]:
    """The example as positional arguments of the model."""
    return example if isinstance(example, tuple) else (example,)


def follow(
    model: nn.Module,
    example: Example,
    exclude: Sequence[str] = (),
    split_first: frozenset[str] = frozenset(),
    tied: frozenset[str] = frozenset(),
) -> Trace:
    """Runs the model once on the example and ties what its operations make inseparable.

    ``exclude`` names modules that are never cut. ``split_first`` names modules whose reshapes put
    channels first (the default is last, as attention heads do). ``tied`` names modules that
    recompute the size of a split axis from their input's: both are then one axis.
    """
    was_training = model.training
    model.eval()
    tracer = _Tracer(model, exclude, split_first, tied)
    try:
        tracer.data.update(id(x) for x in arguments(example) if isinstance(x, Tensor))
        with torch.no_grad(), plain_kernels(), tracer.watching(model), tracer:
            output = model(*arguments(example))
        return tracer.result(output)
    finally:
        model.train(was_training)


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
        split_first: frozenset[str],
        tied: frozenset[str],
    ) -> None:
        super().__init__()
        self.channels = Channels()
        self.names = named_tensors(model)
        self.parameters = {id(t): name for name, t in self.names.items()}
        self.labels: dict[int, Dims] = {
            id(t): [self.channels.fresh(size) for size in t.shape] for t in self.names.values()
        }
        self.alive: list[Tensor] = []  # ids stay unique while their tensors live
        self.data: set[int] = set()  # tensors that depend on the example
        self.touched: set[int] = set()
        self.statistics: set[int] = set()
        self.sizes: dict[str, list[tuple[int, Labels]]] = {}
        self.inputs: dict[str, list[tuple[int, Labels]]] = {}
        self.splits: list[tuple[str, Labels]] = []
        self.stack: list[str] = [""]
        self.model, self.exclude = model, exclude
        self.split_first, self.tied = split_first, tied
        self.across = False
        for name, tensor in self.names.items():
            if any(name == e or name.startswith(f"{e}.") for e in exclude):
                self._freeze(tensor)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Knows at every moment which module is running."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                before = module.register_forward_pre_hook(self._entering(name))
                after = module.register_forward_hook(self._leaving(name))
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def _entering(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            self.stack.append(name)
            tensors = [t for t in inputs if isinstance(t, Tensor)]
            if name in self.exclude:
                for tensor in tensors:
                    self._freeze(tensor)
            self.inputs[name] = [
                (t.shape[-1], labels)
                for t in tensors
                if t.ndim and (labels := self.of(t)[-1]) is not None
            ]

        return hook

    def _leaving(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            self.stack.pop()
            if name in self.exclude:
                for tensor in _tensors(output):
                    self._freeze(tensor)

        return hook

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
        call = self._call(func, args, kwargs or {}, tuple(_tensors(result)))
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
        ordered = {name: bound[name] for name in names if name in bound}
        return Call(
            base_name(func),
            ordered,
            outputs,
            self.channels,
            self.of,
            lambda t: id(t) not in self.data,
            self.stack[-1] in self.split_first,
            set(),
        )

    def _note(self, call: Call, dims: Sequence[Dims]) -> None:
        here = self.stack[-1]
        self.across |= "across" in call.notes
        self.statistics |= {int(n.split(":")[1]) for n in call.notes if n.startswith("statistics:")}
        seen = self.sizes.setdefault(here, [])
        for tensor, labels in [
            *((t, self.of(t)) for t in call.tensors()),
            *zip(call.outputs, dims, strict=False),
        ]:
            seen.extend(
                (n, axis) for n, axis in zip(tensor.shape, labels, strict=False) if axis is not None
            )
        if "split" in call.notes:
            self._note_split(call, dims, here)

    def _note_split(self, call: Call, dims: Sequence[Dims], here: str) -> None:
        for axis in self.of(call.tensors()[0]):
            if axis is None:
                continue
            self.splits.append((here, axis))
            if here in self.tied:
                for size, labels in self.inputs.get(here, []):
                    if len(axis) % size == 0:
                        self.channels.fold(axis, len(axis) // size)
                        self.channels.tie(labels, axis[:size])

    def _refuse(self, func: Any, call: Call) -> None:
        cut = any(self.channels.is_cut(labels) for t in call.tensors() for labels in self.of(t))
        if cut:
            where = self.stack[-1]
            remedy = (
                f"exclude the module so that it is shared whole (exclude=['{where}'])"
                if where
                else "move it into a module of its own and exclude that"
            )
            raise StructureError(
                f"module '{where or type(self.model).__name__}' uses the operation {call.name}, through "
                f"which channels cannot be followed; {remedy}, or give the axes with "
                "Structure.declare(...)"
            )

    def result(self, output: Any) -> Trace:
        """The trace, once the forward pass is over."""
        _tie_layers(self)
        for tensor in self.names.values():
            if id(tensor) not in self.touched:
                self._freeze(tensor)  # not used in this pass: shared whole
        outputs = list(_tensors(output))
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


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item)]
    return []


def _tie_layers(tracer: _Tracer) -> None:
    """What PyTorch's own layers demand beyond their operations: one size for several axes."""
    of, channels = tracer.of, tracer.channels
    for module in tracer.model.modules():
        if isinstance(module, nn.MultiheadAttention):
            packed = module.in_proj_weight
            rows = of(packed if packed is not None else module.q_proj_weight)
            width = (packed if packed is not None else module.q_proj_weight).shape[1]
            if rows[0] is not None:
                channels.tie(rows[1], rows[0][:width])
        elif isinstance(module, nn.RNNBase):
            hidden = [
                of(getattr(module, n))[1]
                for n in dict(module.named_parameters(recurse=False))
                if "weight_hh" in n
            ]
            for other in hidden[1:]:
                channels.tie(hidden[0], other)
