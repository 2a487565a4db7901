"""Processes: they end with all their descendants, and their last error can be read."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedquilt.deploy.process import ManagedProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open("pids", "a") as file:
    print(os.getpid(), file=file)
if len(sys.argv) > 1:
    child = [sys.executable, __file__, *sys.argv[2:]]
    subprocess.Popen(child, start_new_session=True)
    if sys.argv[1] == "leave":
        sys.exit()
time.sleep(600)
"""  # a process that starts another one in a session of its own, and may leave it alone


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def soon(is_so):
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


def start(folder, *words):
    """Starts a process; waits until its descendants run, or have left, as the words say."""
    folder.mkdir(exist_ok=True)
    script = folder / "stubborn.py"
    script.write_text(STUBBORN.replace('"pids"', repr(str(folder / "pids"))))
    process = ManagedProcess([sys.executable, script, *words], folder / "log", dict(os.environ))
    stay = [word != "leave" for word in (*words, "stay")]
    soon(lambda: [is_there(pid) for pid in pids(folder)] == stay)
    return process


def pids(folder):
    path = folder / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


@pytest.mark.parametrize("words", [["stay", "stay"], ["stay", "leave"], ["leave"]])
def test_everything_ends_whatever_it_ignores_and_whoever_its_parent_is(tmp_path, words):
    process = start(tmp_path, *words)
    there = {pid for pid in pids(tmp_path) if is_there(pid)}
    assert process.list_processes() == there
    process.send_signal()
    process.terminate(timeout=0.2)
    assert not [pid for pid in pids(tmp_path) if is_there(pid)]
    assert process.exit_code == (0 if words[0] == "leave" else -signal.SIGKILL)


def test_others_are_left_alone(tmp_path):
    first, second = start(tmp_path / "a", "stay"), start(tmp_path / "b", "stay")
    first.terminate(timeout=0)
    assert not [pid for pid in pids(tmp_path / "a") if is_there(pid)]
    assert all(is_there(pid) for pid in pids(tmp_path / "b"))
    second.terminate(timeout=0)


def test_a_process_dies_with_the_process_that_started_it(tmp_path):
    code = f"""
from fedquilt.deploy.process import ManagedProcess
from pathlib import Path
import os, time
log = Path({str(tmp_path / "log")!r})
print(ManagedProcess(["sleep", "600"], log, dict(os.environ)).pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        pid = int(parent.stdout.readline())
        assert is_there(pid)
        parent.kill()
    soon(lambda: not is_there(pid))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("a\nb\nc\nd\n", "b / c / d"),
        ("a\n\x1b[91mERROR \x1b[0m: no  such\nthing\nb\nc\n", "ERROR : no such / thing / b"),
        ("", "its log is empty"),
    ],
)
def test_the_last_error_is_found_or_the_end_of_this_log(tmp_path, said, words):
    (tmp_path / "log").write_text("ERROR of an earlier one\n")
    process = ManagedProcess(
        ["printf", said.replace("%", "%%")], tmp_path / "log", dict(os.environ)
    )
    process.terminate(timeout=30)
    assert process.last_error == words
