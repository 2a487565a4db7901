"""Which rows of its embeddings a client has read: the only ones that it knows anything about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.structure.structure import Structure
from fedquilt.structure.tensors import named_tensors

Seen = Mapping[str, Tensor]  # by embedding: True for the rows that were read


@contextmanager
def record_tokens(module: nn.Module) -> Iterator[Seen]:
    """Notes what the embeddings of a module look up, by the names of their weights."""
    names = {id(tensor): name for name, tensor in named_tensors(module).items()}
    seen: dict[str, Tensor] = {}
    hooks = []
    for layer in module.modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
            name = names.get(id(layer.weight))
            if name is not None:  # a weight that is computed has no rows of its own
                rows = layer.weight.new_zeros(layer.num_embeddings, dtype=torch.bool)
                note = _make_recording_hook(seen.setdefault(name, rows))
                hooks.append(layer.register_forward_pre_hook(note, with_kwargs=True))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _make_recording_hook(rows: Tensor) -> Any:
    def hook(layer: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        tokens = inputs[0] if inputs else named["input"]
        rows[tokens.flatten().long()] = True

    return hook


def map_tokens_to_groups(structure: Structure, seen: Seen) -> dict[str, set[int]]:
    """The same by the groups that the rows of embeddings are; rows of no group are left out."""
    by_group: dict[str, set[int]] = {}
    for name, rows in seen.items():
        group = _find_token_group(structure, name)
        if group is not None:
            by_group.setdefault(group, set()).update(torch.where(rows)[0].tolist())
    return by_group


def _find_token_group(structure: Structure, name: str) -> str | None:
    """The group whose channels are the rows of an embedding, in their order."""
    axis = structure.axes[name][0]
    if axis is None or len(axis) != 1 or axis[0].group is None:
        return None
    group = structure.groups[axis[0].group]
    is_in_order = axis[0].channels == tuple(range(group.size))
    return group.name if is_in_order and not group.is_cut else None
