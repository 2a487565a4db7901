"""How many threads work: one where the bits must not depend on it, else as many as PyTorch uses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
MIN_PARALLEL_BYTES = 2**23  # below, starting threads takes longer than they save


@contextlib.contextmanager
def single_thread() -> Iterator[None]:
    """PyTorch with one thread, as clients train everywhere, so that the bits are the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Job(Generic[T]):
    """A function that does not depend on others, and the bytes that it works on."""

    size: int
    run: Callable[[], T]


def run_on_cores(jobs: Sequence[Job[T]]) -> list[T]:
    """Runs jobs side by side, the largest first, in as many threads as PyTorch uses now.

    Each job has one thread of PyTorch, so it gives the same bits as alone. PyTorch's own threads
    would share every single operation, and wait for each other after each.

    Returns:
        What the jobs return, in their order.
    """
    count = min(torch.get_num_threads(), len(jobs))
    with single_thread():
        if count < 2 or sum(job.size for job in jobs) < MIN_PARALLEL_BYTES:
            return [job.run() for job in jobs]
        order = sorted(range(len(jobs)), key=lambda i: -jobs[i].size)
        with ThreadPoolExecutor(count) as pool:
            running = {i: pool.submit(jobs[i].run) for i in order}
            return [running[i].result() for i in range(len(jobs))]
