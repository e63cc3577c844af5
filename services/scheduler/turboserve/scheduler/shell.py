"""The scheduler's shell: connects the core to the event log, load reports, playheads, clock and store.

Each term in which this process leads has its own shell (see `app`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Any

import nats.errors
from nats.aio.subscription import Subscription
from opentelemetry.trace import SpanKind

from turboserve import logs, subjects
from turboserve.bus import UNREADABLE, Entry, Lag, read, skip
from turboserve.contracts.events import Event as LogEvent
from turboserve.contracts.events import WorkerJoined, WorkerLeft, event_from_bytes
from turboserve.contracts.pool import PoolStatus
from turboserve.contracts.requests import MigrateSession, MigrationAccepted
from turboserve.contracts.workers import LoadReport, Playhead
from turboserve.scheduler import metrics
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.decision_spans import NO_CAUSE, Cause, cause_of, span_of
from turboserve.scheduler.executor import Executor
from turboserve.scheduler.messages import (
    AbandonMigration,
    AllListed,
    Answered,
    BeginMigration,
    Command,
    CommitMigration,
    DeclareGone,
    Event,
    ListAll,
    LoadReported,
    Place,
    PoolReported,
    RecordDecision,
    Reply,
    SessionChanged,
    SuspendIdle,
    Tick,
    ViewersReported,
    WorkerChanged,
)
from turboserve.scheduler.operator_endpoint import OperatorEndpoint
from turboserve.scheduler.placement import Solve, solve_shares
from turboserve.scheduler.worker_releases import WorkerReleases
from turboserve.service import Runtime
from turboserve.subject_types import Caller
from turboserve.tasks import BackgroundTasks
from turboserve.telemetry import context_of, tracer, tracing, within
from turboserve.telemetry_names import DECISION, ERROR_TYPE, EVENT, MIGRATION_STEP, SCHEDULER_EVENT

log = logs.get("scheduler")
_trace = tracer("scheduler")

_STEPS = {CommitMigration: "commit", AbandonMigration: "abandon"}

IN_FLIGHT = 64
"""Maximum number of commands that run at the same time."""


class Shell:
    """Feeds the core one event at a time, and runs its commands concurrently."""

    def __init__(
        self,
        runtime: Runtime,
        core: Scheduler,
        tick_s: float,
        term: int = 0,
        leads: Callable[[float], bool] = lambda now: True,
        on_leadership_lost: Callable[[], None] = lambda: None,
        solve: Solve = solve_shares,
    ) -> None:
        """`leads` returns whether this process may still decide in `term`, at a monotonic time in seconds.

        The shell calls `on_leadership_lost` when the store reports that `term` is over. `solve` decides the
        shares of classes.
        """
        self.core = core
        self.term = term
        self._leads_at = leads
        self._runtime = runtime
        self._bus = runtime.bus
        self._tick_s = tick_s
        self._executor = Executor(runtime.bus, runtime.clock, term, on_leadership_lost, solve)
        self._operator_endpoint = OperatorEndpoint(runtime.bus, self.feed, self._leads)
        self._room = asyncio.Semaphore(IN_FLIGHT)
        self._synced = asyncio.Event()
        self._subscriptions: list[Subscription] = []
        self._tasks = BackgroundTasks()
        self._releases = WorkerReleases()
        self.lag = Lag()
        """Of the events that this process follows."""
        runtime.warn("worker_releases", self._mixed_releases)
        runtime.warn("shares", lambda: core.shares.failed if self._leads() else None)
        runtime.warn("events", lambda: self.lag.warning(runtime.clock.monotonic()))
        self._listed_up_to = 0
        """Stream sequence up to which events were committed before the newest listing. They are skipped."""

    async def start(self) -> None:
        self._subscriptions += [
            await self._bus.subscribe(subjects.LOAD, "*", self._on_load),
            await self._bus.subscribe(subjects.PLAYHEAD, "*", self._on_playhead),
            await self._bus.subscribe(subjects.POOL, "*", self._on_pool),
            await self._bus.serve_as_leader(subjects.MIGRATE_SESSION, self._on_migrate),
        ]
        self._spawn(self._ticks(), "ticks")
        self._spawn(self._events(), "events")

    async def stop(self) -> None:
        """End all tasks and subscriptions, because the term is over."""
        await self._tasks.stop()
        for subscription in self._subscriptions:
            try:
                await subscription.unsubscribe()
            except (nats.errors.Error, OSError) as error:
                log.debug("subscription not ended", error=repr(error))

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        self._tasks.add(self._runtime.spawn(work, name))

    def _leads(self) -> bool:
        return self._leads_at(self._runtime.clock.monotonic())

    def feed(self, event: Event) -> None:
        """Pass one event to the core and start the commands that it returns. Does nothing after the term."""
        if not self._leads():
            return
        began = time.perf_counter()
        try:
            commands = self.core.handle(event, self._runtime.clock.monotonic())
        except Exception as error:
            # The core's state may be inconsistent now. End the process; the next leader fills a new view.
            self._spawn(_fail(error), "core")
            return
        metrics.decision_duration.record(time.perf_counter() - began, {SCHEDULER_EVENT: type(event).__name__})
        if self.core.synced:
            self._synced.set()
        for command in commands:
            if isinstance(command, Reply):
                if command.error is not None:
                    metrics.refusals.add(1, {ERROR_TYPE: command.error.code})
                self._operator_endpoint.answer(command)
                continue
            self._note(command)
            cause = self._cause(command, event) if tracing() else NO_CAUSE
            self._tasks.create(self._execute(command, cause), type(command).__name__)

    def _cause(self, command: Command, event: Event) -> Cause:
        session = self.core.view.sessions.get(getattr(command, "session", ""))
        if session is None and isinstance(command, RecordDecision):
            session = self.core.view.sessions.get(command.decision.session)
        return cause_of(command, event, None if session is None else session.record)

    async def _execute(self, command: Command, cause: Cause) -> None:
        try:
            if not tracing():
                await self._run(command, nullcontext())
                return
            # Without `within`, the command would continue whatever was current when the event was processed.
            with within(NO_CAUSE.context):
                await self._run(command, span_of(command, cause) or nullcontext())
        except Exception as error:
            # End the process: an unanswered ticket would block its session forever.
            self._spawn(_fail(error), type(command).__name__)

    async def _run(self, command: Command, span: AbstractContextManager[object]) -> None:
        async with self._room:
            if not self._leads():
                return
            mark = await self._event_log_end() if isinstance(command, ListAll) else 0
            with span:
                answer = await self._executor.run(command)
        if isinstance(answer, Answered) and answer.refused is not None:
            metrics.refusals.add(1, {ERROR_TYPE: answer.refused.value})
        if answer is not None:
            self.feed(answer)
        if isinstance(answer, AllListed):
            self._listed_up_to = mark

    async def _event_log_end(self) -> int:
        try:
            info = await self._bus.jetstream().stream_info(subjects.EVENTS)
            return int(info.state.last_seq)
        except (TimeoutError, nats.errors.Error, OSError):
            return 0

    async def _ticks(self) -> None:
        while True:
            self.feed(Tick(connected=self._bus.connected))
            await asyncio.sleep(self._tick_s)

    async def _on_migrate(self, request: MigrateSession, _caller: Caller) -> MigrationAccepted | None:
        return await self._operator_endpoint.migrate(request) if self._leads() else None

    async def _on_load(self, report: LoadReport, _body: bytes) -> None:
        self._releases.reported(report.worker, report.release)
        self.feed(LoadReported(report))

    async def _on_pool(self, status: PoolStatus, _body: bytes) -> None:
        self.feed(PoolReported(status))

    def _mixed_releases(self) -> str | None:
        mixed = self._releases.mixed(self.core.view.workers)
        return mixed if self._leads() else None

    async def _on_playhead(self, playhead: Playhead, _body: bytes) -> None:
        self.feed(ViewersReported(playhead.session, playhead.viewers))

    async def _events(self) -> None:
        """Feed all events committed since the first listing. Later listings repair what is missed here."""
        await self._synced.wait()
        sources = (subjects.EVENT, subjects.WORKER_EVENT)
        async with aclosing(read(self._bus, sources, self._listed_up_to, lag=self.lag)) as batches:
            async for entries in batches:
                for entry in entries:
                    self._on_event(entry)

    def _on_event(self, entry: Entry) -> None:
        if entry.sequence <= self._listed_up_to:
            return
        try:
            event = event_from_bytes(entry.data)
        except UNREADABLE as error:
            # The next listing has the row that the event reports.
            skip(entry.subject, error)
            return
        if not tracing():
            self._feed_change(event)
            return
        attributes = {
            "messaging.system": "nats",
            "messaging.destination.name": entry.subject,
            "messaging.destination.template": "event.{id}",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            EVENT: event.type,
        }
        with (
            within(context_of(entry.headers)),
            _trace.child("process event", kind=SpanKind.CONSUMER, attributes=attributes),
        ):
            self._feed_change(event)

    def _feed_change(self, event: LogEvent) -> None:
        if isinstance(event, WorkerJoined | WorkerLeft):
            self.feed(WorkerChanged(event.worker))
        else:
            self.feed(SessionChanged(event.record))

    @staticmethod
    def _note(command: Command) -> None:
        if isinstance(command, Place | BeginMigration | RecordDecision):
            decision = command.decision
            metrics.decisions.add(1, {DECISION: decision.kind})
            log.info(
                "decision",
                kind=decision.kind,
                session=decision.session,
                worker=decision.worker,
                epoch=decision.epoch,
                reason=decision.reason,
            )
        elif isinstance(command, CommitMigration | AbandonMigration):
            step = type(command).__name__
            metrics.migrations.add(1, {MIGRATION_STEP: _STEPS[type(command)]})
            log.info("migration", step=step, session=command.session, migration=command.migration)
        elif isinstance(command, DeclareGone):
            metrics.workers_declared_gone.add(1)
            log.warning("worker lost", worker=command.worker, reason=command.reason)
        elif isinstance(command, SuspendIdle):
            metrics.idle_suspensions.add(1)
            log.info("session idle", session=command.session)


async def _fail(error: Exception) -> None:
    raise error
