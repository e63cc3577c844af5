"""The worker's shell: carries out the session table's commands, and delivers the resulting events to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from opentelemetry import trace

from turboserve import logs
from turboserve.audience import AggregatedPlayhead, AudienceFollower
from turboserve.bus import Bus
from turboserve.clock import Clock
from turboserve.contracts.loans import WorkerLoan
from turboserve.contracts.worker_offers import FrameSize
from turboserve.contracts.workers import Assignment, LoadReport, WorkerPhase
from turboserve.subjects import ASSIGN
from turboserve.tasks import BackgroundTasks
from turboserve.telemetry import tracing
from turboserve.worker import metrics
from turboserve.worker.engine.engine import Engine
from turboserve.worker.service import commands, events, migration_commands, quality
from turboserve.worker.service.engine_commands import AdmitRequest
from turboserve.worker.service.heartbeat import RELEASE, Heartbeat
from turboserve.worker.service.migrations import Migrations
from turboserve.worker.service.packager import PackagedChunk, ToLoop
from turboserve.worker.service.ports import DecodeLimit, EngineRunner, Loaded, NoDecodeLimit, Platform
from turboserve.worker.service.session_logs import SessionLogs
from turboserve.worker.service.spans import AdmissionSpans
from turboserve.worker.service.table import Table
from turboserve.worker.service.watchdog import STUCK_S, Watchdog
from turboserve.worker.service.worker_classes import NOT_DECLARED, WorkerClasses
from turboserve.worker.settings import Settings

FINAL_REPORT_TIMEOUT_S = 2.0
"""Longest time that a stopping worker waits for its chunks to be published, then for its engine, s."""

_ASSIGNING = (events.Renewed, events.Assigned)
log = logs.get("worker")


class Worker:
    """One worker between `start` and `stop`. All methods run on the event loop's thread."""

    def __init__(
        self,
        worker: str,
        settings: Settings,
        bus: Bus,
        clock: Clock,
        platform: Platform,
        loaded: Loaded,
        capacity: int,
        floor_capacity: int,
        started_at: float | None = None,
        served: Mapping[str, int] = NOT_DECLARED,
    ) -> None:
        """`capacity`, `floor_capacity`: see `LoadReport`. `started_at`: when the worker began to load,
        wall-clock seconds. None: now. `served`: see `WorkerClasses`."""
        engine, config = loaded.engine, loaded.engine.config
        self.id = worker
        self.classes = classes = WorkerClasses(loaded, served)
        lease_s, model = settings.lease_s, settings.models[0]
        self.table = Table(worker, model, capacity, lease_s, floor_capacity, classes.slots)
        self._settings, self._bus, self._clock, self._config = settings, bus, clock, config
        self.slack, self._quality = quality.SlackBoard(), quality.QualityBoard()
        self._started_at = clock.wall() if started_at is None else started_at
        self._host_states = min(one.host_states for one in classes.engines)
        self._device, self._pid = str(engine.device), platform.pid
        device = platform.run(engine, self._arrived, loaded.classes)
        self._engine, self._packager = device.engine, device.packager
        network, prints = platform.network(engine), classes.fingerprints
        self.migrations = Migrations(
            worker, settings, self._engine, network, self.table, self.handle, clock.monotonic, prints
        )
        self.logs = SessionLogs(
            worker,
            bus,
            clock,
            config,
            settings.chunk_ttl_s,
            settings.send_latents,
            self.table,
            self.handle,
            self._check_connection,
            lambda session: classes.config_of(self.migrations.class_of(session)),
            classes.config_of,
        )
        self.heartbeat = Heartbeat(bus, clock, settings, self.load, self.handle, platform.leave)
        self._audiences = AudienceFollower(bus, clock.monotonic, self._audience_changed)
        self._tasks = BackgroundTasks(_log_failure)
        self._connection = bus.connection
        self._stopping = False
        self._admissions = AdmissionSpans()
        self.decoding: DecodeLimit = NoDecodeLimit()
        self.loan: Callable[[], WorkerLoan | None] = lambda: None

    # Start and stop

    async def start(self, spawn: Callable[[Coroutine[Any, Any, None], str], object]) -> None:
        """Start the threads and the subscriptions. `spawn` runs the endless tasks."""
        self._packager.start()
        self._engine.start()
        await self.migrations.start()
        await self._bus.subscribe(ASSIGN, self.id, self._assigned)
        spawn(self.heartbeat.run(), "heartbeat")
        spawn(self._tick(), "ticks")

    async def stop(self) -> None:
        """Generate nothing new; publish what is generated, for a short time; end the threads; leave."""
        self._stopping = True
        self.migrations.fetch_no_more()
        self._engine.submit(commands.StopGenerating())
        deadline = self._clock.monotonic() + FINAL_REPORT_TIMEOUT_S
        while self.table.unpublished and self._clock.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await self._engine.end(FINAL_REPORT_TIMEOUT_S)
        await self._packager.end(0.5)
        if self._engine.alive:
            # Its forward may still yield chunks: without a final report, no worker takes over yet.
            log.warning("engine still running: final report skipped", waited_s=FINAL_REPORT_TIMEOUT_S)
        else:
            # Nothing is generated any more. The report goes first: the end of a large copy may take time.
            await self.heartbeat.leave()
        await self.migrations.stop()
        self._audiences.close()
        self.logs.close()
        self._tasks.cancel()

    @property
    def alive(self) -> bool:
        return self._engine.alive

    @property
    def runner(self) -> EngineRunner:
        """What steps the engine."""
        return self._engine

    @property
    def engine(self) -> Engine:
        """The engine, for reading."""
        return self._engine.engine

    @property
    def joined(self) -> bool:
        """Whether the state store knows this worker."""
        return self.heartbeat.answered

    def load(self) -> LoadReport:
        runs = {entry.session: entry.run for entry in self.table.entries.values()}
        held = self.table.held(self._config.media_start, self.classes.starts)
        now, classes = self._clock.monotonic(), self.classes.report()
        engine, fidelity, (width, height) = self.engine, self.engine.fidelity, self._config.frame_size
        seconds = quality.beyond_slabs(self.classes.profile.to_mapping(), engine.slabs, engine.places)
        return LoadReport(
            worker=self.id,
            model=self._settings.models[0],
            capacity=self.decoding.limited(self.table.capacity) if classes is None else classes[0].capacity,
            weights_digest=self._engine.engine.fingerprint,
            controls=self.engine.declarations,
            frame=FrameSize(width=width, height=height),
            classes=classes,
            phase=WorkerPhase.DRAINING if self.table.draining or self._stopping else WorkerPhase.READY,
            sessions=self._quality.onto(self.slack.onto(held, runs, now), runs),
            refusals=self.table.refusals(),
            migrations=self.table.incoming.reports(),
            transfer=self.migrations.addresses,
            host=self.migrations.machine,
            chunk_latency_s=seconds,
            floor_chunk_latency_s=quality.floor_seconds(seconds, fidelity.ladder) if fidelity.lowers else {},
            floor_capacity=self.decoding.limited(self.table.floor_capacity) if fidelity.lowers else None,
            decoding=self.decoding.capacity(self.table.capacity),
            quality=self._quality.mean(now),
            quality_debt=self._quality.debt(now),
            deficit=self.slack.deficit,
            loan=self.loan(),
            host_states=self._host_states,
            host_sessions=self.engine.options.host_sessions,
            offloaded=self.engine.offloaded,
            device=self._device,
            pid=self._pid,
            pool_member=self._settings.pool_member,
            started_at=self._started_at,
            release=RELEASE,
            device_error_sessions=self._engine.device_error_sessions,
        )

    async def _tick(self) -> None:
        tick_s = self._settings.worker_tick_s
        watchdog = Watchdog(round(STUCK_S / tick_s))
        while True:
            await asyncio.sleep(tick_s)
            self.handle(events.Tick())
            self.classes.count_returns()
            self._check_connection()
            if not self._stopping:
                # End the process: its renewals would continue, so no other process notices the fault.
                watchdog.check(self._engine, self._packager)

    def _check_connection(self) -> None:
        """Tell the table of a new connection. Call this before an answer that may have come over it."""
        connection = self._bus.connection
        if connection is not None and connection != self._connection:
            self._connection = connection
            self.handle(events.Reconnected())

    # Events

    def handle(self, message: events.Input) -> None:
        now = self._clock.monotonic()
        if isinstance(message, _ASSIGNING):
            self.migrations.keys.learn(message, now)
        for command in self.table.handle(message, now):
            self._carry_out(command)
        if isinstance(message, _ASSIGNING):
            if tracing():
                records = (message.record,) if isinstance(message, events.Assigned) else message.records
                self._admissions.assigned(records, self.table.entries)
            self._audiences.follow(self.table.watched)

    def _arrived(self, item: ToLoop) -> None:
        if isinstance(item, quality.SlackMeasured):
            self.slack.measured(item)
            if item.tiers_changed:
                self._spawn(self.heartbeat.publish())
            return
        if not isinstance(item, PackagedChunk):
            if isinstance(item, events.RunFailed):
                log.error("session failed", session=item.session, reason=item.reason)
            self.handle(item)
            return
        self.logs.packaged(item)
        # The context lets an exemplar name the chunk's trace.
        sampled = item.span.get_span_context().is_valid
        context = trace.set_span_in_context(item.span) if sampled else None
        metrics.compute_duration.record(item.compute_s, context=context)
        metrics.batch_sessions.record(item.concurrent_sessions, context=context)
        self.classes.observe(item)
        now = self._clock.monotonic()
        self._quality.made(item.session, item.run, item.fidelity, lowered=item.lowered, now=now)
        self.handle(events.ChunkPackaged(item.session, item.run, item.index, item.control_seq))

    async def _assigned(self, message: Assignment, _: bytes) -> None:
        self.handle(events.Assigned(message.record, message.incoming, message.key))

    def _audience_changed(self, session: str, together: AggregatedPlayhead) -> None:
        playing = together.viewers > 0
        self.handle(events.PlayheadMoved(session, together.playhead_s, playing, together.observed_at))

    # Commands

    def _carry_out(self, command: commands.Command) -> None:
        match command:
            case commands.PublishChunk():
                self.logs.publish(command)
            case commands.ForgetChunk():
                self.logs.forget(command.session, command.run, command.index)
            case commands.ReadLogEnd() | commands.FetchLatents() | commands.FailSession():
                self._spawn(self.logs.carry_out(command))
            case commands.Admit():
                kept = self.logs.take_context(command.session, command.run)
                if tracing():
                    self._admissions.admitted(command.session, command.next_chunk)
                log.info("session starts", session=command.session, chunk=command.next_chunk)
                self._engine.submit(AdmitRequest(command, kept))
            case commands.Report():
                self.heartbeat.soon()
            case commands.Evict():
                log.info("session released", session=command.session)
                self._quality.forget(command.session)
                self.logs.forget_run(command.session, command.run)
                self._engine.submit(command)
            case commands.Suspend() | commands.Resume():
                log.info(f"session {type(command).__name__.lower()}s", session=command.session)
                self._engine.submit(command)
            case (
                migration_commands.SendFinalDelta()
                | migration_commands.SendManifest()
                | migration_commands.CancelTransfer()
                | migration_commands.FetchState()
                | migration_commands.CancelFetch()
            ):
                self.migrations.carry_out(command)
            case commands.StopGenerating():
                log.warning("lease expired: generation stops until the state store answers")
                self._engine.submit(command)
            case commands.GenerateUntil() if self._stopping:
                pass
            case _:
                self._engine.submit(command)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.create(work)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("task failed", exc_info=task.exception())
