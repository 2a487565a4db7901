"""Cut a subnet out of a supernet: its cells, its tensors, and the smaller module itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from fedquilt.structure.blocks.rewire import rewire
from fedquilt.structure.computed import detach_computed
from fedquilt.structure.groups import Axis, SizeAttribute
from fedquilt.structure.layers import resize_layers
from fedquilt.structure.structure import Structure, cache_per_structure
from fedquilt.structure.subnet import Subnet, unpack_bits
from fedquilt.structure.tensors import copy_model, named_tensors

Params = Mapping[str, Tensor]  # tensors of a model by name; never changed in place
Index = slice | Tensor  # positions of one axis: a slice where they are neighbors
WHOLE = slice(None)


@cache_per_structure(max_entries=4096)
def index_cells(structure: Structure, subnet: Subnet) -> Mapping[str, tuple[Index, ...]]:
    """Where a subnet's cells lie in the global tensors: one index per axis, as an open mesh.

    This is the only place that turns a subnet into indices, so cutting and stitching agree.
    """
    structure.validate(subnet)
    axes, numbers = _number_axes(structure)
    positions = [list_positions(axis, subnet) for axis in axes]
    return {
        name: tuple(positions[number] for number in numbers[name])
        for name in structure.tensor_names(subnet)
    }


@cache_per_structure(max_entries=1)
def _number_axes(
    structure: Structure,
) -> tuple[Sequence[Axis | None], Mapping[str, tuple[int, ...]]]:
    """The different axes of a model, and which of them each tensor has: there are few."""
    numbers: dict[Axis | None, int] = {}
    of_tensors = {
        name: tuple(numbers.setdefault(axis, len(numbers)) for axis in axes)
        for name, axes in structure.axes.items()
    }
    return tuple(numbers), of_tensors


def list_positions(axis: Axis | None, subnet: Subnet) -> Index:
    """The positions of an axis that a subnet keeps, ascending."""
    masks = {group: mask for group, mask in subnet.kept if mask}
    if axis is None or not any(span.group in masks for span in axis):
        return WHOLE
    kept, offset = [], 0
    for span in axis:
        mask = masks.get(span.group) if span.group is not None else None
        size = len(span.channels)
        if mask is None:
            kept.append(np.arange(offset, offset + size))
        else:
            channels = span.channel_array
            is_kept = unpack_bits(mask, max(mask.bit_length(), int(channels.max()) + 1))
            kept.append(offset + np.flatnonzero(is_kept[channels]))
        offset += size
    return _to_index(torch.from_numpy(np.concatenate(kept)))


def _to_index(positions: Tensor) -> Index:
    """Ascending positions, as a slice where they are neighbors."""
    if not len(positions):
        return slice(0, 0)
    first, last = int(positions[0]), int(positions[-1])
    return slice(first, last + 1) if last - first + 1 == len(positions) else positions


@cache_per_structure(max_entries=1024)
def index_cells_within(
    structure: Structure, wide: Subnet, narrow: Subnet
) -> Mapping[str, tuple[Index, ...]]:
    """Where the cells of a narrower subnet lie in the tensors of a wider one.

    Of a subnet that is not narrower, those cells that the other one has.
    """
    return {
        name: tuple(
            _compute_positions_within(axis, size, wide, narrow)
            for axis, size in zip(structure.axes[name], structure.shapes[name], strict=True)
        )
        for name in structure.shapes
    }


def _compute_positions_within(axis: Axis | None, size: int, wide: Subnet, narrow: Subnet) -> Index:
    every = torch.arange(size)
    inside = torch.isin(every[list_positions(axis, wide)], every[list_positions(axis, narrow)])
    if inside.all():
        return WHOLE
    return _to_index(inside.nonzero().flatten())


@cache_per_structure(max_entries=4096)
def compute_shapes(structure: Structure, subnet: Subnet) -> Mapping[str, tuple[int, ...]]:
    """The shape of each of a subnet's tensors."""
    return {
        name: tuple(
            len(range(size)[i]) if isinstance(i, slice) else len(i)
            for size, i in zip(structure.shapes[name], index, strict=True)
        )
        for name, index in index_cells(structure, subnet).items()
    }


def view_cells(tensor: Tensor, index: tuple[Index, ...]) -> Tensor:
    """The indexed cells: a view if every index is a slice, else a copy."""
    part = tensor[tuple(i if isinstance(i, slice) else WHOLE for i in index)]
    for axis, i in enumerate(index):
        if isinstance(i, Tensor):
            part = part.index_select(axis, i.to(part.device))
    return part


def is_sliced(index: tuple[Index, ...]) -> bool:
    """Whether every index is a slice, so that cells can be viewed and need not be gathered."""
    return all(isinstance(i, slice) for i in index)


def compute_offsets(shape: Sequence[int], index: tuple[Index, ...]) -> Tensor:
    """Where the indexed cells lie in a tensor of this shape, flattened; in their order.

    >>> compute_offsets((2, 4), (slice(None), torch.tensor([0, 3]))).tolist()
    [0, 3, 4, 7]
    """
    offsets = torch.zeros((), dtype=torch.int64)
    for size, i in zip(shape, index, strict=True):
        offsets = offsets.unsqueeze(-1) * size + torch.arange(size)[i]
    return offsets.flatten()


def write_cells(tensor: Tensor, index: tuple[Index, ...], values: Tensor | bool) -> None:
    """Writes values to the indexed cells, in place; a tensor has the shape of the cells."""
    if is_sliced(index):
        tensor[index] = values
        return
    offsets = compute_offsets(tensor.shape, index).to(tensor.device)
    if not tensor.is_contiguous():
        places = torch.unravel_index(offsets, tensor.shape)
        tensor[places] = values.reshape(-1) if isinstance(values, Tensor) else values
    elif isinstance(values, Tensor):
        tensor.view(-1).scatter_(0, offsets, values.reshape(-1))
    else:
        tensor.view(-1).index_fill_(0, offsets, values)


