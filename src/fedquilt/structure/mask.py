"""The full-size model with zeros outside a subnet, to compare subnets with."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedquilt.structure.blocks.rewire import rewire
from fedquilt.structure.cut import Index, index_cells, view_cells, write_cells
from fedquilt.structure.groups import Axis
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import named_tensors


def mask_model(model: nn.Module, structure: Structure, subnet: Subnet) -> nn.Module:
    """The full-size model with zeros in every cell outside the subnet and in skipped branches."""
    full = copy.deepcopy(model)
    rewire(full, structure.blocks, (), factors=dict.fromkeys(subnet.skipped, 0.0))
    where = index_cells(structure, Subnet(subnet.kept))
    with torch.no_grad():
        for name, tensor in named_tensors(full).items():
            tensor.copy_(mask_tensor(tensor, where[name], structure.axes[name]))
    return full


def mask_tensor(tensor: Tensor, where: tuple[Index, ...], axes: Sequence[Axis | None]) -> Tensor:
    """The tensor with zeros outside the given cells."""
    if all(axis is None for axis in axes):
        return tensor
    masked = torch.zeros_like(tensor)
    write_cells(masked, where, view_cells(tensor, where))
    return masked
