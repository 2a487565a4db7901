"""A page about finished runs, wherever they come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fedquilt.errors import ConfigError
from fedquilt.evaluation.targets import checked_target
from fedquilt.report.page import write
from fedquilt.report.stories import compared, told
from fedquilt.runs.run import Run


def report(
    runs: Sequence[Run],
    out: str | Path = "report",
    *,
    targets: Sequence[float] = (),
    clients: bool = True,
    workers: int | None = None,
) -> Path:
    """Writes one page about runs: tables, pictures, and the data behind them; its path.

    Client by client too, where a run has its clients: those that it was trained with, or that
    ``open_run`` was given. ``targets`` are accuracies, such as 0.4: how many rounds it took to
    reach them. What happened on the way is known of runs that were kept, with ``out=...``.
    """
    if isinstance(runs, Run) or not runs:
        raise ConfigError("a report is about a list of one or more runs; write [run]")
    wanted = [checked_target(accuracy) for accuracy in targets]
    stories = [
        told(name, run, run.population if clients else None, workers=workers)
        for name, run in zip(_names(runs), runs, strict=True)
    ]
    return write(Path(out), compared(stories, wanted))


def _names(runs: Sequence[Run]) -> list[str]:
    """A name for each run: its folder's, its method's if it has none; with numbers if need be."""
    plain = [type(run.method).__name__ if run.folder is None else run.folder.name for run in runs]
    seen: Counter[str] = Counter()
    found = []
    for name in plain:
        seen[name] += 1
        found.append(f"{name} ({seen[name]})" if plain.count(name) > 1 else name)
    return found
