"""MACs and peak memory of a net, counted on shapes without storage where that is possible."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fedquilt.structure.cut import build_module
from fedquilt.structure.dispatch import unfused_kernels
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import Example, named_tensors, to_arguments

SHORT_LENGTHS = (6, 7, 8)  # tokens of texts on which recurrent nets are counted


def count_layer_macs(small: nn.Module, example: Example) -> dict[str, int]:
    """MACs of one example in each layer that has any."""
    flops = _count_flops(small, example).get_flop_counts()
    layers = (path for path, m in small.named_modules() if not any(True for _ in m.children()))
    macs = {p: sum(flops.get(f"{type(small).__name__}.{p}", {}).values()) // 2 // 2 for p in layers}
    return {path: count for path, count in macs.items() if count}


def count_weight_uses(small: nn.Module, example: Example) -> dict[str, int]:
    """How often each weight is multiplied for one example, in layers with one weight."""
    name_of = {id(t): n for n, t in named_tensors(small).items()}
    used: dict[str, int] = {}
    for path, macs in count_layer_macs(small, example).items():
        weight = getattr(small.get_submodule(path), "weight", None)
        if isinstance(weight, nn.Parameter):
            name = name_of[id(weight)]
            used[name] = used.get(name, 0) + macs // weight.numel()
    return used


def build_on_meta(model: nn.Module, structure: Structure, subnet: Subnet) -> nn.Module:
    """The subnet with shapes but no storage."""
    shell = {n: torch.empty_like(t, device="meta") for n, t in named_tensors(model).items()}
    return build_module(model, structure, subnet, shell)


T = TypeVar("T")


def _observe(
    look: Callable[[nn.Module, tuple[Any, ...]], T],
    small: nn.Module,
    example: Example,
    batch_size: int,
) -> T:
    """Runs ``look`` on a net and a batch like the example, on shapes alone if that works.

    A net that needs values, such as the lengths of texts, gets some: weights of 0, and the
    example repeated.
    """
    try:
        with torch.device("meta"):  # for tensors that the net creates
            return look(small, _make_inputs(example, batch_size, "meta"))
    except Exception:  # of any kind: a broken net raises again below
        real = copy.deepcopy(small).to_empty(device="cpu")
        with torch.no_grad():
            for tensor in named_tensors(real).values():
                tensor.zero_()
        with torch.random.fork_rng(devices=[]):  # dropout must not draw from a run's numbers
            return look(real, _make_inputs(example, batch_size, "cpu"))


def _make_inputs(example: Example, batch_size: int, device: str) -> tuple[Any, ...]:
    def resized(x: Tensor) -> Tensor:
        return x[torch.arange(batch_size, device=x.device) % len(x)].to(device)

    return tuple(resized(x) if isinstance(x, Tensor) else x for x in to_arguments(example))


def is_recurrent(model: nn.Module) -> bool:
    """Whether a model has recurrent layers."""
    return any(isinstance(layer, nn.RNNBase) for layer in model.modules())


def count_macs(small: nn.Module, example: Example) -> int:
    """MACs of one example.

    Those of a recurrent net are extrapolated from short texts, if each token adds the same: to
    run all positions takes seconds.
    """
    text = example if isinstance(example, Tensor) else None
    if (
        text is None
        or not is_recurrent(small)
        or text.ndim != 2
        or text.shape[1] <= SHORT_LENGTHS[-1]
    ):
        return _count_macs_on(small, example)
    try:
        first, second, third = (_count_macs_on(small, text[:, :length]) for length in SHORT_LENGTHS)
    except RuntimeError:  # a net for texts of one length
        return _count_macs_on(small, example)
    per_token = third - second
    if per_token != second - first:
        return _count_macs_on(small, example)
    return third + per_token * (text.shape[1] - SHORT_LENGTHS[-1])


def _count_macs_on(small: nn.Module, example: Example) -> int:
    return int(_count_flops(small, example).get_total_flops()) // 2 // 2


def _count_flops(small: nn.Module, example: Example) -> FlopCounterMode:
    """Counts two operations per MAC, of two examples: batch norm cannot train on one."""

    def look(net: nn.Module, inputs: tuple[Any, ...]) -> FlopCounterMode:
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), unfused_kernels(), _without_gradients(net), counter:
            net.eval()(*inputs)
        return counter

    return _observe(look, small, example, 2)


@contextmanager
def _without_gradients(net: nn.Module) -> Iterator[None]:
    """Turns off gradients of parameters, whose graph PyTorch's counter would look for."""
    learned = [parameter for parameter in net.parameters() if parameter.requires_grad]
    try:
        for parameter in learned:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)


def measure_peak_memory(
    small: nn.Module, example: Example, batch_size: int, optimizer_tensors: int = 1
) -> int:
    """Peak bytes of a training step: weights, gradients, activations, and the optimizer's tensors.

    An optimizer has ``optimizer_tensors`` of them for each weight.
    """
    weights = sum(t.nbytes for t in named_tensors(small).values())
    trained = sum(p.nbytes for p in small.parameters() if p.requires_grad)

    def look(net: nn.Module, inputs: tuple[Any, ...]) -> int:
        meter = _StorageMeter()
        with meter:
            outputs = [t for t in tree_leaves(net.train()(*inputs)) if isinstance(t, Tensor)]
            torch.autograd.backward([output.sum() for output in outputs if output.requires_grad])
        return meter.peak + sum(x.nbytes for x in inputs if isinstance(x, Tensor))

    return weights + optimizer_tensors * trained + _observe(look, small, example, batch_size)


class _StorageMeter(TorchDispatchMode):
    """Adds up the storage that operations create, for as long as it exists."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._known.add(leaf.untyped_storage()._cdata)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._enter(leaf)
        return result

    def _enter(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._leave, key, size)

    def _leave(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
