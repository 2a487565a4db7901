"""What a subnet costs: parameters, bytes to send, multiply-accumulates, peak training memory.

Nothing is trained and nothing large is allocated: the subnet is built without storage (PyTorch's
``meta`` device) and a forward, or a whole training step, is run on shapes alone.
"""

from __future__ import annotations

import copy
import math
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fedquilt.structure.cut import build
from fedquilt.structure.groups import Axis, Structure, following
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.trace import Example, arguments, named_tensors, plain_kernels

SHORT = (6, 7, 8)  # tokens of texts on which recurrent nets are counted


@dataclass(frozen=True)
class Cost:
    """The price of a subnet; ``memory`` in bytes at its peak in one training step."""

    params: int
    bytes: int  # what travels one way: every tensor of the subnet
    macs: int  # one example, forward; multiply-accumulates of convolutions and matrix products
    memory: int

    def __add__(self, other: Cost) -> Cost:
        """The price of both, side by side."""
        return Cost(
            self.params + other.params,
            self.bytes + other.bytes,
            self.macs + other.macs,
            self.memory + other.memory,
        )


def cost(
    model: nn.Module,
    structure: Structure,
    subnet: Subnet,
    example: Example,
    *,
    batch_size: int = 10,
    memory: bool = True,
) -> Cost:
    """Parameters, bytes, MACs per example, and the peak memory of a step with momentum.

    The memory is 0 if nobody wants to know: it takes longest to find.
    """
    alike = _with_leading(subnet, _even_groups(structure))
    return _cost(_Asked(model, example), structure, alike, batch_size, memory)


def _with_leading(subnet: Subnet, groups: frozenset[str]) -> Subnet:
    """As many channels of these groups, but the leading ones: a net of the same shapes.

    So methods that draw other channels in every round ask for one price and not for thousands.
    """
    kept = ((g, (1 << m.bit_count()) - 1 if g in groups else m) for g, m in subnet.kept)
    return replace(subnet, kept=tuple(kept))


@lru_cache(maxsize=64)
def _even_groups(structure: Structure) -> frozenset[str]:
    """Groups of which every axis has all channels equally often: it does not matter which."""
    uneven = set()
    for axis in (axis for axes in structure.axes.values() for axis in axes if axis is not None):
        for span in axis:
            if span.group is not None:
                size = structure.groups[span.group].size
                times = Counter(span.channels)
                if len(times) != size or len(set(times.values())) != 1:
                    uneven.add(span.group)
    return frozenset(structure.groups.keys() - uneven)


@dataclass(frozen=True, eq=False)
class _Model:
    model: nn.Module
    example: Example


class _Asked(_Model):
    """A model and example, compared by identity, so that costs are computed once."""

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Asked)
            and other.model is self.model
            and _shapes(other.example) == _shapes(self.example)
        )

    def __hash__(self) -> int:
        return hash((id(self.model), _shapes(self.example)))


