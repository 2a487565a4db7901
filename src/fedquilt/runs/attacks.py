"""Rounds with hostile clients, simulated, and how well a backdoor works in the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedquilt.engines.engine import Engine
from fedquilt.errors import ConfigError, UpdateError
from fedquilt.evaluation.accuracy import SizeScore
from fedquilt.federation.aggregation import AggregationPipeline
from fedquilt.federation.client import Failure, Task, Update
from fedquilt.federation.hostile import Attack, RoundAttack
from fedquilt.federation.state import Setup, State
from fedquilt.federation.update import validate_update
from fedquilt.runs.accounting import RoundAccounting
from fedquilt.training.poisoning import Backdoor, Poisoned

BACKDOOR_SUCCESS = "backdoor_success"  # a metric: triggered examples that are taken for the target


def check_attack(attack: Attack | None, setup: Setup, *, is_secure: bool) -> None:
    """Raises a ConfigError if an attack does not go with a run."""
    if attack is None:
        return
    if is_secure:
        raise ConfigError(
            "simulated attacks replace single updates, which a secure sum does not let see; leave "
            "out attacks or secure_aggregation"
        )
    attack.list_hostile(setup)
    attack.check(setup)


@dataclass(frozen=True, eq=False)
class AttackedExchange:
    """An exchange in which some clients are hostile.

    Args:
        setup: What stays the same during the run.
        attack: What they do.
    """

    setup: Setup
    attack: Attack

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
        """Replaces valid updates of hostile clients, and merges all as they come."""
        gives_changes = pipeline.decoder.gives_changes
        hostile = self.attack.list_hostile(self.setup)
        attack = RoundAttack(self.attack, hostile, self.setup, state, gives_changes=gives_changes)
        planned = attack.plan(tasks)
        results = engine.run(planned, **({} if enough is None else {"enough": enough}))

        def intercept() -> Iterator[Update]:
            for update in accounting.filter_valid(planned, results):
                sent = attack.intercept(update)
                if sent is not update and not gives_changes:
                    try:
                        validate_update(sent, self.setup.structure, state.params)
                    except UpdateError as problem:  # a server would not merge it
                        accounting.failures.append(Failure(sent.client, str(problem)))
                        continue
                yield sent

        merged = pipeline.merge_round(self.setup, state, intercept())
        accounting.merging = dict(merged.metrics)
        return merged.state


def measure_backdoor(
    attack: Attack | None,
    engine: Engine,
    scores: Sequence[SizeScore],
    evaluate: Callable[..., Sequence[SizeScore]],
) -> tuple[SizeScore, ...]:
    """The scores with the success of a backdoor, if that is the attack.

    Args:
        attack: What hostile clients do; None: there are none.
        engine: Runs tasks.
        scores: The scores of each size.
        evaluate: Finds scores with an ``engine``.

    Returns:
        The scores with another metric: the fraction of test examples of other classes that are
        taken for the target once they have the trigger.
    """
    if not isinstance(attack, Backdoor):
        return tuple(scores)
    triggered = evaluate(engine=_TriggeredEngine(engine, attack))
    return tuple(
        replace(
            score,
            metrics={
                **score.metrics,
                BACKDOOR_SUCCESS: one.user_value if one.value is None else one.value,
            },
        )
        for score, one in zip(scores, triggered, strict=True)
    )


class _TriggeredEngine:
    """An engine whose test data all have the backdoor's trigger, and its target as their label."""

    def __init__(self, engine: Engine, attack: Backdoor) -> None:
        self._engine, self._attack = engine, attack

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, tasks: Sequence[Task], *, enough: int | None = None) -> Iterator[Any]:
        """Runs the tasks on triggered data."""
        wrapped = [
            replace(task, recipe=Poisoned(task.recipe, self._attack, triggered=True))
            for task in tasks
        ]
        return self._engine.run(wrapped)
