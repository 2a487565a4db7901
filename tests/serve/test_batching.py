"""Requests that wait together are computed together, and none breaks another's answer."""

import asyncio
import threading

import pytest
import torch

from fedquilt.serve.batching import Batcher
from fedquilt.serve.errors import RequestError
from fedquilt.serve.limits import Limits


def row(value):
    return (torch.full((1, 2), float(value)),)


class Model:
    """Doubles its input, notes its batches, and waits where it is told to."""

    def __init__(self):
        self.batches = []
        self.may_go = threading.Event()
        self.has_begun = threading.Event()

    def __call__(self, inputs):
        self.batches.append(inputs[0][:, 0].tolist())
        self.has_begun.set()
        self.may_go.wait(20)
        if (inputs[0] < 0).any():
            raise IndexError("a token is out of range")
        return 2 * inputs[0]


def run_while_busy(work, limits=None, *, joins_requests=True):
    """Runs requests that arrive while the model is at work on a first one."""
    model, batcher = Model(), Batcher(limits or Limits(), joins_requests=joins_requests)

    async def story():
        first = asyncio.ensure_future(batcher.compute("a", model, row(0)))
        await asyncio.to_thread(model.has_begun.wait, 20)
        others = [asyncio.ensure_future(batcher.compute(k, model, row(v))) for k, v in work]
        await asyncio.sleep(0)  # all of them are in the queue now
        model.may_go.set()
        return await asyncio.gather(first, *others, return_exceptions=True)

    try:
        return model, asyncio.run(story())[1:]
    finally:
        batcher.close()


def test_requests_of_one_size_are_one_batch_and_each_gets_its_own_answer():
    model, results = run_while_busy([("a", 1), ("b", 2), ("a", 3), ("b", 4)])
    assert model.batches == [[0], [1, 3], [2, 4]]
    assert [r.outputs[0, 0].item() for r in results] == [2, 4, 6, 8]
    assert {r.batch_size for r in results} == {2}


def test_a_batch_has_at_most_its_limit():
    model, results = run_while_busy([("a", v) for v in range(1, 6)], Limits(batch=2))
    assert model.batches == [[0], [1, 2], [3, 4], [5]]
    assert [r.outputs[0, 0].item() for r in results] == [2, 4, 6, 8, 10]


def test_a_request_that_breaks_the_model_fails_alone():
    _, results = run_while_busy([("a", 1), ("a", -1), ("a", 3)])
    assert [results[0].outputs[0, 0].item(), results[2].outputs[0, 0].item()] == [2, 6]
    assert isinstance(results[1], RequestError)
    assert results[1].status == 422
    assert "out of range" not in str(results[1])  # what the model said stays in the log


def test_models_that_normalize_each_batch_by_itself_get_no_joined_requests():
    model, _ = run_while_busy([("a", 1), ("a", 2)], joins_requests=False)
    assert model.batches == [[0], [1], [2]]


def test_more_than_can_wait_is_turned_away_and_the_rest_is_answered():
    _, results = run_while_busy([("a", v) for v in (1, 2, 3)], Limits(waiting=2))
    assert [r.outputs[0, 0].item() for r in results[:2]] == [2, 4]
    assert results[2].status == 503


def test_a_model_that_takes_too_long_is_not_waited_for():
    model, batcher = Model(), Batcher(Limits(seconds=0.05))

    async def story():
        await batcher.compute("a", model, row(1))

    with pytest.raises(RequestError, match="busy"):
        asyncio.run(story())
    model.may_go.set()
    batcher.close()
    assert len(model.batches) == 1


def test_what_waits_at_the_end_is_turned_away():
    model, batcher = Model(), Batcher(Limits())

    async def story():
        jobs = [asyncio.ensure_future(batcher.compute("a", model, row(v))) for v in (1,)]
        await asyncio.to_thread(model.has_begun.wait, 20)
        jobs.append(asyncio.ensure_future(batcher.compute("b", model, row(2))))
        await asyncio.sleep(0)
        closing = asyncio.to_thread(batcher.close)
        model.may_go.set()
        await closing
        return await asyncio.gather(*jobs, return_exceptions=True)

    first, second = asyncio.run(story())
    assert first.outputs[0, 0].item() == 2
    assert isinstance(second, RequestError) or second.outputs[0, 0].item() == 4
