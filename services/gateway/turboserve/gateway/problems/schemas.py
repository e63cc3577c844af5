"""The body of every error (RFC 9457), and its description in OpenAPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from pydantic import Field

from turboserve import logs
from turboserve.contracts.base import Note
from turboserve.contracts.errors import FieldError, InvalidInputError, TurboServeError
from turboserve.gateway.public import PublicOutput

MEDIA_TYPE = "application/problem+json"


class InvalidField(PublicOutput):
    """One invalid input of a request."""

    field: Note = Field(description="Path of the input.", examples=["metadata.key"])
    message: Note = Field(
        description="What is wrong with it.", examples=["String should have at most 2000 characters"]
    )
    limit: int | float | Note | None = Field(
        None, description="The bound that it violates, if there is one.", examples=[2_000]
    )


class Problem(PublicOutput):
    """An RFC 9457 problem. Programs read `code`, and people read `detail`."""

    type: str = Field(
        description="URN of the kind of problem: `urn:turboserve:problem:` and the code.",
        examples=["urn:turboserve:problem:invalid_input"],
    )
    title: str = Field(description="The kind of problem in words.", examples=["Invalid input"])
    status: int = Field(description="The HTTP status.", examples=[422])
    detail: Note = Field(
        description="What happened.", examples=["prompt: String should have at most 2000 characters"]
    )
    instance: Note = Field(description="Path of the request.", examples=["/v1/sessions"])
    code: str = Field(description="The kind of problem. It does not change.", examples=["invalid_input"])
    field: Note | None = Field(
        None, description="The invalid input, or the object concerned.", examples=["prompt"]
    )
    limit: int | float | Note | None = Field(None, description="The violated bound.", examples=[2_000])
    retry_after_s: float | None = Field(
        None, description="Seconds until a retry makes sense, as in Retry-After.", examples=[2.0]
    )
    request_id: str | None = Field(
        None,
        description="Id of the request, as in the header X-Request-Id and in the logs of all services.",
        examples=["req_01j9x0gq7v5m2k3n4p6r8s9t0a"],
    )
    errors: list[InvalidField] | None = Field(
        None, description="Status 422: all invalid inputs. `field` and `limit` repeat the first of them."
    )


def problem_of(error: TurboServeError, instance: str) -> Problem:
    errors: Sequence[FieldError] = ()
    if isinstance(error, InvalidInputError):
        errors = error.errors or (FieldError(error.field or "body", error.detail, error.limit),)
    return Problem(
        type=f"urn:turboserve:problem:{error.code}",
        title=error.title,
        status=error.status,
        detail=error.detail,
        instance=instance,
        code=error.code,
        field=error.field,
        limit=error.limit,
        retry_after_s=error.retry_after_s,
        request_id=logs.request_id(),
        errors=[InvalidField(**asdict(one)) for one in errors] or None,
    )


_MEANING = {
    401: "No API key, an unknown one or one in the address; a link or ticket that has ended.",
    403: "The API key lacks the scope, the link's role does not suffice, or a page of this origin may not "
    "send the request.",
    404: "Not found, or it belongs to another tenant.",
    409: "The present state does not allow the request.",
    410: "The log no longer keeps this chunk. `limit` is the index of the oldest chunk that it keeps.",
    413: "The body is over the limit.",
    415: "The body is not declared as application/json.",
    416: "The range lies behind the end. `limit` is the size, bytes.",
    421: "The Host header has a name that this gateway does not answer to.",
    422: "An input has the wrong type or lies outside its limit.",
    429: "No free slot, a limit of the tenant or the key, or too many wrong API keys. Retry-After says when "
    "to try again.",
}
_ALWAYS = (400, 421, 500, 503, 504)
_RETRY = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds until a retry makes sense."}}
_CHALLENGE = {"WWW-Authenticate": {"schema": {"type": "string"}, "description": "Bearer."}}
RATES = {
    "RateLimit-Policy": {
        "schema": {"type": "string"},
        "description": "The limits per time that the request counts for, with units `q` in `w` seconds.",
    },
    "RateLimit": {
        "schema": {"type": "string"},
        "description": "Of each, the units `r` that are left, and seconds `t` until all are available.",
    },
}
BODY = (400, 413, 415, 422)
"""Error statuses that a route may answer because of the request's body."""


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI responses for a route's `statuses` and for those that every route may answer."""
    found: dict[int | str, dict[str, Any]] = {}
    for status in (*statuses, *_ALWAYS):
        found[status] = {
            "description": _MEANING.get(status, HTTPStatus(status).phrase),
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        if status in (409, 429, 503, 504):
            found[status]["headers"] = {**_RETRY, **RATES} if status == 429 else _RETRY
        if status == 401:
            found[status]["headers"] = _CHALLENGE
    return found
