"""Logs in JetStream: fenced appends, reads of one message by sequence, and how far a process is behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import field

import nats
from nats.aio.msg import Msg as NatsMsg
from nats.js.errors import APIError, NoStreamResponseError, ServiceUnavailableError
from opentelemetry.trace import SpanKind

from turboserve.bus.client import Bus
from turboserve.contracts.errors import (
    DeadlineError,
    FencedError,
    LogFullError,
    LogUnavailableError,
    UnavailableError,
)
from turboserve.static_frozen import statically_frozen
from turboserve.telemetry import inject_context, set_error, tracer, tracing
from turboserve.telemetry_names import SESSION

_trace = tracer("bus")

WRONG_LAST_SEQUENCE = 10071
NO_ROOM = frozenset({10023, 10047, 10077})
"""Error codes of a broker without room: its storage (10023, 10047) or the stream (10077) is at its limit."""
DIRECT_GET_S = 2.0
"""Deadline for reading one message, seconds."""
NOT_FOUND = "404"
LAG_WARN_S = 5.0
"""From this lag on, /readyz warns, seconds."""
LAG_LIMIT_S = 30.0
"""From this lag on, a service that decides by what it reads is not ready, seconds."""


@statically_frozen()
class Entry:
    """One accepted message."""

    subject: str
    sequence: int
    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@statically_frozen()
class Ack:
    """The broker has stored the message. `duplicate`: it had stored the message before."""

    sequence: int
    duplicate: bool


class Lag:
    """Since when a process is behind a log: with reading it, or with appending to it. For readiness.

    Pure: callers pass monotonic seconds.
    """

    def __init__(self) -> None:
        self._since: float | None = None

    def note(self, behind: bool, now: float) -> None:
        """Note whether the process has something left to read or to append."""
        if not behind:
            self._since = None
        elif self._since is None:
            self._since = now

    def seconds(self, now: float) -> float:
        """Return the time for which the process has been behind, seconds; 0 if it is up to date."""
        return 0.0 if self._since is None else now - self._since

    def warning(self, now: float) -> str | None:
        """Return the text for /readyz; None while the lag is short."""
        seconds = self.seconds(now)
        return f"behind for {seconds:.0f} s" if seconds >= LAG_WARN_S else None


async def append(
    bus: Bus,
    subject: str,
    data: bytes,
    *,
    message_id: str,
    headers: Mapping[str, str] | None = None,
    expect: tuple[str, int] | None = None,
    ttl_s: int | None = None,
    deadline_s: float = 2.0,
) -> Ack:
    """Append to the log. A repeat with the same `message_id` returns the sequence of the first append.

    `expect` is the fence: a subject and the sequence of its newest message.

    Raises:
        FencedError: the subject of `expect` has a newer message.
        DeadlineError: the outcome is unknown; append again.
        LogFullError: the broker has no room for the message.
        LogUnavailableError: the broker's storage is off, or the stream does not exist.
        UnavailableError: any other failure.
    """
    if not tracing():
        return await _append(bus, subject, data, message_id, headers or {}, expect, ttl_s, deadline_s)
    with _trace.child(
        f"send {_family(subject)}", kind=SpanKind.PRODUCER, attributes=_attributes(subject)
    ) as span:
        try:
            return await _append(bus, subject, data, message_id, headers or {}, expect, ttl_s, deadline_s)
        except UnavailableError as error:
            set_error(span, error)
            raise
        except FencedError as error:
            set_error(span, error, failed=False)
            raise


async def _append(
    bus: Bus,
    subject: str,
    data: bytes,
    message_id: str,
    headers: Mapping[str, str],
    expect: tuple[str, int] | None,
    ttl_s: int | None,
    deadline_s: float,
) -> Ack:
    all_headers = inject_context({**headers, "Nats-Msg-Id": message_id})
    if expect is not None:
        all_headers["Nats-Expected-Last-Subject-Sequence"] = str(expect[1])
        if expect[0] != subject:
            all_headers["Nats-Expected-Last-Subject-Sequence-Subject"] = expect[0]
    if ttl_s is not None:
        all_headers["Nats-TTL"] = f"{ttl_s}s"
    try:
        ack = await bus.jetstream().publish(subject, data, timeout=deadline_s, headers=all_headers)
    except NoStreamResponseError as error:
        # A broker whose storage is off answers this as well.
        raise LogUnavailableError(f"no stream takes {subject}: {error}", retry_after_s=0.5) from None
    except APIError as error:
        if error.err_code == WRONG_LAST_SEQUENCE:
            raise FencedError(
                f"{subject}: {error.description}", field=expect[0] if expect else None
            ) from None
        if error.err_code in NO_ROOM:
            raise LogFullError(f"{subject}: {error.description}", retry_after_s=1.0) from None
        if isinstance(error, ServiceUnavailableError):
            raise LogUnavailableError(f"{subject}: {error}", retry_after_s=0.5) from None
        raise UnavailableError(f"{subject}: {error}", retry_after_s=0.5) from None
    except (TimeoutError, nats.errors.TimeoutError):
        raise DeadlineError(
            f"no ack for {subject} within {deadline_s} s", limit=deadline_s, retry_after_s=0.2
        ) from None
    except (nats.errors.Error, OSError) as error:
        raise UnavailableError(f"the broker is not reachable: {error!r}", retry_after_s=0.5) from None
    return Ack(ack.seq, bool(ack.duplicate))


def _family(subject: str) -> str:
    """Return the log of a subject, `chunk` of `chunk.ses_1.wk1`: a span's name has no id."""
    return subject.partition(".")[0]


