"""Laws of robust rules, for every method that averages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import fedquilt as fq
from fedquilt.errors import ConfigError

REFUSED = {"centralised": "merges no updates", "standalone": "nothing is merged"}
RULES = (fq.Median(hostile=1), fq.GeometricMedian(hostile=1), fq.MultiKrum(hostile=1, mixing="nnm"))


def test_rules_take_the_place_of_the_mean_in_every_method(case, request):
    """No trimming is the mean over holders, equally weighted; other rules move no other cells."""
    name = request.node.callspec.params["case"]
    if name in REFUSED:
        with pytest.raises(ConfigError, match=f"{REFUSED[name]}; leave out aggregator"):
            replace(case.method, aggregator=RULES[0]).aggregation(case.setup, "train")
        return
    state = case.start()
    updates = case.updates(state)

    def merge(**parts):
        method = replace(case.method, **parts)
        return method.merge(case.setup, state, updates).params

    mean = merge(aggregator=fq.Mean(), transforms=(fq.EqualWeights(),))
    same = merge(aggregator=fq.TrimmedMean(hostile=0))
    assert mean.keys() == same.keys()
    for tensor in mean:
        np.testing.assert_allclose(
            same[tensor].detach().float().numpy(), mean[tensor].detach().float().numpy(), atol=2e-5
        )
    for rule in RULES:
        merged = merge(aggregator=rule)
        again = replace(case.method, aggregator=rule).merge(case.setup, state, updates[::-1]).params
        for tensor, value in merged.items():
            assert value.isfinite().all()
            assert value.equal(again[tensor]), tensor  # the order does not change a bit
