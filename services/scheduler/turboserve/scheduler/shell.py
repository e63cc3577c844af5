"""The scheduler's shell: connects the core to the event log, load reports, playheads, clock and store."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import nats.errors
from opentelemetry.metrics import CallbackOptions, Observation

from turboserve import logs, subjects
from turboserve.bus import Entry, consume
from turboserve.contracts.events import WorkerJoined, WorkerLeft, event_from_bytes
from turboserve.contracts.workers import LoadReport, Playhead
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.executor import Executor
from turboserve.scheduler.messages import (
    AllListed,
    Answered,
    Command,
    DeclareGone,
    Event,
    ListAll,
    LoadReported,
    Note,
    Place,
    SessionChanged,
    SuspendIdle,
    Tick,
    Watched,
    WorkerChanged,
)
from turboserve.service import Runtime
from turboserve.telemetry import meter

log = logs.get("scheduler")
_meter = meter("scheduler")
_decision_s = _meter.create_histogram(
    "turboserve_scheduler_decision_seconds", unit="s", description="Time the core takes for one event."
)
_decided = _meter.create_counter(
    "turboserve_scheduler_decisions", description="Decisions by kind; `wait` changes nothing."
)
_idled = _meter.create_counter("turboserve_scheduler_idle_suspensions", description="Sessions found idle.")
_declared = _meter.create_counter("turboserve_scheduler_workers_declared_gone", description="By time-out.")
_refused = _meter.create_counter("turboserve_scheduler_refusals", description="Commands refused, by reason.")

DURABLE = "scheduler"
IN_FLIGHT = 64
"""Commands carried out at once, at most."""


class Shell:
    """Feeds the core one event at a time, and runs its commands concurrently."""

    def __init__(self, runtime: Runtime, core: Scheduler, tick_s: float) -> None:
        self.core = core
        self._runtime = runtime
        self._bus = runtime.bus
        self._tick_s = tick_s
        self._executor = Executor(runtime.bus, runtime.clock)
        self._room = asyncio.Semaphore(IN_FLIGHT)
        self._synced = asyncio.Event()
        self._listed_up_to = 0
        """Events up to this stream sequence were committed before the newest listing was made."""

    async def start(self) -> None:
        await self._bus.subscribe(subjects.LOAD, "*", self._on_load)
        await self._bus.subscribe(subjects.PLAYHEAD, "*", self._on_playhead)
        self._runtime.spawn(self._ticks(), "ticks")
        self._runtime.spawn(
            consume(
                self._bus,
                subjects.EVENTS,
                DURABLE,
                [subjects.EVENT.every, subjects.WORKER_EVENT.every],
                self._on_event,
            ),
            "events",
        )

    def feed(self, event: Event) -> None:
        """Give the core one event and start what it asks for."""
        began = time.perf_counter()
        try:
            commands = self.core.handle(event, self._runtime.clock.monotonic())
        except Exception as error:
            # A core that failed halfway cannot be trusted: the process ends, the next fills its view anew.
            self._runtime.spawn(_fail(error), "core")
            return
        _decision_s.record(time.perf_counter() - began, {"event": type(event).__name__})
        if self.core.synced:
            self._synced.set()
        for command in commands:
            self._note(command)
            # If one raises, the process ends: an unanswered ticket would hold its session for ever.
            self._runtime.spawn(self._execute(command), type(command).__name__)

    async def _execute(self, command: Command) -> None:
        async with self._room:
            mark = await self._event_log_end() if isinstance(command, ListAll) else 0
            answer = await self._executor.run(command)
        if isinstance(answer, Answered) and answer.refused is not None:
            _refused.add(1, {"reason": answer.refused.value})
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

    async def _on_load(self, report: LoadReport, _body: bytes) -> None:
        self.feed(LoadReported(report))

    async def _on_playhead(self, playhead: Playhead, _body: bytes) -> None:
        self.feed(Watched(playhead.session, playhead.viewers))

    async def _on_event(self, entry: Entry) -> None:
        await self._synced.wait()
        if entry.sequence <= self._listed_up_to:
            return
        event = event_from_bytes(entry.data)
        if isinstance(event, WorkerJoined | WorkerLeft):
            self.feed(WorkerChanged(event.worker))
        else:
            self.feed(SessionChanged(event.record))

    @staticmethod
    def _note(command: Command) -> None:
        if isinstance(command, Place | Note):
            decision = command.decision
            _decided.add(1, {"kind": decision.kind})
            log.info(
                "decision",
                kind=decision.kind,
                session=decision.session,
                worker=decision.worker,
                epoch=decision.epoch,
                reason=decision.reason,
            )
        elif isinstance(command, DeclareGone):
            _declared.add(1)
            log.warning("worker taken for dead", worker=command.worker, reason=command.reason)
        elif isinstance(command, SuspendIdle):
            _idled.add(1)
            log.info("session idle", session=command.session)


async def serve(runtime: Runtime, core: Scheduler, tick_s: float) -> Shell:
    """Start the scheduler on `runtime`; it is ready once its view has been filled from the state store."""
    shell = Shell(runtime, core, tick_s)
    runtime.check("view", lambda: core.synced)
    _observe(core)
    await shell.start()
    return shell


async def _fail(error: Exception) -> None:
    raise error


def _observe(core: Scheduler) -> None:
    def waiting(_options: CallbackOptions) -> list[Observation]:
        return [Observation(core.waiting)]

    def workers(_options: CallbackOptions) -> list[Observation]:
        return [Observation(len(core.view.workers))]

    gauges: dict[str, Any] = {"waiting_sessions": waiting, "workers": workers}
    for name, callback in gauges.items():
        _meter.create_observable_gauge(f"turboserve_scheduler_{name}", callbacks=[callback])
