"""The nets once more on clients' test data, with statistics of each client's own data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedquilt.federation.client import Task
from fedquilt.methods.method import Method, PersonalChoice, PersonalStatistics
from fedquilt.training.evaluate import Evaluate


def choose_statistics(method: Method, choice: PersonalChoice) -> PersonalStatistics | None:
    """What a client's test data are normalized by for the personal value; None: as they were."""
    if choice == "refreshed":
        return method.refreshed_statistics
    if choice == "batch":
        return "batch"
    return method.personal_statistics if choice else None


def refresh_statistics(own: Sequence[Task], statistics: PersonalStatistics | None) -> list[Task]:
    """The tasks of clients, with statistics of their own data; none without such statistics."""
    tasks: list[Task] = []
    for task in own if statistics is not None else ():
        assert isinstance(task.recipe, Evaluate)
        recipe = replace(task.recipe, attack=None, labels=None)
        if statistics == "batch":
            recipe = replace(recipe, batch_statistics=True)
        else:
            recipe = replace(recipe, statistics=statistics, batch_statistics=False)
        tasks.append(replace(task, recipe=recipe))
    return tasks
