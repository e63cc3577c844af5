"""What a request is handled with: its id, its line in the access log, and the services of the process."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turboserve import logs
from turboserve.bus import Bus
from turboserve.bus.chunk_log import ChunkLog
from turboserve.clock import Clock
from turboserve.contracts.errors import KeyQuotaError, TenantLimitError, TurboServeError, UnavailableError
from turboserve.gateway.audit.recorder import AuditRecorder
from turboserve.gateway.auth.access import Identity, Keys
from turboserve.gateway.auth.middleware import Authenticator, admitted
from turboserve.gateway.auth.signing import GrantSigner
from turboserve.gateway.keys.service import StoredKeys
from turboserve.gateway.pools.snapshots import PoolSnapshots
from turboserve.gateway.problems.errors import TooManyStreamsError
from turboserve.gateway.prompt_guides import PromptGuide
from turboserve.gateway.sessions.service import Sessions
from turboserve.gateway.settings import Settings
from turboserve.gateway.sharing.service import Sharing
from turboserve.gateway.timeline.service import TimelineService
from turboserve.gateway.webhooks.service import TenantWebhooks
from turboserve.ids import new_id
from turboserve.wording import counted

RETRY_S = 5.0
ELSEWHERE_S = 0.5
"""Time after which a client may try again that is sent on: it may know this gateway alone."""
SPREAD_S = 0.5
"""Viewers that are sent on leave at random moments of this time, so that not all arrive elsewhere at once."""
SHOWN_METHOD = 16
PROBES = frozenset({"/healthz", "/readyz", "/metrics"})
"""Paths that the access log leaves out."""

log = logs.get("access")


def owner_of(identity: Identity) -> tuple[str, str | None]:
    """Return the tenant and the key for which the sender's streams count."""
    return identity.tenant, identity.key_id


class Streams:
    """The open streams. When the gateway stops, it sets `stopping`, and every stream ends.

    While `leaving` is set, no stream begins, and viewers are sent on to another gateway, or to this one
    after its restart.
    """

    def __init__(
        self,
        limit: int,
        per_tenant: int = 0,
        per_key: Callable[[str], int | None] = lambda _: None,
    ) -> None:
        """`per_tenant`: maximum number of streams of one tenant; 0: no such limit. `per_key`: of a key."""
        self._limit, self._per_tenant, self._per_key = limit, per_tenant, per_key
        self._open: Counter[str] = Counter()
        self._of_keys: Counter[str] = Counter()
        self._none = asyncio.Event()
        self._none.set()
        self.stopping = asyncio.Event()
        self.leaving = asyncio.Event()

    @property
    def count(self) -> int:
        """Number of open streams."""
        return self._open.total()

    def check(self, tenant: str, key: str | None = None) -> None:
        """Raise TooManyStreamsError at the limit of all streams, TenantLimitError at that of `tenant`, and
        KeyQuotaError at that of the API key with the id `key`.

        Raises UnavailableError while viewers are sent on.
        """
        if self.leaving.is_set():
            raise UnavailableError(
                "this gateway stops, or does not reach its broker: use another one", retry_after_s=ELSEWHERE_S
            )
        most = None if key is None else self._per_key(key)
        if key is not None and most is not None and self._of_keys[key] >= most:
            raise KeyQuotaError(
                f"this key has {counted(self._of_keys[key], 'stream')} at this gateway, the limit is {most}",
                field="key_streams",
                limit=most,
                retry_after_s=RETRY_S,
            )
        if self._per_tenant and self._open[tenant] >= self._per_tenant:
            raise TenantLimitError(
                f"this tenant has {counted(self._per_tenant, 'stream')} at this gateway, which is the limit",
                field="tenant_streams",
                limit=self._per_tenant,
                retry_after_s=RETRY_S,
            )
        if self._open.total() >= self._limit:
            raise TooManyStreamsError(
                "this gateway serves no more streams",
                field="streams",
                limit=self._limit,
                retry_after_s=RETRY_S,
            )

    @contextmanager
    def place(self, tenant: str, key: str | None = None) -> Iterator[None]:
        """Count one stream of `tenant` and `key` during the block. Raises as `check`."""
        self.check(tenant, key)
        self._open[tenant] += 1
        if key is not None:
            self._of_keys[key] += 1
        self._none.clear()
        try:
            yield
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]
            if key is not None:
                self._of_keys[key] -= 1
                if not self._of_keys[key]:
                    del self._of_keys[key]
            if not self._open:
                self._none.set()

    def send_on(self) -> None:
        """Ask viewers to connect to another gateway, and refuse new streams."""
        self.leaving.set()

    async def until_sent_on(self) -> None:
        """Wait until one viewer should leave: at once if the gateway stops, else within `SPREAD_S`."""
        while True:
            await self.leaving.wait()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), random.uniform(0, SPREAD_S))
            if self.leaving.is_set():
                return

    def admit_again(self) -> None:
        """End what `send_on` began, unless the gateway stops."""
        if not self.stopping.is_set():
            self.leaving.clear()

    async def close(self, within_s: float = 2.0) -> None:
        """Ask all streams to end, and wait for them at most `within_s` seconds."""
        self.stopping.set()
        self.send_on()
        try:
            await asyncio.wait_for(self._none.wait(), within_s)
        except TimeoutError:
            return


