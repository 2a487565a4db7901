"""Models that are not supported, each with an error that says what to do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedquilt.errors import StructureError
from fedquilt.structure.tensors import named_tensors

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def require_supported(model: nn.Module) -> None:
    """Raises unless a model consists of Python modules whose tensors have shapes and own memory."""
    for path, module in model.named_modules():
        name = f"module '{path}'" if path else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise StructureError(
                f"{name} is compiled by TorchScript, whose code cannot be cut; give the nn.Module "
                "that it was compiled from"
            )
        inside = "module" if isinstance(module, WRAPPERS) else "_orig_mod"  # of torch.compile
        if inside in module._modules:
            raise StructureError(
                f"{name} is a wrapper ({type(module).__name__}) around the model to be cut; give "
                f"what it wraps, {path or 'model'}.{inside}"
            )
    tensors = named_tensors(model)
    lazy = next((name for name, tensor in tensors.items() if is_lazy(tensor)), None)
    if lazy is not None:
        raise StructureError(
            f"'{lazy}' belongs to a lazy layer and has no shape yet; run the model once on its "
            "example before you give it, model(example)"
        )
    _require_own_memory(tensors)


def _require_own_memory(tensors: Mapping[str, Tensor]) -> None:
    """Raises if a parameter shares memory, which cutting, sending and averaging would split."""
    for one, other in _find_sharing(tensors):
        if any(isinstance(tensors[name], nn.Parameter) for name in (one, other)):
            raise StructureError(
                f"'{one}' and '{other}' are two tensors that share memory, and would come apart in "
                "training; make them one parameter under two names, or use views of one in "
                "forward, or give each its own memory with clone()"
            )


def unshare_buffers(model: nn.Module) -> None:
    """Gives own memory to buffers that share it, as views of one table or expanded values do."""
    buffers = dict(model.named_buffers())
    shared = {other for _, other in _find_sharing(buffers)}
    copies = {
        id(buffer): buffer.clone(memory_format=torch.contiguous_format)
        for name, buffer in buffers.items()
        if name in shared or 0 in buffer.stride()
    }
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = copies.get(id(buffer), buffer)


def _find_sharing(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Pairs of names of different tensors that share memory."""
    by_storage: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.device.type != "meta" and tensor.layout is torch.strided:
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    for names in by_storage.values():
        for one, other in itertools.combinations(names, 2):
            if _has_overlap(tensors[one], tensors[other]):
                yield one, other


def _has_overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two views of a storage have an element in common."""
    used = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    if one.dtype != other.dtype:
        return True
    for tensor in (one, other):
        view = used.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if tensor is other and bool(view.any()):
            return True
        view.fill_(True)
    return False
