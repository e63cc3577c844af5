"""Middleware that authenticates a request before any route sees its path, query or body."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated

from fastapi import Depends, Query, Security
from fastapi.params import Security as SecurityParameter
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from turboserve import logs
from turboserve.clock import Clock
from turboserve.contracts.errors import TurboServeError, UnauthorizedError
from turboserve.contracts.keys import Scope as KeyScope
from turboserve.gateway import metrics
from turboserve.gateway.auth.access import Identity, Keys, bearer
from turboserve.gateway.auth.throttle import FailureThrottle, LogBudget, network_of
from turboserve.gateway.problems.errors import MissingScopeError, TooManyWrongKeysError
from turboserve.gateway.problems.handlers import problem_response
from turboserve.gateway.public import takes_head
from turboserve.telemetry_names import REASON

REVOKED_CODE = 4401
CHECK_EVERY_S = 0.5
CLOSE_S = 1.0
LOG_LINES_PER_MINUTE = 20

log = logs.get("auth")
ENDED = "the API key was revoked or has expired"
_CLOSE = {"type": "websocket.close", "code": REVOKED_CODE, "reason": ENDED}
_ADMISSION = "turboserve.admission"
"""Key of the ASGI scope. The value is an Identity, or the error that a WebSocket's endpoint sends."""
QUERY_KEY = "turboserve.access_token"
"""Key of the ASGI scope. The value is the API key that the query contained, or None."""
_scheme = HTTPBearer(
    auto_error=False, scheme_name="apiKey", description="An API key. Required if the gateway has keys."
)


class Authenticator:
    """Identifies requests by their key. Answers `failures_per_minute` wrong keys of one address with 401."""

    def __init__(self, keys: Keys, clock: Clock, failures_per_minute: int) -> None:
        self._keys = keys
        self._clock = clock
        self._limit = failures_per_minute
        self._throttle = FailureThrottle(failures_per_minute)
        self._log_budget = LogBudget(LOG_LINES_PER_MINUTE)

    def identify(self, key: str | None, address: str | None) -> Identity:
        """Return the identity that `key` belongs to.

        Raises:
            UnauthorizedError: There is no key, or the key is unknown.
            TooManyWrongKeysError: The address has sent too many wrong keys. A known key still passes.
        """
        identity = self._keys.identify(key)
        if identity is not None:
            return identity
        if not key:
            # Counted, not throttled: a missing key is no guess. A page sends none before its user enters one.
            metrics.keys_refused.add(1, {REASON: "missing"})
            raise UnauthorizedError(
                "an API key is needed: Authorization: Bearer KEY, or for streams ?access_token=KEY",
                field="Authorization",
            )
        network = network_of(address)
        now_s = self._clock.monotonic()
        wait_s = self._throttle.failed(network, now_s)
        reason = "unknown" if wait_s is None else "throttled"
        metrics.keys_refused.add(1, {REASON: reason})
        left_out = self._log_budget.take(now_s)
        if left_out is not None:
            log.warning("api key refused", address=network, reason=reason, others_not_logged=left_out)
        if wait_s is None:
            raise UnauthorizedError("unknown API key", field="Authorization")
        raise TooManyWrongKeysError(
            f"more than {self._limit} wrong API keys a minute came from this address",
            field="Authorization",
            limit=self._limit,
            retry_after_s=round(wait_s, 1),
        )


class Authenticate:
    """ASGI middleware: gives every request under /v1 an identity, or answers it with a problem.

    Browsers do not show a refused handshake. So a WebSocket passes with its error, and the endpoint accepts
    it, sends the error and closes. A stream ends when the key that opened it is revoked or expires.
    """

    def __init__(self, app: ASGIApp, authenticator: Authenticator, keys: Keys) -> None:
        self._app = app
        self._authenticator = authenticator
        self._keys = keys
        self._streams: dict[_RevocableStream, None] = {}
        self._checking: asyncio.Task[None] | None = None
        """Checks all streams: a task for each of them would cost more."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not f"{scope['path']}/".startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        try:
            client = scope.get("client")
            identity = self._authenticator.identify(_key(scope), str(client[0]) if client else None)
        except TurboServeError as error:
            if scope["type"] == "http":
                await problem_response(error, scope["path"])(scope, receive, send)
                return
            refuse(scope, error)
            await self._app(scope, receive, send)
            return
        scope.setdefault(_ADMISSION, identity)
        if takes_head(scope["path"]):
            await self._app(scope, receive, send)
            return
        if not self._keys:
            await self._app(scope, receive, send)
            return
        stream = _RevocableStream(self._keys, identity, scope, receive, send)
        self._streams[stream] = None
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check(), name="keys of streams")
        try:
            await stream.run(self._app)
        finally:
            del self._streams[stream]

    async def _check(self) -> None:
        """End the streams of keys that are not valid any more, also those over which nothing is sent."""
        while self._streams:
            await asyncio.sleep(CHECK_EVERY_S)
            for stream in self._streams:
                stream.check()


def refuse(scope: Scope, error: TurboServeError) -> None:
    """Make the endpoint of a WebSocket refuse the connection with `error`. The first error counts."""
    scope.setdefault(_ADMISSION, error)


def admitted(scope: Scope) -> Identity:
    """Return the sender's identity. Raises the error with which a WebSocket is to be refused."""
    found = scope.get(_ADMISSION)
    if isinstance(found, TurboServeError):
        raise found
    if not isinstance(found, Identity):
        raise UnauthorizedError("this request was not authenticated", field="Authorization")
    return found


