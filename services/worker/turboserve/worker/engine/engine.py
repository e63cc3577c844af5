"""The engine: sessions in, chunks out. Owned by one thread, driven by `step`; it does no I/O and starts
nothing.

The order of stages within a step is the pipeline's end first: a decoded chunk is what a viewer waits for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from turboserve.worker.engine.admission import SessionTable
from turboserve.worker.engine.boundary import Boundary
from turboserve.worker.engine.events import ChunkReady, ChunkTimings, Event, SessionFailed
from turboserve.worker.engine.gather import policy
from turboserve.worker.engine.pacing import Pacing
from turboserve.worker.engine.profile import LatencyProfile
from turboserve.worker.engine.session import PendingControl, Session
from turboserve.worker.engine.snapshot import Snapshot
from turboserve.worker.engine.spec import Control, Decoder, EngineOptions, SessionSpec, TextEncoder
from turboserve.worker.engine.stages import Clock, Decoded, DecodeStage, ForwardStage, Outcome, TextStage
from turboserve.worker.model.schedule import Schedule
from turboserve.worker.model.transformer import CausalWanTransformer


@dataclass(frozen=True, eq=False)
class Models:
    """One replica of everything that computes."""

    transformer: CausalWanTransformer
    text: TextEncoder
    decoder: Decoder


class Engine:
    """Runs many sessions on one device. Not thread-safe.

    Every `now` is monotonic seconds on the caller's clock, which `clock` must read too.
    """

    def __init__(
        self,
        models: Models,
        options: EngineOptions,
        clock: Clock = time.monotonic,
        profiles: Mapping[str, Mapping[int, float]] | None = None,
    ) -> None:
        """Allocates the slabs. Raises `BudgetTooSmall` when not one fits.

        `profiles`: measured seconds by batch size, by stage (`profile_file.STAGES`), to begin with.
        """
        known = {stage: LatencyProfile(seconds) for stage, seconds in (profiles or {}).items()}
        transformer = models.transformer
        self.config = transformer.config
        self.options = options
        self.text = TextStage(models.text, clock, known.get("text"))
        self.forward = ForwardStage(
            transformer,
            policy(options.policy),
            options.max_batch,
            clock,
            known.get("forward"),
            known.get("recache"),
        )
        self.decode = DecodeStage(models.decoder, clock, known.get("decode"))
        self._clock = clock
        schedule = Schedule(self.config)
        self.table = SessionTable(transformer, options)
        self.pacing = Pacing(self.config, options, self.forward.profile, self.decode.profile)
        self._boundary = Boundary(transformer, schedule, self.table, self.pacing)

    @property
    def free_slots(self) -> int:
        """Sessions that can still be admitted or resumed."""
        return self.table.pool.free

    def admit(self, spec: SessionSpec, now: float, snapshot: Snapshot | None = None) -> None:
        """Take a session in: new, from the latents of a lost one (`spec.rebuild`), or from a snapshot.

        A snapshot's own prompt and counters win over the spec's. Raises `SlabsExhausted`, `DuplicateSession`,
        `BadRebuild` or `SnapshotRejected`; then nothing has changed.
        """
        session = self.table.admit(spec, snapshot)
        session.playhead.reported_at_s = now
        if session.state.text is None:
            first = Control(spec.control_seq, prompt=spec.prompt)
            session.controls.append(PendingControl(first))

    def control(self, session: str, control: Control) -> None:
        """Queue a control for the session's next chunk boundary. Raises `UnknownSession`."""
        self.table.active(session).controls.append(PendingControl(control))

    def playhead(self, session: str, seconds: float, *, now: float, playing: bool = True) -> None:
        """Tell where the session's viewer is. Raises `UnknownSession`."""
        playhead = self.table.active(session).playhead
        playhead.position_s, playhead.reported_at_s, playhead.playing = seconds, now, playing

    def suspend(self, session: str) -> None:
        """Ask for the session's state to move to the host at its next boundary: `Suspended` says when it has.

        Raises `UnknownSession`.
        """
        self.table.active(session).suspending = True

    def resume(self, session: str, now: float) -> None:
        """Bring a suspended session back to the device. Raises `UnknownSession` or `SlabsExhausted`."""
        self.table.resume(session).playhead.reported_at_s = now

    def snapshot(self, session: str) -> Snapshot:
        """State of a suspended session, for moving it elsewhere; it stays here until evicted."""
        return self.table.suspended(session)

    def evict(self, session: str) -> None:
        """Drop a session, active or suspended, and free all it held. Raises `UnknownSession`."""
        self.table.evict(session)

    def step(self, now: float) -> list[Event]:
        """Do one batch of one stage, if any has work; returns what happened, in order."""
        events: list[Event] = []
        for session in list(self.table.sessions.values()):
            events += self._boundary.cross(session, now)
        for run in (self._run_decode, self._run_text, self._run_forward):
            ran = run(now)
            if ran is not None:
                return events + ran
        return events

    def has_work(self, now: float) -> bool:
        """Whether `step` would do something now. False: wait for a call, or for `next_due`."""
        return any(
            session.forwarding
            or session.decoding
            or any(not pending.ready for pending in session.controls)
            or self._boundary.pending(session, now)
            for session in self.table.sessions.values()
        )

    def next_due(self, now: float) -> float | None:
        """When the next idle session becomes due by its viewer's playing alone; None if no session will."""
        times = [self.pacing.due_at(session, now) for session in self.table.sessions.values()]
        return min((t for t in times if t is not None), default=None)

    def _run_decode(self, now: float) -> list[Event] | None:
        waiting = [session for session in self.table.sessions.values() if session.decoding]
        if not waiting:
            return None
        session = min(waiting, key=lambda s: self.pacing.slack(s, now))
        return self._scatter_decoded(self.decode.run([session])[0])

    def _run_text(self, now: float) -> list[Event] | None:
        waiting = [
            (session, pending)
            for session in self.table.sessions.values()
            for pending in session.controls
            if not pending.ready
        ][: self.options.max_batch]
        if not waiting:
            return None
        events: list[Event] = []
        outcomes = self.text.run([pending.control.prompt or "" for _, pending in waiting])
        for (session, pending), outcome in zip(waiting, outcomes, strict=True):
            pending.text = outcome.result
            if outcome.error is not None:
                events.append(self._fail(session, outcome.error))
        return events

    def _run_forward(self, now: float) -> list[Event] | None:
        sessions = self.table.sessions
        candidates = [self.pacing.candidate(s, now) for s in sessions.values() if s.forwarding]
        batch = self.forward.gather(sessions, candidates)
        if not batch:
            return None
        for session in batch:
            if session.started_at_s is None:
                session.started_at_s = now
        events: list[Event] = []
        for outcome in self.forward.run(batch):
            session = outcome.item
            if outcome.error is not None or outcome.result is None or session.work is None:
                events.append(self._fail(session, outcome.error))
                continue
            session.work.advance(outcome.result)
            chunk = session.chunk
            if chunk is not None and chunk.clean is not None and chunk.done == chunk.total - 1:
                session.denoised_at_s = self._clock()
        return events

    def _scatter_decoded(self, outcome: Outcome[Session, Decoded]) -> list[Event]:
        session, result = outcome.item, outcome.result
        if result is None:
            return [self._fail(session, outcome.error)]
        state = session.state
        state.decoder_cache = result.cache
        if session.warming is not None:
            session.warming = None
            return []
        chunk = session.chunk
        assert chunk is not None
        assert chunk.clean is not None
        session.decoded = True
        ready = self._clock()
        return [
            ChunkReady(
                session=session.name,
                index=chunk.index,
                latents=chunk.clean.to("cpu"),
                frames=result.frames,
                control_seq=state.control_seq,
                media_start_s=self.config.media_start(chunk.index),
                timings=ChunkTimings(
                    due_s=session.due_at_s or 0.0,
                    started_s=session.started_at_s or 0.0,
                    denoised_s=session.denoised_at_s,
                    ready_s=ready,
                ),
            )
        ]

    def _fail(self, session: Session, error: Exception | None) -> Event:
        if session.name in self.table.sessions:
            self.table.evict(session.name)
        return SessionFailed(session.name, repr(error))
