"""The chunk boundary: what happens to a session between two chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import assert_never

from turboserve.worker.engine.activity import QUIESCED, RUNNING, STARTING, Offloaded, Starting
from turboserve.worker.engine.admission import SessionTable
from turboserve.worker.engine.backend import Backend
from turboserve.worker.engine.errors import HostMemoryUnavailableError, HostPoolFullError
from turboserve.worker.engine.fidelity_chooser import FidelityChooser
from turboserve.worker.engine.interface import (
    Control,
    ControlApplied,
    Event,
    SessionEnded,
    SessionQuiesced,
    SessionReady,
    SuspendRefused,
)
from turboserve.worker.engine.pacing import Pacing
from turboserve.worker.engine.session import ChunkTask, ContextTask, Session, Task


class Boundary:
    """Advances a session at a chunk boundary as far as possible without a forward.

    While later layers of a session's state arrive, it may only begin a chunk: everything else reads or writes
    all layers at once.
    """

    def __init__(
        self, backend: Backend, table: SessionTable, pacing: Pacing, fidelity: FidelityChooser
    ) -> None:
        self._backend = backend
        self._config = backend.config
        self._table = table
        self._pacing = pacing
        self._fidelity = fidelity

    def cross(self, session: Session, now: float) -> Sequence[Event]:
        """Finish completed work and begin what is due."""
        if _is_settled(session):
            # As nearly every session that is asked: the order of the other questions does not matter then.
            return self._begin(session, now) if self._due(session, now) else ()
        if isinstance(session.activity, Offloaded):
            return self._outside(session, session.activity, now)
        if not session.may_compute:
            return ()
        events: list[Event] = []
        if session.task is not None:
            if session.forwarding:
                return ()
            events += self._finish(session, session.task)
        if session.arriving is not None and self._needs_all_layers(session):
            return events
        if session.controls:
            events += self._apply_controls(session, now)
        if session.task is not None:
            return events
        if session.warming or session.state.text is None or session.controls:
            # The next chunk must not begin before a control whose prompt still waits for its embedding.
            return events
        if isinstance(session.activity, Starting):
            session.activity = RUNNING
            events.append(SessionReady(session.name, session.state.next_chunk))
        if session.suspending:
            # The decoder's cache is part of the state: nothing of the session may be in the decode executor.
            return events if session.busy else events + self._suspend(session)
        if session.quiesce_request is not None and self._stops(session, now):
            if not session.busy:
                number = session.quiesce_request.number
                session.quiesce_request, session.activity = None, QUIESCED
                session.offloading = False
                events.append(SessionQuiesced(session.name, session.state.next_chunk, number))
            return events
        if session.offloading:
            if not session.busy:
                self._offload(session, now)
            return events
        if self._due(session, now):
            events += self._begin(session, now)
        return events

    def pending(self, session: Session, now: float) -> bool:
        """Whether `cross` would do something."""
        if session.task is not None:
            # Only a session that may compute has work.
            return not session.forwarding and session.may_compute
        if _is_settled(session):
            return self._due(session, now)
        if isinstance(session.activity, Offloaded):
            return self._stops_outside(session, session.activity, now)
        if not session.may_compute:
            return False
        if session.arriving is not None and self._needs_all_layers(session):
            return False
        if session.controls and all(pending.ready for pending in session.controls):
            return True
        if session.warming or session.state.text is None or session.controls:
            return False
        if isinstance(session.activity, Starting):
            return True
        if session.suspending:
            return not session.busy
        if session.quiesce_request is not None and self._stops(session, now):
            return not session.busy
        if session.offloading:
            return not session.busy
        return self._due(session, now)

    @staticmethod
    def _needs_all_layers(session: Session) -> bool:
        waits = session.quiesce_request is not None or session.suspending or session.offloading
        return bool(session.controls) or waits or not session.state.recent

    def _outside(self, session: Session, outside: Offloaded, now: float) -> Sequence[Event]:
        """Suspend or quiesce an offloaded session where it is: its state is at a boundary, on the host."""
        if not self._stops_outside(session, outside, now):
            return ()
        if session.suspending:
            return self._suspend(session)
        assert session.quiesce_request is not None
        number = session.quiesce_request.number
        session.quiesce_request = None
        session.activity = replace(outside, quiesced=True)
        return [SessionQuiesced(session.name, session.state.next_chunk, number)]

    def _stops_outside(self, session: Session, outside: Offloaded, now: float) -> bool:
        if outside.quiesced or outside.state is None or session.controls:
            # A migration reads the state, or the session gets a slab first.
            return False
        return session.suspending or self._stops(session, now)

    def _offload(self, session: Session, now: float) -> None:
        session.offloading = False
        with suppress(HostPoolFullError):
            # Without a cell the session keeps its slab. There is one while places are not exceeded.
            self._table.host_transfers.offload(session, now)

    def _finish(self, session: Session, task: Task) -> Sequence[Event]:
        session.task = None
        match task:
            case ChunkTask():
                self._backend.finish(session.state, task.work)
                session.state.next_chunk += 1
                return ()
            case ContextTask():
                return _applied(session, task.applies)
            case _:
                assert_never(task)

    def _apply_controls(self, session: Session, now: float) -> Sequence[Event]:
        """Apply all waiting controls at once: only the last of several embeddings is worth a recache."""
        if not all(pending.ready for pending in session.controls):
            return ()
        pending = list(session.controls)
        prompt, _ = session.conditions(pending[-1])
        session.controls.clear()
        for each in pending:
            control = each.control
            if each.encoded is not None:
                session.steps.append(each.encoded)
            session.state.control_seq = control.control_seq
            session.state.values = session.state.values if control.values is None else control.values
            session.paused = session.paused if control.paused is None else control.paused
            session.state.seed = session.state.seed if control.seed is None else control.seed
            if control.fidelity is not None:
                session.state.fidelity, session.state.fixed_fidelity = control.fidelity, True
            session.state.floor = session.state.floor if control.floor is None else control.floor
            session.state.pinned = session.state.pinned if control.pinned is None else control.pinned
            if control.max_lead_s is not None:
                session.max_lead_s = self._pacing.lead(control.max_lead_s)
            if control.drops_buffer_since_s is not None:
                self._pacing.skip(session, control.drops_buffer_since_s)
        prompts = [each for each in pending if each.text is not None]
        # The first prompt starts the session. It is not a change that a viewer waits for.
        first = session.state.text is None
        applies = [each.control for each in (pending[1:] if first else pending)]
        if prompts:
            text = prompts[-1].text
            assert text is not None
            self._backend.set_prompt(session.state, prompt, text)
        if prompts and isinstance(session.activity, Starting) and session.activity.replay:
            replay = self._backend.replay(session.state, session.activity.replay)
            session.activity = STARTING
            session.task = ContextTask(replay, now, "replay", applies)
        elif prompts and session.state.recent:
            session.task = ContextTask(self._backend.recache(session.state), now, "recache", applies)
        else:
            return _applied(session, applies)
        return ()

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
        if quiet and not self._pacing.may_generate(session, now):
            return True
        # No idle window comes while chunks take longer than they play. The viewer has most video left now.
        return self._pacing.falls_behind(session, now)

    def _due(self, session: Session, now: float) -> bool:
        if session.task is not None or session.state.text is None:
            return False
        if session.controls or session.paused or session.ended:
            return False
        if not self._pacing.may_generate(session, now) or session.held_up:
            return False
        # The end is reported after the last chunk.
        return not session.busy or self._past_the_end(session) is None

    def _begin(self, session: Session, now: float) -> list[Event]:
        reason = self._past_the_end(session)
        if reason is not None:
            session.ended = True
            return [SessionEnded(session.name, reason)]
        self._fidelity.choose(session, self._table.sessions.values(), now)
        session.lead_s = self._pacing.lead_at(session, now)
        session.task = ChunkTask(self._backend.chunk(session.state), now)
        return []

    def _past_the_end(self, session: Session) -> str | None:
        """Why the model cannot represent the session's next chunk; None if it can."""
        limit = self._backend.end_frame(session.state)
        if limit is None:
            return None
        last = session.state.first_frame(self._config) + self._config.frames_per_chunk
        return None if last <= limit else f"frames: {last} wanted, the model's limit is {limit}"

    def _suspend(self, session: Session) -> list[Event]:
        session.suspending = False
        try:
            self._table.host_transfers.suspend(session)
        except (HostPoolFullError, HostMemoryUnavailableError) as error:
            return [SuspendRefused(session.name, str(error))]
        return []


def _is_settled(session: Session) -> bool:
    """Whether the session runs and is at a boundary, and nothing but its next chunk is to come."""
    return (
        session.task is None
        and session.activity is RUNNING
        and not session.controls
        and not session.suspending
        and session.quiesce_request is None
        and not session.offloading
        and session.arriving is None
    )


def _applied(session: Session, controls: Iterable[Control]) -> Sequence[Event]:
    return [ControlApplied(session.name, each.control_seq, session.state.next_chunk) for each in controls]
