"""Writes a page about one or several runs: tables, figures, and the data behind them."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedquilt.errors import CheckpointError
from fedquilt.evaluation.accuracy import SizeScore
from fedquilt.evaluation.architectures import (
    Architecture,
    ClientNet,
    Compression,
    Distances,
    KeepRate,
    LayerCost,
)
from fedquilt.evaluation.clients import ClientScore
from fedquilt.evaluation.summary import get_main_value, summarize
from fedquilt.evaluation.targets import TargetResult
from fedquilt.formatting import format_percent, format_si
from fedquilt.learning.metrics import MetricInfo
from fedquilt.learning.task import CLASSIFICATION
from fedquilt.methods.method import SIZE_NAMES
from fedquilt.report import drawing, score_plots, subnet_plots
from fedquilt.report.figures import Figure
from fedquilt.report.records import LocalTest, Milestone
from fedquilt.report.tables import (
    MEANINGS,
    get_cell,
    list_columns,
    make_domain_rows,
    make_header,
    make_legend,
)

TEMPLATE = "report.html.jinja"
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

    @property
    def metric(self) -> MetricInfo:
        """The metric of the scores."""
        return self.scores[0].metric if self.scores else CLASSIFICATION.metric

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; scores call their values by the metric."""
        document = asdict(replace(self, scores=(), progress=()))
        document["scores"] = [score.to_json() for score in self.scores]
        document["progress"] = [
            {**vars(milestone), "score": milestone.score.to_json()} for milestone in self.progress
        ]
        return document


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


@dataclass(frozen=True)
class _FigureSection:
    """A figure of the page, with its PNG file in Base64."""

    title: str
    image: str
    caption: str


def write_page(folder: Path, reports: Sequence[RunReport]) -> Path:
    """Writes ``report.json``, the figures and ``index.html``; returns the path of the page."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        data = {report.name: report.to_json() for report in reports}
        (folder / "report.json").write_text(json.dumps(data, indent=1))
        figures = [
            _draw_figure(figure, folder / f"{number:02d}-{_make_slug(figure.title)}.png")
            for number, figure in enumerate(_plot_figures(reports))
        ]
        page = folder / "index.html"
        page.write_text(_render_page(reports, figures), encoding="utf-8", errors="replace")
    except OSError as problem:
        raise CheckpointError(
            f"the report could not be written to {folder} ({problem})"
        ) from problem
    return page


def _plot_figures(reports: Sequence[RunReport]) -> list[Figure]:
    scores = {r.name: r.scores for r in reports}
    progress = {r.name: r.progress for r in reports}
    kinds = {SIZE_NAMES[r.size_kind] for r in reports}
    figures = [*score_plots.plot_by_size(scores, kinds), *score_plots.plot_trade_off(scores)]
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
    return figures


def _draw_figure(figure: Figure, path: Path) -> _FigureSection:
    drawing.draw_figure(figure, path)
    image = base64.b64encode(path.read_bytes()).decode()
    return _FigureSection(figure.title, image, figure.caption)


def _make_slug(title: str) -> str:
    words = "".join(c if c.isalnum() else " " for c in title.lower()).split()
    return "-".join(words)[:MAX_SLUG]


def _render_page(reports: Sequence[RunReport], figures: Sequence[_FigureSection]) -> str:
    """Renders the page as one file: figures are part of it."""
    environment = Environment(
        loader=PackageLoader("fedquilt.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(
        runs=[_make_run_section(report) for report in reports],
        costs=_make_cost_table(reports),
        targets=_make_target_table(reports),
        figures=figures,
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
    return _RunSection(report.name, facts, sizes, notes, domains)


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