def _shapes(example: Example) -> tuple[Any, ...]:
    return tuple(
        (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in arguments(example)
    )


@lru_cache(maxsize=256)
def _cost(
    asked: _Asked, structure: Structure, subnet: Subnet, batch_size: int, memory: bool
) -> Cost:
    small = _on_paper(asked.model, structure, subnet)
    travelling = set(structure.names(subnet))
    return Cost(
        params=sum(p.numel() for p in small.parameters()),
        bytes=sum(t.nbytes for n, t in named_tensors(small).items() if n in travelling),
        macs=_macs(small, asked.example),
        memory=_peak(small, asked.example, batch_size) if memory else 0,
    )


class Prices:
    """Costs of many subnets of leading channels, each in the time of a few hundred additions.

    Multiply-accumulates of a layer are its weights times the positions at which they are used,
    whatever the width; where that does not explain all of a model's (attention multiplies
    activations with each other), they are counted. Memory is counted when it is asked for.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        example: Example,
        *,
        batch_size: int = 10,
        home: tuple[str, ...] = (),
    ) -> None:
        """``home`` names tensors that do not travel."""
        self._model, self._structure, self._example = model, structure, example
        self._batch_size, self._home = batch_size, home
        tensors = named_tensors(model)
        self._lengths = {
            name: tuple(_Length(axis, n) for axis, n in zip(axes, tensors[name].shape, strict=True))
            for name, axes in structure.axes.items()
        }
        self._last: tuple[dict[str, int], dict[str, int]] = (
            {},
            {name: tensor.numel() for name, tensor in tensors.items()},
        )
        self._is_weight = {n: isinstance(t, nn.Parameter) for n, t in tensors.items()}
        self._item = {name: tensor.element_size() for name, tensor in tensors.items()}
        self._staying = structure.matching(home)
        self._uses = self._explained()

    def __call__(self, subnet: Subnet, *, memory: bool = False) -> Cost:
        """What a subnet costs; its memory is 0 if nobody wants to know."""
        cells = self._cells(subnet)
        counted = self._counted(subnet) if self._uses is None or memory else None
        return Cost(
            params=sum(n for name, n in cells.items() if self._is_weight[name]),
            bytes=sum(
                n * self._item[name] for name, n in cells.items() if name not in self._staying
            ),
            macs=(
                counted.macs
                if counted is not None
                else sum(uses * cells[name] for name, uses in (self._uses or {}).items())
            ),
            memory=counted.memory if counted is not None and memory else 0,
        )

    def _cells(self, subnet: Subnet) -> Mapping[str, int]:
        """How many cells each tensor has; those that are as in the last subnet are known."""
        counts = {group: mask.bit_count() for group, mask in subnet.kept}
        known, cells = self._last
        cells = dict(cells)
        for group in {**known, **counts}:
            if known.get(group) != counts.get(group):
                for name in following(self._structure)[group]:
                    cells[name] = math.prod(length(counts) for length in self._lengths[name])
        self._last = counts, cells
        return cells

    def _counted(self, subnet: Subnet) -> Cost:
        return cost(
            self._model, self._structure, subnet, self._example, batch_size=self._batch_size
        )

    def _explained(self) -> Mapping[str, int] | None:
        """How often each weight is used on an example, if that explains all that is computed."""
        used = _uses(_on_paper(self._model, self._structure, Subnet()), self._example)
        groups = self._structure.cut_groups()
        uneven = {group: (i + 1) / (len(groups) + 1) for i, group in enumerate(groups)}
        for width in (1.0, 0.5, uneven):
            subnet = self._structure.subnet(width)
            small = _on_paper(self._model, self._structure, subnet)
            weights = named_tensors(small)
            if sum(n * weights[name].numel() for name, n in used.items()) != _macs(
                small, self._example
            ):
                return None
        return used


class _Length:
    """How long an axis is, for each number of leading channels of its groups."""

    def __init__(self, axis: Axis | None, size: int) -> None:
        self._fixed, self._spans = size, list[tuple[str, list[int]]]()
        for span in axis or ():
            if span.group is not None:
                self._fixed -= len(span.channels)
                first = sorted(span.channels)
                kept = [bisect_left(first, n) for n in range(max(span.channels) + 2)]
                self._spans.append((span.group, kept))

    def __call__(self, counts: Mapping[str, int]) -> int:
        return self._fixed + sum(kept[counts.get(group, -1)] for group, kept in self._spans)


def macs_by_layer(model: nn.Module, structure: Structure, example: Example) -> dict[str, int]:
    """MACs of one example in each layer of the whole model that has any.

    Layers are modules without others in them; what a module computes beside those is in none.
    """
    return _by_layer(_on_paper(model, structure, Subnet()), example)


def _by_layer(small: nn.Module, example: Example) -> dict[str, int]:
    found = _counted(small, example).get_flop_counts()
    layers = (path for path, m in small.named_modules() if not any(True for _ in m.children()))
    macs = {p: sum(found.get(f"{type(small).__name__}.{p}", {}).values()) // 2 // 2 for p in layers}
    return {path: count for path, count in macs.items() if count}


def _uses(small: nn.Module, example: Example) -> dict[str, int]:
    """How often each weight is multiplied for one example, as far as layers have one weight."""
    name_of = {id(t): n for n, t in named_tensors(small).items()}
    used: dict[str, int] = {}
    for path, macs in _by_layer(small, example).items():
        weight = getattr(small.get_submodule(path), "weight", None)
        if isinstance(weight, nn.Parameter):
            name = name_of[id(weight)]
            used[name] = used.get(name, 0) + macs // weight.numel()
    return used


def _on_paper(model: nn.Module, structure: Structure, subnet: Subnet) -> nn.Module:
    """The subnet with shapes but no storage."""
    shell = {n: torch.empty_like(t, device="meta") for n, t in named_tensors(model).items()}
    return build(model, structure, subnet, shell)


T = TypeVar("T")


def _seen(
    look: Callable[[nn.Module, tuple[Any, ...]], T],
    small: nn.Module,
    example: Example,
    batch_size: int,
) -> T:
    """What is seen on a net at work on a batch like the example; on shapes alone, if they do.

    A net that needs values on its way, such as the lengths of texts, is given some: weights of 0,
    and the example again and again.
    """
    try:
        with torch.device("meta"):  # for what the net makes on its way
            return look(small, _inputs(example, batch_size, "meta"))
    except Exception:  # of whatever kind; a net that is ill says so again
        real = copy.deepcopy(small).to_empty(device="cpu")
        with torch.no_grad():
            for tensor in named_tensors(real).values():
                tensor.zero_()
        with torch.random.fork_rng(devices=[]):  # dropout must not draw from a run's numbers
            return look(real, _inputs(example, batch_size, "cpu"))


def _inputs(example: Example, batch_size: int, device: str) -> tuple[Any, ...]:
    def resized(x: Tensor) -> Tensor:
        return x[torch.arange(batch_size, device=x.device) % len(x)].to(device)

    return tuple(resized(x) if isinstance(x, Tensor) else x for x in arguments(example))


def is_recurrent(model: nn.Module) -> bool:
    """Whether a model goes through its input position by position."""
    return any(isinstance(layer, nn.RNNBase) for layer in model.modules())


def _macs(small: nn.Module, example: Example) -> int:
    """MACs of one example; of a recurrent net from short texts, if each token adds the same.

    Such a net does the same at every position, and to follow all of them takes seconds.
    """
    text = example if isinstance(example, Tensor) else None
    if text is None or not is_recurrent(small) or text.ndim != 2 or text.shape[1] <= SHORT[-1]:
        return _macs_on(small, example)
    try:
        first, second, third = (_macs_on(small, text[:, :length]) for length in SHORT)
    except RuntimeError:  # a net of one length
        return _macs_on(small, example)
    per_token = third - second
    if per_token != second - first:
        return _macs_on(small, example)
    return third + per_token * (text.shape[1] - SHORT[-1])


def _macs_on(small: nn.Module, example: Example) -> int:
    return int(_counted(small, example).get_total_flops()) // 2 // 2


def _counted(small: nn.Module, example: Example) -> FlopCounterMode:
    """Two operations for each multiply-accumulate of two examples.

    One example cannot be normalised by its own batch.
    """

    def look(net: nn.Module, inputs: tuple[Any, ...]) -> FlopCounterMode:
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), plain_kernels(), _frozen(net), counter:
            net.eval()(*inputs)
        return counter

    return _seen(look, small, example, 2)


@contextmanager
def _frozen(net: nn.Module) -> Iterator[None]:
    """No parameter asks for gradients: PyTorch's counter looks for the graph of those that do."""
    learned = [parameter for parameter in net.parameters() if parameter.requires_grad]
    try:
        for parameter in learned:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)


def _peak(small: nn.Module, example: Example, batch_size: int) -> int:
    """Bytes alive at the worst moment of a step: weights, gradients, momentum, activations."""
    weights = sum(t.nbytes for t in named_tensors(small).values())
    momentum = sum(p.nbytes for p in small.parameters() if p.requires_grad)

    def look(net: nn.Module, inputs: tuple[Any, ...]) -> int:
        ledger = Ledger()
        with ledger:
            outputs = [t for t in tree_leaves(net.train()(*inputs)) if isinstance(t, Tensor)]
            torch.autograd.backward([output.sum() for output in outputs if output.requires_grad])
        return ledger.peak + sum(x.nbytes for x in inputs if isinstance(x, Tensor))

    return weights + momentum + _seen(look, small, example, batch_size)


class Ledger(TorchDispatchMode):
    """Adds up the storage that operations create, as long as it lives."""

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
