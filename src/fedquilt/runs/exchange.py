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


class Exchange(Protocol):
    """Lets clients work, and merges what they send."""

    def run(
        self,
        engine: Engine,
        state: State,
        tasks: Sequence[Task],
        pipeline: AggregationPipeline,
        accounting: RoundAccounting,
        *,
        is_closing: bool,
        enough: int | None,
    ) -> State:
        """Runs the tasks of a round.

        Args:
            engine: Runs tasks.
            state: The state that clients are sent.
            tasks: What the method asks of them.
            pipeline: How replies become the next state.
            accounting: Gets every reply, and what was sent.
            is_closing: Whether the round is of a closing phase.
            enough: After this number of updates the engine need not wait for others.

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

    def run(
        self,
        engine: Engine,
        state: State,
        tasks: Sequence[Task],
        pipeline: AggregationPipeline,
        accounting: RoundAccounting,
        *,
        is_closing: bool,
        enough: int | None,
    ) -> State:
        """Merges valid updates as they come."""
        attack = None
        if self.attack is not None:
            attack = start_attack(self.attack, self.setup, state, pipeline)
            tasks = attack.plan(tasks)
        results = engine.run(tasks, **({} if enough is None else {"enough": enough}))
        updates = accounting.filter_valid(tasks, results)
        if attack is not None:
            updates = intercept_updates(attack, updates, accounting)
        merged = pipeline.merge_round(self.setup, state, updates)
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
