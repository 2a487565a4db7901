"""Where numbers come from: what the last bits of a run depend on beside its settings.

PyTorch chooses its kernels by the processor, and those of another one, or of another version, round
otherwise. So a run remembers where it was at work, and says so when it goes on elsewhere.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from fedquilt.version import __version__

Origin = Mapping[str, str]


def origin(cpuinfo: Path = Path("/proc/cpuinfo")) -> Origin:
    """That of what is computed in this process."""
    instructions = torch.backends.cpu.get_cpu_capability()
    name = _named(cpuinfo) or platform.processor()
    return {
        "fedquilt": __version__,
        "torch": torch.__version__,
        "processor": f"{platform.machine()} {instructions} {name}".strip(),
    }


def _named(cpuinfo: Path) -> str:
    """What Linux calls the first processor; the name alone may be that of several kinds."""
    try:
        lines = cpuinfo.read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    facts = {key.strip(): value.strip() for key, _, value in pairs}
    kinds = (("model name", ""), ("cpu family", "family "), ("model", "model "))
    return ", ".join(word + facts[key] for key, word in kinds if key in facts)


def change(before: Origin, after: Origin) -> str:
    """What is another than it was; nothing if all is the same.

    >>> change({"torch": "2.6.0", "processor": "x86_64 AVX2"}, {"torch": "2.6.0"})
    'processor x86_64 AVX2 -> not known'
    """
    keys = [k for k in sorted({**before, **after}) if before.get(k) != after.get(k)]
    unknown = "not known"
    return ", ".join(f"{k} {before.get(k, unknown)} -> {after.get(k, unknown)}" for k in keys)
