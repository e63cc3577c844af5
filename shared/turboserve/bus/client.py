"""A service's connection to the broker: publish, subscribe, call, serve."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import nats
from nats.aio.msg import Msg as NatsMsg
from nats.aio.subscription import Subscription
from nats.errors import ConnectionClosedError, NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js import JetStreamContext
from opentelemetry import trace
from pydantic import ValidationError

from turboserve import logs
from turboserve.bus.incarnations import StreamIncarnations
from turboserve.bus.port import BrokerClient, Connect
from turboserve.bus.unreadable import UNREADABLE, skip
from turboserve.config import Settings
from turboserve.contracts.base import Contract
from turboserve.contracts.errors import (
    DeadlineError,
    ErrorBody,
    ForbiddenError,
    IncompatibleVersionError,
    InvalidInputError,
    TurboServeError,
    UnavailableError,
    error_from,
)
from turboserve.contracts.requests import CreateSession, NoteDecision
from turboserve.contracts.sessions import Decision
from turboserve.contracts.versions import MEMBER, SCHEMA_VERSION, SchemaVersionError
from turboserve.sampling import PERIODIC
from turboserve.subjects import ADMIN, Caller, Endpoint, Topic, inbox_prefix
from turboserve.tasks import BackgroundTasks
from turboserve.telemetry import QUIET, context_of, inject_context, set_error, tracer, tracing, within

ERROR_HEADER = "Ts-Error"
INCOMPATIBLE_S = 60.0
"""A service is not ready for this long after it found another MAJOR schema version, seconds. A load balancer
sends no request to a gateway that is not ready, so no answer may come that ends the state earlier."""
META_HEADER = "Ts-Meta"
OTHER_ACCOUNT = "_R_."
"""Prefix of the reply subjects that the broker makes for requests from other accounts."""
COMPLAIN_S = 5.0
"""Interval of log lines while the broker is unreachable, seconds."""

SESSION = "turboserve.session.id"
"""Attribute of spans about one session."""
INTERNAL = 500
"""Status from which on an error is the server's own failure."""

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
        self.incarnations = StreamIncarnations(self.jetstream)
        self._incompatible: dict[str, tuple[float, str]] = {}
        """Services of another MAJOR schema version → when their last answer showed this, and the reason."""
        self._deadline_s = settings.request_deadline_s
        self._requests = BackgroundTasks()
        self._jetstreams: dict[float, JetStreamContext] = {}
        """JetStream clients by timeout, seconds."""

    @classmethod
    async def connect(cls, service: str, settings: Settings, connect: Connect = nats.connect) -> Bus:
        """Connect as `service`. Retries until the broker is reachable."""

        async def disconnected() -> None:
            log.warning("broker disconnected")

        async def reconnected() -> None:
            log.info("broker reconnected")

        closed = asyncio.Event()

        async def ended() -> None:
            closed.set()

        monotonic = asyncio.get_running_loop().time
        complained_at = -COMPLAIN_S

        async def failed(error: Exception) -> None:
            # The client retries forever, several times a second.
            nonlocal complained_at
            if isinstance(error, OSError) and monotonic() >= complained_at + COMPLAIN_S:
                complained_at = monotonic()
                log.warning(
                    "broker not reachable", url=_without_password(settings.nats_url), error=repr(error)
                )
            elif "permissions violation" in str(error).lower():
                # A message that the broker refuses is lost, and nothing else reports it.
                log.warning("broker refuses", error=str(error))
            else:
                log.debug("broker error", error=repr(error))

        while True:
            try:
                client = await connect(
                    settings.nats_url.split(","),
                    name=service,
                    user=broker_user(service, settings) if settings.nats_password else None,
                    password=settings.nats_password.get_secret_value() if settings.nats_password else None,
                    inbox_prefix=inbox_prefix(broker_user(service, settings)).encode(),
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.2,
                    connect_timeout=2,
                    ping_interval=5,
                    max_outstanding_pings=2,
                    disconnected_cb=disconnected,
                    reconnected_cb=reconnected,
                    error_cb=failed,
                    closed_cb=ended,
                )
                return cls(client, service, settings, closed)
            except (TimeoutError, OSError, nats.errors.Error) as error:
                url = _without_password(settings.nats_url)
                log.warning("broker not reachable yet", url=url, error=repr(error))
                await asyncio.sleep(0.5)

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
        """Wait until the broker has processed everything sent before, subscriptions included.

        Raises nats-py's errors if the broker does not answer.
        """
        # Twice, since nats-py sends the first ping ahead of data that it has not written yet.
        for _ in range(2):
            await self.client.flush()

    async def close(self) -> None:
        """Finish the requests that are being answered, then close the connection."""
        self.incarnations.close()
        await self._requests.wait(2.0)
        try:
            await asyncio.wait_for(self.client.drain(), 3.0)
        except (TimeoutError, nats.errors.Error, OSError):
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
            refusal = _incompatible(f"the answer to {endpoint.subject}", error)
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
            attributes=_attributes(endpoint, "request", request) if tracing() else None,
            **QUIET,
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
                if isinstance(failure, IncompatibleVersionError):
                    self.note_incompatible(endpoint.server, failure)
                else:
                    self._compatible(endpoint.server)
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

        return await self._serve(endpoint, answer)

    async def serve_as_leader(
        self, endpoint: Endpoint[Req, Resp], handler: Callable[[Req, Caller], Awaitable[Resp | None]]
    ) -> Subscription:
        """Answer `endpoint` if this instance is the leader.

        Every instance receives every request. A handler that returns None leaves the answer to another
        instance. With a queue group, the broker would give some requests to a former leader that hangs.
        """

        async def answer(request: Req, caller: Caller) -> tuple[Resp | None, bytes | None]:
            return await handler(request, caller), None

        return await self._serve(endpoint, answer, queue="")

    async def serve_raw(
        self, endpoint: Endpoint[Req, Resp], handler: Callable[[Req, Caller], Awaitable[tuple[Resp, bytes]]]
    ) -> Subscription:
        """As `serve`, for answers with a raw body."""

        async def answer(request: Req, caller: Caller) -> tuple[Resp, bytes | None]:
            return await handler(request, caller)

        return await self._serve(endpoint, answer)

    async def _serve(
        self,
        endpoint: Endpoint[Req, Resp],
        handler: Callable[[Req, Caller], Awaitable[tuple[Resp | None, bytes | None]]],
        queue: str | None = None,
    ) -> Subscription:
        async def run(raw: NatsMsg) -> None:
            headers: dict[str, str] = {}
            body = b""
            problem: TurboServeError | None = None
            with _trace.start_as_current_span(
                f"process {endpoint.subject}",
                context=context_of(raw.headers),
                kind=trace.SpanKind.SERVER,
                attributes=_attributes(endpoint, "process", None) if tracing() else None,
                **QUIET,
            ) as span:
                try:
                    caller = caller_of(endpoint, raw)
                    try:
                        request = endpoint.request.from_bytes(raw.data)
                    except SchemaVersionError as error:
                        skip(endpoint.subject, error)
                        raise _incompatible(f"{endpoint.server} refuses {endpoint.subject}", error) from None
                    if tracing() and (session := session_of(request)) is not None:
                        span.set_attribute(SESSION, session)
                    response, data = await handler(request, caller)
                    if response is None:
                        return
                    if data is None:
                        body = response.to_bytes()
                    else:
                        headers[META_HEADER], body = response.to_text(), data
                except ValidationError as error:
                    problem = _invalid(error)
                except TurboServeError as error:
                    problem = error
                except Exception:
                    log.exception("request failed", subject=endpoint.subject)
                    problem = TurboServeError(f"{endpoint.server} failed at {endpoint.subject}")
                if problem is not None:
                    headers[ERROR_HEADER] = problem.body().to_text()
                    set_error(span, problem, failed=problem.status >= INTERNAL)
            try:
                await self.client.publish(raw.reply, body, headers=headers or None)
            except (nats.errors.Error, OSError) as error:
                log.warning("reply not sent", subject=endpoint.subject, error=repr(error))

        async def receive(raw: NatsMsg) -> None:
            if not is_reply_subject(endpoint, raw):
                log.warning("request without an inbox of its caller", subject=raw.subject, reply=raw.reply)
                return
            self._requests.create(run(raw))

        group = endpoint.server if queue is None else queue
        return await self.client.subscribe(endpoint.every, queue=group, cb=receive)


