"""Jobs side by side: what they return, what they raise, and how many threads each has."""

from __future__ import annotations

import threading

import pytest
import torch

from fedquilt.federation import threads
from fedquilt.federation.threads import Job, run_on_cores


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setattr(threads, "MIN_PARALLEL_BYTES", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_come_in_the_order_of_the_jobs_and_each_has_one_thread(two_threads):
    def work(number: int) -> tuple[int, int, str]:
        return number, torch.get_num_threads(), threading.current_thread().name

    found = run_on_cores([Job(10 - n % 3, lambda n=n: work(n)) for n in range(6)])
    assert [number for number, _, _ in found] == list(range(6))
    assert {count for _, count, _ in found} == {1}
    assert threading.main_thread().name not in {name for _, _, name in found}
    assert torch.get_num_threads() == 2


def test_two_jobs_run_at_the_same_time(two_threads):
    both = threading.Barrier(2)
    run_on_cores([Job(1, lambda: both.wait(timeout=60)) for _ in range(2)])  # alone each would wait


def test_the_first_problem_is_raised_and_the_threads_are_as_before(two_threads):
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_on_cores([Job(1, lambda: None), Job(1, fail)])
    assert torch.get_num_threads() == 2


def test_little_work_stays_in_this_thread():
    names = run_on_cores([Job(1, lambda: threading.current_thread().name) for _ in range(2)])
    assert set(names) == {threading.current_thread().name}