class _RevocableStream:
    """The channel of a stream. When its key ends, the application gets a disconnect and cannot send.

    Once the application has returned, the client gets the end of the body, or the close code 4401.
    """

    def __init__(self, keys: Keys, identity: Identity, scope: Scope, receive: Receive, send: Send) -> None:
        self._keys, self._identity = keys, identity
        self._scope, self._receive, self._send = scope, receive, send
        self._websocket = scope["type"] == "websocket"
        self._waiting: asyncio.Timeout | None = None
        self._revoked = False
        self._begun, self._over = False, False
        """Whether the response or handshake was answered. Whether the client has left, or has everything."""

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self._scope, self._next, self._pass)
        except (OSError, WebSocketDisconnect):
            if not self._revoked:
                raise
        if self._revoked and not self._over:
            # uvicorn raises RuntimeError for a close after the other side's.
            with suppress(OSError, RuntimeError):
                await self._close()

    def check(self) -> bool:
        """Return whether the key is still valid. If not, end the stream."""
        if not self._revoked and not self._keys.holds(self._identity):
            self._revoked = True
            if self._waiting is not None:
                self._waiting.reschedule(asyncio.get_running_loop().time())
        return not self._revoked

    async def _next(self) -> Message:
        if not self._begun or self.check():
            try:
                async with asyncio.timeout(None) as self._waiting:
                    try:
                        message = await self._receive()
                    finally:
                        self._waiting = None
                self._over |= message["type"] in ("http.disconnect", "websocket.disconnect")
                if self.check() or not self._begun:
                    return message
            except TimeoutError:
                if not self._revoked:
                    raise
        return _CLOSE | {"type": "websocket.disconnect"} if self._websocket else {"type": "http.disconnect"}

    async def _pass(self, message: Message) -> None:
        # Browsers do not show a refused handshake, so it is accepted and then closed.
        if message["type"] != "websocket.accept" and not self.check():
            raise WebSocketDisconnect(REVOKED_CODE, ENDED) if self._websocket else OSError(ENDED)
        self._begun = True
        if message["type"] in ("websocket.close", "http.response.body"):
            self._over = not message.get("more_body", False)
        await self._send(message)

    async def _close(self) -> None:
        if self._websocket:
            async with asyncio.timeout(CLOSE_S):
                await self._send({**_CLOSE})
        elif self._begun:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            error = UnauthorizedError(ENDED, field="Authorization")
            await problem_response(error, self._scope["path"])(self._scope, self._receive, self._send)


def _key(scope: Scope) -> str | None:
    key = bearer(Headers(scope=scope).get("authorization"))
    # Only for streams, where browsers cannot set headers: URLs end up in histories and in logs of proxies.
    if key is None and not takes_head(scope["path"]):
        key = scope.get(QUERY_KEY)
    return key


def _identity(
    connection: HTTPConnection,
    _credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_scheme)],
) -> Identity:
    return admitted(connection.scope)


def check_scope(
    needed: SecurityScopes,
    connection: HTTPConnection,
    _credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_scheme)],
) -> None:
    """Check that the sender's key has the scopes that the route declares.

    Raises MissingScopeError. A WebSocket passes with the error, as without a key.
    """
    scope = connection.scope
    if scope["type"] == "websocket" and isinstance(scope.get(_ADMISSION), TurboServeError):
        return
    identity = admitted(scope)
    try:
        for name in needed.scopes:
            identity.require(KeyScope(name))
    except MissingScopeError as error:
        if scope["type"] != "websocket":
            raise
        scope[_ADMISSION] = error


def needs(scope: KeyScope) -> SecurityParameter:
    """Return the dependency by which a route declares the scope that it needs. Every route has one.

    A sender without the scope gets 403 before its body is validated.
    """
    found: SecurityParameter = Security(check_scope, scopes=[scope.value])
    return found


def _tenant(identity: Annotated[Identity, Depends(_identity)]) -> str:
    return identity.tenant


def _stream_tenant(
    identity: Annotated[Identity, Depends(_identity)],
    # The middleware reads this parameter. It is declared here for OpenAPI.
    _access_token: Annotated[
        str | None,
        Query(
            alias="access_token",
            description="The API key, for clients that cannot set the header Authorization.",
            examples=["KEY"],
        ),
    ] = None,
) -> str:
    return identity.tenant


Caller = Annotated[Identity, Depends(_identity)]
"""The sender's identity, from the Authorization header."""
Tenant = Annotated[str, Depends(_tenant)]
"""The sender's tenant, from the Authorization header."""
StreamTenant = Annotated[str, Depends(_stream_tenant)]
"""The sender's tenant, from the Authorization header or `?access_token=`."""
