"""What the engine's thread does: it carries out the table's commands, and says what the engine's events mean.

Not bound to a thread: `engine_thread` runs it on one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from turboserve import logs
from turboserve.worker.engine import adoption, events
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.errors import EngineError, SlabsExhausted, UnknownSession
from turboserve.worker.engine.spec import Control, Rebuild, SessionSpec
from turboserve.worker.engine.streams import DEVICE_LOST
from turboserve.worker.service import commands as do
from turboserve.worker.service import inputs as told
from turboserve.worker.service.stamped import FromEngine, Made

ISOLATED_CHUNKS = 8
"""So many chunks of a session that was in a failing step are computed in steps of its own."""
IDLE_S = 0.5
"""The engine is asked again after this long without a command."""

log = logs.get("engine")


@dataclass(frozen=True, eq=False)
class AdmitWith:
    """`Admit` and what was fetched for it."""

    admit: do.Admit
    latents: Tensor | None = None
    """Clean latents of the newest chunks before `next_chunk`, [frames, C, H, W]; None: lost, or none yet."""
    sink: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """Anything that has to be done on the engine's thread; `future` has its result."""

    function: Callable[[Engine], Any]
    future: Future[Any]


EngineCommand = (
    AdmitWith
    | Call
    | do.Freeze
    | do.Thaw
    | do.Evict
    | do.Suspend
    | do.Resume
    | do.Halt
    | do.Unhalt
    | do.SetPrompt
    | do.SetPlayhead
    | do.GenerateUntil
    | do.StopGenerating
)


@dataclass(eq=False)
class _EngineRun:
    """One run of a session in the engine."""

    run: int
    warming: AdmitWith | None = None
    """Set while a first chunk is made only to give a session without latents a context."""
    held_back: list[EngineCommand] = field(default_factory=list)


