"""Exception handlers that turn every exception into a problem."""

from __future__ import annotations

import math
import re

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from turboserve.contracts.errors import NotFoundError, TurboServeError
from turboserve.contracts.sessions import RateLeft
from turboserve.gateway.problems.errors import MalformedRequestError, MethodNotAllowedError
from turboserve.gateway.problems.schemas import MEDIA_TYPE, problem_of
from turboserve.gateway.problems.validation import invalid_input
from turboserve.gateway.public import rate_headers, takes_head

PATH_SHOWN = 200
WINDOWS = {"minute": 60.0, "day": 86_400.0}
"""Seconds of a limit, by the end of its name."""


def problem_response(
    error: TurboServeError, instance: str, headers: dict[str, str] | None = None
) -> Response:
    """Return the error as `application/problem+json`, with Retry-After if a retry makes sense."""
    headers = dict(headers or {})
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        per_time = WINDOWS.get((error.field or "").rpartition("_per_")[2])
        if per_time is not None and isinstance(error.limit, int | float):
            rate = RateLeft(
                name=error.field or "",
                limit=error.limit,
                window_s=per_time,
                left=0,
                reset_s=error.retry_after_s,
            )
            headers |= rate_headers([rate])
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 416:
        headers["Content-Range"] = f"bytes */{error.limit}"
    if error.status == 426:
        headers |= {"Upgrade": "websocket", "Connection": "Upgrade"}
    body = problem_of(error, instance).model_dump_json(exclude_none=True)
    return Response(body, error.status, headers, media_type=MEDIA_TYPE)


def install(app: FastAPI) -> None:
    @app.exception_handler(TurboServeError)
    async def typed(request: Request, error: TurboServeError) -> Response:
        return problem_response(error, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        problem = invalid_input(error.errors(), skip=("body", "query", "path", "header"))
        return problem_response(problem, request.url.path)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        problem: TurboServeError
        if error.status_code == 404:
            problem = NotFoundError(f"there is nothing at {path[:PATH_SHOWN]}", field="path")
        elif error.status_code == 405:
            allowed = ", ".join(sorted(_methods(request)))
            problem = MethodNotAllowedError(
                f"{path} does not take {request.method}", field="method", limit=allowed
            )
            return problem_response(problem, path, {"Allow": allowed})
        else:
            problem = MalformedRequestError(str(error.detail), field="body")
        return problem_response(problem, path, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def crash(request: Request, _error: Exception) -> Response:
        return problem_response(TurboServeError("something in the gateway broke"), request.url.path)


def _methods(request: Request) -> set[str]:
    # Starlette names only the methods of the first route on this path, which may have several routes.
    found: set[str] = set()
    for path, operations in request.app.openapi()["paths"].items():
        pattern = "".join(
            "[^/]+" if part.startswith("{") else re.escape(part) for part in re.split(r"(\{[^}]*\})", path)
        )
        if re.fullmatch(pattern, request.url.path):
            found |= {method.upper() for method in operations}
    found = found or {"GET"}
    return found | {"HEAD"} if "GET" in found and takes_head(request.url.path) else found
