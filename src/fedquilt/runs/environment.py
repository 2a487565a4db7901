"""The environment of a run: what its last bits depend on beside its settings.

PyTorch chooses its kernels by the processor, and kernels of another processor or version round
differently. So a run stores its environment, and reports when it resumes in another one.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from fedquilt.devices import CPU, describe_device, is_accelerator
from fedquilt.version import __version__

Environment = Mapping[str, str]


def read_environment(
    cpuinfo: Path = Path("/proc/cpuinfo"), device: torch.device = CPU
) -> Environment:
    """The environment of this process, and of an accelerator if clients train on one."""
    instructions = torch.backends.cpu.get_cpu_capability()
    name = _read_processor_name(cpuinfo) or platform.processor()
    return {
        "fedquilt": __version__,
        "torch": torch.__version__,
        "processor": f"{platform.machine()} {instructions} {name}".strip(),
        **({"device": describe_device(device)} if is_accelerator(device) else {}),
    }


def _read_processor_name(cpuinfo: Path) -> str:
    """What Linux calls the first processor, with its family and model; empty if unknown."""
    try:
        lines = cpuinfo.read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    facts = {key.strip(): value.strip() for key, _, value in pairs}
    kinds = (("model name", ""), ("cpu family", "family "), ("model", "model "))
    return ", ".join(word + facts[key] for key, word in kinds if key in facts)


def describe_environment_change(before: Environment, after: Environment) -> str:
    """What differs, as text; empty if nothing does.

    >>> before = {"torch": "2.6.0", "processor": "x86_64 AVX2"}
    >>> describe_environment_change(before, {"torch": "2.6.0"})
    'processor x86_64 AVX2 -> not known'
    >>> describe_environment_change(before, {**before, "device": "cuda NVIDIA A100"})
    'device cpu -> cuda NVIDIA A100'
    """
    before, after = ({"device": CPU.type, **environment} for environment in (before, after))
    keys = [k for k in sorted({**before, **after}) if before.get(k) != after.get(k)]
    unknown = "not known"
    return ", ".join(f"{k} {before.get(k, unknown)} -> {after.get(k, unknown)}" for k in keys)
