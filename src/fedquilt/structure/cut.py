"""Cut a subnet out of a supernet: its cells, its tensors, and the smaller module itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from fedquilt.structure.blocks import rewire
from fedquilt.structure.computed import detach_computed
from fedquilt.structure.groups import Axis, Size, Structure
from fedquilt.structure.layers import resize
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.trace import named_tensors

Params = Mapping[str, Tensor]  # tensors of a model by name; never changed in place
Index = slice | Tensor  # positions of one axis: a stretch where they are neighbours
WHOLE = slice(None)


@lru_cache(maxsize=4096)
def cells(structure: Structure, subnet: Subnet) -> Mapping[str, tuple[Index, ...]]:
    """Where a subnet's cells lie in the global tensors: one index per axis, as an open mesh.

    This is the only place that turns a subnet into indices, so cutting and stitching agree.
    """
    structure.validate(subnet)
    return {
        name: tuple(positions(axis, subnet) for axis in structure.axes[name])
        for name in structure.names(subnet)
    }


def positions(axis: Axis | None, subnet: Subnet) -> Index:
    """The positions of an axis that a subnet keeps, ascending."""
    if axis is None or not any(subnet.count(s.group) for s in axis if s.group is not None):
        return WHOLE
    return _positions(
        axis, tuple((g, m) for g, m in subnet.kept if any(s.group == g for s in axis))
    )


@lru_cache(maxsize=16384)
def _positions(axis: Axis, kept: tuple[tuple[str, int], ...]) -> Index:
    masks, offset = dict(kept), 0
    found: list[int] = []
    for span in axis:
        mask = masks.get(span.group) if span.group is not None else None
        found.extend(
            offset + i for i, c in enumerate(span.channels) if mask is None or mask >> c & 1
        )
        offset += len(span.channels)
    if found == list(range(found[0], found[0] + len(found))):
        return slice(found[0], found[0] + len(found))
    return torch.tensor(found, dtype=torch.int64)


@lru_cache(maxsize=1024)
def cells_within(
    structure: Structure, wide: Subnet, narrow: Subnet
) -> Mapping[str, tuple[Index, ...]]:
    """Where the cells of a narrower subnet lie in the tensors of a wider one."""
    return {
        name: tuple(
            _within(axis, size, wide, narrow)
            for axis, size in zip(structure.axes[name], structure.shapes[name], strict=True)
        )
        for name in structure.shapes
    }


def _within(axis: Axis | None, size: int, wide: Subnet, narrow: Subnet) -> Index:
    every = torch.arange(size)
    inside = torch.isin(every[positions(axis, wide)], every[positions(axis, narrow)])
    if inside.all():
        return WHOLE
    found = inside.nonzero().flatten()
    first, last = int(found[0]), int(found[-1])
    return slice(first, last + 1) if last - first + 1 == len(found) else found


@lru_cache(maxsize=4096)
def shapes(structure: Structure, subnet: Subnet) -> Mapping[str, tuple[int, ...]]:
    """The shape of each of a subnet's tensors."""
    return {
        name: tuple(
            len(range(size)[i]) if isinstance(i, slice) else len(i)
            for size, i in zip(structure.shapes[name], index, strict=True)
        )
        for name, index in cells(structure, subnet).items()
    }


def view(tensor: Tensor, index: tuple[Index, ...]) -> Tensor:
    """The indexed cells: the tensor's own memory where every index is a stretch, else a copy."""
    part = tensor[tuple(i if isinstance(i, slice) else WHOLE for i in index)]
    for axis, i in enumerate(index):
        if isinstance(i, Tensor):
            part = part.index_select(axis, i)
    return part


def mesh(shape: Sequence[int], index: tuple[Index, ...]) -> tuple[Tensor, ...]:
    """The same cells as index tensors that broadcast against each other."""
    kept = (torch.arange(n)[i] for n, i in zip(shape, index, strict=True))
    return tuple(
        k.view([-1 if a == axis else 1 for a in range(len(shape))]) for axis, k in enumerate(kept)
    )


