"""When a session may generate its next chunk, and how urgent the chunk is.

Playout slack P is the video that a viewer has left. Service credit is P − R − T (SlackServe, 3.1): R is the
time to finish the current chunk, T the time to generate one more. Below zero, the viewer is about to see a
stall.
"""

from __future__ import annotations

import math
from typing import assert_never

from turboserve.worker.engine.gather import Candidate
from turboserve.worker.engine.profile import LatencyProfile
from turboserve.worker.engine.session import DecoderContext, Session, UndecodedChunk
from turboserve.worker.engine.spec import EngineOptions
from turboserve.worker.model.config import ModelConfig

_FIRST_CHUNK_SLACK = 4.0
"""Slack of a viewer who has seen nothing yet, as a multiple of a chunk's time (SlackServe, Appendix C)."""


class Pacing:
    """Pure arithmetic over a session's playhead and the measured latencies."""

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
