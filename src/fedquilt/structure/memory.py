"""Where the tensors of large models lie: in memory, in files that are mapped, or given back."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import sys
import tempfile
from functools import lru_cache
from typing import IO, Any

import torch
from torch import Tensor, nn

from fedquilt.structure.tensors import named_tensors

MIN_LARGE_BYTES = 2**26  # below, a copy of a model more or less does not matter
MIN_OFFLOADED_BYTES = 2**16  # of one tensor
MIN_OWN_BYTES = 2**20  # of a tensor whose memory is asked for by itself
ALIGNMENT = 64  # bytes


def is_large(model: nn.Module) -> bool:
    """Whether a copy of the model would matter."""
    return sum(tensor.nbytes for tensor in named_tensors(model).values()) >= MIN_LARGE_BYTES


def release_freed_memory() -> None:
    """Gives freed memory back to the system.

    The C library of Linux keeps it, in pieces between what is still in use. Those that have no
    ``malloc_trim`` give large blocks back themselves, and nothing is done.
    """
    gc.collect()  # modules with another forward refer to themselves
    trim_memory()


def trim_memory() -> None:
    """The same for what is freed already, which takes a few milliseconds."""
    trim = _find_trim()
    if trim is not None:
        trim(0)


@lru_cache(maxsize=1)
def _find_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # no glibc
        return None


def make_zeros(like: Tensor) -> Tensor:
    """Contiguous zeros of the shape and kind of another tensor.

    A large one has memory of its own: it is taken from the system where it is written to, and goes
    back as soon as the tensor does. The C library would keep it among what is still in use.
    """
    is_small = like.device.type != "cpu" or like.nbytes < max(MIN_OWN_BYTES, 1)
    if is_small or sys.platform == "win32":  # which gives back what is freed
        return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    mapped = mmap.mmap(-1, like.nbytes, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=like.dtype).view(like.shape)


def map_tensor(
    file: int, start: int, dtype: torch.dtype, shape: tuple[int, ...], num_bytes: int
) -> Tensor:
    """A tensor in an open file, mapped into memory: it takes memory where it is read.

    Whoever writes to it writes to a copy. It stays valid if the file is closed or removed.
    """
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    first = start - start % mmap.ALLOCATIONGRANULARITY
    mapped = mmap.mmap(file, start + num_bytes - first, access=mmap.ACCESS_COPY, offset=first)
    flat = torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes, offset=start - first)
    return flat.view(dtype).view(shape)


class OffloadedModels:
    """The tensors of large models in a temporary file, of which only what is read takes memory.

    The models work as before. Processes that are forked share the file, not copies of the tensors.

    Args:
        models: Large ones; others stay in memory, and so do tensors without a file.

    >>> layer = nn.Embedding.from_pretrained(torch.ones(4096, 4096))
    >>> with OffloadedModels(layer):
    ...     float(layer.weight[0, 0])
    1.0
    """

    def __init__(self, *models: nn.Module) -> None:
        self._places: dict[int, tuple[Tensor, int]] = {}  # tensors, and where they start
        tensors = {
            id(tensor): tensor
            for model in models
            if is_large(model)
            for tensor in named_tensors(model).values()
            if tensor.nbytes >= MIN_OFFLOADED_BYTES
            and tensor.device.type == "cpu"
            and tensor.is_contiguous()
        }
        self._file: IO[bytes] | None = None
        with contextlib.suppress(OSError):  # a full disk: the tensors stay in memory
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
            places: dict[int, tuple[Tensor, int]] = {}
            for key, tensor in tensors.items():
                places[key] = (
                    tensor,
                    self._file.seek(-(-self._file.tell() // ALIGNMENT) * ALIGNMENT),
                )
                self._file.write(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
            self._file.flush()
            self._places = places
        self.release()
        if tensors:
            release_freed_memory()  # processes that are forked would keep it, too

    def release(self) -> None:
        """Gives back the memory of what was read since, which can be read again."""
        for tensor, start in self._places.values():
            assert self._file is not None
            with torch.no_grad():
                tensor.data = map_tensor(
                    self._file.fileno(), start, tensor.dtype, tuple(tensor.shape), tensor.nbytes
                )

    def close(self) -> None:
        """Closes the file; the tensors stay valid."""
        if self._file is not None:
            self._file.close()
        self._places = {}

    def __enter__(self) -> OffloadedModels:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
