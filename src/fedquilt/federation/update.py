"""Which updates are accepted: exactly what was asked for, and finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedquilt.errors import StructureError, UpdateError
from fedquilt.federation.client import Update, client_label
from fedquilt.federation.constants import is_constant
from fedquilt.structure.cut import Params, compute_shapes, global_name, index_cells, view_cells
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet

MAX_VALUE = 1e18  # times any weight, and summed over any number of clients, it is still a float32


def validate_update(update: Update, structure: Structure, params: Params) -> Update:
    """The update itself, if its names, shapes, types and values are those of its subnets.

    ``params`` are the global tensors. Raises an UpdateError that says what is wrong otherwise.
    """
    who = client_label(update.client)
    if not (math.isfinite(update.weight) and update.weight >= 0):
        raise UpdateError(
            f"{who} sent the weight {update.weight}; weights are finite and not negative"
        )
    if len(update.subnets) != len(update.params):
        raise UpdateError(
            f"{who} sent {len(update.params)} sets of tensors for {len(update.subnets)} subnets"
        )
    for subnet, tensors in zip(update.subnets, update.params, strict=True):
        _accept_part(who, subnet, tensors, structure, params)
    return update


def _accept_part(
    who: str, subnet: Subnet, tensors: Params, structure: Structure, params: Params
) -> None:
    try:
        where, index = compute_shapes(structure, subnet), index_cells(structure, subnet)
    except StructureError as problem:
        raise UpdateError(f"{who} sent a subnet that does not fit: {problem}") from problem
    if set(tensors) != set(where):
        odd = sorted(set(tensors) ^ set(where))
        raise UpdateError(f"{who} sent other tensors than its subnet has; they differ in: {odd[0]}")
    for name, shape in where.items():
        if tuple(tensors[name].shape) != shape:
            raise UpdateError(
                f"{who} sent '{name}' with shape {tuple(tensors[name].shape)}, its subnet has "
                f"{shape}; was the model built at another width?"
            )
        old = params.get(global_name(name, structure, subnet), params.get(name))
        if old is None:
            raise UpdateError(f"{who} sent '{name}' of '{subnet.owner}', which is not in the model")
        dtype = old.dtype
        if tensors[name].dtype != dtype:
            raise UpdateError(
                f"{who} sent '{name}' as {tensors[name].dtype}, the model has {dtype}"
            )
        new = tensors[name]
        if not _is_sound(new):
            new = new.masked_fill(is_constant(new, view_cells(old, index[name])), 0)
            _check_values(who, name, new)


def _is_sound(tensor: Tensor) -> bool:
    """Whether one read is enough to know: no value is above the norm, nor anything but finite."""
    return not tensor.is_floating_point() or float(torch.linalg.vector_norm(tensor)) <= MAX_VALUE


def _check_values(who: str, name: str, tensor: Tensor) -> None:
    """Refuses values that are not finite, or so large that a sum of them need not be."""
    if not bool(torch.isfinite(tensor).all()):
        raise UpdateError(
            f"{who} sent '{name}' with values that are not finite; its training diverged"
        )
    largest = float(tensor.abs().max())
    if largest > MAX_VALUE:
        raise UpdateError(
            f"{who} sent '{name}' with values up to {largest:.0e}, and {MAX_VALUE:.0e} is the "
            "most; its training diverged"
        )
