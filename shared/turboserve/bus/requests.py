"""Requests on the bus: their headers, span attributes and errors, and how a service answers them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import nats
from nats.aio.msg import Msg as NatsMsg
from nats.aio.subscription import Subscription
from opentelemetry import trace
from pydantic import ValidationError

from turboserve import logs
from turboserve.bus.port import BrokerClient
from turboserve.bus.unreadable import skip
from turboserve.contracts.base import Contract
from turboserve.contracts.errors import (
    ForbiddenError,
    IncompatibleVersionError,
    InvalidInputError,
    TurboServeError,
)
from turboserve.contracts.requests import CreateSession, NoteDecision
from turboserve.contracts.sessions import Decision
from turboserve.contracts.versions import MEMBER, SCHEMA_VERSION, SchemaVersionError
from turboserve.subject_types import Caller, Endpoint
from turboserve.subjects import ADMIN, inbox_prefix
from turboserve.tasks import BackgroundTasks
from turboserve.telemetry import context_of, set_error, tracer, tracing
from turboserve.telemetry_names import PERIODIC, SESSION

ERROR_HEADER = "Ts-Error"
META_HEADER = "Ts-Meta"
RELAYED = "relayed"
"""`field` of an answer that passes on the incompatibility of a third service."""
OTHER_ACCOUNT = "_R_."
"""Prefix of the reply subjects that the broker makes for requests from other accounts."""
INTERNAL = 500
"""Status from which on an error is the server's own failure."""

Req = TypeVar("Req", bound=Contract)
Resp = TypeVar("Resp", bound=Contract)

log = logs.get("bus")
_trace = tracer("bus")


class RequestServer:
    """The requests that one service answers. They run concurrently."""

    def __init__(self, client: BrokerClient) -> None:
        self.client = client
        self._requests = BackgroundTasks()

    async def wait(self, timeout_s: float) -> None:
        """Wait until the requests are answered, at most `timeout_s` seconds."""
        await self._requests.wait(timeout_s)

    async def serve(
        self,
        endpoint: Endpoint[Req, Resp],
        handler: Callable[[Req, Caller], Awaitable[tuple[Resp | None, bytes | None]]],
        queue: str | None = None,
    ) -> Subscription:
        """Answer `endpoint` with `handler`, whose answer is a message and its raw body, or None: no answer.

        `queue`: the group of instances that share the requests. None: those of the endpoint's service.
        """

        async def run(raw: NatsMsg) -> None:
            headers: dict[str, str] = {}
            body = b""
            problem: TurboServeError | None = None
            refusal: IncompatibleVersionError | None = None
            with (
                logs.for_request(logs.request_of(raw.headers)),
                _trace.start_as_current_span(
                    f"process {endpoint.subject}",
                    context=context_of(raw.headers),
                    kind=trace.SpanKind.SERVER,
                    attributes=span_attributes(endpoint, "process", None) if tracing() else None,
                    notes_errors=False,
                ) as span,
            ):
                try:
                    caller = caller_of(endpoint, raw)
                    try:
                        request = endpoint.request.from_bytes(raw.data)
                    except SchemaVersionError as error:
                        skip(endpoint.subject, error)
                        refusal = incompatible(f"{endpoint.server} refuses {endpoint.subject}", error)
                        raise refusal from None
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
                    if isinstance(error, IncompatibleVersionError) and error is not refusal:
                        # A third service has the other version, and the caller reads this one.
                        problem = IncompatibleVersionError(
                            error.detail, field=RELAYED, limit=error.limit, retry_after_s=error.retry_after_s
                        )
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


def span_attributes(
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


def incompatible(what: str, error: SchemaVersionError) -> IncompatibleVersionError:
    """Return the error that `what` has another MAJOR schema version."""
    return IncompatibleVersionError(f"{what}: {error}", field=MEMBER, limit=f"{SCHEMA_VERSION.major}.x")


def _invalid(error: ValidationError) -> InvalidInputError:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or None
    return InvalidInputError(f"{where or 'request'}: {first['msg']}", field=where)
