"""Follow a model's operations on an example and find which positions form a channel."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from fedquilt.errors import StructureError
from fedquilt.structure.channels import NO_REASON, Channels, Labels
from fedquilt.structure.operations import RESHAPES, Call, Dims, base_name, pointwise, rule_for

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


@dataclass(frozen=True)
class Cause:
    """An operation through which channels could not be followed, and the module that runs it."""

    operation: str
    module: str


@dataclass(frozen=True)
class Called:
    """One operation of a forward pass, as it was called."""

    name: str
    arguments: Mapping[str, Any]  # tensors by their shape
    given: tuple[Dims, ...]  # labels of its tensors
    made: tuple[Dims, ...]  # labels of its outputs
    across: tuple[Labels, ...]  # channels that it, or what it was given, was computed across


@dataclass(frozen=True)
class Pass:
    """One run of the model: as in use, or as in training."""

    inputs: tuple[Any, ...]
    training: bool
    calls: list[Called]


@dataclass
class Trace:
    """What following the forward passes has shown."""

    channels: Channels
    tensors: dict[str, Dims]  # labels of every parameter and buffer
    statistics: frozenset[str]  # running statistics of batch normalisation
    outputs: Labels | None  # labels of the last axis of the first output
    sizes: dict[str, list[tuple[int, Labels]]]  # labelled axes that each module met
    across: dict[str, list[Labels]]  # channels that each module computes across
    splits: list[Split] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)  # of the reasons for being frozen, from 1
    unused: list[str] = field(default_factory=list)  # tensors that the passes do not meet


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
    model = copy.deepcopy(model)
    tracer = _Tracer(model, exclude, choices or Choices())
    with tracer.watching(model), as_followed():
        outputs = [tracer.run(arguments(example))]
        for inputs in training_inputs(arguments(example)):
            with suppress(Exception):  # not every model can be trained on such a batch
                outputs.append(tracer.run(inputs, training=True))
                break
    return tracer.result(outputs)


@contextmanager
def as_followed() -> Iterator[None]:
    """How a model runs while it is followed: without gradients, and leaving the noise as it was."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), plain_kernels():
        yield


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


