"""The one training loop against the loop written out, and the one evaluation loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedquilt.training.loop import iterate_batches, run_batches, run_epochs, split_evenly
from fedquilt.training.settings import LoopSettings


class Noisy:
    """Data that are drawn: inputs are the rows and some noise from the generator."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def batch(self, rows, generator=None):
        noise = torch.zeros(()) if generator is None else torch.rand((), generator=generator)
        return rows + noise, rows % 3


def run(count, settings, seed=4, **more):
    """What the loop hands to a step that draws from both generators, and what it returns."""
    seen, reports = [], []

    def step(batch, generator):
        seen.append((*batch, torch.rand(2, generator=generator), torch.rand(2)))
        return batch[0].mean()

    loss = run_epochs(Noisy(count), step, settings, seed, reports.append, **more)
    return seen, reports, loss


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 3), st.integers(0, 5))
def test_batches_and_draws_are_those_of_the_loop_written_out(count, size, epochs, seed):
    seen, reports, loss = run(count, LoopSettings(epochs, size), seed)
    torch.default_generator.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    data, expected, expected_reports = Noisy(count), [], []
    for epoch in range(epochs):
        total, done = torch.zeros(()), 0
        for rows in torch.randperm(count, generator=generator).split(size):
            if len(rows) == 1 and count > 1 and size > 1:
                continue
            x, y = data.batch(rows, generator)
            expected.append((x, y, torch.rand(2, generator=generator), torch.rand(2)))
            total += x.mean() * len(rows)
            done += len(rows)
            expected_reports.append((epoch + done / count) / epochs)
        mean = float(total / done)
    assert len(seen) == len(expected)
    for ours, theirs in zip(seen, expected, strict=True):
        assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))
    assert (reports, loss) == (expected_reports, mean)


def test_some_rows_are_trained_on_and_hooks_come_before_what_they_are_named_after():
    rows, calls = torch.tensor([2, 3, 5, 7, 11]), []

    def before_batch(generator):
        calls.append("batch")
        torch.rand(3, generator=generator)  # a second stream

    settings = LoopSettings(epochs=2, batch_size=2)
    more = {"before_epoch": lambda: calls.append("epoch"), "before_batch": before_batch}
    seen, reports, _ = run(20, settings, rows=rows, **more)
    assert calls == ["epoch", "batch", "batch"] * 2  # a last row alone is left out
    generator = torch.Generator().manual_seed(4)
    order = torch.randperm(5, generator=generator)
    torch.rand(3, generator=generator)
    assert seen[0][0].equal(rows[order[:2]] + torch.rand((), generator=generator))
    assert reports == pytest.approx([0.2, 0.4, 0.7, 0.9])


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 9))
def test_batches_cover_everything_once_but_a_single_leftover(count, size, seed):
    generator = torch.Generator().manual_seed(seed)
    batches = list(iterate_batches(count, size, generator))
    rows = torch.cat(batches).tolist()
    single_left = size > 1 and count > 1 and count % size == 1
    assert len(set(rows)) == len(rows) == count - single_left
    assert all(len(b) == size for b in batches[:-1])
    again = list(iterate_batches(count, size, torch.Generator().manual_seed(seed)))
    assert all(a.equal(b) for a, b in zip(batches, again, strict=True))


def test_another_epoch_brings_other_batches():
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.cat(list(iterate_batches(50, 7, generator))) for _ in range(2))
    assert not one.equal(other)


def test_evaluation_sees_examples_as_they_are_and_without_gradients():
    weight, seen = torch.ones((), requires_grad=True), []
    run_batches(
        Noisy(7),
        split_evenly(torch.arange(7), 3),
        lambda batch: seen.append((batch[0], (batch[0] * weight).requires_grad)),
    )
    assert [rows.tolist() for rows, _ in seen] == [[0, 1, 2], [3, 4], [5, 6]]
    assert not any(has_gradient for _, has_gradient in seen)


@given(st.integers(0, 60), st.integers(1, 12))
def test_rows_are_split_in_order_into_as_few_batches_as_possible(count, size):
    parts = split_evenly(torch.arange(count), size)
    assert torch.cat(parts).tolist() == list(range(count))
    assert len(parts) == max(1, -(-count // size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
