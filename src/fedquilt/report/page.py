"""One page about one or several runs: tables, pictures, and the data behind them."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedquilt.errors import CheckpointError
from fedquilt.evaluation.accuracy import SizeScore
from fedquilt.evaluation.architectures import Architecture, ClientNet, Distances
from fedquilt.evaluation.clients import ClientScore
from fedquilt.report import figures
from fedquilt.report.records import Milestone, accuracy_of
from fedquilt.report.tables import COLUMNS, percent

STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:64em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right}"
    "tr+tr{border-top:1px solid #ddd}img{max-width:100%}"
)


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
        page.write_text(_page(stories, pictures))
    except OSError as problem:
        raise CheckpointError(
            f"the report could not be written to {folder} ({problem})"
        ) from problem
    return page


def _figures(stories: Sequence[Story]) -> list[figures.Figure]:
    scores = {s.name: s.scores for s in stories}
    found = [*figures.by_width(scores), *figures.trade_off(scores)]
    if any(s.progress for s in stories):
        progress = {s.name: s.progress for s in stories}
        found += [figures.by_clock(progress), *figures.by_traffic(progress)]
    if any(s.clients for s in stories):
        found.append(figures.by_client({s.name: s.clients for s in stories}))
    if any(len(s.shares) > 1 for s in stories):
        found.append(figures.by_group({s.name: s.shares for s in stories}))
    found += figures.by_cost({s.name: s.nets for s in stories})
    for story in stories:
        found += figures.by_block(f"Step sizes of {story.name}", "step size", story.steps)
        title = f"Mean absolute weights of {story.name}"
        found += figures.by_block(title, "mean |weight|", story.weights)
        found += figures.by_layer(story.name, story.architectures, story.distances)
    return found


def _slug(title: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in title.lower()).split())


def _page(stories: Sequence[Story], pictures: Sequence[tuple[figures.Figure, Path]]) -> str:
    """The page in one file: pictures are part of it."""
    parts = [f"<!doctype html><meta charset=utf-8><title>Fedquilt</title><style>{STYLE}</style>"]
    for story in stories:
        facts = ", ".join(f"{k} {v}" for k, v in story.about.items())
        parts += [f"<h2>{html.escape(story.name)}</h2><p>{html.escape(facts)}</p>", _table(story)]
        parts.append(_summary(story))
    for figure, path in pictures:
        image, title = base64.b64encode(path.read_bytes()).decode(), html.escape(figure.title)
        parts.append(f'<h3>{title}</h3><img alt="{title}" src="data:image/png;base64,{image}">')
        if figure.caption:
            parts.append(f"<p>{html.escape(figure.caption)}</p>")
    return "\n".join(parts)


def _summary(story: Story) -> str:
    """The worst size and the mean over sizes."""
    known = [a for s in story.scores if (a := accuracy_of(s)) is not None]
    if len(known) < 2 or any(score.robustness for score in story.scores):
        return ""
    return f"<p>worst {percent(min(known))}, mean {percent(sum(known) / len(known))}</p>"


def _table(story: Story) -> str:
    rows = [asdict(score) for score in story.scores]
    names = [n for n in COLUMNS if any(row.get(n) is not None for row in rows)]
    head = "".join(f"<th>{COLUMNS[n][0]}</th>" for n in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{COLUMNS[n][1](row[n])}</td>" for n in names) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
