"""Writes a page about one or several runs: tables, figures, and the data behind them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedquilt.errors import CheckpointError
from fedquilt.evaluation.architectures import (
    Architecture,
    ClientNet,
    Compression,
    Distances,
    KeepRate,
    LayerCost,
)
from fedquilt.evaluation.clients import ClientScore
from fedquilt.evaluation.scores import SizeScore
from fedquilt.evaluation.summary import get_main_value, summarize
from fedquilt.evaluation.targets import TargetResult
from fedquilt.figures import drawing
from fedquilt.figures.figure import Figure, Lines
from fedquilt.formatting import format_percent, format_si
from fedquilt.learning.metric import MetricInfo
from fedquilt.learning.task import CLASSIFICATION
from fedquilt.methods.method import SIZE_NAMES
from fedquilt.report import round_plots, score_plots, subnet_plots
from fedquilt.report.coverage import Coverage
from fedquilt.report.figure_json import encode_figure
from fedquilt.report.records import ClientSummary, LocalTest, Milestone, RoundRecord
from fedquilt.report.tables import (
    MEANINGS,
    get_cell,
    list_columns,
    make_domain_rows,
    make_header,
    make_legend,
)
from fedquilt.runs.status import RunStatus
from fedquilt.web.assets import read_asset

TEMPLATE, PARTS_TEMPLATE = "page.html.jinja", "parts.html.jinja"
STYLES = (("fedquilt.web", "theme.css"), ("fedquilt.report", "report.css"))
SCRIPTS = (
    ("fedquilt.web", "theme.js"),
    ("fedquilt.report", "plots.js"),
    ("fedquilt.report", "report.js"),
)
MAX_LISTED = 1000  # clients in the data of a report; of more, every k-th is listed
LISTED = ("clients", "nets", "architectures", "compressions", "local")
MAX_SLUG = 80  # characters of a figure's file name; the name of a run may be much longer


@dataclass(frozen=True)
class RunReport:
    """The data of one run that a report shows."""

    name: str
    about: Mapping[str, Any]
    scores: Sequence[SizeScore]
    progress: Sequence[Milestone] = ()
    clients: Sequence[ClientScore] = ()
    shares: Mapping[str, float] = field(default_factory=dict)
    steps: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by size and block
    weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # mean absolute values
    architectures: Sequence[Architecture] = ()  # of clients that chose their subnets
    distances: Distances | None = None  # between these architectures
    nets: Sequence[ClientNet] = ()  # the costs of clients' subnets, chosen or not
    mean_costs: Mapping[str, float] = field(default_factory=dict)  # over clients
    mean_shares: Mapping[str, float] = field(default_factory=dict)  # of the full model's
    traffic: Mapping[str, float] = field(default_factory=dict)  # bytes per round, up and down
    rates: Sequence[KeepRate] = ()  # the fraction of each width group that subnets keep
    layers: Sequence[LayerCost] = ()  # the costs of each layer
    compressions: Sequence[Compression] = ()  # sizes of subnets, divergence of labels
    correlation: float | None = None  # between the two
    local_tests: Sequence[LocalTest] = ()  # of local models, by round
    local: Mapping[int, float] = field(default_factory=dict)  # last accuracy of each local model
    targets: Sequence[TargetResult] = ()  # and the rounds to reach them
    size_kind: str = "width"  # what a size is a fraction of
    value_is: str = MEANINGS["value"]  # of which model, on which data
    exceeds_budgets: str | None = None  # how, in a sentence
    rounds: Sequence[RoundRecord] = ()  # of training
    evaluations: Sequence[tuple[int, Sequence[SizeScore]]] = ()  # of every size, by round
    coverage: Coverage | None = None  # how often each part of the model was trained
    client_summaries: Sequence[ClientSummary] = ()  # a few clients, failing ones first
    status: RunStatus | None = None  # what the run does now; None: it has not said
    attack: Mapping[str, Any] | None = None  # what hostile clients did; None: there were none

    @property
    def metric(self) -> MetricInfo:
        """The metric of the scores."""
        return self.scores[0].metric if self.scores else CLASSIFICATION.metric

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; scores call their values by the metric."""
        document = asdict(replace(self, scores=(), progress=(), evaluations=(), status=None))
        del document["status"]  # of a moment, which is over
        document["scores"] = [score.to_json() for score in self.scores]
        document["progress"] = [
            {**vars(milestone), "score": milestone.score.to_json()} for milestone in self.progress
        ]
        document["evaluations"] = [
            {"round": round, "scores": [score.to_json() for score in scores]}
            for round, scores in self.evaluations
        ]
        for name in LISTED:
            if len(document[name]) > MAX_LISTED:
                document[f"num_{name}"] = len(document[name])
                document[name] = _thin(document[name])
        return document


