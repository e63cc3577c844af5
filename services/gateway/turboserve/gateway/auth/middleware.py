"""Middleware that authenticates a request before any route sees its path, query or body."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Query, Security
from fastapi.params import Security as SecurityParameter
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from turboserve import logs
from turboserve.clock import Clock
from turboserve.contracts.errors import SessionNotFoundError, TurboServeError, UnauthorizedError
from turboserve.contracts.keys import Scope as KeyScope
from turboserve.contracts.links import Role
from turboserve.gateway import metrics
from turboserve.gateway.auth.access import Identity, Keys, bearer
from turboserve.gateway.auth.grants import ROLE_SCOPES, Grant, GrantKind, QueryCredentials, kind_of
from turboserve.gateway.auth.revocable import ENDED, RevocableStream
from turboserve.gateway.auth.signing import GrantSigner
from turboserve.gateway.auth.throttle import FailureThrottle, LogBudget, network_of
from turboserve.gateway.problems.errors import (
    KeyInAddressError,
    LinkRoleError,
    MissingScopeError,
    TooManyWrongKeysError,
)
from turboserve.gateway.problems.handlers import problem_response
from turboserve.gateway.public import takes_head, takes_ticket
from turboserve.telemetry_names import REASON

CHECK_EVERY_S = 0.5
LOG_LINES_PER_MINUTE = 20

log = logs.get("auth")
_ADMISSION = "turboserve.admission"
"""Key of the ASGI scope. The value is an Identity, or the error that a WebSocket's endpoint sends."""
QUERY_CREDENTIALS = "turboserve.query_credentials"
"""Key of the ASGI scope. The value is a QueryCredentials."""
_scheme = HTTPBearer(
    auto_error=False,
    scheme_name="apiKey",
    description="An API key, or a link to one session. Required if the gateway has keys.",
)


