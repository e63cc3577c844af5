"""Rows of events in the outbox, and their publication: in order, each once, whatever fails in between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from turboserve import logs, telemetry
from turboserve.bus import LAG_WARN_S, Bus, append, last_entry
from turboserve.clock import Clock
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.events import (
    ControlApplied,
    ControlSuperseded,
    Event,
    PromptApplied,
    PromptSuperseded,
    WorkerJoined,
    WorkerLeft,
)
from turboserve.state_store import metrics
from turboserve.state_store.ports.database import Database
from turboserve.state_store.ports.records import PendingEvent
from turboserve.state_store.settings import Settings
from turboserve.subjects import EVENT, EVENTS, WORKER_EVENT
from turboserve.telemetry import context_from, within
from turboserve.wording import counted

LOCK = 0x7475_7262_0002
"""Number of the advisory lock that lets one instance at a time publish, so that the log keeps the order."""
BATCH = 64
TURN_S = 1.0
"""Time in a turn after which no event is appended, seconds, so that the lock outlasts the turn."""
READ_ON_S = 0.25
"""Time in a turn after which no further events are read, seconds, so that other instances get turns."""

log = logs.get("outbox")


def outbox_values(event: Event) -> dict[str, Any]:
    """Return the columns of an event's row in the outbox, except its number.

    Events contain no metadata of a session, which would repeat up to 40 KB with each change.
    """
    tenant = None
    if isinstance(event, WorkerJoined | WorkerLeft):
        subject = WORKER_EVENT.of(event.worker.id)
    else:
        subject, tenant = EVENT.of(event.record.id), event.record.tenant
        if event.record.metadata:
            event = event.model_copy(update={"record": event.record.model_copy(update={"metadata": {}})})
    return {
        "event_id": event.id,
        "subject": subject,
        "body": event.to_bytes().decode(),
        "created_at": event.at,
        "traceparent": trace_of(event),
        "tenant": tenant,
        "type": event.type,
    }


def trace_of(event: Event) -> str | None:
    """Return the trace context of an event: of what a chunk settled, or of the current change."""
    if isinstance(event, PromptApplied | PromptSuperseded | ControlApplied | ControlSuperseded):
        # The row keeps the context of its newest prompt or control alone.
        newest = event.control_seq == event.record.control_seq
        return event.record.prompt_traceparent if newest else None
    return telemetry.traceparent()


def _of_different_subjects(events: Sequence[PendingEvent]) -> Sequence[PendingEvent]:
    """Return the first events, up to the second one of a subject."""
    subjects: set[str] = set()
    for number, event in enumerate(events):
        if event.subject in subjects:
            return events[:number]
        subjects.add(event.subject)
    return events


class Outbox:
    """Publishes committed events. Call `wake` after a commit. Polling finds what other instances left."""

    def __init__(self, database: Database, bus: Bus, clock: Clock, settings: Settings) -> None:
        self._database, self._bus, self._clock, self._settings = database, bus, clock, settings
        self._turn_s = min(TURN_S, settings.transaction_deadline_s)
        self._awake = asyncio.Event()
        self._waiting = (0, 0.0)
        """Events that wait, and the age of the oldest one, seconds."""

    def wake(self) -> None:
        self._awake.set()

    def warning(self) -> str | None:
        """Return how many events wait for the log and for how long; None if that is short."""
        count, lag_s = self._waiting
        wait = counted(count, "event waits", "events wait")
        return f"{wait}, the oldest for {lag_s:.0f} s" if lag_s >= LAG_WARN_S else None

    async def run(self) -> None:
        """Publish events; never returns."""
        while True:
            try:
                if await self.drain():
                    continue
            except TurboServeError as error:
                log.warning("event publication delayed", error=error.detail)
                await asyncio.sleep(error.retry_after_s or 0.5)
                continue
            while not await self._woken() and not await self._waits():
                pass

    async def _woken(self) -> bool:
        """Return True after `wake`, and False after `sweep_s` without it."""
        with suppress(TimeoutError):
            # wait_for can swallow a cancellation before Python 3.12.
            async with asyncio.timeout(self._settings.sweep_s):
                await self._awake.wait()
        return self._awake.is_set()

    async def _waits(self) -> bool:
        """Return whether an event waits, by a look without the lock; True if the database is away."""
        try:
            async with self._database.statement() as db:
                return bool(await db.outbox.oldest(1))
        except TurboServeError:
            return True

    async def drain(self) -> bool:
        """Publish what waits, in one turn. Returns whether there may be more.

        After `wake`, the turn reads again, so that events of many commits share its lock. Raises
        UnavailableError if a server is away.

        Events are read, published and removed under the lock but without a transaction, so that a slow broker
        blocks no row. After a crash before the removal, events are published again with the same message id.
        The broker recognizes them in its duplicate window; after it, a look at the log does. The same holds
        for a process that was stopped in an append and has lost the lock: it appends no other event in this
        turn.
        """
        started = self._clock.monotonic()
        async with self._database.exclusive(LOCK) as db:
            while True:
                # Before the read: what is committed after it wakes again.
                self._awake.clear()
                pending = await db.outbox.oldest(BATCH)
                done, problem = await self._append_all(pending, started)
                if done:
                    await db.outbox.remove(done)
                more = len(pending) == BATCH or len(done) < len(pending)
                late = self._clock.monotonic() - started > READ_ON_S
                if problem is not None or late or not (more or self._awake.is_set()):
                    break
        if problem is not None:
            raise problem
        return more

    async def _append_all(
        self, pending: Sequence[PendingEvent], started: float
    ) -> tuple[list[int], TurboServeError | None]:
        """Append events. Returns the numbers of those that are in the log, and the error that ended the turn.

        Events of different subjects are sent together, in their order, and their acknowledgments awaited
        together. An event waits for the acknowledgment of the one before it on its subject, which may fail.

        `started`: when the turn began, by the monotonic clock.
        """
        done = await self._published_before(pending)
        left = [event for event in pending if event.number not in done]
        while left:
            together = _of_different_subjects(left)
            outcomes = await asyncio.gather(*(self._append(event, started) for event in together))
            done += [event.number for event, is_in in zip(together, outcomes, strict=True) if is_in is True]
            problem = next((one for one in outcomes if isinstance(one, TurboServeError)), None)
            if problem is not None or not all(outcomes):
                return done, problem
            left = left[len(together) :]
        return done, None

    async def _append(self, event: PendingEvent, started: float) -> bool | TurboServeError:
        """Append an event. Returns whether it was early enough in the turn for that, or what went wrong."""
        if self._clock.monotonic() - started > self._turn_s:
            return False
        body = event.body.encode()
        try:
            with within(context_from(event.traceparent)):
                await append(self._bus, event.subject, body, message_id=event.event_id, deadline_s=TURN_S)
        except TurboServeError as error:
            return error
        metrics.outbox_delay.record(max(0.0, self._clock.wall() - event.created_at))
        return True

    async def measure(self, every_s: float = 5.0) -> None:
        """Keep the gauges of waiting events up to date; never returns."""
        while True:
            with suppress(TurboServeError):
                async with self._database.statement() as db:
                    count, since = await db.outbox.backlog()
                lag_s = 0.0 if since is None else max(0.0, self._clock.wall() - since)
                self._waiting = count, lag_s
                metrics.outbox_backlog.set(count)
                metrics.outbox_lag.set(lag_s)
            await asyncio.sleep(every_s)

    async def _published_before(self, pending: Sequence[PendingEvent]) -> list[int]:
        """Return the numbers of events published before, too long ago for the broker to recognize them.

        Each subject is published in order, so all events up to the last one in the log have been published.
        """
        horizon = self._clock.wall() - self._settings.duplicate_window_s / 2
        subjects = {event.subject for event in pending if event.created_at < horizon}
        numbers: list[int] = []
        for subject in subjects:
            entry = await last_entry(self._bus, EVENTS, subject)
            ours = [event for event in pending if event.subject == subject]
            ids = [event.event_id for event in ours]
            last = (entry.headers if entry else {}).get("Nats-Msg-Id")
            if last in ids:
                numbers += [event.number for event in ours[: ids.index(last) + 1]]
        return numbers