def broker_user(service: str, settings: Settings) -> str:
    """Return the broker user of `service`: from the settings, from the URL, or the service's name."""
    if settings.nats_password is not None:
        return settings.nats_user or service
    return urlsplit(settings.nats_url.split(",")[0]).username or service


def caller_of(endpoint: Endpoint[Any, Any], raw: NatsMsg) -> Caller:
    """Return the sender of a request. Raises ForbiddenError unless it is one of the endpoint's callers.

    The broker already lets each user publish only its own requests. This check protects a service at a broker
    that is configured differently.
    """
    try:
        caller = endpoint.caller_of(raw.subject)
    except ValueError as error:
        raise ForbiddenError(str(error), field="caller") from None
    if caller.role not in (*endpoint.callers, ADMIN):
        raise ForbiddenError(f"{endpoint.subject} is not for {caller.token}", field="caller")
    return caller


def is_reply_subject(endpoint: Endpoint[Any, Any], raw: NatsMsg) -> bool:
    """Whether the answer to `raw` goes to its caller, and to no subject that another user may receive."""
    if raw.reply.startswith(OTHER_ACCOUNT):
        return True
    try:
        return raw.reply.startswith(f"{inbox_prefix(endpoint.caller_of(raw.subject).token)}.")
    except ValueError:
        return False


def session_of(request: Contract) -> str | None:
    """Return the session that a request is about; None: it is about no single session."""
    match request:
        case CreateSession(id=session) | NoteDecision(decision=Decision(session=session)):
            return session
        case _:
            return getattr(request, "session", None)


def _attributes(
    endpoint: Endpoint[Any, Any], operation: str, request: Contract | None
) -> dict[str, str | bool]:
    """Attributes of a span, by OpenTelemetry's conventions of messaging."""
    attributes: dict[str, str | bool] = {
        "messaging.system": "nats",
        "messaging.destination.name": endpoint.subject,
        "messaging.operation.name": operation,
        "messaging.operation.type": "send" if operation == "request" else "process",
    }
    if endpoint.periodic:
        attributes[PERIODIC] = True
    if request is not None and (session := session_of(request)) is not None:
        attributes[SESSION] = session
    return attributes


def _without_password(url: str) -> str:
    return re.sub(r"//[^@/,]*@", "//", url)


def _incompatible(what: str, error: SchemaVersionError) -> IncompatibleVersionError:
    return IncompatibleVersionError(f"{what}: {error}", field=MEMBER, limit=f"{SCHEMA_VERSION.major}.x")


def _invalid(error: ValidationError) -> InvalidInputError:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or None
    return InvalidInputError(f"{where or 'request'}: {first['msg']}", field=where)