class Authenticator:
    """Identifies requests by their key, link or ticket.

    Answers `failures_per_minute` wrong ones of one address with 401, and further ones with 429.
    """

    def __init__(self, keys: Keys, signer: GrantSigner, clock: Clock, failures_per_minute: int) -> None:
        self._keys, self._signer = keys, signer
        self._clock = clock
        self._limit = failures_per_minute
        self._throttle = FailureThrottle(failures_per_minute)
        self._log_budget = LogBudget(LOG_LINES_PER_MINUTE)

    async def identify(self, key: str | None, ticket: str | None, address: str | None) -> Identity:
        """Return the identity that `key`, an API key or a link, or without one `ticket` belongs to.

        Raises:
            UnauthorizedError: There is no key, the key is unknown, or the link or ticket has ended.
            TooManyWrongKeysError: The address has sent too many wrong keys. A known key still passes.
            KeysUnreadError: The keys or signing keys are not read yet.
        """
        if key is None and ticket is not None:
            identity = self._granted(await self._signer.check(GrantKind.TICKET, ticket))
        elif key is not None and kind_of(key) is GrantKind.LINK:
            identity = self._granted(await self._signer.check(GrantKind.LINK, key))
        else:
            identity = self._keys.identify(key)
        if identity is not None:
            return identity
        if not key and not ticket:
            # Counted, not throttled: a missing key is no guess. A page sends none before its user enters one.
            metrics.keys_refused.add(1, {REASON: "missing"})
            raise UnauthorizedError(
                "an API key is needed: Authorization: Bearer KEY, or for streams ?ticket=TICKET",
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
            raise UnauthorizedError("unknown API key, link or ticket", field="Authorization")
        raise TooManyWrongKeysError(
            f"more than {self._limit} wrong API keys a minute came from this address",
            field="Authorization",
            limit=self._limit,
            retry_after_s=round(wait_s, 1),
        )

    def holds(self, identity: Identity) -> bool:
        """Return whether the key or link of `identity` is still valid and has the same rights."""
        grant = identity.grant
        if grant is None:
            return self._keys.holds(identity)
        return self._signer.holds(grant) and self._has_key(grant)

    def _granted(self, grant: Grant | None) -> Identity | None:
        if grant is None:
            return None
        if not self._has_key(grant):
            raise UnauthorizedError(ENDED, field="Authorization")
        return Identity(grant.tenant, ROLE_SCOPES[grant.role], grant.key, grant)

    def _has_key(self, grant: Grant) -> bool:
        """Whether the API key with which a ticket was made is valid. A link outlasts its creator's key."""
        if grant.link is not None:
            return True
        if grant.key is None:
            return not self._keys
        return self._keys.allows(grant.key, grant.tenant, ROLE_SCOPES[grant.role])


class Authenticate:
    """ASGI middleware: gives every request under /v1 an identity, or answers it with a problem.

    Browsers show no refused handshake: a WebSocket passes with its error, which the endpoint sends before it
    closes. A stream ends when the key that opened it is revoked or expires.
    """

    def __init__(self, app: ASGIApp, authenticator: Authenticator, keys: Keys) -> None:
        self._app = app
        self._authenticator = authenticator
        self._keys = keys
        self._streams: dict[RevocableStream, None] = {}
        self._checking: asyncio.Task[None] | None = None
        """Checks all streams: a task for each of them would cost more."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not f"{scope['path']}/".startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        try:
            client = scope.get("client")
            key, ticket = _credentials(scope)
            identity = await self._authenticator.identify(key, ticket, str(client[0]) if client else None)
        except TurboServeError as error:
            if scope["type"] == "http":
                await problem_response(error, scope["path"])(scope, receive, send)
                return
            refuse(scope, error)
            await self._app(scope, receive, send)
            return
        scope.setdefault(_ADMISSION, identity)
        if takes_head(scope["path"]) or (not self._keys and identity.grant is None):
            await self._app(scope, receive, send)
            return
        stream = RevocableStream(self._authenticator.holds, identity, scope, receive, send)
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


def _credentials(scope: Scope) -> tuple[str | None, str | None]:
    """Return the key of the header, and the ticket of the query. Raises KeyInAddressError."""
    in_query = scope.get(QUERY_CREDENTIALS, QueryCredentials())
    if in_query.has_key:
        metrics.keys_refused.add(1, {REASON: "in_address"})
        raise KeyInAddressError(
            "an API key in an address ends up in logs and histories: send Authorization: Bearer KEY, or for "
            "streams ?ticket=TICKET of POST /v1/sessions/{session}/tickets",
            field="access_token",
        )
    key = bearer(Headers(scope=scope).get("authorization"))
    # Only for streams, where browsers cannot set headers.
    return key, in_query.ticket if takes_ticket(scope["path"]) else None


def _identity(
    connection: HTTPConnection,
    _credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_scheme)],
) -> Identity:
    return admitted(connection.scope)


@dataclass(frozen=True)
class AccessCheck:
    """The dependency that checks a sender's rights to a route."""

    shared: Role | None = None
    """The role with which the holder of a link may use the route for its session. None: no holder may."""
    in_path: bool = True
    """Whether the path has the session. Else the route itself compares it with the link's."""

    def __call__(
        self,
        needed: SecurityScopes,
        connection: HTTPConnection,
        _credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_scheme)],
    ) -> None:
        """Check that the sender's key has the scopes that the route declares, or its link the role.

        Raises MissingScopeError, LinkRoleError, and SessionNotFoundError for a link to another session. A
        WebSocket passes with the error, as without a key.
        """
        scope = connection.scope
        if scope["type"] == "websocket" and isinstance(scope.get(_ADMISSION), TurboServeError):
            return
        identity = admitted(scope)
        try:
            if identity.grant is not None:
                self._check_grant(identity.grant, connection.path_params.get("session"))
            for name in needed.scopes:
                identity.require(KeyScope(name))
        except (MissingScopeError, LinkRoleError, SessionNotFoundError) as error:
            if scope["type"] != "websocket":
                raise
            scope[_ADMISSION] = error

    def _check_grant(self, grant: Grant, session: str | None) -> None:
        if self.shared is None:
            raise LinkRoleError("a link does not allow this: an API key is needed", field="role")
        if not grant.role.includes(self.shared):
            raise LinkRoleError(
                f"the link's role is {grant.role.value}, and this needs {self.shared.value}",
                field="role",
                limit=self.shared.value,
            )
        if self.in_path and session != grant.session:
            # As for a session that does not exist.
            raise SessionNotFoundError(f"there is no session {session}", field="session")


def needs(scope: KeyScope, shared: Role | None = None, *, in_path: bool = True) -> SecurityParameter:
    """Return the dependency by which a route declares the scope that it needs. Every route has one.

    With `shared`, holders of a link with this role may use the route for the link's session: the path
    parameter `session`, unless `in_path` is False. A sender without the scope gets 403 before validation.
    """
    checked: SecurityParameter = Security(AccessCheck(shared, in_path), scopes=[scope.value])
    return checked


def _tenant(identity: Annotated[Identity, Depends(_identity)]) -> str:
    return identity.tenant


def _stream_caller(
    identity: Annotated[Identity, Depends(_identity)],
    # For OpenAPI: the middleware reads this parameter.
    _ticket: Annotated[
        str | None,
        Query(
            alias="ticket",
            description="A ticket for the session, for clients that cannot set the header Authorization.",
            examples=["tst_…"],
        ),
    ] = None,
) -> Identity:
    return identity


Caller = Annotated[Identity, Depends(_identity)]
"""The sender's identity, from the Authorization header."""
Tenant = Annotated[str, Depends(_tenant)]
"""The sender's tenant, from the Authorization header."""
StreamCaller = Annotated[Identity, Depends(_stream_caller)]
"""The sender's identity, from the Authorization header or `?ticket=`."""
