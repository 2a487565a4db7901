"""Real SuperLinks and SuperNodes: who is let in, what a run gives, and that nothing stays behind.

Processes take seconds to start, so each test is a whole story.
"""

import io
import signal
import socket
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fedquilt.cli import main
from fedquilt.deploy.certificates import ensure_node_key
from fedquilt.deploy.federation import Federation
from fedquilt.deploy.flower_cli import find_executable, make_environment
from fedquilt.deploy.process import ManagedProcess
from fedquilt.errors import FederationError

LONG = 900  # seconds: every message to a client is a process, and machines may be busy
SHORT_RUN = [
    *("train", "--method", "fedavg", "--clients", "2", "--rounds", "1"),
    *("--set", "model.width=0.25", "--set", "local_training.epochs=1"),
]


def fedquilt(*arguments):
    """The exit code of a command, and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ending:
        main([str(a) for a in arguments])
    return ending.value.code or 0, out.getvalue(), err.getvalue()


def trained_tensors(folder):
    files = sorted((folder / "model").glob("**/*.safetensors"))
    assert files
    return {(f.name, name): tensor for f in files for name, tensor in load_file(f).items()}


def assert_same_bits(one, other):
    ours, theirs = trained_tensors(one), trained_tensors(other)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


def is_there(pid):
    """Whether a process runs; one that nobody has collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def free_port():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def strangers(federation, folder):
    """Nodes that nobody registered: one with a key of its own, and one without."""
    authority = federation.folder / "certificates" / "ca.crt"
    key = ensure_node_key(folder, "stranger").private
    common = [find_executable("flower-supernode"), "--superlink", federation.address]
    common += ["--root-certificates", authority, "--node-config", "partition-id=0"]
    for name, more in {"with": ["--auth-supernode-private-key", key], "without": []}.items():
        log = folder / f"{name}-a-key.log"
        yield ManagedProcess(
            [*common, *more, "--port", str(free_port())], log, make_environment(folder)
        )


@pytest.mark.slow
@pytest.mark.timeout(LONG)
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_federation_lets_its_own_nodes_in_trains_like_one_machine_and_leaves_nothing(tmp_path):
    nodes = [{"partition-id": i} for i in range(2)]
    with Federation(tmp_path / "federation", nodes) as federation:
        intruders = list(strangers(federation, tmp_path))
        federation.wait(LONG)
        assert [node.is_online for node in federation.status()] == [True] * 2

        run = fedquilt(*SHORT_RUN, "--federation", federation.folder, "--out", tmp_path / "a")
        assert run[0] == 0, run
        assert "round 1/1" in run[1]
        assert "accuracy" in run[1]
        here = fedquilt(*SHORT_RUN, "--workers", "0", "--out", tmp_path / "b")
        assert here[0] == 0, here
        assert_same_bits(tmp_path / "a", tmp_path / "b")

        for intruder in intruders:
            intruder.terminate(LONG)
            assert intruder.exit_code != 0
            assert "SuperNode ID" not in intruder.log_text

        federation.stop_node(1, signal.SIGKILL)
        assert [node.is_running for node in federation.status()] == [True, False]
        with pytest.raises(FederationError, match="node 1 ended with exit code -9"):
            federation.wait(1)
        family = federation.list_processes()
        assert len(family) >= 2 * 2  # the SuperLink, a node, and a child of each
    assert not [pid for pid in family if is_there(pid)]
    refused = fedquilt(*SHORT_RUN, "--federation", tmp_path / "federation")
    assert refused[0] == 2
    assert "fedquilt up --out" in refused[2]


@pytest.mark.federation
@pytest.mark.slow
@pytest.mark.timeout(LONG)
def test_simulated_nodes_train_like_one_machine(tmp_path):
    run = fedquilt(*SHORT_RUN, "--engine", "flower-simulation", "--out", tmp_path / "a")
    assert run[0] == 0, run
    here = fedquilt(*SHORT_RUN, "--workers", "0", "--out", tmp_path / "b")
    assert here[0] == 0, here
    assert_same_bits(tmp_path / "a", tmp_path / "b")
