"""Runs that are killed, stopped and starved, on real processes."""

from __future__ import annotations

import random
import shutil
import signal
import time

import pytest

METHODS = ["heterofl", "standalone", "lg-fedavg", "stc", "splitmix"]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_run_killed_at_random_moments_ends_with_the_same_files(
    trainer, tree, kill, tmp_path, method
):
    started = time.monotonic()
    trainer.start(method, tmp_path / "whole")
    assert trainer.wait() == 0, trainer.errors.read_text()
    usual = time.monotonic() - started
    draw, out = random.Random(method), tmp_path / "cut"
    killed = 0
    for attempt in range(60):
        pid = trainer.start(method, out, resume=(out / "initial.safetensors").exists())
        if attempt < 12:
            time.sleep(draw.uniform(0, 0.5 * usual))
            kill(pid)
        code = trainer.wait()
        killed += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL), trainer.errors.read_text()
        if code == 0:
            assert tree(out) == tree(tmp_path / "whole")
            if killed >= 3:
                break
            shutil.rmtree(out)  # the machine was slower when the time was taken
            usual /= 2
    assert killed >= 3
    assert code == 0


@pytest.mark.slow
def test_ctrl_c_saves_the_last_round_and_resuming_ends_with_the_same_files(
    trainer, tree, kill, tmp_path
):
    trainer.start("standalone", tmp_path / "whole")
    assert trainer.wait() == 0, trainer.errors.read_text()
    out = tmp_path / "cut"
    pid = trainer.start("standalone", out)
    deadline = time.monotonic() + 60
    records = out / "metrics.jsonl"
    while time.monotonic() < deadline:  # until the third round is evaluated; its number is odd,
        if records.exists() and records.read_text().count("\n") > 3:  # so it is not saved anyway
            break
        time.sleep(0.002)
    kill(pid, signal.SIGINT)
    assert trainer.wait() == 4
    assert "KeyboardInterrupt" in trainer.errors.read_text()
    assert max((out / "checkpoints").iterdir()).name >= "round-000003"
    trainer.start("standalone", out, resume=True)
    assert trainer.wait() == 0, trainer.errors.read_text()
    assert tree(out) == tree(tmp_path / "whole")


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_good_checkpoint_and_says_so(trainer, tree, tmp_path):
    trainer.start("heterofl", tmp_path / "whole")
    assert trainer.wait() == 0, trainer.errors.read_text()
    out = tmp_path / "full"
    trainer.start("heterofl", out, limit=4000)  # from round 4 on, larger files cannot be written
    assert trainer.wait() == 3, trainer.errors.read_text()
    sentence = trainer.errors.read_text().splitlines()[-1]
    assert "the checkpoint of round 4 could not be written" in sentence
    assert "the last good one is round-000002; make room and resume" in sentence
    names = [p.name for p in (out / "checkpoints").iterdir()]
    assert names == ["round-000002"]
    trainer.start("heterofl", out, resume=True)
    assert trainer.wait() == 0, trainer.errors.read_text()
    assert tree(out) == tree(tmp_path / "whole")
