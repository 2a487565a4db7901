"""A recipe names what a client does; the workbench is what it does it with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from fedquilt.data import ClientData
from fedquilt.federation.client import Task, Update
from fedquilt.structure.cut import Params, build, cells, load, positions, take, view
from fedquilt.structure.groups import Structure
from fedquilt.structure.layout import lay_out
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.trace import named_tensors

MOST_MODELS = 16  # built modules that a workbench keeps


class Recipe(Protocol):
    """A frozen dataclass of plain settings that knows how to do one kind of client work."""

    def run(self, task: Task, bench: Workbench) -> Update:
        """Does the work for one client."""
        ...


class Workbench:
    """What clients have at hand on one worker: their data, their own state, modules built once."""

    def __init__(
        self, model: nn.Module, structure: Structure, data: Mapping[str, Mapping[int, ClientData]]
    ):
        self.model, self.structure = model, structure
        self._data = data
        self._built: OrderedDict[Subnet, nn.Module] = OrderedDict()
        self.kept: Mapping[str, Tensor] | None = None  # the state of the client at work
        self.to_keep: Mapping[str, Tensor] | None = None  # its new state, if it changed

    def examples(self, split: str, client: int) -> ClientData:
        """The client's data: ``train`` or ``test``."""
        return self._data[split][client]

    def module(self, subnet: Subnet, params: Params, home: tuple[str, ...] = ()) -> nn.Module:
        """The subnet's module holding the subnet's cells of the global tensors.

        Tensors that match ``home`` stay on the client: they come from its state, or at first from
        the model's own initial values.
        """
        shape = Subnet(subnet.kept)
        if shape not in self._built:
            self._built[shape] = build(self.model, self.structure, shape)
            if self.structure.channels_last:
                lay_out(self._built[shape])
            if len(self._built) > MOST_MODELS:
                self._built.popitem(last=False)
        self._built.move_to_end(shape)
        module = self._built[shape]
        load(module, take(params, self.structure, subnet.leaving(*home)))
        left_out = self.structure.matching(subnet.without) | self.structure.matching(home)
        if left_out:
            initial, where = named_tensors(self.model), cells(self.structure, shape)
            load(module, {n: view(initial[n].detach(), where[n]) for n in left_out})
        if home and self.kept is not None:
            load(module, self.kept)
        return module

    def keep(self, module: nn.Module, home: tuple[str, ...]) -> None:
        """Remembers the tensors that stay on the client."""
        if home:
            names = self.structure.matching(home)
            self.to_keep = {
                n: t.detach().clone() for n, t in named_tensors(module).items() if n in names
            }

    def tensors(self, module: nn.Module, subnet: Subnet, built_for: Subnet) -> dict[str, Tensor]:
        """A copy of a module's tensors that are part of a subnet of what it was built for."""
        own = {n: t.detach() for n, t in named_tensors(module).items()}
        names = self.structure.names(subnet)
        if subnet.kept == built_for.kept:
            return {n: own[n].clone() for n in names}
        return _narrowed(own, self.structure, built_for, subnet, names)


def _narrowed(
    own: Params, structure: Structure, wide: Subnet, narrow: Subnet, names: list[str]
) -> dict[str, Tensor]:
    """Cells of the narrower subnet, taken from the tensors of the wider one."""
    result = {}
    for name in names:
        index = []
        for axis, size in zip(structure.axes[name], structure.shapes[name], strict=True):
            every = torch.arange(size)
            inside = torch.isin(every[positions(axis, wide)], every[positions(axis, narrow)])
            index.append(inside.nonzero().flatten())
        result[name] = view(own[name], tuple(index)).clone()
    return result