def global_name(name: str, structure: Structure, subnet: Subnet) -> str:
    """The global name of a subnet's tensor: ``name@owner`` if it is private."""
    return f"{name}@{subnet.owner}" if name in structure.match_names(subnet.private) else name


def copy_subnet_tensors(params: Params, structure: Structure, subnet: Subnet) -> dict[str, Tensor]:
    """Copies the subnet's cells: its tensors, really smaller.

    A private tensor that has not been trained yet starts from the shared one.

    Args:
        params: The global tensors.
        structure: What can be cut in the model.
        subnet: The part to copy.

    >>> import torch, fedquilt as fq
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> structure = fq.trace_structure(model, torch.zeros(1, 4))
    >>> tensors = fq.copy_subnet_tensors(model.state_dict(), structure, structure.subnet(0.5))
    >>> tuple(tensors["0.weight"].shape), tuple(tensors["1.weight"].shape)
    ((4, 4), (3, 4))
    """
    seen = view_subnet_tensors(params, structure, subnet)
    return {n: t.clone(memory_format=torch.contiguous_format) for n, t in seen.items()}


def view_subnet_tensors(params: Params, structure: Structure, subnet: Subnet) -> dict[str, Tensor]:
    """The same with views where possible: read them at once, and do not write to them."""
    if isinstance(params, SubnetTensors):
        return params.select(subnet, structure)
    seen = {}
    for name, index in index_cells(structure, subnet).items():
        source = params.get(global_name(name, structure, subnet))
        seen[name] = view_cells(params[name] if source is None else source, index)
    return seen


class SubnetTensors(Mapping[str, Tensor]):
    """The global tensors of a few subnets only: all that a client has been sent.

    As a mapping it holds the tensors of the first subnet. ``copy_subnet_tensors`` and
    ``view_subnet_tensors`` find those of each subnet.
    """

    def __init__(self, subnets: Sequence[Subnet], tensors: Sequence[Params]) -> None:
        self._parts = list(zip(subnets, tensors, strict=True))

    def map(self, function: Callable[[Tensor], Tensor]) -> SubnetTensors:
        """The same with every tensor replaced, for example by its copy on a device."""
        subnets, tensors = zip(*self._parts, strict=True) if self._parts else ((), ())
        changed = [{name: function(t) for name, t in part.items()} for part in tensors]
        return SubnetTensors(subnets, changed)

    def select(self, subnet: Subnet, structure: Structure) -> dict[str, Tensor]:
        """The tensors of one of the subnets, or of one that excludes more of them."""
        names = structure.tensor_names(subnet)
        for whole, tensors in self._parts:
            if replace(whole, excluded=()) == replace(subnet, excluded=()) and all(
                name in tensors for name in names
            ):
                return {name: tensors[name] for name in names}
        raise KeyError(f"{subnet} was not sent")

    def __getitem__(self, name: str) -> Tensor:
        return self._parts[0][1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts[0][1] if self._parts else ())

    def __len__(self) -> int:
        return len(self._parts[0][1]) if self._parts else 0


def build_module(
    model: nn.Module, structure: Structure, subnet: Subnet, params: Params | None = None
) -> nn.Module:
    """Builds the subnet as a dense, smaller module of the same classes.

    Tensors that the subnet excludes are cut too and have the model's own values. Skipped blocks
    have no tensors.

    Args:
        model: The whole model.
        structure: What can be cut in it.
        subnet: The part to build.
        params: Global tensors to take values from; None: those of the model.

    >>> import torch, fedquilt as fq
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> structure = fq.trace_structure(model, torch.zeros(1, 4))
    >>> fq.build_module(model, structure, structure.subnet(0.25))[0]
    Linear(in_features=4, out_features=2, bias=True)
    """
    everything = replace(subnet, excluded=())
    own = {name: tensor.detach() for name, tensor in named_tensors(model).items()}
    values = copy_subnet_tensors({**own, **(params or {})}, structure, everything)
    small: dict[int, object] = {}
    for name, tensor in named_tensors(model).items():
        value = values.get(name, own[name])
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        small[id(tensor)] = value
    detach_computed(model)
    built = copy_model(model, small)
    resize_layers(built)
    set_size_attributes(built, structure, subnet)
    rewire(built, structure.blocks, subnet.skipped)
    return built


def set_size_attributes(module: nn.Module, structure: Structure, subnet: Subnet) -> None:
    """Sets module attributes that are sizes of axes to what they are in a subnet."""
    for size in structure.size_attributes:
        _set_size_attribute(module, size, subnet)


def _set_size_attribute(model: nn.Module, size: SizeAttribute, subnet: Subnet) -> None:
    module = model.get_submodule(size.module)
    index = list_positions(size.axis, subnet)
    full = range(sum(len(s.channels) for s in size.axis))
    count = len(full[index]) if isinstance(index, slice) else len(index)
    new: float = count if size.power == 1 else count**size.power
    set_attribute(module, size.attribute, size.item, new)


def set_attribute(module: nn.Module, attribute: str, item: int | None, value: float) -> None:
    """Sets a numeric attribute of a module, or one item of a tuple or list."""
    if item is None:
        setattr(module, attribute, value)
    else:
        old = getattr(module, attribute)
        setattr(module, attribute, type(old)(value if i == item else v for i, v in enumerate(old)))


def load_tensors(module: nn.Module, params: Params) -> None:
    """Copies tensors into a module built for their subnet; others keep their value."""
    tensors = named_tensors(module)
    with torch.no_grad():
        for name, value in params.items():
            tensors[name].copy_(value)
