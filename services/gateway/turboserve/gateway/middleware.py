"""The application and its middleware: what happens to each request before its endpoint and after it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from urllib.parse import unquote_plus

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from turboserve.contracts.errors import BodyTooLargeError, TurboServeError
from turboserve.gateway import metrics
from turboserve.gateway.auth.access import Authority, HostRules, OriginRules
from turboserve.gateway.auth.grants import QueryCredentials
from turboserve.gateway.auth.middleware import QUERY_CREDENTIALS, refuse
from turboserve.gateway.context import RequestLog
from turboserve.gateway.problems.errors import (
    ForbiddenOriginError,
    HostNotAllowedError,
    MalformedRequestError,
    UnsupportedMediaTypeError,
)
from turboserve.gateway.problems.handlers import problem_response
from turboserve.gateway.public import is_whep, takes_head
from turboserve.telemetry_names import HEADER

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
SHOWN = 200
EMBED = "/embed/"
JSON = "application/json"
SDP = "application/sdp"
SDP_FRAGMENT = "application/trickle-ice-sdpfrag"
DISCARD_BYTES = 8 << 20
DISCARD_S = 2.0


_HEAD = "turboserve.head"
"""Key of the ASGI scope: the request is HEAD, although its method reads GET."""


class HeadAsGet:
    """ASGI middleware: handles HEAD like GET. The server omits the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD" and takes_head(scope["path"]):
            scope = {**scope, "method": "GET", _HEAD: True}
        await self._app(scope, receive, send)


def is_head(scope: Scope) -> bool:
    """Whether the client sent HEAD. An answer that is long to make then needs no body."""
    return bool(scope.get(_HEAD))


class Application(FastAPI):
    """FastAPI that removes credentials from the query first: its telemetry runs before any middleware."""

    def build_middleware_stack(self) -> ASGIApp:
        """Put the request's id around everything, also around the answer to an exception."""
        stack = super().build_middleware_stack()
        return RequestLog(stack, self.state.gateway.settings.access_log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            scope = _without_credentials(scope)
        await super().__call__(scope, receive, send)


def _without_credentials(scope: Scope) -> Scope:
    """Return the scope with `ticket` and `access_token` moved from its query to what authentication reads.

    Other code may record the URL of a request: FastAPI puts the query into every span.
    """
    kept, ticket, has_key = [], None, False
    for part in scope.get("query_string", b"").split(b"&"):
        name, _, value = part.decode("latin-1").partition("=")
        match unquote_plus(name):
            case "ticket":
                ticket = unquote_plus(value) or ticket
            case "access_token":
                has_key = True
            case _:
                kept.append(part)
    found = QueryCredentials(ticket, has_key)
    return {**scope, "query_string": b"&".join(kept), QUERY_CREDENTIALS: found}


class BrowserHeaders:
    """ASGI middleware: adds security headers for browsers to every HTTP response.

    Browsers then trust the Content-Type, show no response in a frame, and give no response to a page of
    another origin, not even as an image or a video, unless responses are `embeddable`. With `framed`, the
    policy of the player `/embed/…` alone decides about its frames.
    """

    def __init__(self, app: ASGIApp, embeddable: bool, framed: bool = False) -> None:
        self._app, self._framed = app, framed
        self._headers = [
            (b"x-content-type-options", b"nosniff"),
            (b"x-frame-options", b"DENY"),
            (b"cross-origin-resource-policy", b"cross-origin" if embeddable else b"same-origin"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = self._headers
                if self._framed and scope["path"].startswith(EMBED):
                    # The header names no origins. Browsers would obey it although there is the policy.
                    headers = [header for header in headers if header[0] != b"x-frame-options"]
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        await self._app(scope, receive, marked if scope["type"] == "http" else send)


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
            metrics.foreign_requests.add(1, {HEADER: "host"})
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
        metrics.foreign_requests.add(1, {HEADER: "origin"})
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


class JsonOnly:
    """ASGI middleware: refuses a request that changes something if its body is not declared as JSON.

    Browsers send forms and text to any site without a preflight. They send JSON only after a preflight, and
    SDP, which opens a WebRTC stream.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in SAFE_METHODS:
            headers = Headers(scope=scope)
            kinds = headers.getlist("content-type")
            sdp = is_whep(scope["path"])
            accepted = _is_sdp if sdp else _is_json
            if (kinds or _has_body(headers)) and not (len(kinds) == 1 and accepted(kinds[0])):
                declared, wanted = ", ".join(kinds)[:SHOWN] or "nothing", SDP if sdp else JSON
                error = UnsupportedMediaTypeError(
                    f"the body is declared as {declared}: declare {wanted}, or send no body",
                    field="Content-Type",
                    limit=wanted,
                )
                await problem_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0").strip() != "0" or "transfer-encoding" in headers


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == JSON or (kind.startswith("application/") and kind.endswith("+json"))


def _is_sdp(content_type: str) -> bool:
    # Trickled candidates have a type of their own. Their method is refused by the route, as WHEP has it.
    return content_type.partition(";")[0].strip().lower() in (SDP, SDP_FRAGMENT)


class BodyLimit:
    """ASGI middleware: reads bodies of at most `limit_bytes`, chunked or not, and answers larger ones 413."""

    def __init__(self, app: ASGIApp, limit_bytes: int) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._limit_bytes:
            if b"expect" not in headers:  # A client that sends `Expect` waits with its body.
                await _discard(receive)
            await self._refuse(scope, receive, send)
            return
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if len(body) > self._limit_bytes:
                if message.get("more_body", False):
                    await _discard(receive)
                await self._refuse(scope, receive, send)
                return
            if not message.get("more_body", False):
                break
        whole: Message | None = {"type": "http.request", "body": bytes(body), "more_body": False}

        async def replay() -> Message:
            nonlocal whole
            if whole is None:
                return await receive()
            first, whole = whole, None
            return first

        await self._app(scope, replay, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = BodyTooLargeError(
            f"the body is over {self._limit_bytes} bytes", field="body", limit=self._limit_bytes
        )
        # The body may not have been read to its end, so the connection cannot carry another request.
        await problem_response(error, scope["path"], {"Connection": "close"})(scope, receive, send)


async def _discard(receive: Receive) -> None:
    """Read and discard more of the body, at most `DISCARD_BYTES` and for at most `DISCARD_S`.

    Closing a connection with unread bytes resets it, and the client loses the answer.
    """
    seen = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while seen < DISCARD_BYTES:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                seen += len(message.get("body", b""))
