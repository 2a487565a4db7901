"""The Python half of the simulated accelerator: what PyTorch calls the module of a device.

It is installed as any other backend is: PyTorch calls ``load`` in every process that imports it,
because an entry point of the group ``torch.backends`` names it.
"""

from __future__ import annotations

import types
from pathlib import Path

import torch

NAME = "sim"


def load() -> None:
    """Makes ``torch.device("sim")`` work, as ``torch.sim``."""
    torch.utils.rename_privateuse1_backend(NAME)
    torch.ops.load_library(str(Path(__file__).parent / "accelerator.so"))
    torch._register_device_module(NAME, make_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def make_module() -> types.ModuleType:
    """The functions that PyTorch, and this library, ask of the module of a device."""
    sim, module = torch.ops.sim, types.ModuleType(f"torch.{NAME}")

    def index(device: torch.device | str | int | None) -> int:
        if isinstance(device, int):
            return device
        number = None if device is None else torch.device(device).index
        return sim.current_device() if number is None else number

    module.is_available = lambda: True
    module.device_count = sim.device_count
    module.current_device = sim.current_device
    module.set_device = lambda device: sim.set_device(index(device))
    module.get_device_name = lambda device=None: "Simulated"
    module.synchronize = lambda device=None: None
    module._is_in_bad_fork = lambda: False
    module.manual_seed = lambda seed: sim.seed(sim.current_device(), seed)
    module.manual_seed_all = lambda seed: [sim.seed(n, seed) for n in range(sim.device_count())]
    module.get_rng_state = lambda device=None: sim.get_rng_state(index(device))
    module.set_rng_state = lambda state, device=None: sim.set_rng_state(index(device), state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]

    def mem_get_info(device: torch.device | None = None) -> tuple[int, int]:
        used, _, total = sim.memory(index(device))
        return total - used, total

    module.mem_get_info = mem_get_info
    return module
