"""A law of health: runs in which nothing is wrong raise no alarm, whatever their method."""

from __future__ import annotations

from dataclasses import replace

from fedquilt.runs.events import Evaluated, ProblemFound
from fedquilt.runs.health import FEWEST_ROUNDS
from fedquilt.runs.policies import Cadence

from .conftest import OPTIMISER

LONGER = replace(OPTIMISER, lr=0.1, epochs=2)  # so that there is something to learn


def test_a_healthy_run_raises_no_alarm(case):
    setup = replace(case.setup, rounds=FEWEST_ROUNDS)
    method = replace(case.method, local_training=LONGER)
    longer = replace(case, setup=setup, method=method)
    with longer.engine() as engine:
        _, _, events = longer.run(engine, cadence=Cadence(evaluate_every=0))
    (final,) = (event for event in events if isinstance(event, Evaluated))
    assert [finding for finding in final.findings if finding.is_severe] == []
    said = [event.finding for event in events if isinstance(event, ProblemFound)]
    assert not any(finding.is_severe for finding in said)
