"""Runs a model on an example and follows its channels through every operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.weak import WeakTensorKeyDictionary

from fedquilt.errors import StructureError
from fedquilt.structure.dispatch import (
    Interceptor,
    bind_arguments,
    describe_arguments,
    get_base_name,
    tracing_mode,
)
from fedquilt.structure.memory import is_large
from fedquilt.structure.tensors import (
    Example,
    copy_model,
    find_tensors,
    make_training_inputs,
    named_tensors,
    to_arguments,
)
from fedquilt.structure.trace.channels import NO_REASON, Channels, Labels
from fedquilt.structure.trace.layers import tie_layers
from fedquilt.structure.trace.record import Cause, Choices, Split, Trace, TracedCall, TracedPass
from fedquilt.structure.trace.rules import find_rule
from fedquilt.structure.trace.rules.pointwise import tie_pointwise
from fedquilt.structure.trace.rules.registry import Call, Dims
from fedquilt.structure.trace.rules.reshape import RESHAPES


def trace_model(
    model: nn.Module, example: Example, exclude: Sequence[str] = (), choices: Choices | None = None
) -> Trace:
    """Runs the model on the example and ties the channels that its operations make inseparable.

    The model runs in evaluation mode and, if it can, in training mode, where it may do more.
    ``exclude`` names modules that are never cut.
    """
    given, model = model, copy_model(model)
    tracer = Tracer(model, exclude, choices or Choices())
    with tracer.track_modules(model), tracing_mode():
        outputs = [tracer.run(to_arguments(example))]
        for inputs in make_training_inputs(to_arguments(example)):
            with suppress(Exception):  # not every model can be trained on such a batch
                outputs.append(tracer.run(inputs, training=True))
                break
    trace = tracer.finish(outputs)
    if is_large(model):
        pairs = zip(given.parameters(), model.parameters(), strict=True)
        trace.keeps_weights = all(_have_same_values(*pair) for pair in pairs)
    return trace


def _have_same_values(before: Tensor, after: Tensor) -> bool:
    """Whether no value differs; tensors on ``meta`` have shapes and no values."""
    return before.is_meta or torch.equal(before, after)


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
class _TensorInfo:
    """What the tracer knows of one tensor of a pass."""

    dims: Dims
    is_data: bool = False  # it depends on the example
    is_used: bool = False
    across: tuple[Labels, ...] = ()  # channels that its values were computed across
    lost: int = NO_REASON  # why axes of it have no labels


class Tracer(Interceptor):
    """Labels every tensor of a forward pass with its channels, and ties those that meet."""

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
        self.infos: Any = WeakTensorKeyDictionary()  # drops tensors that no longer exist
        for tensor in self.names.values():
            self.infos[tensor] = _TensorInfo(
                [self.channels.create_owned(size) for size in tensor.shape]
            )
        self.statistics: set[int] = set()
        self.sizes: dict[str, list[tuple[int, Labels]]] = {}
        self.given: dict[str, list[tuple[int, Labels]]] = {}
        self.reshapes: Counter[str] = Counter()
        self.reshaped: dict[tuple[str, int], list[Labels]] = {}  # by module and size
        self.derived: list[tuple[Labels, list[Labels]]] = []  # reshaped axes, and what was given
        self.splits: list[Split] = []
        self.across: dict[str, list[Labels]] = {}
        self.places: list[tuple[Tensor, Labels, int]] = []
        self.passes: list[TracedPass] = []
        self.causes: dict[Cause, int] = {}  # the reasons for being frozen
        self.stack: list[str] = [""]
        self.model, self.exclude, self.choices = model, exclude, choices
        self.error: StructureError | None = None
        for module in model.modules():
            self._freeze_kernel(module)
        for name, tensor in self.names.items():
            if self._is_excluded(name):
                self._freeze(tensor)

    def _freeze_kernel(self, module: nn.Module) -> None:
        """Freezes height and width of a kernel, which code that computes a weight may flatten."""
        if isinstance(module, _ConvNd):
            rank = 2 + len(module.kernel_size)
            for tensor in (t for t in module.parameters() if t.ndim == rank):
                for labels in self.labels_of(tensor)[2:]:
                    self.channels.freeze(labels)

    def run(self, inputs: tuple[Any, ...], *, training: bool = False) -> Any:
        """Runs the model once and returns its output."""
        self.stack = [""]
        self.passes.append(TracedPass(inputs, training, []))
        for tensor in find_tensors(inputs):
            self.infos[tensor] = _TensorInfo([None] * tensor.ndim, is_data=True)
        with self:
            return self.model.train(training)(*inputs)

    @contextmanager
    def track_modules(self, model: nn.Module) -> Iterator[None]:
        """Keeps the names of the running modules in ``stack``, the innermost last."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                before = module.register_forward_pre_hook(
                    self._make_enter_hook(name), with_kwargs=True
                )
                after = module.register_forward_hook(self._make_leave_hook(name))
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def _make_enter_hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.stack.append(name)
            self.given[name] = []
            self._note_given(name, find_tensors((inputs, named)))

        return hook

    def _make_leave_hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            self.stack.pop()
            if name in self.exclude:
                for tensor in find_tensors(output):
                    self._freeze(tensor)
            self._note_given(self.stack[-1], find_tensors(output))

        return hook

    def _note_given(self, module: str, tensors: Sequence[Tensor]) -> None:
        """Notes tensors that a module gets from its caller or from the modules inside it."""
        if module in self.exclude:
            for tensor in tensors:
                self._freeze(tensor)
        sized = [pair for t in tensors for pair in _list_labelled(t, self.labels_of(t))]
        self.given.setdefault(module, []).extend(sized)
        self.sizes.setdefault(module, []).extend(sized)

    def labels_of(self, tensor: Tensor) -> Dims:
        """Labels of a tensor, axis by axis; an unknown tensor has none and is never cut."""
        known = self.infos.get(tensor)
        return [None] * tensor.ndim if known is None else list(known.dims)

    def _freeze(self, tensor: Tensor) -> None:
        for labels in self.labels_of(tensor):
            self.channels.freeze(labels, NO_REASON)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        call = self._make_call(func, args, kwargs or {}, tuple(find_tensors(result)))
        known = [self.infos[t] for t in call.tensors() if t in self.infos]
        for given in known:
            given.is_used = True
        if not call.outputs:
            self._record(call)
            return result
        rule = find_rule(func)
        self._set_reasons(call, known)
        if rule is None:
            self._raise_if_cut(call)
            dims: Sequence[Dims] = [[None] * out.ndim for out in call.outputs]
        else:
            dims = rule(call)
        self._note_call(call, dims)
        passes_on = rule is tie_pointwise or call.name in LAYOUT
        across = (*call.across, *(labels for k in known for labels in k.across if passes_on))
        self._record(call, dims, across)
        if not call.tensors():
            dims = [
                [self._label_constant(n, x) for n, x in zip(out.shape, axes, strict=True)]
                for out, axes in zip(call.outputs, dims, strict=True)
            ]
        made = _TensorInfo(
            [], any(k.is_data for k in known), across=across, lost=self._find_loss_reason(call)
        )
        for out, labels in zip(call.outputs, dims, strict=False):
            if id(out) not in self.parameters:
                self.infos[out] = replace(made, dims=list(labels))
        return result

    def _set_reasons(self, call: Call, known: Sequence[_TensorInfo]) -> None:
        """Sets the reasons for what this operation freezes: itself, or an axis lost before."""
        is_table = call.name in PICKING and not any(given.is_data for given in known)
        reason = self.number_cause(Cause(call.name.strip("_"), self.stack[-1]))
        self.channels.reason = NO_REASON if is_table else reason
        lost = [given.lost for given in known if given.lost != NO_REASON]
        if any(t.ndim and t not in self.infos for t in call.tensors()):
            lost.append(self.number_cause(Cause("a constant tensor", self.stack[-1])))
        self.channels.reason_met = min(lost, default=NO_REASON)
        self.channels.has_lost = False

    def _label_constant(self, size: int, labels: Labels | None) -> Labels:
        """Frozen labels for an axis of a constant, such as a range; they carry the reason along."""
        if labels is None:
            labels = self.channels.create(size)
            self.channels.freeze(labels)
        return labels

    def number_cause(self, cause: Cause) -> int:
        """The number that stands for a cause in ``Channels``."""
        return self.causes.setdefault(cause, len(self.causes) + 1)

    def _find_loss_reason(self, call: Call) -> int:
        """Why axes of the outputs have no labels. A product has no axis for what it sums over."""
        if self.channels.has_lost:
            return min(self.channels.reason, self.channels.reason_met or self.channels.reason)
        return NO_REASON if call.name in PRODUCTS else self.channels.reason_met

    def _record(
        self, call: Call, made: Sequence[Dims] = (), across: tuple[Labels, ...] = ()
    ) -> None:
        given = tuple(map(self.labels_of, call.tensors()))
        arguments = describe_arguments(call.arguments)
        self.passes[-1].calls.append(TracedCall(call.name, arguments, given, tuple(made), across))

    def _make_call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[Tensor, ...]
    ) -> Call:
        here = self.stack[-1]
        return Call(
            get_base_name(func),
            bind_arguments(func, args, kwargs),
            outputs,
            self.channels,
            self.labels_of,
            self._is_weight,
            split_first=(here, self.reshapes[here]) in self.choices.split_first,
            equal_parts=self.choices.one_number,
        )

    def _is_weight(self, tensor: Tensor) -> bool:
        known = self.infos.get(tensor)
        return known is None or not known.is_data

    def _note_call(self, call: Call, dims: Sequence[Dims]) -> None:
        here = self.stack[-1]
        self.statistics |= {id(t) for t in call.statistics}
        self.across.setdefault(here, []).extend(call.across)
        reason = self.channels.reason
        self.places.extend((tensor, labels, reason) for tensor, labels in call.places)
        seen = self.sizes.setdefault(here, [])
        for tensor, labels in [
            *((t, self.labels_of(t)) for t in call.tensors()),
            *zip(call.outputs, dims, strict=False),
        ]:
            seen.extend(_list_labelled(tensor, labels))
        if call.name in RESHAPES:
            self._note_reshape(call, dims[0], here)

    def _note_reshape(self, call: Call, dims: Dims, here: str) -> None:
        for axis, sizes in call.splits:
            self.splits.append(Split(here, self.reshapes[here], sizes, axis))
        self.reshapes[here] += 1
        if type(self.model.get_submodule(here)).__module__.startswith("torch.nn.modules."):
            return  # PyTorch's own layers: what they demand is in tie_layers
        for size, labels in _list_labelled(call.outputs[0], dims):
            self.reshaped.setdefault((here, size), []).append(labels)
        given = self.given.get(here, [])
        for size, labels in _list_labelled(call.tensors()[0], self.labels_of(call.tensors()[0])):
            self.derived.append((labels, [other for n, other in given if size % n == 0]))

    def _tie_sizes(self) -> None:
        """Ties axes that have one size by ``choices``, unless they are frozen already."""
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

    def _raise_if_cut(self, call: Call) -> None:
        """Raises for an operation without a rule, unless no channel could be cut there."""
        if any(
            self.channels.is_cut(labels) for t in call.tensors() for labels in self.labels_of(t)
        ):
            where = self.stack[-1]
            self.error = StructureError(
                f"module '{where or type(self.model).__name__}' uses the operation {call.name}, "
                f"through which channels cannot be followed; {suggest_fix(where)}, or give the "
                "axes with declare_structure(...)"
            )
            raise self.error

    def finish(self, output: Any) -> Trace:
        """The trace, after the forward passes."""
        if self.error is not None:
            raise self.error
        self.channels.reason = self.channels.reason_met = NO_REASON
        tie_layers(self.model, self.channels, self.labels_of, self.number_cause)
        self._tie_sizes()
        unused = [name for name, tensor in self.names.items() if not self.infos[tensor].is_used]
        for name in unused:
            self._freeze(self.names[name])  # the passes do not use them: shared whole
        outputs = list(find_tensors(output))
        for tensor, channels, reason in self.places:
            if self.infos[tensor].is_used or any(tensor is out for out in outputs):
                self.channels.freeze(channels, reason)  # a position in these channels is used
        last: Labels | None = None
        for i, tensor in enumerate(outputs):
            dims = self.labels_of(tensor)
            if i == 0 and dims:
                last = dims[-1]
            for labels in dims:
                self.channels.pin(labels)
        return Trace(
            self.channels,
            {name: self.labels_of(tensor) for name, tensor in self.names.items()},
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


def suggest_fix(module: str) -> str:
    """Advice about a module through which channels cannot be followed."""
    if not module:
        return "move it into a module of its own and exclude that"
    return f"exclude the module so that it is shared whole (exclude=['{module}'])"


def _list_labelled(tensor: Tensor, dims: Dims) -> list[tuple[int, Labels]]:
    return [(n, axis) for n, axis in zip(tensor.shape, dims, strict=False) if axis is not None]