def _thin(listed: Any) -> Any:
    """Every k-th of many clients, so that a report does not grow with their number.

    >>> _thin(list(range(2500)))[:3], len(_thin({i: i for i in range(2500)}))
    ([0, 3, 6], 834)
    """
    step = -(-len(listed) // MAX_LISTED)
    if isinstance(listed, Mapping):
        return dict(list(listed.items())[::step])
    return listed[::step]


@dataclass(frozen=True)
class _Table:
    """A table of the page."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class _RunSection:
    """What the page shows of one run."""

    name: str
    facts: str
    sizes: _Table
    notes: Sequence[str]
    domains: _Table
    clients: _Table
    status: RunStatus | None
    slow: Sequence[int]  # clients that are behind the others of their round
    round: int  # the last one that is done


def write_page(folder: Path, reports: Sequence[RunReport]) -> Path:
    """Writes ``report.json``, the figures and ``index.html``; returns the path of the page."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        data = {report.name: report.to_json() for report in reports}
        (folder / "report.json").write_text(json.dumps(data, indent=1))
        for number, figure in enumerate(plot_figures(reports)):
            drawing.draw_figure(figure, folder / f"{number:02d}-{_make_slug(figure.title)}.png")
        page = folder / "index.html"
        page.write_text(render_page(reports), encoding="utf-8", errors="replace")
    except OSError as problem:
        raise CheckpointError(
            f"the report could not be written to {folder} ({problem})"
        ) from problem
    return page


def plot_figures(reports: Sequence[RunReport]) -> list[Figure]:
    """All figures about some runs, of what is known about them."""
    scores = {r.name: r.scores for r in reports}
    progress = {r.name: r.progress for r in reports}
    kinds = {SIZE_NAMES[r.size_kind] for r in reports}
    figures = round_plots.plot_rounds({r.name: r.rounds for r in reports if r.rounds})
    for report in reports:
        figures += round_plots.plot_sizes_by_round(report.name, report.evaluations)
        figures += round_plots.plot_backdoor(report.name, report.evaluations)
        figures += round_plots.plot_coverage(report.name, report.coverage)
    if any(scores.values()):
        figures += score_plots.plot_by_size(scores, kinds)
        figures += score_plots.plot_trade_off(scores)
    if any(progress.values()):
        figures += [score_plots.plot_by_time(progress), *score_plots.plot_by_traffic(progress)]
    figures += score_plots.plot_by_round(progress, {r.name: r.local_tests for r in reports})
    figures += score_plots.plot_density({r.name: r.local for r in reports})
    if any(r.clients for r in reports):
        figures.append(
            score_plots.plot_by_client({r.name: r.clients for r in reports}, reports[0].metric)
        )
    if any(len(r.shares) > 1 for r in reports):
        figures.append(score_plots.plot_by_group({r.name: r.shares for r in reports}))
    figures += subnet_plots.plot_by_cost({r.name: r.nets for r in reports})
    figures += subnet_plots.plot_by_divergence({r.name: r.compressions for r in reports})
    for report in reports:
        name = report.name
        figures += subnet_plots.plot_by_block(f"Step sizes of {name}", "step size", report.steps)
        title = f"Mean absolute weights of {name}"
        figures += subnet_plots.plot_by_block(title, "mean |weight|", report.weights)
        figures += subnet_plots.plot_by_layer(name, report.architectures, report.distances)
        figures += subnet_plots.plot_keep_rates(name, report.rates)
        figures += subnet_plots.plot_layer_costs(name, report.layers)
    return [f for f in figures if not isinstance(f, Lines) or any(f.curves.values())]


def _make_slug(title: str) -> str:
    words = "".join(c if c.isalnum() else " " for c in title.lower()).split()
    return "-".join(words)[:MAX_SLUG]


def render_page(
    reports: Sequence[RunReport], *, source: str | None = None, title: str = "Fedquilt"
) -> str:
    """Renders the page: as one file, or as one that follows a server.

    Args:
        reports: The runs.
        source: Where the page gets new data; None: it is frozen, and everything is part of it.
        title: The title of the page.
    """
    data = json.dumps([encode_figure(figure) for figure in plot_figures(reports)])
    return (
        _make_environment()
        .get_template(TEMPLATE)
        .render(
            title=title,
            source=source,
            styles=[read_asset(*style) for style in STYLES],
            scripts=[read_asset(*script) for script in SCRIPTS],
            data=data.replace("<", "\\u003c"),  # so that no name ends the script
            **_collect_parts(reports),
        )
    )


def render_parts(reports: Sequence[RunReport]) -> dict[str, str]:
    """The parts of the page that change while runs go, by their names."""
    module = _make_environment().get_template(PARTS_TEMPLATE).module
    parts = _collect_parts(reports)
    return {
        "runs": str(module.render_runs(parts["runs"])),  # type: ignore[attr-defined]
        "tables": str(module.render_tables(parts["costs"], parts["targets"])),  # type: ignore[attr-defined]
    }


def _collect_parts(reports: Sequence[RunReport]) -> dict[str, Any]:
    return {
        "runs": [_make_run_section(report) for report in reports],
        "costs": _make_cost_table(reports),
        "targets": _make_target_table(reports),
    }


@cache
def _make_environment() -> Environment:
    return Environment(
        loader=PackageLoader("fedquilt.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _make_run_section(report: RunReport) -> _RunSection:
    rows = [score.to_json() for score in report.scores]
    columns = list_columns(rows)
    names = [n for n in columns if any(get_cell(row, n) is not None for row in rows)]
    sizes = _Table(
        make_header(rows, names, report.size_kind),
        [[columns[name].format(get_cell(row, name)) for name in names] for row in rows],
    )
    notes = make_legend(rows, names, report.size_kind, report.value_is)
    summary = summarize(report.scores)
    if summary is not None and len(report.scores) > 1:
        worst, mean = map(summary.metric.format, (summary.worst, summary.mean))
        notes.append(f"worst {worst}, mean {mean}: {summary.name} over sizes")
    if report.exceeds_budgets is not None:
        notes.append(report.exceeds_budgets)
    facts = ", ".join(f"{name} {value}" for name, value in report.about.items())
    domains = _Table(*make_domain_rows([{**row, "kind": report.size_kind} for row in rows]))
    done = report.rounds[-1].round if report.rounds else 0
    clients = _make_client_table(report.client_summaries)
    status, slow = report.status, find_slow_clients(report.status)
    return _RunSection(report.name, facts, sizes, notes, domains, clients, status, slow, done)


def _make_client_table(clients: Sequence[ClientSummary]) -> _Table:
    header = ["client", "rounds", "failures", "sent", "last loss", "last problem"]
    rows = [
        [
            f"{c.client}",
            f"{c.rounds}",
            f"{c.failures}",
            format_si(c.bytes, "B"),
            "-" if c.loss is None else f"{c.loss:.4g}",
            c.problem,
        ]
        for c in clients
    ]
    return _Table(header, rows)


def find_slow_clients(status: RunStatus | None) -> list[int]:
    """The clients that have done less than half of what the others at work have, in the median.

    >>> find_slow_clients(RunStatus(working={1: 0.8, 2: 0.9, 3: 0.2}))
    [3]
    """
    if status is None or len(status.working) < 2:
        return []
    usual = median(status.working.values())
    return [client for client, done in status.working.items() if done < usual / 2]


def _make_cost_table(reports: Sequence[RunReport]) -> _Table:
    """The metric and costs of runs side by side, in the mean over clients (ADDS, Table 3)."""
    costs = ["parameters", "MACs", "sent a round", "received a round"]
    names = list(dict.fromkeys(report.metric.name for report in reports))
    header = ["", " / ".join(names), "local accuracy", *costs]
    return _Table(header, [_make_cost_row(report) for report in reports if report.mean_costs])


def _make_cost_row(report: RunReport) -> list[str]:
    largest = max(report.scores, key=lambda score: score.width, default=None)
    value = None if largest is None else get_main_value(largest)
    local_accuracy = fmean(report.local.values()) if report.local else None
    costs = [
        f"{format_si(report.mean_costs[name])} ({format_percent(report.mean_shares.get(name))})"
        for name in ("params", "macs")
    ]
    traffic = report.traffic
    sent = [format_si(traffic[way], "B") if traffic else "-" for way in ("up", "down")]
    shown = report.metric.format(value)
    return [report.name, shown, format_percent(local_accuracy), *costs, *sent]


def _make_target_table(reports: Sequence[RunReport]) -> _Table:
    """Rounds to each target, and the speed-up over the first run (ADDS, Table 4)."""
    given = reports[0].targets if reports else ()
    targets = [reports[0].metric.format(result.target) for result in given]
    if not targets:
        return _Table((), ())
    has_local = any(report.local_tests for report in reports)
    rows = []
    for report in reports:
        row = [report.name, *(_format_rounds(r.rounds, r.speed_up) for r in report.targets)]
        if has_local and report.local_tests:
            row += [_format_rounds(r.local_rounds, r.local_speed_up) for r in report.targets]
        elif has_local:
            row += [""] * len(targets)
        rows.append(row)
    local = [f"local models {target}" for target in targets] if has_local else []
    return _Table(["", *targets, *local], rows)


def _format_rounds(rounds: int | None, speed_up: float | None) -> str:
    """Rounds, and the speed-up where it is known.

    >>> _format_rounds(34, 41 / 34), _format_rounds(41, None), _format_rounds(None, None)
    ('34 (1.21 ×)', '41', '—')
    """
    if rounds is None:
        return "—"
    return f"{rounds}" if speed_up is None else f"{rounds} ({speed_up:.2f} ×)"
