"""The chunk boundary: finish work, apply controls, suspend sessions and begin chunks."""

from __future__ import annotations

from collections.abc import Sequence

from turboserve.worker.engine.admission import SessionTable
from turboserve.worker.engine.backend import Backend
from turboserve.worker.engine.errors import HostMemoryUnavailableError, HostPoolFullError
from turboserve.worker.engine.events import (
    ControlApplied,
    Event,
    SessionEnded,
    SessionQuiesced,
    SessionReady,
    SuspendRefused,
)
from turboserve.worker.engine.pacing import Pacing
from turboserve.worker.engine.session import PendingControl, Session


class Boundary:
    """Advances a session at a chunk boundary as far as possible without a forward."""

    def __init__(self, backend: Backend, table: SessionTable, pacing: Pacing) -> None:
        self._backend = backend
        self._config = backend.config
        self._limit = backend.config.session_frames
        self._table = table
        self._pacing = pacing

    def cross(self, session: Session, now: float) -> Sequence[Event]:
        """Finish completed work and begin what is due."""
        if session.transfer is not None or session.quiesced:
            return ()
        events: list[Event] = []
        if session.work is not None:
            if session.forwarding:
                return ()
            events += self._finish(session)
        if session.work is None and session.controls:
            events += self._apply_controls(session)
        if session.work is not None:
            session.due_at_s = now
            return events
        if session.warming or session.state.text is None or session.controls:
            # The next chunk must not begin before a control whose prompt still waits for its embedding.
            return events
        if not session.announced:
            session.announced = True
            events.append(SessionReady(session.name, session.state.next_chunk))
        if session.suspending:
            # The decoder's cache is part of the state: nothing of the session may be in the decode executor.
            return events if session.busy else events + self._suspend(session)
        if session.quiesce_request is not None and self._stops(session, now):
            if not session.busy:
                number = 0 if session.quiesce_request is None else session.quiesce_request.number
                session.quiesce_request, session.quiesced = None, True
                events.append(SessionQuiesced(session.name, session.state.next_chunk, number))
            return events
        if self._due(session, now):
            events += self._begin(session, now)
        return events

    def pending(self, session: Session, now: float) -> bool:
        """Whether `cross` would do something."""
        if session.quiesced:
            return False
        if session.transfer is not None or session.work is not None:
            return session.transfer is None and not session.forwarding
        if session.controls and all(pending.ready for pending in session.controls):
            return True
        if session.warming or session.state.text is None or session.controls:
            return False
        if not session.announced or session.suspending:
            return not session.announced or not session.busy
        if session.quiesce_request is not None and self._stops(session, now):
            return not session.busy
        return self._due(session, now)

    def _finish(self, session: Session) -> Sequence[Event]:
        chunk = session.chunk
        session.work = None
        if chunk is not None:
            self._backend.finish(session.state, chunk)
            session.state.next_chunk += 1
        session.due_at_s = session.started_at_s = None
        if not session.applying:
            return ()
        applied, session.applying = session.applying, []
        return [ControlApplied(session.name, c.control_seq, session.state.next_chunk) for c in applied]

    def _apply_controls(self, session: Session) -> Sequence[Event]:
        """Apply all waiting controls at once: only the last of several prompts is worth a recache."""
        if not all(pending.ready for pending in session.controls):
            return []
        pending = list(session.controls)
        session.controls.clear()
        for each in pending:
            control = each.control
            if each.encoded is not None:
                session.steps.append(each.encoded)
            session.state.control_seq = control.control_seq
            session.paused = session.paused if control.paused is None else control.paused
            session.state.seed = session.state.seed if control.seed is None else control.seed
            session.max_lead_s = session.max_lead_s if control.max_lead_s is None else control.max_lead_s
        prompts = [each for each in pending if each.text is not None]
        # The first prompt starts the session. It is not a change that a viewer waits for.
        first = session.state.text is None
        session.applying = [each.control for each in (pending[1:] if first else pending)]
        if prompts:
            self._set_prompt(session, prompts[-1])
        if prompts and session.replay:
            session.work = self._backend.replay(session.state, session.replay)
            session.replay = []
        elif prompts and session.state.recent:
            session.work = self._backend.recache(session.state)
        return [] if session.work is not None else self._finish(session)

    def _set_prompt(self, session: Session, pending: PendingControl) -> None:
        assert pending.text is not None
        assert pending.control.prompt is not None
        self._backend.set_prompt(session.state, pending.control.prompt, pending.text)

    def _stops(self, session: Session, now: float) -> bool:
        """Whether the session begins no further chunk because it is to be quiesced."""
        quiesce_request = session.quiesce_request
        if quiesce_request is None:
            return False
        wanted_s = quiesce_request.quiet_at(now)
        if wanted_s <= 0 or session.paused or session.ended:
            return True
        due = self._pacing.due_at(session, now)
        quiet = due is None or due - now >= wanted_s
        return quiet and not self._pacing.may_generate(session, now)

    def _due(self, session: Session, now: float) -> bool:
        if session.work is not None or session.state.text is None:
            return False
        if session.controls or session.paused or session.ended:
            return False
        if not self._pacing.may_generate(session, now) or session.held_up:
            return False
        # The end is reported after the last chunk.
        return self._limit is None or self._past_the_end(session) is None or not session.busy

    def _begin(self, session: Session, now: float) -> list[Event]:
        reason = self._past_the_end(session)
        if reason is not None:
            session.ended = True
            return [SessionEnded(session.name, reason)]
        session.due_at_s = now
        session.work = self._backend.chunk(session.state)
        return []

    def _past_the_end(self, session: Session) -> str | None:
        """Why the model cannot represent the session's next chunk; None if it can."""
        if self._limit is None:
            return None
        last = session.state.first_frame(self._config) + self._config.frames_per_chunk
        return None if last <= self._limit else f"frames: {last} wanted, the model's limit is {self._limit}"

    def _suspend(self, session: Session) -> list[Event]:
        session.suspending = False
        try:
            self._table.suspend(session)
        except (HostPoolFullError, HostMemoryUnavailableError) as error:
            return [SuspendRefused(session.name, str(error))]
        return []
