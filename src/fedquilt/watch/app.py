"""The server of the page: a document about the chosen runs, read again and again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fedquilt.report.figure_json import encode_figure
from fedquilt.report.page import SCRIPTS, STYLES, plot_figures, render_page, render_parts
from fedquilt.runs.find import FoundRun
from fedquilt.watch.machine import read_machine_load
from fedquilt.watch.reader import RunWatcher
from fedquilt.web.assets import collect_assets

TITLE = "Fedquilt: runs"


def create_app(watcher: RunWatcher) -> Starlette:
    """An ASGI application that shows runs and changes nothing."""
    assets = collect_assets(*STYLES, *SCRIPTS)
    page = render_page((), source="/data", title=TITLE)

    async def show_page(request: Request) -> Response:
        return Response(page, media_type="text/html")

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in assets:
            return JSONResponse({"error": "there is no such file"}, 404)
        body, kind = assets[name]
        return Response(body, media_type=kind)

    def data(request: Request) -> Response:  # not async: it reads files, in a thread
        text = make_document(watcher, request.query_params.getlist("run"))
        tag = f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        return Response(text, media_type="application/json", headers={"etag": tag})

    async def fail(request: Request, problem: Exception) -> Response:
        return JSONResponse({"error": "the server failed; its log says why"}, 500)

    routes = [
        Route("/", show_page),
        Route("/health", health),
        Route("/static/{name}", static),
        Route("/data", data),
    ]
    return Starlette(routes=routes, exception_handlers={Exception: fail})


def make_document(watcher: RunWatcher, names: Sequence[str]) -> str:
    """What the page shows, as JSON: parts of it as HTML, and figures as data."""
    runs = watcher.find_runs()
    shown = watcher.choose(runs, names)
    reports = [watcher.read(run) for run in shown]
    parts = {**_render_choice(runs, shown), **render_parts(reports)}
    figures = [encode_figure(figure) for figure in plot_figures(reports)]
    return json.dumps({"parts": parts, "figures": figures})


def _render_choice(runs: Sequence[FoundRun], shown: Sequence[FoundRun]) -> dict[str, str]:
    """The list of runs to choose from, and the load of the machine."""
    environment = Environment(
        loader=PackageLoader("fedquilt.watch"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = [run.name for run in shown]
    links = [(run, run.name in names, _toggle(names, run.name)) for run in runs]
    choice = environment.get_template("choice.html.jinja").render(links=links)
    machine = environment.get_template("machine.html.jinja").render(load=read_machine_load())
    return {"choice": choice, "machine": machine}


def _toggle(names: Sequence[str], name: str) -> list[str]:
    """The runs that are shown after one of them was clicked."""
    rest = [other for other in names if other != name]
    return rest if len(rest) < len(names) and rest else [*rest, name]
