"""Whether a variant fits the model, the data and the budgets: what its method says itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedquilt.comparison.trial import Trial
from fedquilt.engines.scratch import ScratchDirectory
from fedquilt.errors import FedquiltError
from fedquilt.learning.metric import MetricInfo
from fedquilt.runs.plan import start_run


@dataclass(frozen=True)
class Fit:
    """What a method says of a run before it starts.

    Args:
        problem: Why it cannot be run; None: it can.
        exceeds_budgets: In which way clients train more than they can afford; None: they do not.
        metric: The metric of the task; None: the run cannot be made.
    """

    problem: str | None = None
    exceeds_budgets: str | None = None
    metric: MetricInfo | None = None


def check_fit(trial: Trial) -> Fit:
    """Asks the method: it prepares the model, and plans a first round with all clients."""
    try:
        with ScratchDirectory() as folder:
            run = start_run(trial.plan(folder / "run"))
        setup, method = run.setup, run.plan.method
        state = method.start(setup)
        first = next(phase for phase in method.phases(setup) if not phase.is_closing)
        eligible = first.eligible(setup.registry)
        list(method.plan(setup, replace(state, phase=first.name), eligible))
        method.sizes(setup)
        return Fit(
            exceeds_budgets=method.exceeds_budgets(setup),
            metric=setup.task.metric,
        )
    except FedquiltError as problem:
        return Fit(problem=" ".join(str(problem).split()))