def put(tensor: Tensor, index: tuple[Index, ...], values: Tensor | bool) -> None:
    """Writes values to the indexed cells, in place."""
    tensor[mesh(tensor.shape, index)] = values


def source_name(name: str, structure: Structure, subnet: Subnet) -> str:
    """The global name of a subnet's tensor: its owner's where it is the subnet's own."""
    return f"{name}@{subnet.owner}" if name in structure.matching(subnet.own) else name


def take(params: Params, structure: Structure, subnet: Subnet) -> dict[str, Tensor]:
    """The subnet's tensors, really smaller: a copy of its cells.

    A tensor of its own that nobody has trained yet starts from the shared one.
    """
    seen = look(params, structure, subnet)
    return {n: t.clone(memory_format=torch.contiguous_format) for n, t in seen.items()}


def look(params: Params, structure: Structure, subnet: Subnet) -> dict[str, Tensor]:
    """The same without copying what need not be copied: only to be read, and at once."""
    if isinstance(params, Parts):
        return params.of(subnet, structure)
    seen = {}
    for name, index in cells(structure, subnet).items():
        source = params.get(source_name(name, structure, subnet))
        seen[name] = view(params[name] if source is None else source, index)
    return seen


class Parts(Mapping[str, Tensor]):
    """Global tensors as far as some subnets hold them: what a client has that was sent no more.

    By name there are only those of the first subnet, as a mapping; ``look`` and ``take`` find each
    subnet's own.
    """

    def __init__(self, subnets: Sequence[Subnet], tensors: Sequence[Params]) -> None:
        self._parts = list(zip(subnets, tensors, strict=True))

    def of(self, subnet: Subnet, structure: Structure) -> dict[str, Tensor]:
        """The tensors of a subnet that is here, or of one that leaves out some of its tensors."""
        names = structure.names(subnet)
        for whole, tensors in self._parts:
            if replace(whole, without=()) == replace(subnet, without=()) and all(
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


def build(
    model: nn.Module, structure: Structure, subnet: Subnet, params: Params | None = None
) -> nn.Module:
    """The subnet as a dense, smaller module of the same classes.

    Values come from ``params`` (global tensors), or from the model itself. Tensors that the subnet
    leaves out exist in it, cut alike, with the model's own values; those of blocks that it skips
    are gone.
    """
    everything = replace(subnet, without=())
    own = {name: tensor.detach() for name, tensor in named_tensors(model).items()}
    values = take({**own, **(params or {})}, structure, everything)
    small: dict[int, object] = {}
    for name, tensor in named_tensors(model).items():
        value = values.get(name, own[name])
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        small[id(tensor)] = value
    detach_computed(model)
    built = copy.deepcopy(model, small)
    resize(built)
    set_numbers(built, structure, subnet)
    rewire(built, structure.blocks, subnet.skipped)
    return built


def set_numbers(module: nn.Module, structure: Structure, subnet: Subnet) -> None:
    """Sets the plain numbers of modules that are sizes of axes, as they are in a subnet."""
    for size in structure.sizes:
        _set_size(module, size, subnet)


def _set_size(model: nn.Module, size: Size, subnet: Subnet) -> None:
    module = model.get_submodule(size.module)
    index = positions(size.axis, subnet)
    full = range(sum(len(s.channels) for s in size.axis))
    count = len(full[index]) if isinstance(index, slice) else len(index)
    new: float = count if size.power == 1 else count**size.power
    set_number(module, size.attribute, size.item, new)


def set_number(module: nn.Module, attribute: str, item: int | None, value: float) -> None:
    """Sets a plain number of a module, or one in a tuple or list of them."""
    if item is None:
        setattr(module, attribute, value)
    else:
        old = getattr(module, attribute)
        setattr(module, attribute, type(old)(value if i == item else v for i, v in enumerate(old)))


def load(module: nn.Module, params: Params) -> None:
    """Writes tensors into a module built for their subnet; others keep their value."""
    tensors = named_tensors(module)
    with torch.no_grad():
        for name, value in params.items():
            tensors[name].copy_(value)
