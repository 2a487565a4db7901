"""What holds on a simulated accelerator: the checks of three files, in a process that has one.

They need a process of their own. PyTorch starts threads for the gradients of an accelerator, and
after that no forked process can compute gradients, which other tests of this process may want to.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .simulated.install import COMPILER, install

ROOT = Path(__file__).parents[2]
CHECKS = ["tests/laws/device_laws.py", "tests/devices/checks.py", "tests/deploy/device_checks.py"]


@pytest.fixture(scope="session")
def with_accelerator(tmp_path_factory):
    """An environment whose processes have the simulated accelerator."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"the simulated accelerator is built with {COMPILER}, which is not here")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    paths = [str(install(shared / "simulated")), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {name: v for name, v in os.environ.items() if not name.startswith("PYTEST_")}
    memory = str(base / "memory")  # which processes on one device share
    paths = os.pathsep.join(paths)
    return {**own, "PYTHONPATH": paths, "FEDQUILT_SIMULATED_MEMORY": memory}


@pytest.mark.timeout(900)
def test_all_checks_hold_on_a_simulated_accelerator(with_accelerator):
    options = [
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=--import-mode=importlib",
    ]
    command = [sys.executable, "-m", "pytest", *options, *CHECKS]
    result = subprocess.run(command, cwd=ROOT, env=with_accelerator, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert "skipped" not in result.stdout.splitlines()[-1]
