"""One page about one or several runs: tables, pictures, and the data behind them."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from fedquilt.errors import CheckpointError
from fedquilt.evaluation.accuracy import SizeScore
from fedquilt.evaluation.architectures import (
    Architecture,
    ClientNet,
    Compression,
    Distances,
    LayerCost,
    Rate,
)
from fedquilt.evaluation.clients import ClientScore
from fedquilt.evaluation.summary import main_accuracy, summarize
from fedquilt.evaluation.targets import Reached
from fedquilt.methods.method import SIZE_NAMES
from fedquilt.report import figures
from fedquilt.report.records import LocalTest, Milestone
from fedquilt.report.tables import (
    COLUMNS,
    MEANINGS,
    by_domain,
    head_of,
    legend,
    percent,
    prefixed,
)

STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:64em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right}"
    "tr+tr{border-top:1px solid #ddd}table+p,p+p{margin:0}img{max-width:100%}"
)
LONGEST_SLUG = 80  # of a picture's file name; a run's name may be as long as a file name can be
WAYS = ("up", "down")


@dataclass(frozen=True)
class Story:
    """What there is to tell of one run."""

    name: str
    about: Mapping[str, Any]
    scores: Sequence[SizeScore]
    progress: Sequence[Milestone] = ()
    clients: Sequence[ClientScore] = ()
    shares: Mapping[str, float] = field(default_factory=dict)
    steps: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # size -> block -> step
    weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # mean absolute ones
    architectures: Sequence[Architecture] = ()  # of clients that chose their nets
    distances: Distances | None = None  # between these
    nets: Sequence[ClientNet] = ()  # what clients' nets cost, chosen or not
    mean_costs: Mapping[str, float] = field(default_factory=dict)  # over these
    mean_shares: Mapping[str, float] = field(default_factory=dict)  # of the whole model's
    traffic: Mapping[str, float] = field(default_factory=dict)  # bytes a round, up and down
    rates: Sequence[Rate] = ()  # what chosen nets keep of each width group
    layers: Sequence[LayerCost] = ()  # what they cost, layer by layer
    compressions: Sequence[Compression] = ()  # how small they are, and how their labels diverge
    correlation: float | None = None  # between the two
    local_tests: Sequence[LocalTest] = ()  # of clients' own models, round by round
    local: Mapping[int, float] = field(default_factory=dict)  # accuracy of each client's, the last
    targets: Sequence[Reached] = ()  # rounds that it took to reach them
    size_kind: str = "width"  # what sizes are fractions of
    accuracy_is: str = MEANINGS["accuracy"]  # the accuracy of what, on which data
    exceeds_budgets: str | None = None  # a sentence, if clients trained more than they can afford


def write(folder: Path, stories: Sequence[Story]) -> Path:
    """Writes ``report.json``, the pictures and ``index.html``; the path of the page."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        data = {story.name: asdict(story) for story in stories}
        (folder / "report.json").write_text(json.dumps(data, indent=1))
        pictures = []
        for number, figure in enumerate(_figures(stories)):
            path = folder / f"{number:02d}-{_slug(figure.title)}.png"
            figures.draw(figure, path)
            pictures.append((figure, path))
        page = folder / "index.html"
        page.write_text(_page(stories, pictures), encoding="utf-8", errors="replace")
    except OSError as problem:
        raise CheckpointError(
            f"the report could not be written to {folder} ({problem})"
        ) from problem
    return page


def _figures(stories: Sequence[Story]) -> list[figures.Figure]:
    scores = {s.name: s.scores for s in stories}
    kinds = {SIZE_NAMES[s.size_kind] for s in stories}
    found = [*figures.by_size(scores, kinds), *figures.trade_off(scores)]
    if any(s.progress for s in stories):
        progress = {s.name: s.progress for s in stories}
        found += [figures.by_clock(progress), *figures.by_traffic(progress)]
    local = {s.name: s.local_tests for s in stories}
    found += figures.by_round({s.name: s.progress for s in stories}, local)
    found += figures.by_density({s.name: s.local for s in stories})
    if any(s.clients for s in stories):
        found.append(figures.by_client({s.name: s.clients for s in stories}))
    if any(len(s.shares) > 1 for s in stories):
        found.append(figures.by_group({s.name: s.shares for s in stories}))
    found += figures.by_cost({s.name: s.nets for s in stories})
    found += figures.by_divergence({s.name: s.compressions for s in stories})
    for story in stories:
        found += figures.by_block(f"Step sizes of {story.name}", "step size", story.steps)
        title = f"Mean absolute weights of {story.name}"
        found += figures.by_block(title, "mean |weight|", story.weights)
        found += figures.by_layer(story.name, story.architectures, story.distances)
        found += figures.by_rate(story.name, story.rates)
        found += figures.by_layer_cost(story.name, story.layers)
    return found


