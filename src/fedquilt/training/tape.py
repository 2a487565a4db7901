"""The operations of one forward pass, in order: what each was given and what it has made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fedquilt.devices import CPU, fork_generators, seed_generators
from fedquilt.structure.tensors import named_tensors


@dataclass(frozen=True)
class TensorRef:
    """The place of a tensor that a step has made; those of step -1 are the net's inputs."""

    step: int
    place: int = 0


@dataclass(eq=False)
class RecordedCall:
    """One operation; among its arguments tensors that earlier steps have made are their places."""

    call: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    named: Mapping[str, Any]
    outputs: list[Tensor]
    versions: list[int]  # of the outputs, which count how often their numbers were changed
    module: str  # that ran
    sources: tuple[TensorRef, ...]
    from_data: bool  # it depends on the net's inputs

    def argument(self, name: str, place: int) -> Any:
        """An argument by its name or its place."""
        return self.args[place] if place < len(self.args) else self.named.get(name)

    @property
    def is_changed(self) -> bool:
        """Whether what it has made was written over later on."""
        return any(t._version != v for t, v in zip(self.outputs, self.versions, strict=True))


@dataclass(frozen=True, eq=False)
class Tape:
    """A forward pass; ``output`` is None if something other than these steps has made it."""

    inputs: tuple[Any, ...]
    steps: tuple[RecordedCall, ...]
    output: TensorRef | None

    def value(self, made: TensorRef) -> Tensor:
        """What was made."""
        tensor: Tensor = (
            self.inputs[made.place] if made.step < 0 else self.steps[made.step].outputs[made.place]
        )
        return tensor

    def replay(self, step: RecordedCall, values: Mapping[TensorRef, Tensor]) -> Any:
        """A step once more, with other values for some of what it was given."""
        args, named = tree_map_only(
            TensorRef,
            lambda made: values[made] if made in values else self.value(made),
            (step.args, dict(step.named)),
        )
        return step.call(*args, **named)


def record_forward(module: nn.Module, inputs: tuple[Any, ...]) -> Tape:
    """Records a forward pass in eval mode, without gradients; the module stays as it is."""
    recorder = _Recorder(inputs)
    with torch.no_grad(), evaluation_mode(module), recorder.watch_modules(module), recorder:
        output = module(*inputs)
    return Tape(inputs, tuple(recorder.steps), recorder.made.get(id(output)))


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """A module in eval mode, with random numbers that are the same each time and drawn apart."""
    modes = [(layer, layer.training) for layer in module.modules()]
    device = next((tensor.device for tensor in named_tensors(module).values()), CPU)
    with fork_generators(device):
        seed_generators(0, device)
        module.eval()
        try:
            yield
        finally:
            for layer, training in modes:
                layer.training = training


class _Recorder(TorchFunctionMode):
    def __init__(self, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.steps: list[RecordedCall] = []
        self.made = {id(x): TensorRef(-1, i) for i, x in enumerate(inputs)}
        self._alive: list[Tensor] = []  # ids stay unique while their tensors live
        self._modules = [""]

    @contextmanager
    def watch_modules(self, module: nn.Module) -> Iterator[None]:
        """Knows at every moment which module is running."""
        with ExitStack() as stack:
            for name, layer in module.named_modules():
                before = layer.register_forward_pre_hook(partial(self._enter, name))
                after = layer.register_forward_hook(self._leave)
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def _enter(self, name: str, *_: Any) -> None:
        self._modules.append(name)

    def _leave(self, *_: Any) -> None:
        self._modules.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named, name = kwargs or {}, getattr(func, "__name__", "")
        if args and (named.get("inplace") or (name.endswith("_") and not name.endswith("__"))):
            self._save_before_change(args[0])
        given, given_named = tree_map_only(Tensor, self._to_ref, (args, dict(named)))
        result = func(*args, **named)
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if outputs:
            sources = tuple(
                v for v in tree_leaves((given, given_named)) if isinstance(v, TensorRef)
            )
            from_data = any(m.step < 0 or self.steps[m.step].from_data for m in sources)
            versions, module = [t._version for t in outputs], self._modules[-1]
            step = RecordedCall(
                func, name, given, given_named, outputs, versions, module, sources, from_data
            )
            self.made |= {id(t): TensorRef(len(self.steps), i) for i, t in enumerate(outputs)}
            self.steps.append(step)
            self._alive.extend(outputs)
        return result

    def _to_ref(self, tensor: Tensor) -> Tensor | TensorRef:
        return self.made.get(id(tensor), tensor)

    def _save_before_change(self, tensor: Any) -> None:
        """Keeps the numbers of a tensor that is about to change."""
        for step in self.steps:
            for place, made in enumerate(step.outputs):
                if made is tensor:
                    step.outputs[place] = copy = made.clone()
                    step.versions[place] = copy._version