class Interceptor(TorchDispatchMode):
    """Sees every operation, in ``__torch_dispatch__``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else PyTorch loads its compiler, which takes seconds and is not used here


LAYOUT = frozenset(
    (
        *RESHAPES,
        *("t", "transpose", "permute", "unsqueeze", "squeeze", "expand", "slice", "select"),
        *("clone", "contiguous", "_to_copy", "detach", "alias"),
    )
)
PICKING = frozenset(("select", "slice", "index", "index_select", "gather", "unbind"))
PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "linear", "mv", "dot", "convolution"))


@dataclass
class _Known:
    """What is known of one tensor of a pass."""

    dims: Dims
    is_data: bool = False  # it depends on the example
    is_used: bool = False
    across: tuple[Labels, ...] = ()  # channels that its values were computed across
    lost: int = NO_REASON  # why axes of it have no labels


class _Tracer(Interceptor):
    def __init__(
        self,
        model: nn.Module,
        exclude: Sequence[str],
        choices: Choices,
    ) -> None:
        super().__init__()
        self.channels = Channels()
        self.names = named_tensors(model)
        self.parameters = {id(t): name for name, t in self.names.items()}
        self.known: Any = WeakTensorKeyDictionary()  # forgets tensors that are gone
        for tensor in self.names.values():
            self.known[tensor] = _Known([self.channels.owned(size) for size in tensor.shape])
        self.statistics: set[int] = set()
        self.sizes: dict[str, list[tuple[int, Labels]]] = {}
        self.given: dict[str, list[tuple[int, Labels]]] = {}
        self.reshapes: Counter[str] = Counter()
        self.reshaped: dict[tuple[str, int], list[Labels]] = {}  # by module and size
        self.derived: list[tuple[Labels, list[Labels]]] = []  # reshaped axes, and what was given
        self.splits: list[Split] = []
        self.across: dict[str, list[Labels]] = {}
        self.places: list[tuple[Tensor, Labels, int]] = []
        self.passes: list[Pass] = []
        self.causes: dict[Cause, int] = {}  # the reasons for being frozen
        self.stack: list[str] = [""]
        self.model, self.exclude, self.choices = model, exclude, choices
        self.refusal: StructureError | None = None
        for module in model.modules():
            self._freeze_kernel(module)
        for name, tensor in self.names.items():
            if self._is_excluded(name):
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
        self.passes.append(Pass(inputs, training, []))
        for tensor in tensors_in(inputs):
            self.known[tensor] = _Known([None] * tensor.ndim, is_data=True)
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
        known = self.known.get(tensor)
        return [None] * tensor.ndim if known is None else list(known.dims)

    def _freeze(self, tensor: Tensor) -> None:
        for labels in self.of(tensor):
            self.channels.freeze(labels, NO_REASON)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        call = self._call(func, args, kwargs or {}, tuple(tensors_in(result)))
        known = [self.known[t] for t in call.tensors() if t in self.known]
        for given in known:
            given.is_used = True
        if not call.outputs:
            self._record(call)
            return result
        rule = rule_for(func)
        self._set_reasons(call, known)
        if rule is None:
            self._refuse(func, call)
            dims: Sequence[Dims] = [[None] * out.ndim for out in call.outputs]
        else:
            dims = rule(call)
        self._note(call, dims)
        passes_on = rule is pointwise or call.name in LAYOUT
        across = (*call.across, *(labels for k in known for labels in k.across if passes_on))
        self._record(call, dims, across)
        if not call.tensors():
            dims = [
                [self._constant(n, x) for n, x in zip(out.shape, some, strict=True)]
                for out, some in zip(call.outputs, dims, strict=True)
            ]
        made = _Known([], any(k.is_data for k in known), across=across, lost=self._lost(call))
        for out, labels in zip(call.outputs, dims, strict=False):
            if id(out) not in self.parameters:
                self.known[out] = replace(made, dims=list(labels))
        return result

    def _set_reasons(self, call: Call, known: Sequence[_Known]) -> None:
        """What this operation freezes, it freezes itself or for what was lost before."""
        is_table = call.name in PICKING and not any(given.is_data for given in known)
        reason = self.reason(Cause(call.name.strip("_"), self.stack[-1]))
        self.channels.reason = NO_REASON if is_table else reason
        lost = [given.lost for given in known if given.lost != NO_REASON]
        if any(t.ndim and t not in self.known for t in call.tensors()):
            lost.append(self.reason(Cause("a constant tensor", self.stack[-1])))
        self.channels.reason_met = min(lost, default=NO_REASON)
        self.channels.has_lost = False

    def _constant(self, size: int, labels: Labels | None) -> Labels:
        """An axis that is made of nothing, such as a range: who meets it is whole because of it."""
        if labels is None:
            labels = self.channels.fresh(size)
            self.channels.freeze(labels)
        return labels

    def reason(self, cause: Cause) -> int:
        """The number by which channels remember a cause."""
        return self.causes.setdefault(cause, len(self.causes) + 1)

    def _lost(self, call: Call) -> int:
        """Why axes of the outputs have no labels; what a product sums over is no axis of it."""
        if self.channels.has_lost:
            return min(self.channels.reason, self.channels.reason_met or self.channels.reason)
        return NO_REASON if call.name in PRODUCTS else self.channels.reason_met

    def _record(
        self, call: Call, made: Sequence[Dims] = (), across: tuple[Labels, ...] = ()
    ) -> None:
        given = tuple(map(self.of, call.tensors()))
        arguments = plain_arguments(call.arguments)
        self.passes[-1].calls.append(Called(call.name, arguments, given, tuple(made), across))

    def _call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[Tensor, ...]
    ) -> Call:
        here = self.stack[-1]
        return Call(
            base_name(func),
            bound_arguments(func, args, kwargs),
            outputs,
            self.channels,
            self.of,
            self._is_weight,
            split_first=(here, self.reshapes[here]) in self.choices.split_first,
            equal_parts=self.choices.one_number,
        )

    def _is_weight(self, tensor: Tensor) -> bool:
        known = self.known.get(tensor)
        return known is None or not known.is_data

    def _note(self, call: Call, dims: Sequence[Dims]) -> None:
        here = self.stack[-1]
        self.statistics |= {id(t) for t in call.statistics}
        self.across.setdefault(here, []).extend(call.across)
        reason = self.channels.reason
        self.places.extend((tensor, labels, reason) for tensor, labels in call.places)
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
        self.channels.reason = self.channels.reason_met = NO_REASON
        _tie_layers(self)
        self._tie_sizes()
        unused = [name for name, tensor in self.names.items() if not self.known[tensor].is_used]
        for name in unused:
            self._freeze(self.names[name])  # not met in these passes: shared whole
        outputs = list(tensors_in(output))
        for tensor, channels, reason in self.places:
            if self.known[tensor].is_used or any(tensor is out for out in outputs):
                self.channels.freeze(channels, reason)  # it matters at which of them something is
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
            self.passes,
            list(self.causes),
            [name for name in unused if not self._is_excluded(name)],
        )

    def _is_excluded(self, name: str) -> bool:
        return any(name == e or name.startswith(f"{e}.") for e in self.exclude)


def remedy(module: str) -> str:
    """What to do about a module through which channels cannot be followed."""
    if not module:
        return "move it into a module of its own and exclude that"
    return f"exclude the module so that it is shared whole (exclude=['{module}'])"


def bound_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of an ATen operation by name, in its order, defaults included."""
    schema = func._schema.arguments
    bound = {a.name: a.default_value for a in schema if a.has_default_value()}
    bound.update(zip([a.name for a in schema], args, strict=False))
    bound.update(kwargs)
    return {a.name: bound[a.name] for a in schema if a.name in bound}


_SHAPE = "a tensor of shape"


def is_shape(argument: Any) -> bool:
    """Whether a plain argument stands for a tensor."""
    return isinstance(argument, tuple) and argument[:1] == (_SHAPE,)


def plain_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that can be compared: tensors by their shape."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return (_SHAPE, *value.shape)
        if isinstance(value, float) and math.isnan(value):
            return "nan"  # which is not equal to itself
        return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value

    return {name: plain(value) for name, value in arguments.items()}


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
    for path, module in tracer.model.named_modules():
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
                if name.startswith("weight_hr"):  # PyTorch wants projections to be smaller
                    reason = tracer.reason(Cause("a projected state", path))
                    channels.freeze(of(weight)[1], reason)
