"""The chunk boundary: when a session's next chunk is due, how urgent it is, and what happens before it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import assert_never

from turboserve.worker.engine.admission import SessionTable
from turboserve.worker.engine.backend import Backend
from turboserve.worker.engine.errors import HostMemoryUnavailableError, HostPoolFullError
from turboserve.worker.engine.gather import Candidate, LatencyProfile
from turboserve.worker.engine.interface import (
    Control,
    ControlApplied,
    EngineOptions,
    Event,
    SessionEnded,
    SessionQuiesced,
    SessionReady,
    SuspendRefused,
)
from turboserve.worker.engine.session import (
    QUIESCED,
    RUNNING,
    STARTING,
    ChunkTask,
    ContextTask,
    DecoderContext,
    PendingControl,
    Session,
    Starting,
    Task,
    UndecodedChunk,
)
from turboserve.worker.model.config import ModelConfig

_FIRST_CHUNK_SLACK = 4.0
"""Slack of a viewer who has seen nothing yet, as a multiple of a chunk's time (SlackServe, Appendix C)."""


class Pacing:
    """When a session may generate its next chunk, and how urgent the chunk is.

    Playout slack P is the video that a viewer has left. Service credit is P − R − T (SlackServe, 3.1): R is
    the time to finish the current chunk, T the time to generate one more. Below zero, the viewer is about to
    see a stall. All of it is pure arithmetic over the playhead and the measured latencies.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: EngineOptions,
        forward: LatencyProfile,
        decode: LatencyProfile,
        package: LatencyProfile,
    ) -> None:
        """Profiles of one forward, of a chunk's decoding, and of its packaging."""
        self._config = config
        self._options = options
        self._forward = forward
        self._decode = decode
        self._package = package

    @property
    def chunk_seconds(self) -> float:
        """Time to generate one chunk alone at the best configuration, from its first forward to a fragment
        that can be sent."""
        return self._forward(1) * self._config.chunk_forwards + self._after_forwards

    def _chunk_seconds(self, session: Session) -> float:
        """`chunk_seconds` at the configuration of the session's next chunk."""
        chosen = session.state.fidelity
        if chosen is None:
            return self.chunk_seconds
        return self._forward(1) * (chosen.steps + 1) + self._after_forwards

    @property
    def _after_forwards(self) -> float:
        return self._decode(1) + self._package(1)

    def playhead(self, session: Session, now: float) -> float:
        """The viewer's position now, in seconds of video."""
        return session.playhead.at(now, self._generated(session), self._options.playhead_trust_s)

    def may_generate(self, session: Session, now: float) -> bool:
        """Whether the next chunk starts less than the session's lead ahead of its playhead, or is unpaced."""
        if session.state.next_chunk < session.unpaced_until:
            return True
        playhead = session.playhead
        start = self._config.media_start(session.state.next_chunk) - session.max_lead_s
        # The viewer is at least at the reported position, and at most as much further as time has passed.
        if start < playhead.position_s:
            return True
        if not playhead.playing or start - playhead.position_s >= now - playhead.reported_at_s:
            return False
        return start < self.playhead(session, now)

    def due_at(self, session: Session, now: float) -> float | None:
        """Time at which an idle session's next chunk becomes due by playing; None if it does not."""
        if session.task is not None or session.paused or session.ended or not session.playhead.playing:
            return None
        if session.held_up:
            return None
        start = self._config.media_start(session.state.next_chunk)
        wait = start - session.max_lead_s - session.playhead.position_s
        if wait >= self._options.playhead_trust_s:
            return None
        return max(now, session.playhead.reported_at_s + wait)

    def slack(self, session: Session, now: float) -> float:
        """Playout slack P in seconds."""
        if session.delivered == 0:
            due = None if session.task is None else session.task.due_at_s
            if session.undecoded and isinstance(session.undecoded[0], UndecodedChunk):
                due = session.undecoded[0].timings.due_s
            return _FIRST_CHUNK_SLACK * self._chunk_seconds(session) - (0.0 if due is None else now - due)
        return self._generated(session) - self.playhead(session, now)

    def candidate(self, session: Session, now: float) -> Candidate:
        """The session's next forward, for a gather policy."""
        task = session.task
        assert task is not None
        work = task.work
        left = work.total - work.done
        slack = self.slack(session, now)
        running = work.done > 0
        remaining = self._forward(1) * left + self._after_forwards if running else 0.0
        return Candidate(
            session=session.name,
            frames=work.frames,
            step=work.done,
            steps_left=left,
            waiting_s=max(0.0, now - task.due_at_s),
            slack_s=slack,
            credit_s=slack - remaining - self._chunk_seconds(session),
        )

    def decoding(self, session: Session, now: float) -> Candidate:
        """The session's next decoding, for a gather policy."""
        item = session.undecoded[0]
        left_s = self.slack(session, now) - self._package(1)
        # A decoder that must be warmed belongs to a session that lost its worker: its viewer has waited
        # longest.
        match item:
            case UndecodedChunk():
                waiting_s = max(0.0, now - item.timings.denoised_s)
            case DecoderContext():
                waiting_s = math.inf
            case _:
                assert_never(item)
        return Candidate(
            session=session.name,
            frames=item.latents.shape[0],
            step=0,
            steps_left=1,
            waiting_s=waiting_s,
            slack_s=left_s,
            credit_s=left_s - self._decode(1),
            begins=session.state.decoder_cache is None,
        )

    def _generated(self, session: Session) -> float:
        """Seconds of video delivered."""
        return self._config.media_start(session.delivered)


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
        if not session.may_compute:
            return ()
        events: list[Event] = []
        if session.task is not None:
            if session.forwarding:
                return ()
            events += self._finish(session, session.task)
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
                events.append(SessionQuiesced(session.name, session.state.next_chunk, number))
            return events
        if self._due(session, now):
            events += self._begin(session, now)
        return events

    def pending(self, session: Session, now: float) -> bool:
        """Whether `cross` would do something."""
        if not session.may_compute:
            return False
        if session.task is not None:
            return not session.forwarding
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
        return self._due(session, now)

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
        """Apply all waiting controls at once: only the last of several prompts is worth a recache."""
        if not all(pending.ready for pending in session.controls):
            return ()
        pending = list(session.controls)
        session.controls.clear()
        for each in pending:
            control = each.control
            if each.encoded is not None:
                session.steps.append(each.encoded)
            session.state.control_seq = control.control_seq
            session.paused = session.paused if control.paused is None else control.paused
            session.state.seed = session.state.seed if control.seed is None else control.seed
            session.state.fidelity = session.state.fidelity if control.fidelity is None else control.fidelity
            session.max_lead_s = session.max_lead_s if control.max_lead_s is None else control.max_lead_s
        prompts = [each for each in pending if each.text is not None]
        # The first prompt starts the session. It is not a change that a viewer waits for.
        first = session.state.text is None
        applies = [each.control for each in (pending[1:] if first else pending)]
        if prompts:
            self._set_prompt(session, prompts[-1])
        if prompts and isinstance(session.activity, Starting) and session.activity.replay:
            replay = self._backend.replay(session.state, session.activity.replay)
            session.activity = STARTING
            session.task = ContextTask(replay, now, "replay", applies)
        elif prompts and session.state.recent:
            session.task = ContextTask(self._backend.recache(session.state), now, "recache", applies)
        else:
            return _applied(session, applies)
        return ()

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
        if session.task is not None or session.state.text is None:
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
        session.task = ChunkTask(self._backend.chunk(session.state), now)
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


def _applied(session: Session, controls: Iterable[Control]) -> Sequence[Event]:
    return [ControlApplied(session.name, each.control_seq, session.state.next_chunk) for each in controls]
