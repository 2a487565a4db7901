"""Rounds with hostile clients, simulated, and how well a backdoor works in the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from fedquilt.engines.engine import Engine
from fedquilt.errors import ConfigError, UpdateError
from fedquilt.evaluation.scores import SizeScore
from fedquilt.federation.aggregation import AggregationPipeline
from fedquilt.federation.client import Failure, Task, Update
from fedquilt.federation.hostile import Attack, RoundAttack
from fedquilt.federation.state import Setup, State
from fedquilt.runs.accounting import RoundAccounting
from fedquilt.training.poisoning import ATTACKS, Backdoor, Poisoned

BACKDOOR_SUCCESS = "backdoor_success"  # a metric: triggered examples that are taken for the target
MAX_NAMED = 100  # hostile clients whose numbers are stored with a run


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


def describe_attack(attack: Attack | None, setup: Setup) -> dict[str, Any] | None:
    """What hostile clients do, as JSON: name, settings, how many they are, and a few who are.

    Args:
        attack: What hostile clients do; None: there are none.
        setup: What stays the same during the run.
    """
    if attack is None:
        return None
    hostile = sorted(attack.list_hostile(setup))
    names = {kind: name for name, kind in ATTACKS.items()}
    settings = {n: list(v) if isinstance(v, tuple) else v for n, v in asdict(attack).items()}
    return {
        "name": names.get(type(attack), type(attack).__name__),
        "settings": settings,
        "num_hostile": len(hostile),
        "num_clients": len(setup.clients),
        "hostile": hostile[:MAX_NAMED],
    }


def restore_attack(described: Mapping[str, Any] | None) -> Attack | None:
    """The attack that ``describe_attack`` was given; None if there was none, or a user's own."""
    kind = ATTACKS.get(described["name"]) if described is not None else None
    if described is None or kind is None:
        return None
    settings = {n: tuple(v) if isinstance(v, list) else v for n, v in described["settings"].items()}
    return kind(**settings)


def start_attack(
    attack: Attack, setup: Setup, state: State, pipeline: AggregationPipeline
) -> RoundAttack:
    """An attack in a round that is merged by a pipeline."""
    hostile = attack.list_hostile(setup)
    gives_changes = pipeline.decoder.gives_changes
    return RoundAttack(attack, hostile, setup, state, gives_changes=gives_changes)


def intercept_updates(
    attack: RoundAttack, updates: Iterable[Update], accounting: RoundAccounting
) -> Iterator[Update]:
    """The updates that are merged; what a server would not accept of hostile clients is left out.

    Args:
        attack: What hostile clients do.
        updates: Valid updates.
        accounting: Gets those that are not accepted, as failures.
    """
    for update in updates:
        sent = attack.intercept(update)
        try:
            attack.validate(sent)
        except UpdateError as problem:
            accounting.failures.append(Failure(sent.client, str(problem)))
            continue
        yield sent


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
