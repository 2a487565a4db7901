"""Every benchmark runs, in its smallest form; make test-docs does it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
HELPERS = {"record", "resident"}
SMALLEST = {
    "adds_step": "--repeats 1 --epochs 1 --batches 1",
    "bases": "--batches 1",
    "common_work": None,  # its nets and data are not in this repository
    "customize": "--switches 10 --repeat 1",
    "defaults": "--methods heterofl --out {out}",
    "depth": "--model resnet20 --steps 1",
    "engine": "--rounds 1 --widths 0.0625",
    "flower": "--rounds 1 --works tiny",
    "flower_memory": "--clients 4 --rounds 1",
    "hostile": "--limit 1 --rounds 1 --out {out}/lines.jsonl",
    "large_models": "--size 10",
    "many_clients": "--counts 60 --rounds 2 --repeats 1",
    "memory": "",
    "merge": "",
    "privacy": "--phase search --limit 1 --rounds 1 --data digits --out {out}/lines.jsonl",
    "robust": "--repeats 1",
    "same_bits": "--methods heterofl --rounds 1 --workers 0",
    "search": "--source digits --images 16 --warm 50",
    "secure_aggregation": "--clients 8 --cells 1000 --neighbors all --rings equal",
    "serve": "--seconds 0.2 --repeats 1",
    "server": "cohorts --sizes 2,4 --rounds 1 --sittings 1",
    "taken_away": "--rounds 1",
    "trace": "--net mlp",
}


@pytest.mark.docs
@pytest.mark.parametrize("name", [name for name, given in SMALLEST.items() if given is not None])
def test_a_benchmark_runs(name, tmp_path):
    given = SMALLEST[name].format(out=tmp_path).split()
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py", *given],
        cwd=FOLDER.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_each_benchmark_has_a_smallest_form():
    assert {path.stem for path in FOLDER.glob("*.py")} == HELPERS | SMALLEST.keys()
