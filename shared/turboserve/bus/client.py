"""A service's connection to the broker: publish, subscribe, call, serve."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import nats
from nats.aio.msg import Msg as NatsMsg
from nats.aio.subscription import Subscription
from nats.errors import ConnectionClosedError, NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js import JetStreamContext
from opentelemetry import trace

from turboserve import logs
from turboserve.bus import connection
from turboserve.bus.feeds import LiveFeeds, StreamIncarnations
from turboserve.bus.port import BrokerClient, Connect, broker_user, open_client
from turboserve.bus.requests import (
    ERROR_HEADER,
    META_HEADER,
    RELAYED,
    RequestServer,
    incompatible,
    span_attributes,
)
from turboserve.bus.unreadable import UNREADABLE, skip
from turboserve.config import Settings
from turboserve.contracts.base import Contract
from turboserve.contracts.errors import (
    DeadlineError,
    ErrorBody,
    IncompatibleVersionError,
    TurboServeError,
    UnavailableError,
    error_from,
)
from turboserve.contracts.versions import MEMBER, SchemaVersionError
from turboserve.subject_types import Caller, Endpoint, Topic
from turboserve.telemetry import context_of, inject_context, set_error, tracer, tracing, within

INCOMPATIBLE_S = 60.0
"""A service is not ready for this long after it found another MAJOR schema version, seconds. A load balancer
sends no request to a gateway that is not ready, so no answer may come that ends the state earlier."""

Req = TypeVar("Req", bound=Contract)
Resp = TypeVar("Resp", bound=Contract)
Message = TypeVar("Message", bound=Contract)

log = logs.get("bus")
_trace = tracer("bus")


class NoServerError(UnavailableError):
    """No instance serves this endpoint at the moment, and none received the request. Retry."""

    code = "no_server"


class Bus:
    """One service's connection to the broker. It reconnects forever, and keeps its subscriptions."""

    def __init__(
        self, client: BrokerClient, service: str, settings: Settings, closed: asyncio.Event | None = None
    ) -> None:
        self.client = client
        self.user = broker_user(service, settings)
        """The broker user of this process. The subject of each request names it."""
        self.closed = closed or asyncio.Event()
        """Set when the client has closed for good, which some errors of the broker cause."""
        self.service = service
        self.incarnations, self.feeds = StreamIncarnations(self.jetstream), LiveFeeds(client)
        self._incompatible: dict[str, tuple[float, str]] = {}
        """Services of another MAJOR schema version → when their last answer showed this, and the reason."""
        self._deadline_s = settings.request_deadline_s
        self._server = RequestServer(client)
        self._jetstreams: dict[float, JetStreamContext] = {}
        """JetStream clients by timeout, seconds."""

    @classmethod
    async def connect(cls, service: str, settings: Settings, connect: Connect = connection.connect) -> Bus:
        """Connect as `service`. Retries until the broker is reachable."""
        client, closed = await open_client(service, settings, connect)
        return cls(client, service, settings, closed)

    @property
    def connected(self) -> bool:
        return self.client.is_connected

    @property
    def connection(self) -> int | None:
        """Number of the connection; None: not connected. Rises before a new connection receives anything."""
        return int(self.client.stats["reconnects"]) if self.client.is_connected else None

    def jetstream(self, timeout_s: float = 2.0) -> JetStreamContext:
        if timeout_s not in self._jetstreams:
            self._jetstreams[timeout_s] = self.client.jetstream(timeout=timeout_s)
        return self._jetstreams[timeout_s]

    async def flush(self) -> None:
        """Wait until the broker has processed everything sent before. Raises nats-py's errors."""
        # Twice, since nats-py sends the first ping ahead of data that it has not written yet.
        for _ in range(2):
            await self.client.flush()

    async def close(self) -> None:
        """Finish the requests that are being answered, then close the connection."""
        self.incarnations.close()
        await self._server.wait(2.0)
        try:
            await self.client.drain()
        except (nats.errors.Error, OSError):
            await self.client.close()

    # Topics

    async def publish(self, topic: Topic[Message], token: str, message: Message, data: bytes = b"") -> None:
        """Send without confirmation. With `data`, a header has the message and `data` is the raw body."""
        headers = inject_context({})
        if data:
            headers[META_HEADER] = message.to_text()
            await self.client.publish(topic.of(token), data, headers=headers)
        else:
            await self.client.publish(topic.of(token), message.to_bytes(), headers=headers or None)

    async def subscribe(
        self,
        topic: Topic[Message],
        token: str,
        handler: Callable[[Message, bytes], Awaitable[None]],
        *,
        queue: str = "",
    ) -> Subscription:
        """Call `handler(message, raw body)` for each message on `topic` about `token` (`*`: any), in order.

        Unreadable messages and exceptions of the handler are logged and do not end the subscription. A
        message is dropped if its author is not the one in its subject: the broker lets each worker's user
        publish only on subjects of its own identity.
        """

        async def receive(raw: NatsMsg) -> None:
            if not tracing():
                await process(raw)
                return
            # This runs in the context in which the subscription began, which may be a request's.
            with within(context_of(raw.headers)):
                await process(raw)

        async def process(raw: NatsMsg) -> None:
            try:
                meta = (raw.headers or {}).get(META_HEADER)
                message = topic.message.from_bytes(meta.encode() if meta else raw.data)
                if topic.author is not None and raw.subject != topic.of(str(getattr(message, topic.author))):
                    log.warning("message author does not match its subject", subject=raw.subject)
                    return
                with logs.for_request(logs.request_of(raw.headers)):
                    await handler(message, raw.data if meta else b"")
            except UNREADABLE as error:
                skip(raw.subject, error)
            except Exception:
                log.exception("handler failed", subject=raw.subject)

        return await self.client.subscribe(topic.of(token), queue=queue, cb=receive)

    # Endpoints

    async def call(
        self, endpoint: Endpoint[Req, Resp], request: Req, *, deadline_s: float | None = None
    ) -> Resp:
        """Send a request and return the answer.

        Raises the server's typed error, `DeadlineError`, `NoServerError` or `UnavailableError`. Raises
        `IncompatibleVersionError` if one of the two refuses the other's schema version.
        """
        reply = await self._request(endpoint, request, deadline_s)
        return self._answer(endpoint, reply.data)

    async def call_raw(
        self, endpoint: Endpoint[Req, Resp], request: Req, *, deadline_s: float | None = None
    ) -> tuple[Resp, bytes]:
        """As `call`, for endpoints whose answer has a raw body in addition to its message."""
        reply = await self._request(endpoint, request, deadline_s)
        meta = (reply.headers or {}).get(META_HEADER, "")
        return self._answer(endpoint, meta.encode()), reply.data

    def _answer(self, endpoint: Endpoint[Any, Resp], data: bytes) -> Resp:
        try:
            answer = endpoint.response.from_bytes(data)
        except SchemaVersionError as error:
            refusal = incompatible(f"the answer to {endpoint.subject}", error)
            self.note_incompatible(endpoint.server, refusal)
            raise refusal from None
        self._compatible(endpoint.server)
        return answer

    def note_incompatible(self, server: str, refusal: IncompatibleVersionError) -> None:
        """Remember that `server` has another MAJOR schema version.

        Its next answer of this version ends that, and so do `INCOMPATIBLE_S` seconds without an answer.
        """
        if server not in self.incompatible:
            log.error("incompatible schema version", server=server, error=refusal.detail)
        self._incompatible[server] = asyncio.get_running_loop().time(), refusal.detail

    @property
    def incompatible(self) -> dict[str, str]:
        """Services of another MAJOR schema version, as their last answer showed → reason."""
        if not self._incompatible:
            return {}
        since = asyncio.get_running_loop().time() - INCOMPATIBLE_S
        return {server: reason for server, (at, reason) in self._incompatible.items() if at >= since}

    def _compatible(self, server: str) -> None:
        if self._incompatible:
            self._incompatible.pop(server, None)

    async def _request(
        self, endpoint: Endpoint[Any, Any], request: Contract, deadline_s: float | None
    ) -> NatsMsg:
        wait_s = self._deadline_s if deadline_s is None else deadline_s
        with _trace.start_as_current_span(
            f"request {endpoint.subject}",
            kind=trace.SpanKind.CLIENT,
            attributes=span_attributes(endpoint, "request", request) if tracing() else None,
            notes_errors=False,
        ) as span:
            try:
                reply = await self.client.request(
                    endpoint.request_subject(self.user),
                    request.to_bytes(),
                    timeout=wait_s,
                    headers=inject_context({}) or None,
                )
            except NoRespondersError:
                failure: TurboServeError = NoServerError(
                    f"{endpoint.server} does not answer {endpoint.subject}", retry_after_s=0.5
                )
            except (TimeoutError, NatsTimeoutError):
                failure = DeadlineError(
                    f"no answer to {endpoint.subject} within {wait_s} s", limit=wait_s, retry_after_s=0.5
                )
            except (ConnectionClosedError, OSError, nats.errors.Error) as error:
                failure = UnavailableError(f"the broker is not reachable: {error!r}", retry_after_s=0.5)
            else:
                problem = (reply.headers or {}).get(ERROR_HEADER)
                if not problem:
                    return reply
                failure = error_from(ErrorBody.from_text(problem))
                failure.answered = True
                if isinstance(failure, IncompatibleVersionError) and failure.field != RELAYED:
                    self.note_incompatible(endpoint.server, failure)
                else:
                    self._compatible(endpoint.server)
                if failure.field == RELAYED:
                    failure.field = MEMBER
            # The server marks its own failures. A request without an answer failed here.
            set_error(span, failure, failed=not failure.answered)
        raise failure

    async def serve(
        self, endpoint: Endpoint[Req, Resp], handler: Callable[[Req, Caller], Awaitable[Resp]]
    ) -> Subscription:
        """Answer `endpoint`, sharing the requests with this service's other instances.

        Requests run concurrently. The handler gets the request and its sender, which is one of the endpoint's
        callers or the admin.
        """

        async def answer(request: Req, caller: Caller) -> tuple[Resp, bytes | None]:
            return await handler(request, caller), None

        return await self._server.serve(endpoint, answer)

    async def serve_as_leader(
        self, endpoint: Endpoint[Req, Resp], handler: Callable[[Req, Caller], Awaitable[Resp | None]]
    ) -> Subscription:
        """Answer `endpoint` if this instance is the leader.

        Every instance receives every request. A handler that returns None leaves the answer to another
        instance. With a queue group, the broker would give some requests to a former leader that hangs.
        """

        async def answer(request: Req, caller: Caller) -> tuple[Resp | None, bytes | None]:
            return await handler(request, caller), None

        return await self._server.serve(endpoint, answer, queue="")

    async def serve_raw(
        self, endpoint: Endpoint[Req, Resp], handler: Callable[[Req, Caller], Awaitable[tuple[Resp, bytes]]]
    ) -> Subscription:
        """As `serve`, for answers with a raw body."""

        async def answer(request: Req, caller: Caller) -> tuple[Resp, bytes | None]:
            return await handler(request, caller)

        return await self._server.serve(endpoint, answer)
