"""One module that takes the shape of one subnet after another, without copying the weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fedquilt.errors import StructureError
from fedquilt.structure.cut import Index, Params, list_positions, set_size_attributes, view_cells
from fedquilt.structure.layers import set_sizes
from fedquilt.structure.layout import is_safe, to_channels_last
from fedquilt.structure.structure import Structure, map_followers
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import copy_model, named_tensors


@dataclass(frozen=True)
class _TensorSlot:
    """A place where a module holds a tensor; a tied tensor has several."""

    layer: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor:
        """The tensor that the module holds there."""
        tensor: Tensor = getattr(self.layer, self.name)
        return tensor

    def put(self, tensor: Tensor) -> None:
        """Puts another tensor there, possibly of another shape."""
        is_weight = isinstance(tensor, nn.Parameter)
        vars(self.layer)["_parameters" if is_weight else "_buffers"][self.name] = tensor


class ResizableModule:
    """A module whose tensors are views of the global ones, as wide as its current subnet.

    ``resize_to`` does what ``build_module`` does in the time it takes to change the views.
    Neighboring channels are viewed in place, so changes of the global tensors change the module.
    Other channels are copied at each resize. Blocks cannot be skipped.
    """

    def __init__(self, model: nn.Module, structure: Structure, params: Params) -> None:
        tensors = named_tensors(model)
        missing = [name for name in tensors if name not in params]
        if missing:
            raise StructureError(
                f"params has no tensor '{missing[0]}' of the model; give all of them"
            )
        self._structure, self._params = structure, params
        memo: dict[int, Any] = {
            id(tensor): _like(tensor, params[name].detach()) for name, tensor in tensors.items()
        }
        self.module = copy_model(model, memo)
        self.subnet = Subnet()
        self._where: dict[str, tuple[Index, ...]] = {}
        self._places = self._find_slots()
        self._numbers = {m: _copy_numbers(m) for m in self.module.modules()}
        self._following = map_followers(structure)

    def resize_to(self, subnet: Subnet) -> frozenset[str]:
        """Takes the shape of a subnet; returns the tensors whose shape has changed."""
        if subnet.skipped:
            raise StructureError(
                f"a resizable module cannot skip blocks, got {subnet}; build it with build_module"
            )
        self._structure.validate(subnet)
        groups = self.subnet.differing_groups(subnet)
        changed = frozenset(name for group in groups for name in self._following[group])
        self._update_views(changed, subnet)
        self.subnet = subnet
        return changed

    def _update_views(self, names: Iterable[str], subnet: Subnet) -> None:
        layers: dict[nn.Module, None] = {}
        for name in names:
            axes = self._structure.axes[name]
            self._where[name] = tuple(list_positions(axis, subnet) for axis in axes)
            places = self._places[name]
            seen = view_cells(self._params[name].detach(), self._where[name])
            seen = _like(places[0].tensor, seen)  # one for all places, so that they stay tied
            for place in places:
                place.put(seen)
                layers[place.layer] = None
        for layer in layers:
            vars(layer).update(self._numbers[layer])  # of the whole: whether it is depthwise
            set_sizes(layer)
        if layers:
            set_size_attributes(self.module, self._structure, subnet)

    def index_of(self, name: str) -> tuple[Index, ...]:
        """Where the cells of a tensor lie in the global one."""
        return self._where.get(name, (slice(None),) * len(self._structure.axes[name]))

    def _find_slots(self) -> Mapping[str, list[_TensorSlot]]:
        name_of = {id(tensor): name for name, tensor in named_tensors(self.module).items()}
        places: dict[str, list[_TensorSlot]] = defaultdict(list)
        for layer in self.module.modules():
            for name, tensor in {**layer._parameters, **layer._buffers}.items():
                if tensor is not None:
                    places[name_of[id(tensor)]].append(_TensorSlot(layer, name))
        return places

    def arrange_inputs(self, *inputs: Any) -> tuple[Any, ...]:
        """The inputs in the memory layout that suits the current shape."""
        is_last = self._structure.channels_last and is_safe(self.module)
        return to_channels_last(inputs) if is_last else inputs


def _like(old: Tensor, new: Tensor) -> Tensor:
    """The new tensor as a parameter if the old one is a parameter."""
    if isinstance(old, nn.Parameter):
        return nn.Parameter(new, requires_grad=old.requires_grad)
    return new


def _copy_numbers(layer: nn.Module) -> dict[str, Any]:
    """The numeric attributes of a layer."""
    return {
        name: value
        for name, value in vars(layer).items()
        if not name.startswith("_") and isinstance(value, (int, tuple)) and name != "training"
    }
