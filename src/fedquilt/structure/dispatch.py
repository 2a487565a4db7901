"""ATen operations as PyTorch dispatches them: intercepted, named, and described."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def tracing_mode() -> Iterator[None]:
    """Runs a model without gradients, and restores the random state afterwards."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), unfused_kernels():
        yield


@contextmanager
def unfused_kernels() -> Iterator[None]:
    """Turns fused kernels off, so that the operations inside them are dispatched."""
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
    """Base of modes that get every operation, in ``__torch_dispatch__``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else PyTorch loads its compiler, which takes seconds and is not used here


def bind_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of an ATen operation by name, in its order, defaults included."""
    schema = func._schema.arguments
    bound = {a.name: a.default_value for a in schema if a.has_default_value()}
    bound.update(zip([a.name for a in schema], args, strict=False))
    bound.update(kwargs)
    return {a.name: bound[a.name] for a in schema if a.name in bound}


_SHAPE = "a tensor of shape"


def is_shape(argument: Any) -> bool:
    """Whether a described argument stands for a tensor."""
    return isinstance(argument, tuple) and argument[:1] == (_SHAPE,)


def describe_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that can be compared: tensors by their shape."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return (_SHAPE, *value.shape)
        if isinstance(value, float) and math.isnan(value):
            return "nan"  # which is not equal to itself
        return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value

    return {name: plain(value) for name, value in arguments.items()}


NOISE = frozenset(
    ("rand", "randn", "rand_like", "randn_like", "uniform", "normal", "exponential", "bernoulli")
)


def get_base_name(func: Any) -> str:
    """The operation's name without namespace, overload and in-place underscore."""
    name = str(func._schema.name).split("::")[-1]
    return name.removesuffix("_") if not name.endswith("__") else name
