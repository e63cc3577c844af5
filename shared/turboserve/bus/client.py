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
from turboserve.config import Settings
from turboserve.contracts.base import Contract
from turboserve.contracts.errors import (
    DeadlineError,
    ErrorBody,
    ForbiddenError,
    InvalidInputError,
    TurboServeError,
    UnavailableError,
    error_from,
)
from turboserve.subjects import ADMIN, Caller, Endpoint, Topic, inbox_prefix
from turboserve.tasks import BackgroundTasks
from turboserve.telemetry import context_of, inject_context, tracer

ERROR_HEADER = "Ts-Error"
META_HEADER = "Ts-Meta"
OTHER_ACCOUNT = "_R_."
"""Prefix of the reply subjects that the broker makes for requests from other accounts."""
COMPLAIN_S = 5.0
"""Interval of log lines while the broker is unreachable, seconds."""

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
            headers[META_HEADER] = message.to_bytes().decode()
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
            try:
                meta = (raw.headers or {}).get(META_HEADER)
                message = topic.message.from_bytes(meta.encode() if meta else raw.data)
                if topic.author is not None and raw.subject != topic.of(str(getattr(message, topic.author))):
                    log.warning("message author does not match its subject", subject=raw.subject)
                    return
                await handler(message, raw.data if meta else b"")
            except ValidationError as error:
                log.warning("unreadable message", subject=raw.subject, error=str(error))
            except Exception:
                log.exception("handler failed", subject=raw.subject)

        return await self.client.subscribe(topic.of(token), queue=queue, cb=receive)

    # Endpoints

    async def call(
        self, endpoint: Endpoint[Req, Resp], request: Req, *, deadline_s: float | None = None
    ) -> Resp:
        """Send a request and return the answer.

        Raises the server's typed error, `DeadlineError`, `NoServerError` or `UnavailableError`.
        """
        reply = await self._request(endpoint, request, deadline_s)
        return endpoint.response.from_bytes(reply.data)

    async def call_raw(
        self, endpoint: Endpoint[Req, Resp], request: Req, *, deadline_s: float | None = None
    ) -> tuple[Resp, bytes]:
        """As `call`, for endpoints whose answer has a raw body in addition to its message."""
        reply = await self._request(endpoint, request, deadline_s)
        meta = (reply.headers or {}).get(META_HEADER, "")
        return endpoint.response.from_bytes(meta.encode()), reply.data

    async def _request(
        self, endpoint: Endpoint[Any, Any], request: Contract, deadline_s: float | None
    ) -> NatsMsg:
        wait_s = self._deadline_s if deadline_s is None else deadline_s
        with _trace.start_as_current_span(endpoint.subject, kind=trace.SpanKind.CLIENT):
            try:
                reply = await self.client.request(
                    endpoint.request_subject(self.user),
                    request.to_bytes(),
                    timeout=wait_s,
                    headers=inject_context({}) or None,
                )
            except NoRespondersError:
                raise NoServerError(
                    f"{endpoint.server} does not answer {endpoint.subject}", retry_after_s=0.5
                ) from None
            except (TimeoutError, NatsTimeoutError):
                raise DeadlineError(
                    f"no answer to {endpoint.subject} within {wait_s} s", limit=wait_s, retry_after_s=0.5
                ) from None
            except (ConnectionClosedError, OSError, nats.errors.Error) as error:
                raise UnavailableError(f"the broker is not reachable: {error!r}", retry_after_s=0.5) from None
        problem = (reply.headers or {}).get(ERROR_HEADER)
        if problem:
            refusal = error_from(ErrorBody.from_bytes(problem.encode()))
            refusal.answered = True
            raise refusal
        return reply

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
            try:
                with _trace.start_as_current_span(
                    endpoint.subject, context=context_of(raw.headers), kind=trace.SpanKind.SERVER
                ):
                    caller = caller_of(endpoint, raw)
                    response, data = await handler(endpoint.request.from_bytes(raw.data), caller)
                if response is None:
                    return
                if data is None:
                    body = response.to_bytes()
                else:
                    headers[META_HEADER], body = response.to_bytes().decode(), data
            except ValidationError as error:
                headers[ERROR_HEADER] = _invalid(error).body().to_bytes().decode()
            except TurboServeError as error:
                headers[ERROR_HEADER] = error.body().to_bytes().decode()
            except Exception:
                log.exception("request failed", subject=endpoint.subject)
                problem = TurboServeError(f"{endpoint.server} failed at {endpoint.subject}")
                headers[ERROR_HEADER] = problem.body().to_bytes().decode()
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


def _without_password(url: str) -> str:
    return re.sub(r"//[^@/,]*@", "//", url)


def _invalid(error: ValidationError) -> InvalidInputError:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or None
    return InvalidInputError(f"{where or 'request'}: {first['msg']}", field=where)
