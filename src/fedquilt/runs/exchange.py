"""How the server gets from tasks to the next state: with every update in sight, or with sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fedquilt.engines.engine import Engine
from fedquilt.federation.aggregation import AggregationPipeline
from fedquilt.federation.client import Task
from fedquilt.federation.hostile import Attack
from fedquilt.federation.secure import SecureAggregation
from fedquilt.federation.state import Setup, State
from fedquilt.runs.accounting import RoundAccounting
from fedquilt.runs.attacks import intercept_updates, start_attack


@dataclass(frozen=True, eq=False)
class RoundPlan:
    """A round that is about to be run.

    Args:
        state: The state that clients are sent.
        tasks: What the method asks of them.
        pipeline: How replies become the next state.
        is_closing: Whether the round is of a closing phase.
        enough: After this number of updates the engine need not wait for others; None: for all.
    """

    state: State
    tasks: Sequence[Task]
    pipeline: AggregationPipeline
    is_closing: bool
    enough: int | None


class Exchange(Protocol):
    """Lets clients work, and merges what they send."""

    def run(self, engine: Engine, plan: RoundPlan, accounting: RoundAccounting) -> State:
        """Runs the tasks of a round.

        Args:
            engine: Runs tasks.
            plan: The round.
            accounting: Gets every reply, and what was sent.

        Returns:
            The state after the round; the number of the round is not its concern.
        """
        ...


@dataclass(frozen=True, eq=False)
class PlainExchange:
    """The server sees every update.

    Args:
        setup: What stays the same during the run.
        attack: What hostile clients do; None: all clients are honest.
    """

    setup: Setup
    attack: Attack | None = None

    def run(self, engine: Engine, plan: RoundPlan, accounting: RoundAccounting) -> State:
        """Merges valid updates as they come."""
        tasks, attack = plan.tasks, None
        if self.attack is not None:
            attack = start_attack(self.attack, self.setup, plan.state, plan.pipeline)
            tasks = attack.plan(tasks)
        results = engine.run(tasks, **({} if plan.enough is None else {"enough": plan.enough}))
        updates = accounting.filter_valid(tasks, results)
        if attack is not None:
            updates = intercept_updates(attack, updates, accounting)
        merged = plan.pipeline.merge_round(self.setup, plan.state, updates)
        accounting.merging = dict(merged.metrics)
        return merged.state


def make_exchange(
    setup: Setup, secure: SecureAggregation | None, attack: Attack | None = None
) -> Exchange:
    """The exchange of a run; None: the server sees every update, and all clients are honest."""
    if secure is None:
        return PlainExchange(setup, attack)
    from fedquilt.runs.secure import SecureExchange  # which needs an extra

    return SecureExchange(setup, secure)
