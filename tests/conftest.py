"""What all tests share: a quick garbage collector, and a Python for whole programs."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import hypothesis  # noqa: F401  it looks for references when it is imported, before the freeze
import pytest

ROOT = Path(__file__).parent.parent


def pytest_collection_finish() -> None:
    """Takes what was imported and collected, a million objects, out of every later gc.collect()."""
    gc.collect()
    gc.freeze()


class ForkingPython:
    """Runs programs and commands, one process each, without importing torch again."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", ROOT / "tests" / "forking_python.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            text=True,
        )
        assert self._read() == "ready"

    def run_program(self, path: Path, folder: Path) -> subprocess.CompletedProcess[str]:
        """Runs a program in a folder, where warnings are errors."""
        return self._run([], str(path), folder)

    def run_command(
        self, arguments: Sequence[str], folder: Path
    ) -> subprocess.CompletedProcess[str]:
        """Runs ``fedquilt`` with these arguments in a folder."""
        return self._run(list(arguments), None, folder)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _run(
        self, arguments: list[str], program: str | None, folder: Path
    ) -> subprocess.CompletedProcess[str]:
        self._count += 1
        output = self._folder / str(self._count)
        request = {"arguments": arguments, "program": program}
        request |= {"folder": str(folder), "output": str(output)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        status = int(self._read())
        texts = [Path(f"{output}.{number}").read_text() for number in (1, 2)]
        return subprocess.CompletedProcess([program or "fedquilt", *arguments], status, *texts)

    def _read(self) -> str:
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="session")
def forking_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkingPython]:
    """A Python that has imported fedquilt, and forks for each program; as fast as it is cheap."""
    python = ForkingPython(tmp_path_factory.mktemp("programs"))
    yield python
    python.close()
