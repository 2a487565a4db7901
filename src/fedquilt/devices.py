"""Devices that clients train on: which are there, their memory, and their random numbers.

Nothing here names a kind of accelerator, except where one differs from the others: PyTorch has a
module for each kind (``torch.cuda``, ``torch.mps``, ``torch.xpu``, or one that was installed).
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fedquilt.errors import ConfigError

CPU = torch.device("cpu")
AUTO = "auto"
NAMES = "auto, cpu, cuda, cuda:1, mps or xpu"


def find_devices(name: str) -> tuple[torch.device, ...]:
    """Finds the devices of a setting, and raises a ConfigError if one is not there.

    Args:
        name: ``auto``: all accelerators of this machine, or else the CPU. ``cuda``: all GPUs that
            are visible. ``cuda:1``: this one. Several are separated by commas.

    >>> find_devices("cpu")
    (device(type='cpu'),)
    """
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"a device is one of {NAMES}, got {name!r}")
    parts = [part.strip() for part in name.split(",")]
    devices = [device for part in parts for device in _find_devices(part)]
    if len(set(devices)) < len(devices) or len({device.type for device in devices}) > 1:
        raise ConfigError(
            f"the devices of a run are of one kind, each named once, got '{name}'; write cuda, or "
            "cuda:0,cuda:1"
        )
    return tuple(devices)


def _find_devices(name: str) -> Sequence[torch.device]:
    if name == AUTO:
        accelerator = torch.accelerator.current_accelerator()
        name = "cpu" if accelerator is None or not _count(accelerator.type) else accelerator.type
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"a device is one of {NAMES}, got '{name}'") from None
    if device.type == "cpu":
        return (CPU,)
    count = _count(device.type)
    if count <= (device.index or 0):
        there = ", ".join(f"{device.type}:{i}" for i in range(count)) or f"no {device.type} device"
        raise ConfigError(
            f"device '{name}' is not there: PyTorch {torch.__version__} finds {there} on this "
            "machine; choose device = cpu, or install a PyTorch that was built for the device"
        )
    indices = range(count) if device.index is None else (device.index,)
    return [torch.device(device.type, index) for index in indices]


def _count(kind: str) -> int:
    """How many devices of a kind are there; asks without starting the kind's runtime, if it can."""
    try:
        return int(torch.get_device_module(kind).device_count())
    except (RuntimeError, AttributeError, AssertionError):  # a kind that this PyTorch has not
        return 0


def is_accelerator(device: torch.device) -> bool:
    """Whether it is another device than the CPU."""
    return device.type != "cpu"


def describe_device(device: torch.device) -> str:
    """The kind of a device, and its model where that is known; without its number.

    >>> describe_device(CPU)
    'cpu'
    """
    if not is_accelerator(device):
        return device.type
    get_name = getattr(torch.get_device_module(device.type), "get_device_name", None)
    return f"{device.type} {get_name(device)}" if get_name is not None else device.type


def has_accelerator() -> bool:
    """Whether this PyTorch has an accelerator on this machine."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and _count(accelerator.type) > 0


def seed_generators(seed: int, device: torch.device = CPU) -> None:
    """Seeds the default generators that a model on the device may draw from: dropout and the like.

    PyTorch's ``manual_seed`` would seed all devices, also those of other runs.
    """
    torch.default_generator.manual_seed(seed)
    if is_accelerator(device):
        with on_device(device):
            torch.get_device_module(device.type).manual_seed(seed)


@contextlib.contextmanager
def fork_generators(device: torch.device = CPU) -> Iterator[None]:
    """Puts the default generators of the CPU and of the device back afterwards."""
    if not is_accelerator(device):
        with torch.random.fork_rng(devices=[]):
            yield
    elif device.type == "mps":  # which has one generator, and no number
        before = torch.mps.get_rng_state()
        try:
            with torch.random.fork_rng(devices=[]):
                yield
        finally:
            torch.mps.set_rng_state(before)
    else:
        with torch.random.fork_rng(devices=[device.index], device_type=device.type):
            yield


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Makes a device the current one of its kind."""
    module = torch.get_device_module(device.type) if is_accelerator(device) else None
    if module is None or not hasattr(module, "set_device") or device.index is None:
        yield
        return
    before = module.current_device()
    module.set_device(device.index)
    try:
        yield
    finally:
        module.set_device(before)


def get_free_memory(device: torch.device = CPU) -> float:
    """The free memory of a device in bytes; infinite where the system does not report it."""
    if not is_accelerator(device):
        return _get_free_host_memory()
    module: Any = torch.get_device_module(device.type)
    if hasattr(module, "mem_get_info"):
        return float(module.mem_get_info(device)[0])
    if hasattr(module, "recommended_max_memory"):  # mps
        return float(module.recommended_max_memory() - module.driver_allocated_memory())
    return math.inf


def _get_free_host_memory() -> float:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    if sys.platform == "win32":
        return math.inf
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return math.inf


def synchronize(device: torch.device) -> None:
    """Waits until an accelerator has done all that it was given."""
    if is_accelerator(device):
        torch.get_device_module(device.type).synchronize()


def release_cached_memory(device: torch.device) -> None:
    """Gives back what PyTorch keeps of an accelerator's memory after it was freed."""
    empty_cache = getattr(torch.get_device_module(device.type), "empty_cache", None)
    if empty_cache is not None:
        empty_cache()


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether an exception says that an accelerator has no memory left."""
    return isinstance(problem, torch.OutOfMemoryError) or (
        isinstance(problem, RuntimeError) and str(problem).startswith("MPS backend out of memory")
    )


@contextlib.contextmanager
def reproducible_kernels(device: torch.device) -> Iterator[None]:
    """Makes kernels of an accelerator repeat their bits; on a CPU they do in any case.

    Where PyTorch has no such kernel, it warns and takes the one it has. Products of float32 keep
    all of their digits (no TF32), so that accelerators agree with CPUs.
    """
    if not is_accelerator(device):
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the runtime starts
    is_strict = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fills, cudnn = memory.fill_uninitialized_memory, torch.backends.cudnn
    before = cudnn.benchmark, cudnn.allow_tf32
    try:
        torch.use_deterministic_algorithms(True, warn_only=only_warns or not is_strict)
        memory.fill_uninitialized_memory = False  # nothing here reads it
        cudnn.benchmark, cudnn.allow_tf32 = False, False
        yield
    finally:
        torch.use_deterministic_algorithms(is_strict, warn_only=only_warns)
        memory.fill_uninitialized_memory = fills
        cudnn.benchmark, cudnn.allow_tf32 = before
