"""Middleware that accepts only bodies declared as JSON. A form of a foreign page cannot declare JSON."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from turboserve.gateway.origin.middleware import SAFE_METHODS
from turboserve.gateway.problems.errors import UnsupportedMediaTypeError
from turboserve.gateway.problems.handlers import problem_response

JSON = "application/json"
SHOWN = 100


class JsonOnly:
    """ASGI middleware: refuses a request that changes something if its body is not declared as JSON.

    Browsers send forms and text to any site without a preflight. They send JSON only after a preflight.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in SAFE_METHODS:
            headers = Headers(scope=scope)
            kinds = headers.getlist("content-type")
            if (kinds or _has_body(headers)) and not (len(kinds) == 1 and _is_json(kinds[0])):
                declared = ", ".join(kinds)[:SHOWN] or "nothing"
                error = UnsupportedMediaTypeError(
                    f"the body is declared as {declared}: declare {JSON}, or send no body",
                    field="Content-Type",
                    limit=JSON,
                )
                await problem_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0").strip() != "0" or "transfer-encoding" in headers


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == JSON or (kind.startswith("application/") and kind.endswith("+json"))
