"""One module that takes the shape of one subnet after another, without copying the weights."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fedquilt.errors import StructureError
from fedquilt.structure.cut import Index, Params, positions, set_numbers, view
from fedquilt.structure.groups import Structure, following
from fedquilt.structure.layers import set_sizes
from fedquilt.structure.layout import channels_last, is_safe
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.trace import named_tensors


@dataclass(frozen=True)
class _Place:
    """Where a module holds a tensor; a tied one has several."""

    layer: nn.Module
    name: str

    @property
    def held(self) -> Tensor:
        """What the module holds there."""
        tensor: Tensor = getattr(self.layer, self.name)
        return tensor

    def put(self, tensor: Tensor) -> None:
        """Has the module hold another tensor, of another shape perhaps."""
        is_weight = isinstance(tensor, nn.Parameter)
        vars(self.layer)["_parameters" if is_weight else "_buffers"][self.name] = tensor


class Adjustable:
    """A module whose tensors are views of the global ones, as wide as the subnet of the moment.

    What ``build`` makes for a subnet, this becomes in the time that it takes to change
    the views. Channels that are neighbours are looked at in place: who changes the global tensors
    changes the module. Other channels are copied when a shape is taken. Blocks cannot be skipped.
    """

    def __init__(self, model: nn.Module, structure: Structure, params: Params) -> None:
        tensors = named_tensors(model)
        missing = [name for name in tensors if name not in params]
        if missing:
            raise StructureError(f"there is no tensor '{missing[0]}' to look at")
        self._structure, self._params = structure, params
        memo: dict[int, Any] = {
            id(tensor): _like(tensor, params[name].detach()) for name, tensor in tensors.items()
        }
        self.module = copy.deepcopy(model, memo)
        self.subnet = Subnet()
        self._where: dict[str, tuple[Index, ...]] = {}
        self._places = self._found_places()
        self._numbers = {m: _numbers(m) for m in self.module.modules()}
        self._following = following(structure)

    def take_shape(self, subnet: Subnet) -> frozenset[str]:
        """Becomes a subnet; the tensors that have another shape now."""
        if subnet.skipped:
            raise StructureError(f"an adjustable module cannot skip blocks, got {subnet}")
        self._structure.validate(subnet)
        groups = self.subnet.differing(subnet)
        changed = frozenset(name for group in groups for name in self._following[group])
        self._look(changed, subnet)
        self.subnet = subnet
        return changed

    def _look(self, names: Iterable[str], subnet: Subnet) -> None:
        layers: dict[nn.Module, None] = {}
        for name in names:
            axes = self._structure.axes[name]
            self._where[name] = tuple(positions(axis, subnet) for axis in axes)
            places = self._places[name]
            seen = view(self._params[name].detach(), self._where[name])
            seen = _like(places[0].held, seen)  # one for all places, so that they stay tied
            for place in places:
                place.put(seen)
                layers[place.layer] = None
        for layer in layers:
            vars(layer).update(self._numbers[layer])  # of the whole: whether it is depthwise
            set_sizes(layer)
        if layers:
            set_numbers(self.module, self._structure, subnet)

    def where(self, name: str) -> tuple[Index, ...]:
        """Where the cells of a tensor lie in the global one."""
        return self._where.get(name, (slice(None),) * len(self._structure.axes[name]))

    def _found_places(self) -> Mapping[str, list[_Place]]:
        name_of = {id(tensor): name for name, tensor in named_tensors(self.module).items()}
        places: dict[str, list[_Place]] = defaultdict(list)
        for layer in self.module.modules():
            for name, tensor in {**layer._parameters, **layer._buffers}.items():
                if tensor is not None:
                    places[name_of[id(tensor)]].append(_Place(layer, name))
        return places

    def laid_out(self, *inputs: Any) -> tuple[Any, ...]:
        """Inputs as they lie best in memory for the shape of the moment."""
        is_last = self._structure.channels_last and is_safe(self.module)
        return channels_last(inputs) if is_last else inputs


def _like(old: Tensor, new: Tensor) -> Tensor:
    """The new values as what the old ones are: a parameter, or a plain tensor."""
    if isinstance(old, nn.Parameter):
        return nn.Parameter(new, requires_grad=old.requires_grad)
    return new


def _numbers(layer: nn.Module) -> dict[str, Any]:
    """The plain numbers that a layer keeps about itself."""
    return {
        name: value
        for name, value in vars(layer).items()
        if not name.startswith("_") and isinstance(value, (int, tuple)) and name != "training"
    }
