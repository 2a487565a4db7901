"""The application: predictions, what is known about the model, and a page to try it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from fedquilt.serve.api_page import ERRORS, describe_predict, render_api_page
from fedquilt.serve.batching import Batcher, BatchResult
from fedquilt.serve.errors import RequestError
from fedquilt.serve.limits import Limits
from fedquilt.serve.model import ServedModel, SizedModel
from fedquilt.serve.tasks import is_finite
from fedquilt.serve.wish import Wish, parse_wish
from fedquilt.version import __version__
from fedquilt.web.assets import collect_assets

PAGE = "try.html"
ASSETS = (
    ("fedquilt.web", "theme.css"),
    ("fedquilt.web", "theme.js"),
    ("fedquilt.serve", "try.css"),
    ("fedquilt.serve", "try.js"),
    ("fedquilt.serve", PAGE),
)
DESCRIPTION = "One federated model at every size: choose a size, or say what it may cost."


def create_app(model: ServedModel, limits: Limits | None = None) -> FastAPI:
    """An ASGI application that answers with a model."""
    limits = limits or Limits()
    batcher = Batcher(limits, joins_requests=not model.needs_batches)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        batcher.close()

    app = FastAPI(
        title=f"Fedquilt: {model.name}",
        description=DESCRIPTION,
        version=__version__,
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
        lifespan=lifespan,
    )
    _add_errors(app)
    _add_predict(app, model, batcher, limits)
    _add_facts(app, model)
    _add_pages(app)
    return app


def _add_predict(app: FastAPI, model: ServedModel, batcher: Batcher, limits: Limits) -> None:
    async def predict(request: Request) -> Response:
        """Predicts with the largest size within the limits that are given."""
        with batcher.expect():
            wish = parse_wish(request.query_params)
            sized = model.choose(wish)
            body = await read_body(request, limits)
            inputs = model.reader.read(body, request.headers.get("content-type", ""), limits)
        key = (sized.size, wish.robustness)
        result = await batcher.compute(key, partial(sized, wish.robustness), inputs)
        return Response(_format_answer(model, sized, wish, result), media_type="application/json")

    app.post(
        "/predict",
        response_class=JSONResponse,
        responses=ERRORS,
        openapi_extra=describe_predict(model),
    )(predict)


def _add_facts(app: FastAPI, model: ServedModel) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the server answers."""
        return {"status": "ok"}

    facts = model.describe()

    @app.get("/model")
    async def describe_model() -> dict[str, Any]:
        """The sizes with their parameters, MACs and measured milliseconds; input and task."""
        return facts


def _add_pages(app: FastAPI) -> None:
    assets = collect_assets(*ASSETS)

    def respond(name: str) -> Response:
        body, kind = assets[name]
        return Response(body, media_type=kind)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return respond(PAGE)

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in assets:
            raise HTTPException(404)
        return respond(name)

    @app.get("/docs", include_in_schema=False)
    async def api_page() -> Response:
        return Response(render_api_page(app.openapi()), media_type="text/html; charset=utf-8")


def _add_errors(app: FastAPI) -> None:
    """Every error is one sentence in JSON, and none names a path of the server."""

    async def refuse(request: Request, problem: Exception) -> Response:
        assert isinstance(problem, RequestError)
        headers = {"connection": "close"} if problem.status in (408, 413) else {}
        if problem.status == 503:
            headers["retry-after"] = "1"
        return JSONResponse({"error": str(problem)}, problem.status, headers)

    async def refuse_http(request: Request, problem: Exception) -> Response:
        assert isinstance(problem, HTTPException)
        sentences = {404: "there is no such page; see /docs", 405: "another method is needed"}
        sentence = sentences.get(problem.status_code, "the request cannot be answered")
        return JSONResponse({"error": sentence}, problem.status_code, problem.headers)

    app.add_exception_handler(RequestError, refuse)
    app.add_exception_handler(HTTPException, refuse_http)

    async def hide(request: Request, problem: Exception) -> Response:
        return JSONResponse({"error": "the server failed; its log says why"}, 500)

    app.add_exception_handler(Exception, hide)


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body of a request, if it is not too large and arrives in time."""
    declared = request.headers.get("content-length", "0")
    if not declared.isdigit() or int(declared) > limits.body_bytes:
        raise RequestError(413, f"a request has at most {limits.body_bytes} bytes")
    chunks, size = [], 0
    try:
        with anyio.fail_after(limits.seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limits.body_bytes:
                    raise RequestError(413, f"a request has at most {limits.body_bytes} bytes")
                chunks.append(chunk)
    except ClientDisconnect:
        raise RequestError(400, "the request ended before it was complete") from None
    except TimeoutError:
        raise RequestError(
            408, f"a request must arrive within {limits.seconds:g} seconds"
        ) from None
    return b"".join(chunks)


def _format_answer(model: ServedModel, sized: SizedModel, wish: Wish, result: BatchResult) -> bytes:
    if not is_finite(result.outputs):
        raise RequestError(422, "the model's answer is not finite; check the inputs")
    answer = {
        "size": sized.size,
        "robustness": (wish.robustness or 0.0) if model.has_robustness else None,
        "params": sized.params,
        "macs": sized.macs,
        "ms": sized.milliseconds,
        "batch": {"examples": result.batch_size, "ms": 1000 * result.seconds},
        "task": model.task.kind,
        "predictions": model.task.answer(result.outputs),
    }
    return json.dumps(answer, allow_nan=False, separators=(",", ":")).encode()