def _attributes(subject: str) -> dict[str, str]:
    """Attributes of the span of an append, by OpenTelemetry's conventions of messaging."""
    family, _, rest = subject.partition(".")
    attributes = {
        "messaging.system": "nats",
        "messaging.destination.name": subject,
        "messaging.destination.template": f"{family}.{{id}}",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
    }
    if family in ("own", "chunk", "event"):
        attributes[SESSION] = rest.partition(".")[0]
    return attributes


async def last_entry(bus: Bus, stream: str, subject: str) -> Entry | None:
    """Return the newest message on `subject`, which may be a pattern, or None."""
    return await _get(bus, stream, {"last_by_subj": subject})


async def next_entry(bus: Bus, stream: str, subject: str, sequence: int) -> Entry | None:
    """Return the first message on `subject`, which may be a pattern, from stream `sequence` on, or None."""
    return await _get(bus, stream, {"seq": max(sequence, 1), "next_by_subj": subject})


async def _get(bus: Bus, stream: str, request: Mapping[str, str | int]) -> Entry | None:
    """Read one stored message.

    nats-py's `get_msg` is not used: it mistakes the headers of a stored message for the broker's answer.
    """
    subject, body = f"$JS.API.DIRECT.GET.{stream}", json.dumps(request).encode()
    try:
        try:
            raw = await bus.client.request(subject, body, timeout=DIRECT_GET_S)
        except nats.errors.NoRespondersError:
            # nats-py also raises this for a stored message with the header that signals no responders.
            raw = await _answer(bus, subject, body)
    except (TimeoutError, nats.errors.Error, OSError) as error:
        raise UnavailableError(f"{stream} does not answer: {error!r}", retry_after_s=0.5) from None
    headers = raw.headers or {}
    # The broker sets these headers in every stored message, and in no other answer.
    if "Nats-Sequence" in headers:
        return Entry(headers["Nats-Subject"], int(headers["Nats-Sequence"]), raw.data, headers)
    if (status := headers.get("Status")) == NOT_FOUND:
        return None
    reason = headers.get("Description")
    raise UnavailableError(f"{stream} cannot be read: {status} {reason}", retry_after_s=0.5)


async def _answer(bus: Bus, subject: str, body: bytes) -> NatsMsg:
    """Send a request and return its answer without interpreting the answer's headers."""
    inbox = bus.client.new_inbox()
    answers: asyncio.Queue[NatsMsg] = asyncio.Queue()
    subscription = await bus.client.subscribe(inbox, cb=answers.put)
    try:
        await bus.client.publish(subject, body, reply=inbox)
        async with asyncio.timeout(DIRECT_GET_S):
            return await answers.get()
    finally:
        with contextlib.suppress(nats.errors.Error, OSError):
            await subscription.unsubscribe()
