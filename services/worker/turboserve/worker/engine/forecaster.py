"""Measures the playout slack of all sessions of an engine, with a forecast of the gather policy's choices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from turboserve.worker.engine.gather import Candidate, GatherPolicy
from turboserve.worker.engine.pacing import Pacing
from turboserve.worker.engine.playout import Forecast, Playout, Tier, forecast
from turboserve.worker.engine.session import ChunkTask, Session, UndecodedChunk
from turboserve.worker.engine.stages import ForwardStage
from turboserve.worker.model.config import ModelConfig


class Forecaster:
    """See `Playout`. Between two forecasts, tiers use the times of the last one."""

    def __init__(
        self, config: ModelConfig, pacing: Pacing, forward: ForwardStage, policy: GatherPolicy
    ) -> None:
        """`policy`: a gather policy as the stage's, but not the same object: a policy may keep a state."""
        self._config, self._pacing, self._forward, self._policy = config, pacing, forward, policy
        self._forecasts: dict[str, Forecast] = {}

    def playouts(self, sessions: Iterable[Session], now: float) -> dict[str, Playout]:
        """Playout slack of each session that has not ended, by name, with a new forecast."""
        live = [session for session in sessions if not session.ended]
        found = (self._pacing.upcoming(session, now) for session in live)
        # Copies: a question about the future must not count as a choice.
        profile, recache = self._forward.profile.copy(), self._forward.recache_profile.copy()
        per_chunk = self._config.frames_per_chunk

        def choose(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
            return self._forward.choose(candidates, self._policy, profile, recache)

        def seconds(frames: int, rows: int) -> float:
            if frames == per_chunk:
                return profile(rows)
            return recache(rows) or profile(rows) * frames / per_chunk

        self._forecasts = forecast([one for one in found if one is not None], choose, seconds)
        return {session.name: self._playout(session, now) for session in live}

    def tiers(self, sessions: Iterable[Session], now: float) -> dict[str, Tier]:
        """Tier of each session that has not ended, by name, with the times of the last forecast."""
        return {each.name: self._playout(each, now).tier for each in sessions if not each.ended}

    def before(self, session: Session, chunk: int, now: float) -> Playout:
        """Playout slack without `chunk`, which was just delivered: what the viewer had left."""
        slack_s = self._pacing.slack(session, now, delivered=chunk)
        return Playout(slack_s, 0.0, self._next_s(session), playing=self._pacing.shrinks(session))

    def _playout(self, session: Session, now: float) -> Playout:
        slack_s, playing = self._pacing.slack(session, now), self._pacing.shrinks(session)
        next_s, after_s = self._next_s(session), self._pacing.after_forwards
        rest_s, lateness_s = 0.0, 0.0
        if session.undecoded and isinstance(session.undecoded[0], UndecodedChunk):
            rest_s, ready_s = after_s, after_s
        else:
            expected = self._forecasts.get(session.name)
            # Without a forecast, nothing of the session is computed or due: it waits for its viewer, or for a
            # transfer.
            ready_s = next_s if expected is None else expected.clean_s + after_s
            if isinstance(session.task, ChunkTask) and session.task.work.done:
                work = session.task.work
                rest_s = self._forward_s(session) * max(0, work.denoising - work.done) + after_s
        if playing:
            lateness_s = max(0.0, ready_s - slack_s)
        return Playout(slack_s, rest_s, next_s, lateness_s, playing)

    def _forward_s(self, session: Session) -> float:
        expected = self._forecasts.get(session.name)
        if expected is not None:
            return expected.forward_s
        return self._forward.profile(1)

    def _next_s(self, session: Session) -> float:
        chosen = session.state.fidelity
        forwards = self._config.chunk_forwards if chosen is None else chosen.steps + 1
        return self._forward_s(session) * forwards + self._pacing.after_forwards
