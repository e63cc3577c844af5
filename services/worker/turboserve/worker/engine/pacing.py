"""When a session's next chunk is due, how urgent it is, and what must be computed before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from turboserve.worker.engine.activity import Starting
from turboserve.worker.engine.gather import Candidate, LatencyProfile
from turboserve.worker.engine.interface import EngineOptions
from turboserve.worker.engine.playout import Part, Upcoming, candidate_of
from turboserve.worker.engine.session import ChunkTask, FirstChunk, Session, UndecodedChunk
from turboserve.worker.engine.state import SessionState
from turboserve.worker.model.config import ModelConfig

FIRST_CHUNK_SLACK = 4.0
"""Slack of a viewer that waits for a first chunk, as a multiple of a chunk's time (SlackServe, C)."""


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
        end_frame: Callable[[SessionState], int | None],
    ) -> None:
        """Profiles of one forward, of a chunk's decoding, and of its packaging. `end_frame`: see
        `Backend.end_frame`."""
        self._config = config
        self._options = options
        self._forward = forward
        self._decode = decode
        self._package = package
        self._end_frame = end_frame
        self.alpha = options.tier_alpha
        """Width of a tier, as a multiple of T."""

    @property
    def chunk_seconds(self) -> float:
        """Time to generate one chunk alone at the best configuration, from its first forward to a fragment
        that can be sent."""
        return self._forward(1) * self._config.chunk_forwards + self.after_forwards

    def _chunk_seconds(self, session: Session) -> float:
        """`chunk_seconds` at the configuration of the session's next chunk."""
        chosen = session.state.fidelity
        if chosen is None:
            return self.chunk_seconds
        return self._forward(1) * (chosen.steps + 1) + self.after_forwards

    @property
    def after_forwards(self) -> float:
        """Time from a chunk's clean latents to a fragment that can be sent, seconds."""
        return self._decode(1) + self._package(1)

    def lead(self, wanted_s: float) -> float:
        """The lead that a session gets, seconds: at least one chunk, or no chunk would be ready in time."""
        return max(wanted_s, self._config.chunk_media_s)

    def skip(self, session: Session, since_s: float) -> None:
        """Note that viewers discard the video before the session's next chunk, as requested at `since_s`."""
        session.first = FirstChunk(session.state.next_chunk, since_s, discards=True)
        session.playhead.shown_from_s = self._config.media_start(session.state.next_chunk)

    def playhead(self, session: Session, now: float) -> float:
        """The viewer's position now, in seconds of video."""
        return session.playhead.at(now, self._generated(session), self._options.playhead_trust_s)

    def may_generate(self, session: Session, now: float) -> bool:
        """Whether the next chunk starts less than the session's lead ahead of its playhead, or is unpaced."""
        if session.state.next_chunk < session.unpaced_until:
            return True
        playhead = session.playhead
        position_s, shown_from_s = playhead.position_s, playhead.shown_from_s
        start = self._config.media_start(session.state.next_chunk) - session.max_lead_s
        # The viewer is at least at the known position, and at most as much further as time has passed.
        if start < position_s or start < shown_from_s:
            return True
        if not playhead.playing or position_s < shown_from_s:
            return False
        if start - position_s >= now - playhead.reported_at_s:
            return False
        return start < self.playhead(session, now)

    def due_at(self, session: Session, now: float) -> float | None:
        """Time at which an idle session's next chunk becomes due by playing; None if it does not."""
        if session.task is not None or session.paused or session.ended or not session.playhead.advancing:
            return None
        return None if session.held_up else self._plays_up_to(session, now)

    def _plays_up_to(self, session: Session, now: float) -> float | None:
        """Time at which a playing viewer comes within the lead of the next chunk; None: after its trust."""
        start = self._config.media_start(session.state.next_chunk)
        wait = start - session.max_lead_s - session.playhead.position_s
        if wait >= self._options.playhead_trust_s:
            return None
        return max(now, session.playhead.reported_at_s + wait)

    def lead_at(self, session: Session, now: float) -> float:
        """Seconds of video from the viewer to the session's next chunk."""
        return self._config.media_start(session.state.next_chunk) - self.playhead(session, now)

    def falls_behind(self, session: Session, now: float) -> bool:
        """Whether a session at a boundary, with a playing viewer, is not about to reach its lead.

        Its last chunk has not increased its lead, and the next one does not complete it.
        """
        lead_s = self.lead_at(session, now)
        missing_s = session.max_lead_s - lead_s
        return (
            session.playhead.advancing and lead_s <= session.lead_s and missing_s > self._config.chunk_media_s
        )

    def slack(self, session: Session, now: float, delivered: int | None = None) -> float:
        """Playout slack P in seconds: the video that the viewer has left.

        A viewer that waits for a first chunk has `FIRST_CHUNK_SLACK` times the time of a chunk, from its
        request on. `delivered`: index after the last chunk to count. None: all.
        """
        generated_s = self._generated(session)
        if delivered is None or delivered == session.delivered:
            delivered, ready_s = session.delivered, generated_s
        else:
            ready_s = self._config.media_start(delivered)
        buffered_s = ready_s - session.playhead.at(now, generated_s, self._options.playhead_trust_s)
        dropped_at = session.dropped_at if session.controls else None
        first = session.first
        if dropped_at is None:
            if first is None or delivered > first.index:
                return buffered_s
            if buffered_s > 0 and not first.discards:
                return max(buffered_s, self._until_deadline(session, first.since_s, now))
            dropped_at = first.since_s
        return self._until_deadline(session, dropped_at, now)

    def _until_deadline(self, session: Session, since_s: float, now: float) -> float:
        """Seconds until the deadline of a first chunk that was requested at `since_s`."""
        return FIRST_CHUNK_SLACK * self._chunk_seconds(session) - (now - since_s)

    def candidate(self, session: Session, now: float) -> Candidate:
        """The session's next forward, for a gather policy."""
        task = session.task
        assert task is not None
        work = task.work
        return candidate_of(
            session.name,
            (work.frames, work.done, work.total),
            now - task.due_at_s,
            self.slack(session, now),
            self._forward(1),
            self._chunk_seconds(session),
            self.after_forwards,
            self._left(session),
            self.alpha,
        )

    def _left(self, session: Session) -> float:
        """See `Candidate.left_s`."""
        end = self._end_frame(session.state)
        if end is None:
            return math.inf
        media_start = self._config.media_start
        return media_start(end // self._config.frames_per_chunk) - media_start(session.delivered)

    def upcoming(
        self, session: Session, now: float, context: Sequence[Part] = (), returns_s: float | None = None
    ) -> Upcoming | None:
        """The forwards up to the session's next chunk; None if it generates none soon.

        `context`: see `ContextWork.parts`. `returns_s`: time until its state is in a slab, where it is not.
        """
        slack = self.slack(session, now)
        chunk_s = self._chunk_seconds(session)
        frames = self._config.frames_per_chunk
        chosen = session.state.fidelity
        forwards = self._config.chunk_forwards if chosen is None else chosen.steps + 1
        task = session.task
        if task is not None and task.work.done < task.work.total:
            work = task.work
            if isinstance(task, ChunkTask):
                parts = [(work.frames, work.done, work.total)]
            else:
                parts = [*context, (frames, 0, forwards)]
            due_s = min(0.0, task.due_at_s - now)
        else:
            due_at = now if self.may_generate(session, now) else self._due_by_playing(session, now, returns_s)
            if due_at is None or session.paused or session.ended:
                return None
            if returns_s is None and not session.may_compute:
                return None
            # The context is computed at once, wherever the viewer is.
            parts, due_s = [*context, (frames, 0, forwards)], 0.0 if context else due_at - now
            due_s = max(due_s, returns_s or 0.0)
        playing = self.shrinks(session)
        left, alpha = self._left(session), self.alpha
        return Upcoming(session.name, parts, due_s, slack, chunk_s, self.after_forwards, playing, left, alpha)

    def _due_by_playing(self, session: Session, now: float, returns_s: float | None) -> float | None:
        """As `due_at`, also for a session that returns to a slab."""
        if returns_s is None:
            return self.due_at(session, now)
        return self._plays_up_to(session, now) if session.playhead.advancing else None

    def shrinks(self, session: Session) -> bool:
        """Whether the session's slack shrinks with time: its viewer plays, or waits for a first chunk."""
        waits = session.first is not None and session.delivered <= session.first.index
        return not session.paused and (waits or session.playhead.playing)

    def decodings(self, sessions: Iterable[Session], now: float) -> list[Candidate]:
        """The sessions' next decodings, for a gather policy."""
        package_s, decode_s = self._package(1), self._decode(1)
        return [self._decoding(session, now, package_s, decode_s) for session in sessions]

    def _decoding(self, session: Session, now: float, package_s: float, decode_s: float) -> Candidate:
        item = session.undecoded[0]
        left_s = self.slack(session, now) - package_s
        # A decoder that must be warmed belongs to a session that lost its worker: its viewer has waited
        # longest.
        waiting_s = math.inf
        if isinstance(item, UndecodedChunk):
            waiting_s = max(0.0, now - item.timings.denoised_s)
        # By position, in the order of the class: a step, the steps left, the waiting time, slack, credit.
        begins = session.state.decoder_cache is None
        return Candidate(
            session.name, item.latents.shape[0], 0, 1, waiting_s, left_s, left_s - decode_s, begins
        )

    def _generated(self, session: Session) -> float:
        """Seconds of video delivered."""
        return self._config.media_start(session.delivered)


class ContextWork:
    """Costs of prompt switches and rebuilds, by the measured latencies of the stages."""

    def __init__(
        self, config: ModelConfig, text: LatencyProfile, forward: LatencyProfile, recache: LatencyProfile
    ) -> None:
        """Profiles of an encoding, of a forward over a chunk, and of one over a whole window."""
        self._config = config
        self._text, self._forward, self._recache = text, forward, recache

    def encoding_s(self, sessions: Iterable[Session]) -> float:
        """Time in which the device encodes prompts before the next forward, seconds."""
        waiting = sum(not pending.ready for each in sessions if each.encoding for pending in each.controls)
        return self._text(waiting) if waiting else 0.0

    def prompts_s(self, session: Session) -> float:
        """Time in which the prompts of a session without a slab are encoded when it has returned, seconds."""
        if session.encoding:
            return 0.0
        waiting = sum(not pending.ready for pending in session.controls)
        return self._text(waiting) if waiting else 0.0

    def parts(self, session: Session) -> list[Part]:
        """The forwards of the session between its chunk in work and its next chunk."""
        parts: list[Part] = []
        task = session.task
        if task is not None and not isinstance(task, ChunkTask) and task.work.done < task.work.total:
            parts.append((task.work.frames, task.work.done, task.work.total))
        if not any(pending.changes_text for pending in session.controls):
            return parts
        if isinstance(session.activity, Starting) and session.activity.replay:
            return parts + [(part.latents.shape[0], 0, 1) for part in session.activity.replay]
        # Outside a slab, the state has only its counters.
        known = len(session.state.recent) if session.may_compute else session.state.next_chunk
        chunks = known + isinstance(task, ChunkTask)
        frames = min(chunks * self._config.frames_per_chunk, self._config.window_frames)
        return [*parts, (frames, 0, 1)] if frames else parts

    def seconds(self, parts: Sequence[Part]) -> float:
        """Time of these forwards in batches of their own, seconds."""
        return sum((total - done) * self.forward_s(frames, 1) for frames, done, total in parts)

    def forward_s(self, frames: int, rows: int) -> float:
        """Time of a forward of so many rows over so many frames, seconds."""
        per_chunk = self._config.frames_per_chunk
        if frames <= per_chunk:
            return self._forward(rows)
        return self._recache(rows) or self._forward(rows) * frames / per_chunk
