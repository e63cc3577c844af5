"""Gives each chunk of an engine its configuration when the chunk begins."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.engine.fidelity_forecast import ChunkQueue, EngineLoad, StreamLoad
from turboserve.worker.engine.fidelity_ladder import FidelityLadder
from turboserve.worker.engine.fidelity_policy import BestFidelity, FidelityPolicy
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.engine.pacing import ContextWork, Pacing
from turboserve.worker.engine.session import ChunkTask, Session, UndecodedChunk
from turboserve.worker.engine.state import SessionState
from turboserve.worker.model.config import ModelConfig


class FidelityChooser:
    """Asks the policy at each chunk boundary, with the load of all sessions."""

    def __init__(
        self,
        config: ModelConfig,
        ladder: FidelityLadder,
        policy: FidelityPolicy,
        forward: LatencyProfile,
        pacing: Pacing,
        max_batch: int,
        end_frame: Callable[[SessionState], int | None],
        context: ContextWork,
        returns_s: Callable[[float], Mapping[str, float]],
    ) -> None:
        """`forward`: L(b) of a forward at the best configuration. `end_frame`: see `Backend.end_frame`.
        `returns_s`: see `ResidencyController.returns_s`."""
        self.ladder = ladder
        self._policy, self._config, self._forward, self._pacing = policy, config, forward, pacing
        self._max_batch, self._end_frame, self._context = max_batch, end_frame, context
        self._returns_s = returns_s
        self.lowers = len(ladder.rungs) > 1 and not isinstance(policy, BestFidelity)
        """Whether the policy may choose anything but the best configuration."""
        self._before_start: dict[str, int] = {}
        """Place of each session before its newest chunk, if its viewer waited for that with nothing to play.
        Such a chunk is no change of the session's configuration."""

    def choose(self, session: Session, sessions: Collection[Session], now: float) -> None:
        """Set the configuration of the chunk that the session begins now.

        A configuration that was set with the session or by a control stays. `sessions`: all active ones.
        """
        state = session.state
        session.lowered = False
        if state.fixed_fidelity:
            self._before_start.pop(session.name, None)
            return
        before, place = self._held_place(session), 0
        if self.lowers:
            load = self.load(sessions, now)
            place = min(self._policy.choose(session.name, load), self._lowest(session))
        if place < before:
            session.raised_at_s = now
        self._before_start.pop(session.name, None)
        if _starts(session):
            here = {each.name for each in sessions}
            self._before_start = {name: at for name, at in self._before_start.items() if name in here}
            self._before_start[session.name] = before
        else:
            session.lowered = place > 0
        state.fidelity = self.ladder.rungs[place].fidelity if place else None

    def late(self, sessions: Collection[Session], now: float) -> int:
        """Number of chunks within the horizon that will be late even at their lowest configurations."""
        load = self.load(sessions, now)
        return 0 if load.forward(1) <= 0 else ChunkQueue(load).late()

    def load(self, sessions: Collection[Session], now: float) -> EngineLoad:
        """The load of these sessions."""
        away = any(not session.may_compute for session in sessions)
        returns_s = self._returns_s(now) if away else {}
        return EngineLoad(
            self.ladder,
            self._forward,
            self._pacing.after_forwards,
            self._config.chunk_media_s,
            [self._stream(each, now, returns_s.get(each.name)) for each in sessions if not each.ended],
            self._max_batch,
            self._context.encoding_s(sessions),
        )

    def _stream(self, session: Session, now: float, returns_s: float | None) -> StreamLoad:
        """`returns_s`: time until its state is in a slab, where it is not."""
        state, pacing = session.state, self._pacing
        place = self._place(state.fidelity)
        stops = session.suspending or (returns_s is None and not session.may_compute)
        waits = pacing.shrinks(session) and not stops
        unpaced = state.next_chunk < session.unpaced_until
        return StreamLoad(
            session.name,
            pacing.slack(session, now) if waits else math.inf,
            undecoded=sum(isinstance(each, UndecodedChunk) for each in session.undecoded),
            forwards_left=self._forwards_left(session, place),
            context_s=self._context.seconds(self._context.parts(session)),
            lead_s=math.inf if unpaced else session.max_lead_s,
            chunks_left=self._chunks_left(session),
            place=place,
            lowest=self._lowest(session),
            held_place=self._held_place(session),
            raised_s=now - session.raised_at_s,
            starts=_starts(session),
            returns_s=0.0 if returns_s is None else returns_s + self._context.prompts_s(session),
        )

    def _held_place(self, session: Session) -> int:
        """See `StreamLoad.held_place`."""
        return self._before_start.get(session.name, self._place(session.state.fidelity))

    def _place(self, fidelity: Fidelity | None) -> int:
        """Place on the ladder. A configuration that is not on it counts as the best."""
        return 0 if fidelity is None else self.ladder.place(fidelity) or 0

    def _chunks_left(self, session: Session) -> int | None:
        end = self._end_frame(session.state)
        if end is None:
            return None
        per_chunk = self._config.frames_per_chunk
        begun = session.state.next_chunk + (session.chunk is not None)
        return max(0, end // per_chunk - begun)

    def _lowest(self, session: Session) -> int:
        if not self.lowers or session.state.fixed_fidelity:
            return 0
        return self.ladder.lowest(session.state.floor, session.state.pinned)

    def _forwards_left(self, session: Session, place: int) -> float:
        """See `StreamLoad.forwards_left`. The pass over clean latents is left out: its chunk counts as
        undecoded already."""
        if not isinstance(session.task, ChunkTask) or session.task.work.clean is not None:
            return 0.0
        work = session.task.work
        return (work.total - work.done) / work.total * self.ladder.rungs[place].forwards


def _starts(session: Session) -> bool:
    """See `StreamLoad.starts`. A session that was suspended or lost its worker may have video left."""
    first = session.first
    return (
        first is not None and first.index == session.state.next_chunk and (first.index == 0 or first.discards)
    )
