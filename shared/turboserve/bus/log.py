"""Logs in JetStream: fenced appends, reads by sequence, and following one subject without gaps.

A reader takes history by direct gets and the present from the stream's republished messages. Each of those
names the sequence before it on its subject, so a lost one is noticed and fetched: no consumer to keep alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import nats
from nats.aio.msg import Msg as NatsMsg
from nats.js.errors import APIError, NoStreamResponseError, ServiceUnavailableError

from turboserve import logs
from turboserve.bus.client import Bus
from turboserve.bus.incarnations import StreamPosition
from turboserve.contracts.errors import (
    DeadlineError,
    FencedError,
    LogFullError,
    LogUnavailableError,
    UnavailableError,
)
from turboserve.telemetry import inject_context

log = logs.get("bus")

WRONG_LAST_SEQUENCE = 10071
NO_ROOM = frozenset({10023, 10047, 10077})
"""Errors of a broker without room: its storage is at its limit (10023, 10047), or the stream is (10077)."""
LIVE = "live."
"""Before the subject of a republished message."""
QUIET_S = 1.5
"""After this much silence a follower asks whether it missed something..."""
QUIET_LIMIT_S = 6.0
"""...and again after twice as long each time, up to this long. Any message shows at once what came before."""
DIRECT_GET_S = 2.0
"""Deadline of reading one message."""
NOT_FOUND = "404"
BACKLOG = 4
"""Live messages that a follower holds for a reader who is busy; what comes on top is read from the log."""


@dataclass(frozen=True)
class Entry:
    """One accepted message."""

    subject: str
    sequence: int
    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ack:
    """The broker has the message; `duplicate`: it had it before."""

    sequence: int
    duplicate: bool


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
    """Append to the log; a repeat under the same `message_id` is answered with the first one's sequence.

    `expect` is the fence: (subject, sequence of its newest message). Raises `FencedError` if that is no
    longer so, `DeadlineError` if the outcome is unknown (append again), `LogFullError` if the broker has no
    room for it, `LogUnavailableError` if its storage is off or the stream is not there, and
    `UnavailableError` for everything else.
    """
    all_headers = inject_context({**(headers or {}), "Nats-Msg-Id": message_id})
    if expect is not None:
        all_headers["Nats-Expected-Last-Subject-Sequence"] = str(expect[1])
        if expect[0] != subject:
            all_headers["Nats-Expected-Last-Subject-Sequence-Subject"] = expect[0]
    if ttl_s is not None:
        all_headers["Nats-TTL"] = f"{ttl_s}s"
    try:
        ack = await bus.jetstream().publish(subject, data, timeout=deadline_s, headers=all_headers)
    except NoStreamResponseError as error:
        # What a broker with its storage switched off answers too.
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


async def last_entry(bus: Bus, stream: str, subject: str) -> Entry | None:
    """The newest message on `subject`, which may be a pattern, or None."""
    return await _get(bus, stream, {"last_by_subj": subject})


async def next_entry(bus: Bus, stream: str, subject: str, sequence: int) -> Entry | None:
    """The first message on `subject`, which may be a pattern, at or after stream `sequence`, or None."""
    return await _get(bus, stream, {"seq": max(sequence, 1), "next_by_subj": subject})


async def _get(bus: Bus, stream: str, request: Mapping[str, str | int]) -> Entry | None:
    """Not by nats-py's `get_msg`: it takes the headers of a stored message for the broker's answer."""
    subject, body = f"$JS.API.DIRECT.GET.{stream}", json.dumps(request).encode()
    try:
        try:
            raw = await bus.client.request(subject, body, timeout=DIRECT_GET_S)
        except nats.errors.NoRespondersError:
            # Or a stored message with the header by which nats-py knows this.
            raw = await _answer(bus, subject, body)
    except (TimeoutError, nats.errors.Error, OSError) as error:
        raise UnavailableError(f"{stream} does not answer: {error!r}", retry_after_s=0.5) from None
    headers = raw.headers or {}
    # The broker sets these in every stored message, whatever its own headers are, and in nothing else.
    if "Nats-Sequence" in headers:
        return Entry(headers["Nats-Subject"], int(headers["Nats-Sequence"]), raw.data, headers)
    if (status := headers.get("Status")) == NOT_FOUND:
        return None
    reason = headers.get("Description")
    raise UnavailableError(f"{stream} cannot be read: {status} {reason}", retry_after_s=0.5)


async def _answer(bus: Bus, subject: str, body: bytes) -> NatsMsg:
    """The answer to a request, whatever its headers are."""
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


async def follow(
    bus: Bus,
    stream: str,
    subject: str,
    live: str,
    *,
    after_sequence: int = 0,
    on_lost: Callable[[], Awaitable[None]] | None = None,
) -> AsyncGenerator[Entry, None]:
    """All messages on `subject` after stream sequence `after_sequence`, each once, in order, for ever.

    `subject` and `live` may be patterns. A live message names the one before it on its own subject, so one
    on another subject than the message before it is read from the log.

    Survives broker restarts and lost live messages. Messages that the stream no longer keeps are skipped:
    readers of chunks check that indices are contiguous. A reader who takes long between two messages costs
    at most `BACKLOG` of them in memory.

    A stream that was deleted and made anew, or that is not as long as the place which was reached in it (a
    broker lost its disk, or the end of it), is noticed within a few seconds and read from its beginning.
    Sequences start again then, and messages that came while nothing was noticed yet may come twice.
    `on_lost` is awaited before that; what it raises ends the following.
    """
    queue: asyncio.Queue[Entry] = asyncio.Queue(BACKLOG)
    dropped = False

    async def receive(raw: NatsMsg) -> None:
        nonlocal dropped
        headers = raw.headers or {}
        if queue.full():
            dropped = True
            return
        queue.put_nowait(
            Entry(raw.subject.removeprefix(LIVE), int(headers["Nats-Sequence"]), raw.data, headers)
        )

    subscription = await bus.client.subscribe(live, cb=receive)
    place = StreamPosition(bus.incarnations, stream, after_sequence)
    quiet_s = QUIET_S
    newest = subject
    """Subject of the message before."""
    announced = 0
    """Sequence of the live message because of which the log is read."""
    try:
        caught_up = False
        while True:
            if place.lost():
                log.warning("stream replaced: reading from its beginning", stream=stream, subject=subject)
                caught_up = False
                while not queue.empty():
                    queue.get_nowait()
                if on_lost is not None:
                    await on_lost()
            if not caught_up:
                try:
                    entry = await next_entry(bus, stream, subject, place.position + 1)
                except UnavailableError:
                    await asyncio.sleep(0.2)
                    continue
                if entry is None:
                    caught_up = True
                    continue
                place.reach(entry.sequence)
                quiet_s, newest = QUIET_S, entry.subject
                caught_up = entry.sequence == announced
                yield entry
                continue
            if dropped and queue.empty():
                dropped = caught_up = False
                continue
            try:
                # Not wait_for: before Python 3.12 it can swallow a cancellation.
                async with asyncio.timeout(quiet_s):
                    entry = await queue.get()
            except TimeoutError:
                caught_up, quiet_s = False, min(2 * quiet_s, QUIET_LIMIT_S)
                continue
            quiet_s = QUIET_S
            if entry.sequence <= place.position:
                continue
            before = int(entry.headers.get("Nats-Last-Sequence", "0"))
            if before > place.position or entry.subject != newest:
                # One before this may be lost on the way (or the stream dropped it): read on from the log.
                caught_up, announced = False, entry.sequence
                continue
            place.reach(entry.sequence)
            yield entry
    finally:
        with contextlib.suppress(nats.errors.Error, OSError):
            await subscription.unsubscribe()