@dataclass(frozen=True)
class Gateway:
    """Services of the process."""

    id: str
    """Id (`gtw_`) that distinguishes this process from other gateways and from its own predecessor."""
    settings: Settings
    bus: Bus
    clock: Clock
    checks: Callable[[], dict[str, bool]]
    warnings: Callable[[], dict[str, str]]
    keys: Keys
    authenticator: Authenticator
    sessions: Sessions
    chunks: ChunkLog
    timeline: TimelineService
    streams: Streams
    pools: PoolSnapshots
    prompt_guides: Mapping[str, PromptGuide]
    """What a model understands of a prompt, by the model's name. A model without a guide reads any text."""
    stored_keys: StoredKeys
    signer: GrantSigner
    sharing: Sharing
    audit: AuditRecorder
    webhooks: TenantWebhooks


def gateway_of(connection: HTTPConnection) -> Gateway:
    found: Gateway = connection.app.state.gateway
    return found


class RequestLog:
    """ASGI middleware: gives each request an id, and writes a line about it with `access_log`.

    The id is the client's `X-Request-Id` if it is well-formed. The response has it, and so have problems and
    the log lines of every service that works for the request. The line names no path and no query: either
    may hold a secret.
    """

    def __init__(self, app: ASGIApp, access_log: bool) -> None:
        self._app, self._access_log = app, access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).getlist("x-request-id")
        name = given[0] if len(given) == 1 and logs.is_request_id(given[0]) else new_id("req")
        status, sent, began = None, 0, asyncio.get_running_loop().time()

        async def marked(message: Message) -> None:
            nonlocal status, sent
            if message["type"] in (
                "http.response.start",
                "websocket.http.response.start",
                "websocket.accept",
            ):
                status = message.get("status", 101)
                message = {
                    **message,
                    "headers": [*message.get("headers", ()), (b"x-request-id", name.encode())],
                }
            sent += len(message.get("body") or message.get("bytes") or message.get("text") or b"")
            await send(message)

        with logs.for_request(name):
            try:
                await self._app(scope, receive, marked)
            finally:
                if self._access_log and scope["path"] not in PROBES:
                    duration_s = round(asyncio.get_running_loop().time() - began, 4)
                    log.info("request", status=status, duration_s=duration_s, bytes=sent, **_described(scope))


def _described(scope: Scope) -> dict[str, str | None]:
    """Return the parts of a request that its line in the access log has. None: not known."""
    identity, telemetry = None, scope.get("fastapi.telemetry")
    with suppress(TurboServeError):
        identity = admitted(scope)
    return {
        "method": scope.get("method", "WEBSOCKET")[:SHOWN_METHOD],
        "route": getattr(telemetry, "route", None),
        "tenant": identity.tenant if identity else None,
        "key": identity.key_id if identity else None,
        "link": identity.grant.link if identity and identity.grant else None,
    }
