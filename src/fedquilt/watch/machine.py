"""How busy this machine is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MEMORY = Path("/proc/meminfo")


@dataclass(frozen=True)
class MachineLoad:
    """The load of the last minute, and memory in bytes; None where the system does not say."""

    cores: int
    load: float | None
    memory_used: int | None
    memory_total: int | None


def read_machine_load() -> MachineLoad:
    """How busy this machine is now."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    cores = os.cpu_count() or 1
    try:
        lines = (line.split() for line in MEMORY.read_text().splitlines())
        known = {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines if len(words) > 1}
        total = known["MemTotal"]
        return MachineLoad(cores, load, total - known["MemAvailable"], total)
    except (OSError, ValueError, KeyError):
        return MachineLoad(cores, load, None, None)
