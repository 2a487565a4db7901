"""What a client's optimizer keeps from round to round, as part of the client's state.

It is kept for the cells that the client trained last. A client whose subnet is a part of that one
takes its part. A tensor with a cell that the client did not train last starts fresh, all of it:
optimizers count the steps of a tensor, not those of a cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedquilt.structure.cut import compute_shapes, global_name, index_cells_within, view_cells
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.context import ClientContext
from fedquilt.training.optimizers import WeightOptimizer

PREFIX = "optimizer"
SUBNET = "subnet"  # under this key is what the client trained last
MovedWeight = tuple[str, Subnet]  # the name of a weight in its net, and what that was built for


class OptimizerMemory:
    """Brings back the optimizers' state of a client's last round, and collects the new one.

    Args:
        context: The client's context.
        is_kept: Whether the state is kept; if not, nothing is brought back or collected.
    """

    def __init__(self, context: ClientContext, *, is_kept: bool) -> None:
        self._structure, self._state = context.structure, context.client_state
        self._is_kept = is_kept
        self._optimizers: list[tuple[WeightOptimizer, list[MovedWeight]]] = []

    def attach(self, optimizer: WeightOptimizer, weights: Iterable[MovedWeight]) -> None:
        """Gives an optimizer the state of its weights, in their order, and watches over it."""
        if self._is_kept:
            named = list(weights)
            optimizer.load_state([self._find(name, subnet) for name, subnet in named])
            self._optimizers.append((optimizer, named))

    def add_to(self, state: Mapping[str, Tensor] | None) -> Mapping[str, Tensor] | None:
        """The client's new state, with that of the optimizers.

        Args:
            state: The new state without it; None: it stays as it was.
        """
        if not self._is_kept:
            return state
        new = dict(self._state if state is None else state)
        for optimizer, weights in self._optimizers:
            for (name, subnet), tensors in zip(weights, optimizer.state(), strict=True):
                owner, called = self._identify(name, subnet)
                encoded = bytearray(subnet.shape.encode())
                new[_key(SUBNET, owner)] = torch.frombuffer(encoded, dtype=torch.uint8).clone()
                for key in [k for k in new if k.startswith(_key(called, ""))]:
                    del new[key]
                new |= {_key(called, key): tensor for key, tensor in tensors.items()}
        return new

    def _find(self, name: str, subnet: Subnet) -> dict[str, Tensor]:
        """The state of a weight; empty if there is none for all of its cells."""
        owner, called = self._identify(name, subnet)
        encoded, prefix = self._state.get(_key(SUBNET, owner)), _key(called, "")
        found = {n.removeprefix(prefix): t for n, t in self._state.items() if n.startswith(prefix)}
        if encoded is None or not found:
            return {}
        last = Subnet.decode(bytes(encoded.tolist()))
        if last == subnet.shape:
            return found
        shape = compute_shapes(self._structure, last).get(name)
        is_fitting = all(not t.ndim or tuple(t.shape) == shape for t in found.values())
        if not (is_fitting and _holds_cells(self._structure, name, last, subnet)):
            return {}
        where = index_cells_within(self._structure, last, subnet)[name]
        return {key: view_cells(t, where) if t.ndim else t for key, t in found.items()}

    def _identify(self, name: str, subnet: Subnet) -> tuple[str, str]:
        """Whose a weight is, and its name in the global model."""
        called = global_name(name, self._structure, subnet)
        return "" if called == name else subnet.owner, called


def _key(*words: str) -> str:
    return "/".join((PREFIX, *words))


def _holds_cells(structure: Structure, name: str, wide: Subnet, narrow: Subnet) -> bool:
    """Whether all cells of a tensor that one subnet has are in another."""
    has, wants = dict(wide.kept), dict(narrow.kept)
    spans = (span for axis in structure.axes[name] if axis is not None for span in axis)
    return all(
        span.group in wants and not wants[span.group] & ~has[span.group]
        for span in spans
        if span.group in has
    )
