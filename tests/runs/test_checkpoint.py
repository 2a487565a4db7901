"""Checkpoints that are damaged, foreign or of another run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedquilt as fq
from fedquilt.errors import CheckpointError
from fedquilt.federation.state import State
from fedquilt.files import write_document
from fedquilt.runs.checkpoint import Checkpoint, list_checkpoints, load_checkpoint, save_checkpoint
from fedquilt.runs.events import RoundDone
from fedquilt.runs.identity import compute_fingerprint


def checkpoint(round: int = 3) -> Checkpoint:
    params = {"a": torch.arange(3.0), "a@0.5": torch.tensor([0.1, -0.0]), "n": torch.tensor(7)}
    return Checkpoint(State(round, "train", params, {"note": [1, 2]}), {4: 2, 11: 1})


def test_what_is_saved_is_what_is_loaded(tmp_path):
    path = save_checkpoint(tmp_path, checkpoint(), "f")
    found = load_checkpoint(path, "f")
    assert (found.state.round, found.state.phase, found.state.method_state) == (
        3, "train", {"note": [1, 2]},
    )  # fmt: skip
    assert found.client_versions == {4: 2, 11: 1}
    for name, tensor in checkpoint().state.params.items():
        assert found.state.params[name].numpy().tobytes() == tensor.numpy().tobytes()


def test_what_the_server_keeps_for_itself_is_saved_apart_and_checked(tmp_path):
    plain = checkpoint()
    state = replace(plain.state, server_tensors={"a": torch.tensor([0.5, -0.0, 2.0])})
    path = save_checkpoint(tmp_path, replace(plain, state=state), "f")
    found = load_checkpoint(path, "f").state
    assert (
        found.server_tensors["a"].numpy().tobytes() == state.server_tensors["a"].numpy().tobytes()
    )
    assert set(found.params) == set(plain.state.params)
    damaged = bytearray((path / "server.safetensors").read_bytes())
    damaged[-1] ^= 1
    (path / "server.safetensors").write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"server\.safetensors is damaged"):
        load_checkpoint(path, "f")
    assert load_checkpoint(save_checkpoint(tmp_path, checkpoint(9), "f")).state.server_tensors == {}


def test_the_last_two_stay(tmp_path):
    for round in (2, 10, 9, 100):
        save_checkpoint(tmp_path, checkpoint(round), "f")
    assert [p.name for p in list_checkpoints(tmp_path)] == ["round-000010", "round-000100"]


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("round", [3, 5])  # one that is there already, and a new one
def test_killed_while_old_ones_are_removed_no_half_one_is_left(tmp_path, monkeypatch, round):
    for earlier in (1, 2, 3):
        save_checkpoint(tmp_path, checkpoint(earlier), "f")
    remove = shutil.rmtree

    def die(path: Path, **options: object) -> None:
        if (Path(path) / "state.json").exists():
            (Path(path) / "state.json").unlink()
            raise Killed
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", die)
    with pytest.raises(Killed):
        save_checkpoint(tmp_path, checkpoint(round), "f")
    monkeypatch.undo()
    assert list_checkpoints(tmp_path)
    for path in list_checkpoints(tmp_path):
        load_checkpoint(path, "f")  # each is whole
    save_checkpoint(tmp_path, checkpoint(6), "f")
    assert not list(tmp_path.glob(".*"))  # and what was left is gone with the next one


def test_a_tensor_that_is_part_of_another_is_saved_alone(tmp_path):
    whole = torch.arange(6.0).view(2, 3)
    state = State(1, "train", {"row": whole[1], "turned": whole.T})
    found = load_checkpoint(save_checkpoint(tmp_path, Checkpoint(state, {}), "f")).state.params
    assert found["row"].tolist() == [3, 4, 5]
    assert found["turned"].tolist() == whole.T.tolist()


def flip(path: Path) -> None:
    data = bytearray((path / "params.safetensors").read_bytes())
    data[-2] ^= 1
    (path / "params.safetensors").write_bytes(data)


def rewrite(*, is_sealed: bool = True, **changes: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        about = json.loads((path / "state.json").read_text())
        del about["digest"]
        kept = {k: v for k, v in {**about, **changes}.items() if v is not None}
        if is_sealed:
            write_document(path / "state.json", kept)
        else:
            (path / "state.json").write_text(json.dumps(kept))

    return change


DAMAGES = {
    "one bit": (flip, "is damaged"),
    "cut off": (lambda p: (p / "params.safetensors").write_bytes(b"\x08"), "is damaged"),
    "no params": (lambda p: (p / "params.safetensors").unlink(), "cannot be read"),
    "no json": (lambda p: (p / "state.json").unlink(), "cannot be read"),
    "half a json": (lambda p: (p / "state.json").write_text('{"format": "fed'), "be read"),
    "not text": (lambda p: (p / "state.json").write_bytes(b"\xff\xfe\x00"), "cannot be read"),
    "deep": (lambda p: (p / "state.json").write_text("[" * 100_000), "cannot be read"),
    "a list": (lambda p: (p / "state.json").write_text("[1]"), "holds no JSON object"),
    "another round": (rewrite(is_sealed=False, round=2), "is damaged"),
    "foreign": (rewrite(format="other"), "not a checkpoint of fedquilt"),
    "newer": (rewrite(version=4), "has version 4, this fedquilt reads version 3"),
    "older": (rewrite(version=2), "has version 2, this fedquilt reads version 3"),
    "incomplete": (rewrite(method_state=None), "of another shape"),
    "another shape": (rewrite(client_versions=[1]), "of another shape"),
    "another run": (rewrite(fingerprint="x"), "belongs to another run"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_bad_checkpoint_is_refused_in_one_sentence(tmp_path, how):
    damage, said = DAMAGES[how]
    path = save_checkpoint(tmp_path, checkpoint(), "f")
    damage(path)
    with pytest.raises(CheckpointError, match=said) as problem:
        load_checkpoint(path, "f")
    assert str(path) in str(problem.value)
    assert "\n" not in str(problem.value)


def test_a_failure_to_save_leaves_the_earlier_ones(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, checkpoint(2), "f")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedquilt.files.fsync", full)
    with pytest.raises(CheckpointError, match=r"No space left.*last good one is round-000002"):
        save_checkpoint(tmp_path, checkpoint(4), "f")
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["round-000002"]
    assert load_checkpoint(tmp_path / "round-000002", "f").state.round == 2


@pytest.fixture
def half_done(train, interrupting, tmp_path) -> Path:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", callbacks=[interrupting(RoundDone, 5)])
    return tmp_path / "run"


def test_only_the_same_run_is_resumed(train, half_done, tree, people, traced):
    before = tree(half_done)
    net, _ = traced
    clients = tuple(replace(c, budget=fq.Budget(0.25)) for c in people.clients)
    others = {
        "seed": {"seed": 3},
        "method": {"method": fq.FedAvg()},
        "setting": {"method": fq.HeteroFL(fq.LocalTraining(lr=0.1, epochs=1, batch_size=4), 0.5)},
        "clients": {"clients": fq.Population(clients, people.train, people.test)},
        "cuts": {"structure": fq.trace_structure(net, torch.zeros(2, 5), exclude=("classifier",))},
    }
    for what, changes in others.items():
        with pytest.raises(CheckpointError, match="belongs to another run"):
            train(half_done, resume=True, **changes)
        assert tree(half_done) == before, what
    wider = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.ReLU(), torch.nn.Linear(9, 3))
    with pytest.raises(CheckpointError, match="started with another model"):
        train(half_done, resume=True, model=wider, structure=None)
    assert tree(half_done) == before


def test_an_older_damaged_checkpoint_does_not_stand_in_the_way(train, half_done, tree, tmp_path):
    train(tmp_path / "whole")
    flip(min((half_done / "checkpoints").iterdir()))
    train(half_done, resume=True)
    assert (
        tree(half_done)["model/params.safetensors"]
        == tree(tmp_path / "whole")["model/params.safetensors"]
    )


def test_fingerprints_know_model_method_clients_and_seed(train):
    run = train(rounds=1)
    same = compute_fingerprint(run.setup, run.method)
    assert (
        compute_fingerprint(replace(run.setup, rounds=9), run.method) == same
    )  # may go on for longer
    assert compute_fingerprint(replace(run.setup, seed=9), run.method) != same


def test_a_finished_run_can_go_on_for_longer(train, tree, tmp_path):
    train(tmp_path / "long", rounds=6)
    train(tmp_path / "short", rounds=4)
    shutil.copytree(tmp_path / "short", tmp_path / "again")
    train(tmp_path / "short", rounds=6, resume=True)
    assert tree(tmp_path / "short") == tree(tmp_path / "long")
    train(tmp_path / "again", rounds=4, resume=True)  # and resuming a finished one is harmless
