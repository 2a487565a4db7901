"""Builds the simulated accelerator, and makes it known to every process that is started with it."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

HERE = Path(__file__).parent
COMPILER = "g++"


def install(folder: Path) -> Path:
    """Builds into a folder, once for all processes that ask; put the folder on ``PYTHONPATH``."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "accelerator.so").exists():
            _compile(HERE / "accelerator.cpp", folder / "accelerator.so")
            shutil.copy(HERE / "fedquilt_simulated.py", folder)
            about = folder / "fedquilt_simulated-0.dist-info"
            about.mkdir()
            (about / "METADATA").write_text("Name: fedquilt-simulated\nVersion: 0\n")
            entry = "[torch.backends]\nsimulated = fedquilt_simulated:load\n"
            (about / "entry_points.txt").write_text(entry)
    return folder


def _compile(source: Path, target: Path) -> None:
    libraries = Path(torch.__file__).parent / "lib"
    flags = ["-shared", "-fPIC", "-std=c++20", "-O0", "-w", *(f"-I{p}" for p in include_paths())]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    links = [f"-L{libraries}", "-ltorch_cpu", "-ltorch", "-lc10"]
    unfinished = target.with_suffix(".tmp")
    command = [COMPILER, *flags, abi, str(source), "-o", str(unfinished), *links]
    subprocess.run(command, check=True, capture_output=True, text=True)
    unfinished.rename(target)
