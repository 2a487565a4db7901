"""A copy of the model whose channels all differ, to compare outputs with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.errors import StructureError
from fedquilt.structure.cut import build_module
from fedquilt.structure.dispatch import NOISE, Interceptor, get_base_name, unfused_kernels
from fedquilt.structure.memory import MIN_OFFLOADED_BYTES, is_large, trim_memory
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import (
    Example,
    copy_model,
    find_tensors,
    named_tensors,
    to_arguments,
)

MAX_DOUBLE_WEIGHTS = 2**24  # a model with more is not copied in double precision: too much memory
MAX_REPLACED = 4  # replaced tensors that exist at the same time


@dataclass(frozen=True)
class Probe:
    """A model whose channels all differ, with inputs and the outputs for them."""

    model: nn.Module
    inputs: tuple[Any, ...]
    outputs: list[Tensor]
    counts: Mapping[str, int] = field(
        default_factory=dict
    )  # of channels per group, if the model is a subnet
    has_noise: bool = True  # in all tensors; otherwise large ones are those of the user's model


def make_probe(model: nn.Module, example: Example, *, share: bool = False) -> Probe:
    """Makes a probe, in double precision and on random inputs where the model allows it.

    With ``share`` the probe has the large weights of the model itself, where a copy would take too
    much memory. The model must be one that does not write to its weights when it runs.
    """
    problem: Exception | None = None
    size = sum(weight.numel() for weight in model.parameters())
    precisions = (False,) if share or size > MAX_DOUBLE_WEIGHTS else (True, False)
    for double, inputs in itertools.product(precisions, (_make_random_inputs, to_arguments)):
        shared = _list_shareable(model) if share else []
        randomized = _copy_sharing(model, shared).eval()
        _randomize_channels(randomized, double=double, keep=shared)
        given = tuple(
            x.double() if double and isinstance(x, Tensor) and x.is_floating_point() else x
            for x in inputs(example)
        )
        try:
            expected = run_model(randomized, given)
        except Exception as failure:
            problem = failure
            continue
        if all(bool(out.isfinite().any()) for out in expected):
            return Probe(randomized, given, expected, has_noise=not share)
    raise StructureError(
        f"the model does not run on inputs of {_describe_shapes(example)} to a finite output of "
        "tensors, so that nothing can be checked; give inputs that it takes, or a model that takes "
        f"these ({problem or 'the output is not finite'})"
    ) from problem


def _describe_shapes(example: Example) -> str:
    shapes = [str(tuple(x.shape)) for x in to_arguments(example) if isinstance(x, Tensor)]
    return f"shape {' and '.join(shapes)}" if shapes else "these kinds"


def _list_shareable(model: nn.Module) -> list[Tensor]:
    """Large weights whose channels differ, as they do unless all values are equal."""
    large = (weight for weight in model.parameters() if weight.nbytes >= MIN_OFFLOADED_BYTES)
    return [weight for weight in large if not _is_flat(weight)]


def _randomize_channels(
    model: nn.Module, *, double: bool = False, keep: Sequence[Tensor] = ()
) -> None:
    """Changes the values of a model so that no two channels are alike, but for those to keep."""
    if double:
        model.double()
    kept = {tensor.data_ptr() for tensor in keep}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in named_tensors(model).values():
            if tensor.is_floating_point() and tensor.data_ptr() not in kept:
                _add_noise(tensor, generator)


def _add_noise(tensor: Tensor, generator: torch.Generator) -> None:
    """Adds noise in proportion to each value, and a little more so that equal values differ."""
    is_weight, is_flat = isinstance(tensor, nn.Parameter), _is_flat(tensor)
    scale = tensor.abs().nan_to_num(0, 0, 0)  # -inf in a mask stays
    offset = 0.1 if is_flat else 0.1 * scale.mean()
    if not is_weight and not is_flat:
        offset = 0.0  # zeros in a buffer may be a mask
    noise = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
    if is_weight and tensor.ndim > 1 and not is_flat:
        noise.sub_(0.5)  # deep nets of positive weights overflow
    tensor.add_(noise.mul_(scale.add_(offset)))


def _is_flat(tensor: Tensor) -> bool:
    """Whether all values are equal; the first two are compared first, which is quick."""
    first = tensor.flatten()[:2]
    return bool((first == first[:1]).all()) and bool((tensor == first[:1]).all()) and len(first) > 0


def _make_random_inputs(example: Example) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for x in to_arguments(example)
    )


Replace = Callable[[str, Tensor], Tensor]  # other values for a tensor of the model, by name


def run_model(
    model: nn.Module, inputs: tuple[Any, ...], replace: Replace | None = None
) -> list[Tensor]:
    """All output tensors of a model, with constants for its random draws.

    ``replace`` gives other values for its parameters and buffers.
    """
    with torch.no_grad(), unfused_kernels(), _ConstantNoise(), torch.random.fork_rng(devices=[]):
        if replace is None:
            outputs = find_tensors(model(*inputs))
        else:
            with _TensorReplacer(model, replace):
                outputs = find_tensors(model(*inputs))
    if is_large(model):
        trim_memory()
    if not outputs:
        raise StructureError("its output holds no tensors; give them as a tuple, list or dict")
    return outputs


class _TensorReplacer(Interceptor):
    """Replaces a model's tensors by others, each when an operation takes it.

    Only a few exist at a time: a second model would take as much memory as the first.
    """

    def __init__(self, model: nn.Module, replace: Replace) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in named_tensors(model).items()}
        self._replace, self._recent = replace, dict[str, Tensor]()
        self._written: dict[str, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_written = func._schema.is_mutable
        args = tuple(self._substitute(value, is_written=is_written) for value in args)
        named = {k: self._substitute(v, is_written=is_written) for k, v in (kwargs or {}).items()}
        return func(*args, **named)

    def _substitute(self, value: Any, *, is_written: bool) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._substitute(item, is_written=is_written) for item in value)
        name = self._names.get(id(value))
        return value if name is None else self._get_replaced(name, value, is_written=is_written)

    def _get_replaced(self, name: str, tensor: Tensor, *, is_written: bool) -> Tensor:
        if name in self._written:
            return self._written[name]
        if name not in self._recent:
            if len(self._recent) == MAX_REPLACED:
                del self._recent[next(iter(self._recent))]
            self._recent[name] = self._replace(name, tensor.detach())
        if is_written:
            self._written[name] = self._recent[name].clone()
            return self._written[name]
        return self._recent[name]


class _ConstantNoise(Interceptor):
    """Makes random draws constant, so that they do not depend on the order of channels."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if get_base_name(func) in NOISE and result.is_floating_point():
            result.fill_(0.5)
        return result