class EngineDriver:
    """Owned by whatever steps the engine. `deliver` is called in the order in which things happened."""

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[FromEngine], None],
        now: Callable[[], float],
        quiet_s: float = 0.2,
        patience_s: float = 2.0,
    ) -> None:
        """`now`: monotonic seconds on the engine's clock. `quiet_s`, `patience_s`: see
        `Settings.move_quiet_s` and `Settings.move_patience_s`."""
        self.engine = engine
        self._quiet_s, self._patience_s = quiet_s, patience_s
        self._deliver, self._now = deliver, now
        self._runs: dict[str, _EngineRun] = {}
        self.generate_until = -math.inf
        """No step begins at this time or later, by the lease."""

    @property
    def generating(self) -> bool:
        """Whether a step may begin now."""
        return self._now() < self.generate_until

    def has_come(self, session: str, run: int) -> None:
        """A session was brought to the engine, and this is its run from now on."""
        self._runs[session] = _EngineRun(run)

    def device_error_sessions(self, error: BaseException) -> tuple[str, ...]:
        """Sessions of the step that has raised `error`, if the device failed in it."""
        lost = isinstance(error, DEVICE_LOST) or isinstance(error.__cause__, DEVICE_LOST)
        return self.engine.computing if lost else ()

    def step(self) -> list[events.Event]:
        """One step of the engine, if one may begin now; what it did, to be given to `stamp`."""
        now = self._now()
        return self.engine.step(now) if now < self.generate_until else []

    def idle_s(self, *, rested: bool = False) -> float:
        """For how long there is nothing to do unless a command comes; 0: a step may begin.

        `rested`: a step has just found nothing to do.
        """
        now = self._now()
        if now >= self.generate_until:
            return IDLE_S
        if not rested and self.engine.has_work(now):
            return 0.0
        due = self.engine.next_due(now)
        return IDLE_S if due is None else min(IDLE_S, max(0.001, due - now))

    def carry_out(self, command: EngineCommand) -> None:
        """Do it now. A run that cannot go on is evicted, and delivered as failed."""
        if isinstance(command, do.GenerateUntil | do.StopGenerating):
            self.generate_until = command.until if isinstance(command, do.GenerateUntil) else -math.inf
            return
        if isinstance(command, AdmitWith):
            self._admit(command)
            return
        if isinstance(command, Call):
            self._call(command)
            return
        stay = self._runs.get(command.session)
        if stay is None or stay.run != command.run:
            return
        if stay.warming is not None and not isinstance(command, do.Evict):
            stay.held_back.append(command)
            return
        try:
            self._apply(command)
        except UnknownSession as error:
            # On the host, it left its slab while the command was on its way: what still matters is said again
            # with its return. Otherwise it failed a moment ago, or this is the first that is heard of it.
            if not self._on_host(command.session):
                self._fail(command.session, str(error))
        except SlabsExhausted as error:
            self._deliver(told.AdmissionRefused(command.session, command.run, str(error), on_host=True))
        except EngineError as error:
            self._fail(command.session, str(error))

    def _call(self, command: Call) -> None:
        # Who asked may have given up meanwhile; from here on that has no effect.
        if not command.future.set_running_or_notify_cancel():
            return
        try:
            command.future.set_result(command.function(self.engine))
        except Exception as error:
            command.future.set_exception(error)

    def _apply(self, command: EngineCommand) -> None:
        now = self._now()
        match command:
            case do.Evict(session=session):
                del self._runs[session]
                self._evict(session)
            case do.Suspend(session=session):
                self.engine.suspend(session)
            case do.Resume(session=session):
                self.engine.resume(session, now)
                self.engine.playhead(session, command.playhead_s, now=now, playing=False)
            case do.Freeze(session=session, number=number):
                adoption.freeze(self.engine, session, now, self._quiet_s, self._patience_s, number)
            case do.Thaw(session=session):
                adoption.thaw(self.engine, session)
            case do.Halt(session=session, control_seq=seq):
                self.engine.control(session, Control(seq, paused=True))
            case do.Unhalt(session=session, control_seq=seq):
                self.engine.control(session, Control(seq, paused=False))
            case do.SetPrompt(session=session, control_seq=seq, prompt=prompt):
                self.engine.control(session, Control(seq, prompt=prompt))
            case do.SetPlayhead(session=session, playhead_s=seconds, playing=playing, age_s=age_s):
                self.engine.playhead(session, seconds, now=now - age_s, playing=playing)

    def _admit(self, command: AdmitWith) -> None:
        admit = command.admit
        rebuild = None
        warming = None
        if admit.next_chunk > 0 and command.latents is None:
            warming = command
        elif command.latents is not None:
            rebuild = Rebuild(admit.next_chunk, command.latents, command.sink)
        spec = SessionSpec(
            admit.session,
            admit.prompt,
            admit.seed,
            admit.control_seq,
            rebuild,
            playhead_s=0.0 if warming else admit.playhead_s,
            isolated_chunks=ISOLATED_CHUNKS if admit.isolated else 0,
        )
        try:
            self.engine.admit(spec, self._now())
        except SlabsExhausted as error:
            self._deliver(told.AdmissionRefused(admit.session, admit.run, str(error), on_host=False))
        except EngineError as error:
            self._deliver(told.RunFailed(admit.session, admit.run, str(error)))
        else:
            self._runs[admit.session] = _EngineRun(admit.run, warming)

    def _warmed(self, stay: _EngineRun, chunk: events.ChunkReady) -> None:
        """Begin again at the chunk that is due, with this first chunk's latents for the lost context."""
        assert stay.warming is not None
        admit = stay.warming.admit
        del self._runs[admit.session]
        self._evict(admit.session)
        dtype = self.engine.table.pool.layout.dtype
        self._admit(AdmitWith(admit, chunk.latents.to(dtype)))
        for command in stay.held_back:
            self.carry_out(command)

    def stamp(self, event: events.Event) -> None:
        """Deliver an event, with the run that it belongs to."""
        stay = self._runs.get(event.session)
        if stay is None:
            return
        session, run = event.session, stay.run
        match event:
            case events.ChunkReady() if stay.warming is not None:
                self._warmed(stay, event)
            case events.SessionFailed(error=error):
                del self._runs[session]
                self._deliver(told.RunFailed(session, run, error))
            case _ if stay.warming is not None:
                pass
            case events.ChunkReady():
                others = sum(
                    held.name != session and (held.work is not None or bool(held.undecoded))
                    for held in self.engine.table.sessions.values()
                )
                self._deliver(Made(run, event, 1 + others))
            case events.ControlApplied(control_seq=seq):
                self._deliver(told.ControlTaken(session, run, seq))
            case events.Suspended(next_chunk=next_chunk):
                self._deliver(told.MovedToHost(session, run, next_chunk))
            case events.Frozen(next_chunk=next_chunk, number=number):
                self._deliver(told.Frozen(session, run, next_chunk, number))
            case events.SuspendRefused(reason=reason):
                self._deliver(told.SuspendRefused(session, run, reason))
            case events.SessionEnded(reason=reason):
                self._deliver(told.RunFinished(session, run, reason))
            case events.SessionReady():
                log.debug("session ready", session=session, next_chunk=event.next_chunk)

    def _fail(self, session: str, reason: str) -> None:
        stay = self._runs.pop(session, None)
        self._evict(session)
        if stay is not None:
            self._deliver(told.RunFailed(session, stay.run, reason))

    def _on_host(self, session: str) -> bool:
        with suppress(UnknownSession):
            self.engine.snapshot(session)
            return True
        return False

    def _evict(self, session: str) -> None:
        with suppress(UnknownSession):
            self.engine.evict(session)
