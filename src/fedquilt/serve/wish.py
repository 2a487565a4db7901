"""What a request asks of the model: a size, or limits on what it costs."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedquilt.serve.errors import RequestError


class Wish(BaseModel):
    """The largest offered size within all limits; without any, the largest of all."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: float | None = Field(None, gt=0, le=1, description="At most this size, in (0, 1].")
    robustness: float | None = Field(
        None, ge=0, le=1, description="From 0 (accurate, the default) to 1 (robust)."
    )
    latency: float | None = Field(
        None, gt=0, description="At most this many milliseconds, as measured for one example."
    )
    params: int | None = Field(None, gt=0, description="At most this many parameters.")
    macs: int | None = Field(None, gt=0, description="At most this many MACs per example.")


ANY = Wish.model_construct(size=None, robustness=None, latency=None, params=None, macs=None)


def parse_wish(query: Mapping[str, str]) -> Wish:
    """The wish in the query of an address.

    >>> parse_wish({"size": "0.5"}).size
    0.5
    """
    if not query:
        return ANY
    try:
        return Wish.model_validate({k: v for k, v in query.items() if v != ""})
    except ValidationError as problem:
        first = problem.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            known = ", ".join(Wish.model_fields)
            raise RequestError(
                422, f"'{name[:40]}' is not known; choose one of: {known}"
            ) from problem
        message = first["msg"].lower()
        given = str(first["input"])[:40]
        raise RequestError(422, f"'{name}': {message}, got '{given}'") from problem
