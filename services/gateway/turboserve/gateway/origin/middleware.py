"""Middleware that checks Host and Origin before anything else of a request."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from turboserve.contracts.errors import TurboServeError
from turboserve.gateway import metrics
from turboserve.gateway.auth.middleware import refuse
from turboserve.gateway.origin.rules import Authority, HostRules, OriginRules
from turboserve.gateway.problems.errors import (
    ForbiddenOriginError,
    HostNotAllowedError,
    MalformedRequestError,
)
from turboserve.gateway.problems.handlers import problem_response

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
SHOWN = 200


class OriginCheck:
    """ASGI middleware: refuses requests for foreign names, and changes and WebSockets of foreign pages."""

    def __init__(self, app: ASGIApp, hosts: HostRules, origins: OriginRules) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            _check_target(scope["path"])
            authority = self._check_host(headers.getlist("host"))
        except TurboServeError as error:
            await _answer(error, scope, receive, send)
            return
        if scope["type"] == "websocket" or scope["method"] not in SAFE_METHODS:
            try:
                self._check_origin(authority, headers)
            except ForbiddenOriginError as error:
                if scope["type"] == "http":
                    await _answer(error, scope, receive, send)
                    return
                refuse(scope, error)
        await self._app(scope, receive, send)

    def _check_host(self, values: list[str]) -> Authority:
        if len(values) != 1:
            raise MalformedRequestError(f"{len(values)} Host headers: send one", field="Host", limit=1)
        try:
            authority = Authority.parse(values[0])
        except ValueError:
            raise MalformedRequestError("Host is not host[:port]", field="Host") from None
        if not self._hosts.allows(authority):
            metrics.foreign_requests.add(1, {"header": "host"})
            raise HostNotAllowedError(
                f"this server does not accept the host name {authority.host[:SHOWN]}: "
                "TURBOSERVE_ALLOWED_HOSTS lists the accepted names",
                field="Host",
            )
        return authority

    def _check_origin(self, authority: Authority, headers: Headers) -> None:
        origins, site = headers.getlist("origin"), headers.get("sec-fetch-site")
        if self._origins.allows(authority, origins, site):
            return
        metrics.foreign_requests.add(1, {"header": "origin"})
        page = f"pages of {', '.join(origins)[:SHOWN]}" if origins else f"{str(site)[:SHOWN]} pages"
        raise ForbiddenOriginError(
            f"{page} may not send changes or open streams: TURBOSERVE_CORS_ORIGINS lists the allowed origins",
            field="Origin" if origins else "Sec-Fetch-Site",
        )


def _check_target(path: str) -> None:
    # An absolute URL names its own host, which would take precedence over the header.
    if not path.startswith("/") and path != "*":
        raise MalformedRequestError("the request's target is not a path", field="target")


async def _answer(error: TurboServeError, scope: Scope, receive: Receive, send: Send) -> None:
    response = problem_response(error, scope["path"])
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).send_denial_response(response)
    else:
        await response(scope, receive, send)
