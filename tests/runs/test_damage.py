"""Files of a run that are damaged, and runs that two processes want to go on with."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fedquilt as fq
from fedquilt import files
from fedquilt.errors import CheckpointError, CorruptFileError
from fedquilt.federation.state import State
from fedquilt.files import MAX_WAIT
from fedquilt.report.records import (
    read_last_local_tests,
    read_local_tests,
    read_milestones,
    read_traffic,
)
from fedquilt.report.run_report import _read_evaluated
from fedquilt.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.event_lines import describe_event
from fedquilt.runs.events import CheckpointDamaged, RoundDone, WaitingForLock
from fedquilt.runs.records import Records, read_final_scores

STEPS = fq.LocalTraining(lr=0.05, epochs=1, batch_size=4)
METHOD = fq.lg_fedavg(STEPS, fraction=1.0)  # clients keep something


def flip(path: Path, place: int = -2, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def flip_digit(path: Path, name: str) -> None:
    """Changes the number behind a name by one bit."""
    data = path.read_bytes()
    place = re.search(rf'"{name}": (\d)'.encode(), data).start(1)
    flip(path, place)


@pytest.fixture(scope="module")
def half_done(tmp_path_factory):
    return tmp_path_factory.mktemp("half")


@pytest.fixture
def run(train, interrupting, half_done, tmp_path) -> Path:
    """A copy of a run that was stopped after round 5 of 7, with checkpoints of 4 and 5."""
    if not (half_done / "run").exists():
        train(half_done / "whole", rounds=7, method=METHOD)
        with pytest.raises(KeyboardInterrupt):
            train(
                half_done / "run", rounds=7, method=METHOD, callbacks=[interrupting(RoundDone, 6)]
            )
    return shutil.copytree(half_done / "run", tmp_path / "run")


def newest(run: Path) -> Path:
    return max((run / "checkpoints").iterdir())


def newest_kept(run: Path) -> Path:
    kept = json.loads((newest(run) / "state.json").read_text())["client_versions"]
    return run / "clients" / f"client-2.{kept['2']}.safetensors"


def last_record(run: Path) -> None:
    """The record of round 5, which the checkpoint of round 4 does not know of."""
    flip_digit_in_line(run / "metrics.jsonl", -1)


def flip_digit_in_line(path: Path, number: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    digit = re.search(rb'"loss":\d\.\d(\d)', lines[number]).start(1)
    line = bytearray(lines[number])
    line[digit] ^= 1
    lines[number] = bytes(line)
    path.write_bytes(b"".join(lines))


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "params": lambda run: flip(newest(run) / "params.safetensors"),
    "round": lambda run: flip_digit(newest(run) / "state.json", "round"),
    "phase": lambda run: flip(newest(run) / "state.json", 30),
    "empty": lambda run: empty(newest(run)),
    "empty file": lambda run: (newest(run) / "state.json").write_text(""),
    "kept": lambda run: flip(newest_kept(run)),
    "kept header": lambda run: flip(newest_kept(run), 40),
    "kept gone": lambda run: newest_kept(run).unlink(),
    "record": last_record,
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(
    train, tree, half_done, run, how
):
    DAMAGES[how](run)
    events = []
    train(run, rounds=7, method=METHOD, resume=True, callbacks=[events.append])
    damaged = [event for event in events if isinstance(event, CheckpointDamaged)]
    assert [event.round for event in damaged] == [4]
    said = describe_event(damaged[0], 7)
    assert "\n" not in said
    assert said.endswith("; resuming from the checkpoint of round 4")
    assert [e.round for e in events if isinstance(e, RoundDone)] == [5, 6, 7]
    assert tree(run) == tree(half_done / "whole")


def test_a_run_that_is_whole_says_nothing_of_damage(train, tree, half_done, run):
    events = []
    train(run, rounds=7, method=METHOD, resume=True, callbacks=[events.append])
    assert not [event for event in events if isinstance(event, CheckpointDamaged)]
    assert tree(run) == tree(half_done / "whole")


@pytest.mark.parametrize("what", ["params", "records", "initial"])
def test_a_run_without_a_sound_checkpoint_is_refused_in_a_sentence_and_left_alone(
    train, tree, run, what
):
    if what == "params":
        for path in run.glob("checkpoints/*/params.safetensors"):
            flip(path)
    elif what == "records":
        flip_digit_in_line(run / "metrics.jsonl", 0)
    else:
        flip(run / "initial.safetensors")
    before = tree(run)
    with pytest.raises(CheckpointError, match="is damaged") as problem:
        train(run, rounds=7, method=METHOD, resume=True)
    assert "\n" not in str(problem.value)
    assert tree(run) == before


def test_records_that_were_removed_are_not_missed(train, half_done, run):
    (run / "metrics.jsonl").unlink()
    train(run, rounds=7, method=METHOD, resume=True)
    lines = (half_done / "whole" / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert (run / "metrics.jsonl").read_text() == "".join(lines[-len(lines) + 7 :])


def test_no_bit_of_a_checkpoints_description_is_believed_when_it_is_another(tmp_path):
    state = State(3, "train", {"a": torch.arange(3.0)}, {"note": [1, 2]})
    path = save_checkpoint(tmp_path, Checkpoint(state, {4: 2}), "f")
    place = path / "state.json"
    whole, expected = place.read_bytes(), load_checkpoint(path, "f")
    for position in range(len(whole)):
        flip(place, position, bit=position % 7)
        with contextlib.suppress(CheckpointError):
            found = load_checkpoint(path, "f")
            assert (found.state.round, found.client_versions) == (
                expected.state.round,
                expected.client_versions,
            )
        place.write_bytes(whole)


def test_no_bit_of_what_clients_keep_is_believed_when_it_is_another(tmp_path):
    tensors = {"a": torch.randn(5), "b": torch.arange(3), "c": torch.empty(0, 2)}
    path = tmp_path / "client.safetensors"
    files.write_sealed(path, tensors)
    whole, found = path.read_bytes(), files.read_sealed(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(t, tensors[n]) for n, t in found.items())
    for position in range(len(whole)):
        if whole[position : position + 1] != b" ":  # in which the header is wrapped
            flip(path, position, bit=position % 7)
            with pytest.raises(CorruptFileError):
                files.read_sealed(path)
            path.write_bytes(whole)


# what a report reads


def finals(directory, round=1):
    return read_final_scores(directory, round)


@pytest.mark.parametrize(
    "read", [finals, read_local_tests, read_last_local_tests, read_milestones, read_traffic]
)
@pytest.mark.parametrize("line", ["[1, 2]", "7", '{"round": 1', '{"round": "x"}', "[" * 100_000])
def test_records_of_another_kind_are_refused_in_a_sentence(tmp_path, read, line):
    (tmp_path / "metrics.jsonl").write_text('{"round": 1, "scores": []}\n' + line + "\n")
    with pytest.raises(CorruptFileError, match="line 2 is not what was written"):
        read(RunDirectory(tmp_path))


@pytest.mark.parametrize(
    ("read", "record"),
    [
        (finals, {"round": 1, "scores": [{"size": 3}], "is_final": True}),
        (finals, {"round": 1, "scores": 3, "is_final": True}),
        (read_milestones, {"round": 1}),
        (read_local_tests, {"round": 1, "local": [3]}),
        (read_traffic, {"round": 1, "phase": "x"}),
    ],
)
def test_records_of_another_shape_are_refused_in_a_sentence(tmp_path, read, record):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(CorruptFileError, match="not of the shape"):
        read(RunDirectory(tmp_path))


def test_a_number_that_was_changed_in_a_finished_runs_records_is_noticed(half_done, run):
    folder = run.with_name("finished")
    shutil.copytree(half_done / "whole", folder)
    assert finals(RunDirectory(folder), 7)
    flip_digit_in_line(folder / "metrics.jsonl", 3)
    for read in (finals, read_local_tests, read_milestones):
        with pytest.raises(CorruptFileError, match="line 4 is not what was written"):
            read(RunDirectory(folder))


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"sizes": 3}', '{"sizes": [{"width": 1}]}', '{"version": 1, "sizes": []}']
)
def test_an_evaluation_of_another_shape_is_refused_in_a_sentence(tmp_path, text):
    (tmp_path / "evaluation.json").write_text(text)
    with pytest.raises(CorruptFileError, match=r"evaluation\.json is damaged"):
        _read_evaluated(RunDirectory(tmp_path))


# records of a run that was stopped


@pytest.mark.parametrize("number", range(1, 12))
def test_a_run_stopped_right_behind_a_record_ends_with_the_same_files(
    train, tree, half_done, run, tmp_path, monkeypatch, number
):
    """Records of rounds and evaluations are written before what they are about is saved."""
    add, out, left = Records.add, tmp_path / "stopped", [number]

    def stop(self, *record):
        add(self, *record)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Records, "add", stop)
        with contextlib.suppress(KeyboardInterrupt):
            train(out, rounds=7, method=METHOD)
    train(out, rounds=7, method=METHOD, resume=True)
    assert tree(out) == tree(half_done / "whole")


# one writer


def test_a_run_that_somebody_is_at_work_on_is_refused(train, tree, run, monkeypatch):
    monkeypatch.setattr(files, "MAX_WAIT", 0.0)
    before = tree(run)
    events = []
    with (
        RunDirectory(run).hold(resume=True, on_wait=pytest.fail),
        pytest.raises(CheckpointError, match="another process is training in"),
    ):
        train(run, rounds=7, method=METHOD, resume=True, callbacks=[events.append])
    assert events == [WaitingForLock(run, MAX_WAIT)]  # it does not wait in silence
    assert tree(run) == before
    train(run, rounds=7, method=METHOD, resume=True)


def test_of_two_runs_that_start_in_one_folder_one_is_refused(train, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_WAIT", 0.0)
    refused = []

    def watch(event):
        if isinstance(event, RoundDone) and not refused:
            with pytest.raises(
                CheckpointError, match=r"another process is training in|already holds"
            ):
                train(tmp_path / "run")
            refused.append(event)

    train(tmp_path / "run", callbacks=[watch])
    assert refused


def test_what_killed_runs_left_is_removed(train, run):
    parts = [run / ".config.toml.part", run / "clients" / ".client-1.9.safetensors.part"]
    parts.append(run / "checkpoints" / ".round-000006.part" / "x")
    for part in parts:
        part.parent.mkdir(exist_ok=True)
        part.write_text("half")
    train(run, rounds=7, method=METHOD, resume=True)
    assert not [path for path in run.rglob(".*")]


def test_kept_files_and_records_are_on_the_disk_before_the_checkpoint_that_names_them(
    train, tmp_path, monkeypatch
):
    synced, saved = [], []
    real_sync, real_save = files.fsync, save_checkpoint

    def sync(path):
        synced.append(path)
        real_sync(path)

    def note(folder, done, fingerprint):
        named = [f"client-{c}.{v}.safetensors" for c, v in done.client_versions.items()]
        assert {*named, "metrics.jsonl", "timing.jsonl"} <= {path.name for path in synced}
        saved.append(done)
        return real_save(folder, done, fingerprint)

    for module in ("fedquilt.files", "fedquilt.engines.client_state", "fedquilt.runs.records"):
        monkeypatch.setattr(f"{module}.fsync", sync)
    monkeypatch.setattr("fedquilt.runs.checkpoint.save_checkpoint", note)
    train(tmp_path / "run", method=METHOD)
    assert len(saved) == 3
