"""The OpenAPI description of the server, and a page of it without scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedquilt.serve.model import ServedModel
from fedquilt.serve.wish import Wish

SENTENCE: dict[str, Any] = {
    "content": {
        "application/json": {
            "schema": {"type": "object", "properties": {"error": {"type": "string"}}}
        }
    }
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, **SENTENCE}
    for status, text in {
        400: "the body cannot be read",
        408: "the body did not arrive in time",
        413: "the body is too large",
        415: "the body is of another type",
        422: "the request does not fit the model",
        503: "the server is busy",
    }.items()
}
ANSWER = {
    "size": {"type": "number"},
    "robustness": {"type": ["number", "null"]},
    "params": {"type": "integer"},
    "macs": {"type": "integer"},
    "ms": {"type": "number", "description": "measured for one example when the server started"},
    "batch": {
        "type": "object",
        "description": "the batch that this request was part of",
        "properties": {"examples": {"type": "integer"}, "ms": {"type": "number"}},
    },
    "task": {"type": "string"},
    "predictions": {"type": "array", "items": {"type": "object"}},
}


def describe_predict(model: ServedModel) -> dict[str, Any]:
    """What ``/predict`` takes and gives, for the OpenAPI document."""
    properties = Wish.model_json_schema()["properties"]
    parameters = [
        {
            "name": name,
            "in": "query",
            "required": False,
            "description": schema["description"],
            "schema": next(s for s in schema["anyOf"] if s["type"] != "null"),
        }
        for name, schema in properties.items()
        if name != "robustness" or model.has_robustness
    ]
    return {
        "parameters": parameters,
        "requestBody": {"required": True, "content": _describe_bodies(model)},
        "responses": {
            "200": {
                "description": "one prediction for each example",
                "content": {
                    "application/json": {"schema": {"type": "object", "properties": ANSWER}}
                },
            }
        },
    }


def _describe_bodies(model: ServedModel) -> dict[str, Any]:
    shapes = " and ".join(str(list(spec.shape[1:])) for spec in model.inputs)
    kind = model.reader.kind
    inputs = {"description": f"Numbers of shape {shapes} as the model takes them, or several."}
    bodies = {"inputs": inputs}
    if kind == "image":
        bodies["pixels"] = {"description": "Pixels from 0 to 255, preprocessed as in training."}
    if kind == "text":
        bodies["text"] = {"description": "A text, or a list of texts."}
    binary = {"schema": {"type": "string", "format": "binary"}}
    content: dict[str, Any] = {
        "application/json": {
            "schema": {"type": "object", "maxProperties": 1, "properties": bodies}
        },
        "application/x-npy": binary,
    }
    if kind == "image":
        content |= {"image/png": binary, "image/jpeg": binary}
    if kind == "text":
        content["text/plain"] = {"schema": {"type": "string"}}
    return content


def render_api_page(document: Mapping[str, Any]) -> str:
    """The document as a page for people."""
    environment = Environment(
        loader=PackageLoader("fedquilt.serve"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("api.html.jinja").render(document=document)
