"""Runs know where they were computed, and say so when they go on elsewhere."""

from __future__ import annotations

import json

import pytest
import torch

import fedquilt as fq
from fedquilt.runs import loop
from fedquilt.runs.environment import describe_environment_change, read_environment
from fedquilt.runs.events import EnvironmentChanged, RoundDone

ELSEWHERE = {"fedquilt": fq.__version__, "torch": "9.9", "processor": "abacus"}


def test_an_origin_tells_processors_apart_whose_names_are_the_same(tmp_path):
    info = tmp_path / "cpuinfo"
    kinds = []
    for number in (1, 17):
        first = f"processor\t: 0\ncpu family\t: 25\nmodel\t\t: {number}\nmodel name\t: Brain: II\n"
        info.write_text(f"{first}\n{first.replace('Brain', 'Another')}")
        kinds.append(read_environment(info))
    assert kinds[0]["processor"].endswith("Brain: II, family 25, model 1")
    told = describe_environment_change(*kinds)
    assert told.startswith(f"processor {kinds[0]['processor']} -> ")
    assert told.endswith("model 17")
    assert describe_environment_change(kinds[0], dict(kinds[0])) == ""


def test_an_origin_knows_the_instructions_that_are_used(tmp_path):
    found = read_environment(tmp_path / "nowhere")
    assert torch.backends.cpu.get_cpu_capability() in found["processor"]
    assert (found["torch"], found["fedquilt"]) == (torch.__version__, fq.__version__)
    assert json.loads(json.dumps(found)) == found


def origins(path):
    return json.loads(path.read_text())["environments"]


def test_a_run_that_moved_says_so_once_and_remembers_both(
    train, interrupting, tree, tmp_path, monkeypatch
):
    here, out, seen = dict(read_environment()), tmp_path / "cut", []
    train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(out, callbacks=[interrupting(RoundDone, 3)])
    stop = interrupting(RoundDone, 2)
    with monkeypatch.context() as patched:
        patched.setattr(loop, "read_environment", lambda **_: ELSEWHERE)
        with pytest.raises(KeyboardInterrupt):
            train(out, resume=True, callbacks=[lambda event: (seen.append(event), stop(event))])
    moved = [event for event in seen if isinstance(event, EnvironmentChanged)]
    assert moved == [EnvironmentChanged(2, describe_environment_change(here, ELSEWHERE))]
    assert "torch" in moved[0].change
    assert "fedquilt" not in moved[0].change
    newest = max((out / "checkpoints").iterdir()) / "state.json"
    assert origins(newest) == [here, ELSEWHERE]
    run = train(out, resume=True)
    assert list(run.info.environments) == origins(out / "model" / "bundle.json")
    assert list(run.info.environments) == [here, ELSEWHERE, here]
    params = "model/params.safetensors"
    assert tree(out)[params] == tree(tmp_path / "whole")[params]


def test_a_run_that_stayed_has_nothing_to_say(train, interrupting, tmp_path):
    seen = []
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, callbacks=[interrupting(RoundDone, 3)])
    run = train(tmp_path, resume=True, callbacks=[seen.append])
    assert not [event for event in seen if isinstance(event, EnvironmentChanged)]
    assert list(run.info.environments) == [read_environment()]
