"""How many rounds a budget of bytes, MACs or simulated seconds allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fedquilt.comparison.results import TrialResult
from fedquilt.comparison.trial import Trial
from fedquilt.engines.scratch import ScratchDirectory
from fedquilt.errors import ConfigError
from fedquilt.federation.state import Setup
from fedquilt.formatting import format_si
from fedquilt.methods.method import Method
from fedquilt.runs.plan import start_run
from fedquilt.settings.compare import RESOURCES

MAX_ROUNDS = 1_000_000


def find_rounds(trial: Trial, pilot: TrialResult, limits: Mapping[str, float]) -> int:
    """The most rounds of a run that is expected to stay within all limits.

    Args:
        trial: The run, with any number of rounds.
        pilot: The result of one round with all clients: what a client spends in each phase.
        limits: What may be spent, by resource: ``bytes``, ``macs`` or ``seconds``.
    """
    with ScratchDirectory() as folder:
        run = start_run(trial.plan(folder / "run"))
    setup, method = run.setup, run.plan.method

    def is_within(rounds: int) -> bool:
        spent = _predict(replace(setup, rounds=rounds), method, pilot)
        return all(spent[name] <= limit for name, limit in limits.items())

    if not is_within(1):
        spent = _predict(replace(setup, rounds=1), method, pilot)
        name = next(name for name, limit in limits.items() if spent[name] > limit)
        raise ConfigError(
            f"one round of {trial.variant} takes {format_si(spent[name])} {name}, and the limit is "
            f"{format_si(limits[name])}; raise it"
        )
    low, high = 1, 2
    while high < MAX_ROUNDS and is_within(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_within(middle) else (low, middle)
    return low


def _predict(setup: Setup, method: Method, pilot: TrialResult) -> dict[str, float]:
    """What a run is expected to spend: sums over phases, each client as often as it is drawn."""
    known = {
        name: {r: getattr(p.spent, r) / p.rounds for r in RESOURCES}
        for name, p in pilot.phases.items()
    }
    costliest = {r: max(costs[r] for costs in known.values()) for r in RESOURCES}
    trained = sum(phase.spent.bytes for phase in pilot.phases.values())
    total = {"bytes": pilot.spent.bytes - trained, "macs": 0.0, "seconds": 0.0}  # closing phases
    for phase in method.phases(setup):
        if phase.is_closing:
            continue
        costs = known.get(phase.name, costliest)
        drawn = phase.count_needed(setup.registry) / max(len(setup.clients), 1)
        for resource, cost in costs.items():
            # the slowest client decides how long a round takes, whoever else is drawn
            total[resource] += phase.rounds * cost * (1.0 if resource == "seconds" else drawn)
    return total
