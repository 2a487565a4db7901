"""Names of modules and tensors inside others."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


def keep_outermost(names: Sequence[str]) -> list[str]:
    """The names that are not inside another one of them."""
    return [n for n in names if not any(n != other and is_in(n, other) for other in names)]


def list_all_tensors(module: nn.Module, path: str = "") -> dict[str, Tensor]:
    """Parameters and buffers, under each of their names."""
    return {
        **dict(module.named_parameters(path, remove_duplicate=False)),
        **dict(module.named_buffers(path, remove_duplicate=False)),
    }


def join_path(path: str, name: str) -> str:
    """The name of something inside a module."""
    return f"{path}.{name}" if path else name


def is_in(name: str, path: str) -> bool:
    """Whether a name is a path or inside it."""
    return not path or name == path or name.startswith(f"{path}.")
