"""A page about finished runs, wherever they come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fedquilt.errors import ConfigError
from fedquilt.evaluation.targets import validate_target
from fedquilt.report.page import write_page
from fedquilt.report.run_report import build_report, compare_reports
from fedquilt.runs.run import Run


def write_report(
    runs: Sequence[Run],
    out: str | Path = "report",
    *,
    targets: Sequence[float] = (),
    clients: bool = True,
    workers: int | None = None,
) -> Path:
    """Writes one page about runs: tables, pictures, and the data behind them.

    What happened on the way is known of runs that were kept, with ``out=...``.

    Args:
        runs: The runs to compare.
        out: The directory of the page.
        targets: Accuracies, such as 0.4: the page says how many rounds it took to reach them.
        clients: Whether to report client by client too, for runs that have their clients: those
            that were just trained, or that ``open_run`` was given clients for.
        workers: The number of processes that evaluate clients; None: one per core, 0: this process.

    Returns:
        The path of the page.

    >>> import tempfile, torch, fedquilt as fq
    >>> inputs, labels = torch.rand(12, 4), torch.arange(12) % 3
    >>> clients = fq.make_clients((inputs, labels), test=(inputs, labels), count=2)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> run = fq.train(model, inputs[:1], "fedavg", clients, rounds=1, workers=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fq.write_report([run], folder, clients=False).name
    'index.html'
    """
    if isinstance(runs, (Run, str, Path)) or not runs:
        raise ConfigError("a report is about a list of one or more runs; write [run]")
    for run in runs:
        if not isinstance(run, Run):
            raise ConfigError(
                f"a report is about runs, got {run!r}; open it with fedquilt.open_run"
            )
    for run in runs:
        for target in targets:  # before anything is computed
            validate_target(target, run.setup.task.metric)
    stories = [
        build_report(name, run, run.population if clients else None, workers=workers)
        for name, run in zip(_name_runs(runs), runs, strict=True)
    ]
    return write_page(Path(out), compare_reports(stories, targets))


def _name_runs(runs: Sequence[Run]) -> list[str]:
    """A name for each run: its folder's, its method's if it has none; with numbers if need be."""
    plain = [type(run.method).__name__ if run.folder is None else run.folder.name for run in runs]
    seen: Counter[str] = Counter()
    found = []
    for name in plain:
        seen[name] += 1
        found.append(f"{name} ({seen[name]})" if plain.count(name) > 1 else name)
    return found
