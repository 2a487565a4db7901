"""A key that is equal for modules whose code does the same."""

from __future__ import annotations

import types
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from fedquilt.structure.blocks.paths import list_all_tensors


class _NotHashable(Exception):
    """A value that cannot be compared."""


PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, type)


FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


def make_code_key(module: nn.Module) -> Hashable | None:
    """A key with all that the code of a module can depend on; None if that is unknown."""
    seen: dict[int, int] = {}
    try:
        parts = tuple(
            (
                path,
                type(part),
                seen.setdefault(id(part), len(seen)),
                tuple(
                    (name, _to_hashable(value))
                    for name, value in vars(part).items()
                    if name not in OF_EVERY_MODULE and (path or name != "training")
                ),
            )
            for path, part in module.named_modules(remove_duplicate=False)
        )
    except _NotHashable:
        return None
    tensors = tuple(
        (name, tuple(tensor.shape), seen.setdefault(id(tensor), len(seen)))
        for name, tensor in list_all_tensors(module).items()
    )
    return parts, tensors


def _to_hashable(value: Any) -> Hashable:
    if isinstance(value, (tuple, list)):
        return tuple(map(_to_hashable, value))
    if not isinstance(value, (*PLAIN, *FUNCTIONS)):
        raise _NotHashable
    return type(value), value
