"""The stage of transformer forwards, and the forecast of its queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

from torch import Tensor

from turboserve.worker.engine.backend import Backend
from turboserve.worker.engine.fidelity_ladder import FidelityLadder
from turboserve.worker.engine.gather import Candidate, GatherPolicy, LatencyProfile
from turboserve.worker.engine.interface import ChunkTimings, Event, Step
from turboserve.worker.engine.pacing import ContextWork, Pacing
from turboserve.worker.engine.playout import Forecast, Playout, Tier, forecast
from turboserve.worker.engine.session import ChunkTask, Session, Task, UndecodedChunk
from turboserve.worker.engine.stages import Clock, Fail, Stage, StageOutcome
from turboserve.worker.engine.streams import DEVICE_LOST
from turboserve.worker.model.config import ModelConfig

LEAVING_S = 5.0
"""Age of the chunk of a session that is leaving its slot, seconds, from which on the chunk comes first."""


class ForwardStage(Stage[Session, Session, Tensor]):
    """Transformer forwards of any kind: denoising steps, clean passes, recaches, replays.

    A recache covers up to a whole window, not a chunk; it is a separate batch and has its own profile.
    """

    def __init__(
        self,
        backend: Backend,
        policy: GatherPolicy,
        max_batch: int,
        clock: Clock,
        pacing: Pacing,
        profile: LatencyProfile | None = None,
        recache_profile: LatencyProfile | None = None,
        ladder: FidelityLadder | None = None,
    ) -> None:
        """`ladder`: what forwards at lower configurations cost. None: not known."""
        super().__init__(backend.device, clock, profile)
        self.recache_profile = recache_profile or LatencyProfile()
        self._backend = backend
        self._frames_per_chunk = backend.config.frames_per_chunk
        self._window_frames = backend.config.window_frames
        self.split_at_s = -inf
        """End of the last forward with another worker's help."""
        self._ladder = ladder or FidelityLadder.of_best(backend.config)
        self._policy = policy
        self._pacing = pacing
        self._max_batch = max_batch

    def waiting(self, sessions: Iterable[Session]) -> list[Session]:
        """See `Stage.waiting`."""
        return [session for session in sessions if session.task is not None and session.forwarding]

    def gather(self, waiting: list[Session], now: float) -> list[Session]:
        """See `Stage.gather`."""
        waiting = self.leaving(waiting, now) or waiting
        if len(waiting) <= 1:
            # A policy has nothing to choose.
            batch = waiting
        else:
            candidates = [self._pacing.candidate(session, now) for session in waiting]
            chosen = self.choose(candidates, self._policy, self.profile, self.recache_profile)
            by_name = {session.name: session for session in waiting}
            batch = [by_name[candidate.session] for candidate in chosen]
        for session in batch:
            if session.task is not None and session.task.started_at_s is None:
                session.task.started_at_s = now
        return batch

    def leaving(self, waiting: Iterable[Session], now: float) -> list[Session]:
        """The sessions that leave their slots and come first.

        No viewer watches a session that is suspended, so some policies would never finish its chunk. Its
        slot, or the target of its migration, waits for the boundary.
        """
        return [session for session in waiting if _leaves(session, now)]

    def choose(
        self,
        candidates: Sequence[Candidate],
        policy: GatherPolicy,
        profile: LatencyProfile,
        recache_profile: LatencyProfile,
    ) -> list[Candidate]:
        """The rows of the next forward."""
        chosen = policy.gather(candidates, profile, self._max_batch)
        if chosen and chosen[0].frames > self._frames_per_chunk:
            # The rows of a recache are longer. A batch has at most a full batch's tokens, which bounds its
            # memory, and as many rows as pay by the recache profile.
            rows = max(1, self._max_batch * self._frames_per_chunk // chosen[0].frames)
            recaches = [each for each in candidates if each.frames == chosen[0].frames]
            chosen = policy.gather(recaches, recache_profile, rows)
        return chosen

    def compute(self, batch: list[Session]) -> list[Tensor]:
        """See `Stage.compute`. Flows [F, C, H, W]."""
        return self._backend.forward([session.task.work for session in batch if session.task is not None])

    def scatter(self, outcomes: list[StageOutcome[Session, Tensor]], fail: Fail) -> list[Event]:
        """See `Stage.scatter`."""
        events: list[Event] = []
        for outcome in outcomes:
            session = outcome.item
            if outcome.error is not None or outcome.result is None or session.task is None:
                events.append(fail(session, outcome.error))
                continue
            try:
                session.task.work.advance(outcome.result)
                self._denoised(session, session.task)
            except DEVICE_LOST:
                raise
            except Exception as error:
                # The steps after a forward allocate memory too: noise, the clean latents.
                events.append(fail(session, error))
        return events

    def observe(self, batch: list[Session], seconds: float) -> None:
        """See `Stage.observe`. A recache of a partly filled window tells nothing about full windows, nor a
        forward about this device with another worker's help, or if it waits for the layers of a state. A
        forward takes the mean of its rows' shares of L(b)."""
        known = [share for session in batch if (share := self._share(session)) is not None]
        if self._backend.split:
            self.split_at_s = self._clock()
        if self._backend.split or len(known) < len(batch) or any(s.arriving is not None for s in batch):
            return
        frames = 0 if batch[0].task is None else batch[0].task.work.frames
        if frames == self._frames_per_chunk:
            if all(each == 1.0 for each in known):
                self.profile.observe(len(batch), seconds)
            else:
                self.profile.observe_lowered(len(batch), seconds, sum(known) / len(known))
        elif frames == self._window_frames:
            self.recache_profile.observe(len(batch), seconds)

    def _share(self, session: Session) -> float | None:
        """Time of the session's forward, relative to one at the best configuration. None: not known, as for a
        context that is computed again at a lower configuration."""
        chosen, task = session.state.fidelity, session.task
        if chosen is None or chosen == self._ladder.best.fidelity:
            return 1.0
        if isinstance(task, ChunkTask) and task.work.total == chosen.steps + 1:
            return self._ladder.forward_share(chosen)
        return None

    def _denoised(self, session: Session, task: Task) -> None:
        """Queue a chunk's decoding as soon as its latents are clean, before its last forward."""
        if not isinstance(task, ChunkTask):
            return
        chunk = task.work
        if chunk.clean is None or chunk.done != chunk.denoising:
            return
        timings = ChunkTimings(
            due_s=task.due_at_s,
            started_s=task.started_at_s or 0.0,
            denoised_s=self._clock(),
            ready_s=0.0,
            steps=tuple(session.steps),
        )
        session.steps.clear()
        state = session.state
        session.undecoded.append(
            UndecodedChunk(
                chunk.clean, chunk.index, state.control_seq, state.fidelity, session.lowered, timings
            )
        )


def record_steps(batch: Sequence[Session], began_s: float, ended_s: float) -> None:
    """Record the forward of `batch` in its sessions. Those at the same stage share a step."""
    names, steps = tuple(session.name for session in batch), dict[str, Step]()
    for session in batch:
        if session.task is None or (stage := session.task.stage) is None:
            continue
        if stage not in steps:
            steps[stage] = Step(stage, began_s, ended_s, names)
        session.steps.append(steps[stage])


def _leaves(session: Session, now: float) -> bool:
    if not session.suspending and session.quiesce_request is None:
        return False
    return session.task is not None and now - session.task.due_at_s > LEAVING_S


class Forecaster:
    """Playouts of all sessions of an engine, with a forecast of the gather policy's choices.

    See `Playout`. Between two forecasts, tiers use the times of the last one.
    """

    def __init__(
        self,
        config: ModelConfig,
        pacing: Pacing,
        forward: ForwardStage,
        policy: GatherPolicy,
        context: ContextWork,
        returns_s: Callable[[float], Mapping[str, float]],
    ) -> None:
        """`policy`: a gather policy as the stage's, but not the same object: a policy may keep a state.
        `returns_s`: see `ResidencyController.returns_s`."""
        self._config, self._pacing, self._forward, self._policy = config, pacing, forward, policy
        self._context, self._returns_s = context, returns_s
        self._forecasts: dict[str, Forecast] = {}

    def playouts(self, sessions: Iterable[Session], now: float) -> dict[str, Playout]:
        """Playout slack of each session that has not ended, by name, with a new forecast."""
        live, self._forecasts = self._forecast(sessions, now)
        return {session.name: self._playout(session, now) for session in live}

    def in_time_after(self, sessions: Iterable[Session], now: float, busy_s: float) -> bool:
        """Whether no viewer's next chunk is late if the device computes something else for `busy_s` first."""
        live, found = self._forecast(sessions, now, busy_s)
        return all(
            self._pacing.slack(each, now) >= self._ready_s(each, found, busy_s)
            for each in live
            if self._pacing.shrinks(each)
        )

    def _forecast(
        self, sessions: Iterable[Session], now: float, busy_s: float = 0.0
    ) -> tuple[list[Session], dict[str, Forecast]]:
        """Sessions that have not ended, and their forecasts if the device is busy for so long."""
        live = [session for session in sessions if not session.ended]
        away = any(not session.may_compute for session in live)
        returns_s = self._returns_s(now) if away else {}
        found = [
            self._pacing.upcoming(
                each,
                now,
                self._context.parts(each),
                returns_s[each.name] + self._context.prompts_s(each) if each.name in returns_s else None,
            )
            for each in live
        ]
        # Copies: a question about the future must not count as a choice.
        profile, recache = self._forward.profile.copy(), self._forward.recache_profile.copy()

        def choose(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
            return self._forward.choose(candidates, self._policy, profile, recache)

        upcoming = [one for one in found if one is not None]
        busy_s += self._context.encoding_s(live)
        return live, forecast(upcoming, choose, self._context.forward_s, busy_s)

    def tiers(self, sessions: Iterable[Session], now: float) -> dict[str, Tier]:
        """Tier of each session that has not ended, by name, with the times of the last forecast."""
        return {each.name: self._playout(each, now).tier for each in sessions if not each.ended}

    def before(self, session: Session, chunk: int, now: float) -> Playout:
        """Playout slack without `chunk`, which was just delivered: what the viewer had left."""
        slack_s = self._pacing.slack(session, now, delivered=chunk)
        return Playout(
            slack_s,
            0.0,
            self._next_s(session),
            playing=self._pacing.shrinks(session),
            alpha=self._pacing.alpha,
        )

    def _playout(self, session: Session, now: float) -> Playout:
        slack_s, playing = self._pacing.slack(session, now), self._pacing.shrinks(session)
        next_s, after_s = self._next_s(session), self._pacing.after_forwards
        rest_s, lateness_s = 0.0, 0.0
        if session.undecoded and isinstance(session.undecoded[0], UndecodedChunk):
            rest_s = after_s
        elif isinstance(session.task, ChunkTask) and session.task.work.done:
            work = session.task.work
            rest_s = self._forward_s(session) * max(0, work.denoising - work.done) + after_s
        if playing:
            lateness_s = max(0.0, self._ready_s(session, self._forecasts) - slack_s)
        return Playout(slack_s, rest_s, next_s, lateness_s, playing, self._pacing.alpha)

    def _ready_s(self, session: Session, forecasts: Mapping[str, Forecast], busy_s: float = 0.0) -> float:
        """When the next chunk is ready, seconds from now."""
        if session.undecoded and isinstance(session.undecoded[0], UndecodedChunk):
            return self._pacing.after_forwards
        expected = forecasts.get(session.name)
        # Without a forecast, nothing of the session is computed or due: it waits for its viewer, or leaves.
        return (
            busy_s + self._next_s(session)
            if expected is None
            else expected.clean_s + self._pacing.after_forwards
        )

    def _forward_s(self, session: Session) -> float:
        expected = self._forecasts.get(session.name)
        if expected is not None:
            return expected.forward_s
        return self._forward.profile(1)

    def _next_s(self, session: Session) -> float:
        chosen = session.state.fidelity
        forwards = self._config.chunk_forwards if chosen is None else chosen.steps + 1
        return self._forward_s(session) * forwards + self._pacing.after_forwards