def is_close(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Whether two lists of outputs are equal up to rounding."""
    return len(left) == len(right) and all(map(_is_close_tensor, left, right))


def _is_close_tensor(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or not torch.equal(left.isfinite(), right.isfinite()):
        return False
    left, right = left[right.isfinite()], right[right.isfinite()]
    tolerance = 1e-5 if right.dtype in (torch.float64, torch.complex128) else 1e-3
    distance = (left - right).abs() if right.is_floating_point() else (left != right).double()
    return bool((distance <= tolerance * right.abs().amax() + 1e-12).all()) if len(right) else True


def make_half_probe(structure: Structure, probe: Probe) -> Probe:
    """The probe of a subnet with half of the channels, which all differ."""
    counts = dict(count_halves(structure))
    small = build_module(
        probe.model, structure, Subnet.from_channels({g: range(n) for g, n in counts.items()})
    )
    if not probe.has_noise:
        _randomize_channels(small)
    return Probe(small, probe.inputs, run_model(small, probe.inputs), counts)


def count_halves(structure: Structure) -> list[tuple[str, int]]:
    """Half of the channels of every group, as ``halve`` counts them."""
    return [(name, halve(structure.groups[name].size)) for name in structure.cut_groups()]


def halve(size: int) -> int:
    """Half of the channels, rounded up, but at least two where there are two."""
    return max(math.ceil(size / 2), min(2, size))  # one channel alone could belong to any axis


def drop_one(size: int) -> int:
    """All channels but one, but at least two where there are two."""
    return max(size - 1, min(2, size))


def copy_sharing_weights(model: nn.Module) -> nn.Module:
    """A copy that shares the weights' memory but not the buffers, which training changes."""
    return _copy_sharing(model, model.parameters())


def _copy_sharing(model: nn.Module, weights: Iterable[Tensor]) -> nn.Module:
    """A copy that shares the memory of some weights."""
    shared: dict[int, Any] = {
        id(weight): nn.Parameter(weight.detach(), weight.requires_grad) for weight in weights
    }
    return copy_model(model, shared)
