"""Factors of the learning rate, against their closed forms and PyTorch's schedulers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedquilt.errors import ConfigError, TrainingError
from fedquilt.training.schedules import Schedule, read_parts
from fedquilt.training.settings import LocalTraining


def factors(*parts: object, total: int) -> list[float]:
    schedule = Schedule(read_parts(parts), "round")
    return [schedule.factor_at(position, total) for position in range(total)]


def by_torch(scheduler: torch.optim.lr_scheduler.LRScheduler, count: int) -> list[float]:
    rates = []
    for _ in range(count):
        rates.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


def test_each_schedule_is_that_of_pytorch():
    kinds = torch.optim.lr_scheduler
    expected = {
        "cosine": kinds.CosineAnnealingLR(sgd(), 7),
        "cosine:0.2": kinds.CosineAnnealingLR(sgd(), 7, eta_min=0.2),
        "linear:0.3": kinds.LinearLR(sgd(), 1.0, 0.3, 7),
        "milestones:2,5:0.5": kinds.MultiStepLR(sgd(), [2, 5], 0.5),
        "decay:0.9": kinds.ExponentialLR(sgd(), 0.9),
        "warmup:3": kinds.LinearLR(sgd(), 1 / 4, 1.0, 3),
        "constant": kinds.ConstantLR(sgd(), 1.0),
    }
    for part, scheduler in expected.items():
        assert factors(part, total=7) == pytest.approx(by_torch(scheduler, 7)), part


@given(st.integers(1, 20), st.integers(1, 40))
def test_a_warm_up_and_then_a_cosine_follow_their_closed_forms(length, rest):
    found = factors(f"warmup:{length}", "cosine", total=length + rest)
    rise = [(i + 1) / (length + 1) for i in range(length)]
    fall = [(1 + math.cos(math.pi * i / rest)) / 2 for i in range(rest)]
    assert found == pytest.approx(rise + fall)


def test_parts_follow_each_other_and_a_schedule_that_ends_stays_at_1():
    assert factors("warmup:1", "constant:2", "decay:0.5", total=6) == [0.5, 1, 1, 1, 0.5, 0.25]
    assert factors("warmup:2", total=4) == pytest.approx([1 / 3, 2 / 3, 1, 1])


def test_the_short_settings_mean_the_same_as_a_schedule():
    pairs = [
        (LocalTraining(lr=0.2, cosine=True), LocalTraining(lr=0.2, schedule="cosine")),
        (
            LocalTraining(milestones=(2, 3), milestone_decay=0.5),
            LocalTraining(schedule="milestones:2,3:0.5"),
        ),
        (LocalTraining(round_decay=0.9), LocalTraining(schedule=["decay:0.9"])),
    ]
    for short, long in pairs:
        rates = [[one.lr_at(round, 5) for round in range(5)] for one in (short, long)]
        assert rates[0] == pytest.approx(rates[1])


def sawtooth(position: int, total: int) -> float:
    return position / total


def minus(position: int, total: int) -> float:
    return -1.0


def test_a_function_is_a_schedule_by_itself_or_by_its_path(tmp_path):
    (tmp_path / "mine.py").write_text("def sawtooth(i, n):\n    return i / n\n")
    by_path = factors("constant:2", f"{tmp_path}/mine.py:sawtooth", total=6)
    assert by_path == factors("constant:2", sawtooth, total=6) == [1, 1, 0, 0.25, 0.5, 0.75]


def test_a_factor_below_0_is_refused_while_it_trains():
    with pytest.raises(TrainingError, match=r"factors of 0 or more, got -1.0 .* round 0 of 3"):
        factors(minus, total=3)


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        ("cos", "schedule 'cos' is not known .*did you mean 'cosine'"),
        ("warmup", "warmup:LENGTH, got 'warmup'"),
        ("warmup:0", "warmup:LENGTH, got 'warmup:0'"),
        ("decay:-1", "decay:FACTOR"),
        ("milestones:a", "milestones:POSITION"),
        (("cosine", "warmup:2"), "only the last part"),
        (lambda i, n: 1.0, "top of a module"),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused_in_one_sentence(schedule, reason):
    for name in ("schedule", "step_schedule"):
        with pytest.raises(ConfigError, match=reason) as refusal:
            LocalTraining(**{name: schedule})
        assert "\n" not in str(refusal.value)


def test_a_schedule_replaces_the_short_settings_and_needs_to_know_where_it_ends():
    with pytest.raises(ConfigError, match="got both"):
        LocalTraining(schedule="cosine", round_decay=0.9)
    with pytest.raises(ConfigError, match="number of rounds"):
        LocalTraining(schedule="cosine").lr_at(3)
    assert LocalTraining(schedule="decay:0.5", lr=1.0).lr_at(3) == 0.125
