"""The work of the engine's thread: carry out the table's commands, and translate the engine's events.

The driver is not bound to a thread: `host_platform.EngineThread` runs it on one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

from turboserve import logs
from turboserve.contracts.fidelity import QualityLimits
from turboserve.telemetry import tracing
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.errors import EngineError, SlabsExhaustedError, UnknownSessionError
from turboserve.worker.engine.interface import (
    ChunkReady,
    Control,
    ControlApplied,
    Event,
    Rebuild,
    SessionEnded,
    SessionFailed,
    SessionQuiesced,
    SessionReady,
    SessionSpec,
    Suspended,
    SuspendRefused,
)
from turboserve.worker.engine.streams import DEVICE_LOST
from turboserve.worker.service import commands, events
from turboserve.worker.service.engine_commands import AdmitRequest, EngineCall, EngineCommand, FetchedContext
from turboserve.worker.service.engine_run import EngineRun
from turboserve.worker.service.packager import FromEngine, GeneratedChunk
from turboserve.worker.service.quality import SlackMonitor, latency_sample
from turboserve.worker.service.spans import NO_ORIGIN, RunTrace

ISOLATED_CHUNKS = 8
"""Number of chunks that are computed alone, for a session that was in a failing step."""
IDLE_S = 0.5
"""Longest wait for a command before the engine is asked again, seconds."""

_LEASE = (commands.GenerateUntil, commands.StopGenerating)
log = logs.get("engine")


class EngineDriver:
    """Drives one engine, on the thread that owns it. `deliver` is called in the order of the events."""

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[FromEngine], None],
        now: Callable[[], float],
        quiet_s: float = 0.2,
        patience_s: float = 2.0,
        tier_report_s: float = 0.25,
    ) -> None:
        """Store the engine and its callbacks.

        `now`: monotonic seconds on the engine's clock. `quiet_s`, `patience_s`: see
        `Settings.migration_idle_window_s` and `Settings.migration_idle_window_timeout_s`. `tier_report_s`:
        see `Settings.tier_report_interval_s`.
        """
        self.engine, self._deliver, self._now = engine, deliver, now
        self._quiet_s, self._patience_s = quiet_s, patience_s
        self.runs: dict[str, EngineRun] = {}
        self._slack = SlackMonitor(engine, tier_report_s)
        engine.records_steps = tracing()
        self.generate_until = -math.inf
        """The end of the lease: no step begins at this time or later."""

    @property
    def generating(self) -> bool:
        """Whether a step may begin now."""
        return self._now() < self.generate_until

    def has_come(self, session: str, run: int) -> None:
        """Register the run of a session that was imported into the engine."""
        self.runs[session] = self._new_run(run)

    def device_error_sessions(self, error: BaseException) -> tuple[str, ...]:
        """Sessions of the step that raised `error`; empty unless the device failed in the step."""
        lost = isinstance(error, DEVICE_LOST) or isinstance(error.__cause__, DEVICE_LOST)
        return self.engine.computing if lost else ()

    def step(self, *, forward: bool = True) -> list[Event]:
        """Run one step (`Engine.step`) if one may begin now. Returns its events, to be passed to `stamp`."""
        now = self._now()
        if now >= self.generate_until:
            return []
        self.measure(now)
        return self.engine.step(now, forward=forward)

    def measure(self, now: float) -> None:
        """Measure and deliver the slack of the sessions whose chunks are delivered, if that is due."""
        if self._slack.may_measure(now):
            runs = {name: one.run for name, one in self.runs.items() if one.warming is None}
            if (measured := self._slack.measure(now, runs)) is not None:
                self._deliver(measured)

    def idle_s(self, *, rested: bool = False) -> float:
        """Seconds for which there is nothing to do unless a command comes; 0: a step may begin.

        `rested`: the last step found nothing to do.
        """
        now = self._now()
        if now >= self.generate_until:
            return IDLE_S
        if not rested and self.engine.has_work(now):
            return 0.0
        due = self.engine.next_due(now)
        return IDLE_S if due is None else min(IDLE_S, max(0.001, due - now))

    def carry_out(self, command: EngineCommand) -> None:
        """Carry out the command now. A run that cannot continue is evicted, and delivered as failed."""
        if isinstance(command, _LEASE):
            self.generate_until = command.until if isinstance(command, commands.GenerateUntil) else -math.inf
            return
        if isinstance(command, AdmitRequest):
            self._admit(command)
            return
        if isinstance(command, EngineCall):
            self._call(command)
            return
        engine_run = self.runs.get(command.session)
        if engine_run is None or engine_run.run != command.run:
            return
        if engine_run.warming is not None and not isinstance(command, commands.Evict):
            engine_run.held_back.append(command)
            return
        try:
            self._apply(command)
        except UnknownSessionError as error:
            # A session on the host left its slab while the command was on its way. The table repeats a
            # command that still matters when the session resumes. Any other session that the engine does not
            # know has failed.
            if not self._on_host(command.session):
                self._fail(command.session, str(error))
        except SlabsExhaustedError as error:
            self._deliver(events.AdmissionRefused(command.session, command.run, str(error), on_host=True))
        except EngineError as error:
            self._fail(command.session, str(error))

    def _call(self, command: EngineCall) -> None:
        # The caller may have canceled the call. After this line a cancellation has no effect.
        if not command.future.set_running_or_notify_cancel():
            return
        try:
            command.future.set_result(command.function(self.engine))
        except Exception as error:
            command.future.set_exception(error)

    def _apply(self, command: EngineCommand) -> None:
        now = self._now()
        match command:
            case commands.SetPlayhead(session=session, playhead_s=seconds, playing=playing, observed_at=at):
                self.engine.playhead(session, seconds, now=now if at is None else at, playing=playing)
            case commands.Evict(session=session):
                del self.runs[session]
                self._evict(session)
            case commands.Suspend(session=session):
                self.engine.suspend(session)
            case commands.Resume(session=session, traceparent=traceparent, waiting_s=waiting_s):
                self.runs[session].assign(traceparent)
                self.engine.resume(session, now, waiting_s)
                self.engine.playhead(session, command.playhead_s, now=now, playing=False)
            case commands.Quiesce(session=session, number=number):
                self.engine.quiesce(session, now, self._quiet_s, self._patience_s, number)
            case commands.Unquiesce(session=session, traceparent=traceparent):
                self.runs[session].assign(traceparent)
                self.engine.unquiesce(session)
            case commands.PauseGeneration(session=session, control_seq=seq):
                self.engine.control(session, Control(seq, paused=True))
            case commands.ResumeGeneration(session=session, control_seq=seq):
                self.engine.control(session, Control(seq, paused=False))
            case commands.SetConditions(session=session, control_seq=seq, prompt=prompt):
                if (trace := self.runs[session].trace) is not None:
                    trace.prompt(seq, command.traceparent)
                self.engine.control(session, Control(seq, prompt=prompt, values=command.values))
            case commands.SetLimits(session=session, control_seq=seq, limits=limits):
                quality = limits.quality or QualityLimits()
                lead_s = self.engine.options.max_lead_s if limits.max_lead_s is None else limits.max_lead_s
                limited = Control(seq, max_lead_s=lead_s, floor=quality.floor or 0.0, pinned=quality.pin)
                self.engine.control(session, limited)
            case commands.DropBuffer(session=session, control_seq=seq, waiting_s=waiting_s):
                self.engine.control(session, Control(seq, drops_buffer_since_s=now - waiting_s))
            case commands.GenerateNext(session=session):
                self.engine.generate_next(session)

    def _admit(self, command: AdmitRequest) -> None:
        admit = command.admit
        quality = admit.limits.quality or QualityLimits()
        context = command.context
        rebuild = None
        warming = None
        if admit.next_chunk > 0 and context.latents is None:
            warming = command
        elif context.latents is not None:
            rebuild = Rebuild(
                admit.next_chunk, context.latents, context.sink, context.fidelities, context.sink_fidelity
            )
        spec = SessionSpec(
            admit.session,
            admit.prompt,
            admit.seed,
            admit.control_seq,
            rebuild,
            playhead_s=0.0 if warming else admit.playhead_s,
            floor=quality.floor,
            pinned=quality.pin,
            max_lead_s=admit.limits.max_lead_s,
            waiting_s=admit.waiting_s,
            drops_buffer=admit.drops_buffer,
            isolated_chunks=ISOLATED_CHUNKS if admit.isolated else 0,
            values=admit.values,
        )
        try:
            self.engine.admit(spec, self._now())
        except SlabsExhaustedError as error:
            self._deliver(events.AdmissionRefused(admit.session, admit.run, str(error), on_host=False))
        except EngineError as error:
            self._deliver(events.RunFailed(admit.session, admit.run, str(error)))
        else:
            engine_run = self.runs[admit.session] = self._new_run(admit.run, warming)
            if engine_run.trace is not None:
                engine_run.trace.assign(admit.traceparent)
                engine_run.trace.prompt(admit.control_seq, admit.prompt_traceparent)

    def _new_run(self, run: int, warming: AdmitRequest | None = None) -> EngineRun:
        return EngineRun(run, warming, trace=RunTrace() if self.engine.records_steps else None)

    def _warmed(self, engine_run: EngineRun, chunk: ChunkReady) -> None:
        """Restart at the due chunk, with this first chunk's latents in place of the lost context."""
        assert engine_run.warming is not None
        admit = engine_run.warming.admit
        del self.runs[admit.session]
        self._evict(admit.session)
        latents = chunk.latents.to(self.engine.dtype)
        self._admit(AdmitRequest(admit, FetchedContext(latents, fidelities=(chunk.fidelity,))))
        for command in engine_run.held_back:
            self.carry_out(command)

    def stamp(self, event: Event) -> None:
        """Deliver an event with its session's run."""
        engine_run = self.runs.get(event.session)
        if engine_run is None:
            return
        session, run = event.session, engine_run.run
        match event:
            case ChunkReady() if engine_run.warming is not None:
                self._warmed(engine_run, event)
            case SessionFailed(error=error):
                del self.runs[session]
                self._deliver(events.RunFailed(session, run, error))
            case _ if engine_run.warming is not None:
                pass
            case ChunkReady():
                others = [
                    held.state.fidelity
                    for held in self.engine.sessions.values()
                    if held.name != session and (held.task is not None or bool(held.undecoded))
                ]
                traced = engine_run.trace is not None and self.engine.records_steps
                origin = engine_run.origin(event, self.runs) if traced else NO_ORIGIN
                now = self._now()
                left = self.engine.playout_before(session, event.index, now)
                playout = None if left is None else (now, left)
                sample = latency_sample(self.engine, event, others)
                self._deliver(GeneratedChunk(run, event, 1 + len(others), origin, playout, sample))
            case ControlApplied(control_seq=seq):
                self._deliver(events.ControlTookEffect(session, run, seq))
            case Suspended(next_chunk=next_chunk):
                self._deliver(events.MovedToHost(session, run, next_chunk))
            case SessionQuiesced(next_chunk=next_chunk, number=number):
                self._deliver(events.Quiesced(session, run, next_chunk, number))
            case SuspendRefused(reason=reason):
                self._deliver(events.SuspendFailed(session, run, reason))
            case SessionEnded(reason=reason):
                self._deliver(events.RunFinished(session, run, reason))
            case SessionReady():
                log.debug("session ready", session=session, next_chunk=event.next_chunk)

    def _fail(self, session: str, reason: str) -> None:
        engine_run = self.runs.pop(session, None)
        self._evict(session)
        if engine_run is not None:
            self._deliver(events.RunFailed(session, engine_run.run, reason))

    def _on_host(self, session: str) -> bool:
        with suppress(UnknownSessionError):
            self.engine.snapshot(session)
            return True
        return False

    def _evict(self, session: str) -> None:
        with suppress(UnknownSessionError):
            self.engine.evict(session)
