"""Which clients of a round train in one pass: by the tasks alone, so on any number of workers.

Clients with one recipe and subnets of one shape form stacks of at most K. How many pay is tried
once for each size of subnets, and kept: a run that is resumed, or repeated with the same choices,
has the same stacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedquilt.engines.client_work import describe_work
from fedquilt.errors import ConfigError, CorruptFileError
from fedquilt.federation.client import Failure, Task, Update
from fedquilt.files import read_document
from fedquilt.structure.cut import compute_shapes
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.stack.layers import UnstackableError
from fedquilt.training.stack.trial import COUNTS, TryStacking

WINDOW = 64  # neighboring tasks among which stacks are formed, so that few results wait for others
MAX_TRIALS = 3  # of one kind of work, if clients fail
AUTO = "auto"
ClientsPerPass = int | str
RunTasks = Callable[[Sequence[Task]], Iterable[Update | Failure]]
ListStacks = Callable[[int], list[tuple[int, ...]]]  # the stacks of the window that starts there


@dataclass(frozen=True)
class PassSize:
    """How many clients of one kind train in one pass.

    Args:
        clients: The most in one pass; 1: each trains alone.
        reason: Why.
    """

    clients: int
    reason: str


@dataclass
class PassSizes:
    """How many clients train in one pass, by the size of their subnets.

    Args:
        setting: A number for all sizes that allow it; ``auto``: a short trial decides; or the
            ``passes.json`` of another run, whose choices are taken over.
        chosen: What was chosen so far, by the number of values in a client's subnet.
        on_change: Is called with the size and the choice when one was made.
    """

    setting: ClientsPerPass = 1
    chosen: dict[str, PassSize] = field(default_factory=dict)
    on_change: Callable[[str, PassSize], None] | None = None

    def __post_init__(self) -> None:
        """Refuses what is no number of clients, and reads choices of another run."""
        is_number = isinstance(self.setting, int) and not isinstance(self.setting, bool)
        is_file = isinstance(self.setting, str) and self.setting.endswith(".json")
        if self.setting != AUTO and not is_file and not (is_number and int(self.setting) >= 1):
            raise ConfigError(
                f"clients_per_pass is a number of clients, at least 1, 'auto', or the passes.json "
                f"of another run, got {self.setting!r}; 1 trains each client by itself"
            )
        if is_file:
            self.load(read_document(Path(str(self.setting))))

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers that a trial compares; none if the number is given."""
        return () if isinstance(self.setting, int) else COUNTS

    def add(self, kind: str, size: PassSize) -> None:
        """Keeps a choice."""
        self.chosen[kind] = size
        if self.on_change is not None:
            self.on_change(kind, size)

    def describe(self) -> dict[str, Any]:
        """The choices as JSON."""
        sizes = {kind: asdict(size) for kind, size in self.chosen.items()}
        return {"clients_per_pass": self.setting, "sizes": sizes}

    def load(self, document: Mapping[str, Any]) -> None:
        """Takes over choices that ``describe`` gave."""
        try:
            self.chosen |= {kind: PassSize(**size) for kind, size in document["sizes"].items()}
        except (AttributeError, KeyError, TypeError) as problem:
            raise CorruptFileError(
                f"clients_per_pass wants the passes.json of a run, got another file ({problem})"
            ) from problem


def plan_stacks(
    tasks: Sequence[Task], structure: Structure, sizes: PassSizes, run: RunTasks
) -> ListStacks:
    """Chooses how many clients are done in one pass, for each kind of work that is new.

    Args:
        tasks: The tasks of a round.
        structure: What can be cut in the model.
        sizes: How many go into one pass; choices for new kinds of work are added.
        run: Runs tasks that try something out.

    Returns:
        What lists the stacks of a window of tasks; other tasks are done alone.
    """
    if sizes.setting == 1:
        return list_no_stacks
    _choose(tasks, structure, sizes, run)

    def list_stacks(start: int) -> list[tuple[int, ...]]:
        stacks = []
        for group in _group(tasks, start, structure) if start % WINDOW == 0 else ():
            kind = describe_work(structure, tasks[group[0]].subnets)
            parts = divide(group, sizes.chosen[kind].clients)
            stacks += [part for part in parts if len(part) > 1]
        return stacks

    return list_stacks


def list_no_stacks(start: int) -> list[tuple[int, ...]]:
    """Every task is done alone."""
    return []


def divide(numbers: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Numbers in stacks of nearly equal length; an even number of them, so that none waits long.

    >>> divide(range(10), 8)
    [(0, 1, 2, 3, 4), (5, 6, 7, 8, 9)]
    """
    if most == 1:
        return [(number,) for number in numbers]
    parts = math.ceil(len(numbers) / most)
    parts += parts % 2 if len(numbers) > 3 else 0
    size, rest = divmod(len(numbers), parts)
    starts = [i * size + min(i, rest) for i in range(parts + 1)]
    return [tuple(numbers[a:b]) for a, b in pairwise(starts)]


def _group(tasks: Sequence[Task], start: int, structure: Structure) -> list[list[int]]:
    """Tasks of a window with equal recipes and shapes, if there are several."""
    groups: dict[Hashable, list[int]] = {}
    for number in range(start, min(start + WINDOW, len(tasks))):
        task = tasks[number]
        find_key = getattr(task.recipe, "stack_key", None)
        key = None if find_key is None else find_key(task)
        if key is not None:
            shapes = tuple(_describe_shape(structure, subnet) for subnet in task.subnets)
            groups.setdefault((key, shapes), []).append(number)
    return [group for group in groups.values() if len(group) > 1]


def _describe_shape(structure: Structure, subnet: Subnet) -> Hashable:
    shapes = tuple(compute_shapes(structure, subnet.shape).items())
    return shapes, subnet.skipped, subnet.excluded, subnet.private


def _choose(tasks: Sequence[Task], structure: Structure, sizes: PassSizes, run: RunTasks) -> None:
    """Tries each new kind of work out, on one of its tasks; on another if that one's fails."""
    new: dict[str, list[Task]] = {}
    for start in range(0, len(tasks), WINDOW):
        for group in _group(tasks, start, structure):
            kind = describe_work(structure, tasks[group[0]].subnets)
            if kind not in sizes.chosen:
                new.setdefault(kind, [tasks[number] for number in group[:MAX_TRIALS]])
    while new:
        trials = [
            replace(tasks[0], recipe=TryStacking(tasks[0].recipe, sizes.counts))
            for tasks in new.values()
        ]
        for (kind, left), result in zip([*new.items()], run(trials), strict=True):
            if _is_of_one_client(result) and len(left) > 1:
                new[kind] = left[1:]
            else:
                sizes.add(kind, _judge(result, sizes.setting))
                del new[kind]


def _is_of_one_client(result: Update | Failure) -> bool:
    """Whether a trial failed for a reason that others of the kind need not have."""
    return isinstance(result, Failure) and not result.reason.startswith(UnstackableError.__name__)


def _judge(result: Update | Failure, setting: ClientsPerPass) -> PassSize:
    if isinstance(result, Failure):
        kind, _, rest = result.reason.partition(": ")
        is_known = kind == UnstackableError.__name__
        return PassSize(1, rest.rpartition(" (")[0] if is_known else result.reason)
    if isinstance(setting, int):
        return PassSize(setting, "as the settings say")
    return PassSize(int(result.weight), f"milliseconds a step: {_describe(result.metrics)}")


def _describe(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{1000 * value:.3g} with {count}" for count, value in seconds.items())