def _slug(title: str) -> str:
    words = "".join(c if c.isalnum() else " " for c in title.lower()).split()
    return "-".join(words)[:LONGEST_SLUG]


def _page(stories: Sequence[Story], pictures: Sequence[tuple[figures.Figure, Path]]) -> str:
    """The page in one file: pictures are part of it."""
    parts = [f"<!doctype html><meta charset=utf-8><title>Fedquilt</title><style>{STYLE}</style>"]
    for story in stories:
        facts = ", ".join(f"{k} {v}" for k, v in story.about.items())
        parts += [f"<h2>{html.escape(story.name)}</h2><p>{html.escape(facts)}</p>", _table(story)]
        parts += [_summary(story), _domains(story)]
    parts += [_means(stories), _targets(stories)]
    for figure, path in pictures:
        image, title = base64.b64encode(path.read_bytes()).decode(), html.escape(figure.title)
        parts.append(f'<h3>{title}</h3><img alt="{title}" src="data:image/png;base64,{image}">')
        if figure.caption:
            parts.append(f"<p>{html.escape(figure.caption)}</p>")
    return "\n".join(parts)


def _summary(story: Story) -> str:
    """The worst size and the mean over sizes, and what to know of budgets."""
    summary, lines = summarize(story.scores), []
    if summary is not None and len(story.scores) > 1:
        worst, mean = percent(summary.worst), percent(summary.mean)
        lines.append(f"worst {worst}, mean {mean}: {summary.name} over sizes")
    if story.exceeds_budgets is not None:
        lines.append(story.exceeds_budgets)
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def _table(story: Story) -> str:
    rows = [asdict(score) for score in story.scores]
    names = [n for n in COLUMNS if any(row.get(n) is not None for row in rows)]
    head = head_of(names, story.size_kind)
    table = _tabled(head, [[COLUMNS[name][1](row[name]) for name in names] for row in rows])
    meanings = legend(names, story.size_kind, story.accuracy_is)
    return table + "".join(f"<p>{html.escape(line)}</p>" for line in meanings)


def _domains(story: Story) -> str:
    head, rows = by_domain([{**asdict(s), "kind": story.size_kind} for s in story.scores])
    return "<p>User accuracy in each domain:</p>" + _tabled(head, rows) if rows else ""


def _means(stories: Sequence[Story]) -> str:
    """Accuracy and costs of runs side by side, in the mean over clients (ADDS, Table 3)."""
    rows = []
    for story in (s for s in stories if s.mean_costs):
        largest = max(story.scores, key=lambda score: score.width, default=None)
        accuracy = None if largest is None else main_accuracy(largest)
        costs = [
            f"{prefixed(story.mean_costs[name])} ({percent(story.mean_shares.get(name))})"
            for name in ("params", "macs")
        ]
        sent = [prefixed(story.traffic[way], "B") if story.traffic else "-" for way in WAYS]
        own = fmean(story.local.values()) if story.local else None
        rows.append([story.name, percent(accuracy), percent(own), *costs, *sent])
    if not rows:
        return ""
    costs = ["parameters", "MACs", "sent a round", "received a round"]
    head = ["", "accuracy", "own models' accuracy", *costs]
    return "<h3>In the mean over clients (and of the whole model)</h3>" + _tabled(head, rows)


def _targets(stories: Sequence[Story]) -> str:
    """Rounds to each accuracy, and how many times as fast as the first run (ADDS, Table 4)."""
    wanted = [reached.target for reached in stories[0].targets] if stories else []
    if not wanted:
        return ""
    head, rows = ["", *map(percent, wanted)], []
    knows_local = any(story.local_tests for story in stories)
    head += [f"own models {percent(target)}" for target in wanted] if knows_local else []
    for story in stories:
        cells = [_rounds(r.rounds, r.speed_up) for r in story.targets]
        if knows_local:
            own = [_rounds(r.local_rounds, r.local_speed_up) for r in story.targets]
            cells += own if story.local_tests else [""] * len(own)
        rows.append([story.name, *cells])
    return "<h3>Rounds to an accuracy</h3>" + _tabled(head, rows)


def _rounds(rounds: int | None, speed_up: float | None) -> str:
    """Rounds as tables show them.

    >>> _rounds(34, 41 / 34), _rounds(41, None), _rounds(None, None)
    ('34 (1.21 ×)', '41', '—')
    """
    if rounds is None:
        return "—"
    return f"{rounds}" if speed_up is None else f"{rounds} ({speed_up:.2f} ×)"


def _tabled(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{html.escape(word)}</th>" for word in head)]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
