"""Where the cells of rings lie among flattened tensors, so that both forms can be had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedquilt.structure.cut import Params

Vectors = Mapping[int, Tensor]  # a flat vector for some of the rings, by their numbers


@dataclass(frozen=True, eq=False)
class RingLayout:
    """Where the cells of each ring lie among the flattened tensors of one holding.

    Args:
        rings: The numbers of its rings, ascending.
        sizes: The number of cells in each of them.
        places: The tensors in the order in which they are flattened: the number of the subnet, the
            name, and the global name.
        order: The position of every cell of the first ring, of the second, and so on.
    """

    rings: tuple[int, ...]
    sizes: tuple[int, ...]
    places: tuple[tuple[int, str, str], ...]
    order: Tensor

    def gather(self, tensors: Sequence[Params]) -> dict[int, Tensor]:
        """Flattens the tensors of each subnet to one vector per ring."""
        if not self.places:
            return {}
        flat = torch.cat([tensors[part][name].reshape(-1) for part, name, _ in self.places])
        vectors = flat.index_select(0, self.order).split(self.sizes)
        return dict(zip(self.rings, vectors, strict=True))

    def scatter(self, vectors: Vectors, like: Sequence[Params]) -> tuple[dict[str, Tensor], ...]:
        """The tensors ``like`` with the cells of the given rings replaced; nothing is changed."""
        scattered = tuple(dict(tensors) for tensors in like)
        if not self.places or not any(ring in vectors for ring in self.rings):
            return scattered
        old = [like[part][name] for part, name, _ in self.places]
        missing = [ring for ring in self.rings if ring not in vectors]
        kept = self.gather(like) if missing else {}
        values = torch.cat([vectors.get(ring, kept.get(ring, _EMPTY)) for ring in self.rings])
        flat = torch.empty_like(values).index_copy_(0, self.order.long(), values)
        pieces = flat.split([tensor.numel() for tensor in old])
        for (part, name, _), tensor, piece in zip(self.places, old, pieces, strict=True):
            scattered[part][name] = piece.reshape(tensor.shape).to(tensor.dtype)
        return scattered


_EMPTY = torch.empty(0)


def lay_out(places: tuple[tuple[int, str, str], ...], labels: Sequence[Tensor]) -> RingLayout:
    """Orders flattened tensors by the numbers of their cells' rings."""
    if not places:
        return RingLayout((), (), (), torch.empty(0, dtype=torch.int32))
    flat = torch.cat(list(labels))
    order = flat.argsort(stable=True)  # row by row, as tensors and the global model are
    rings, sizes = flat.unique(return_counts=True)
    small = order.to(torch.int32) if len(order) < 2**31 else order
    return RingLayout(tuple(rings.tolist()), tuple(sizes.tolist()), places, small)
