"""The engine: sessions in, chunks out. Owned by one thread, driven by `step`; it does no I/O.

What a step runs first is the pipeline's end: a decoded chunk is what a viewer waits for. With `overlap`,
decoding and moving state are done in lanes of their own while the next forward is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from turboserve.worker.engine.admission import SessionTable
from turboserve.worker.engine.backend import Backend, JobExecutor, Replica
from turboserve.worker.engine.boundary import Boundary
from turboserve.worker.engine.decoding import DecodeBatch, DecodeStage
from turboserve.worker.engine.events import Event, SessionFailed, Suspended, SuspendRefused
from turboserve.worker.engine.gather import GATHER_POLICIES
from turboserve.worker.engine.isolation import Isolation
from turboserve.worker.engine.pacing import Pacing
from turboserve.worker.engine.profile import LatencyProfile
from turboserve.worker.engine.profile_file import STAGES
from turboserve.worker.engine.session import PendingControl, Session
from turboserve.worker.engine.snapshot import Snapshot, state_fingerprint
from turboserve.worker.engine.spec import Control, Decoder, EngineOptions, SessionSpec, TextEncoder
from turboserve.worker.engine.stages import Clock, ForwardStage, TextStage
from turboserve.worker.engine.stream_executor import Wakeup
from turboserve.worker.engine.streams import DEVICE_LOST
from turboserve.worker.engine.tensor_backend import TensorBackend
from turboserve.worker.engine.transfer import Transfer, TransferDirection
from turboserve.worker.model.transformer import CausalWanTransformer
from turboserve.worker.model.weights import weight_bytes

LANE_DEPTH = 2
"""Batches in the decode lane at once: the one that is decoded, and one so that the lane need not wait for the
engine. The others wait with their sessions, where the most urgent goes first."""
COMPILER = "inductor"
"""torch's own, which writes Triton for a GPU and C++ for a CPU."""
TEXT_BATCH = 4
"""Prompts encoded at once at most, to bound memory."""


@dataclass(frozen=True, eq=False)
class Models:
    """One replica of everything that computes."""

    transformer: CausalWanTransformer
    text: TextEncoder
    decoder: Decoder
    weights: str = ""
    """`weights_digest` of all three networks; empty where they need not be told apart, as in benchmarks."""

    @property
    def fingerprint(self) -> str:
        """See `state_fingerprint`."""
        return state_fingerprint(self.transformer.config, self.weights)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights on the device."""
        return weight_bytes(self.transformer) + self.text.weight_bytes + self.decoder.weight_bytes

    def backend(self, options: EngineOptions) -> Backend:
        """See `Replica.backend`."""
        return TensorBackend(self, options, COMPILER if options.compile else None)


class Engine:
    """Runs many sessions on one device. Not thread-safe.

    Every `now` is monotonic seconds on the caller's clock, which `clock` must read too.
    """

    def __init__(
        self,
        models: Replica,
        options: EngineOptions,
        clock: Clock = time.monotonic,
        profiles: Mapping[str, Mapping[int, float]] | None = None,
    ) -> None:
        """Allocates the slabs. Raises what `Replica.backend` does.

        `profiles`: measured seconds by batch size, by stage (`profile_file.STAGES`), to begin with.
        """
        known = {stage: LatencyProfile((profiles or {}).get(stage)) for stage in STAGES}
        self.models = models
        self.backend = backend = models.backend(options)
        self.fingerprint = backend.fingerprint
        self.config = backend.config
        self.options = options
        self._wakeup = Wakeup()
        self._clock = clock
        self.table = SessionTable(backend, options, self._wakeup)
        device = self.table.device
        self.package = known["package"]
        """L(b) of packaging, which is not the engine's work: whoever does it refines this."""
        self.pacing = Pacing(self.config, options, known["forward"], known["decode"], self.package)
        most = min(options.max_batch, TEXT_BATCH)
        self.text = TextStage(backend.text, device, clock, most, known["text"])
        self.forward = ForwardStage(
            backend,
            GATHER_POLICIES.make(options.policy),
            options.max_batch,
            clock,
            self.pacing,
            known["forward"],
            known["recache"],
        )
        self.decode = DecodeStage(
            backend,
            clock,
            self.pacing,
            GATHER_POLICIES.make(options.policy),
            min(options.decode_batch, options.max_batch),
            known["decode"],
        )
        self._decodes: JobExecutor[DecodeBatch] = backend.executor("decode", self._wakeup)
        self._boundary = Boundary(backend, self.table, self.pacing)
        self._isolation = Isolation()
        self._step_of: tuple[str, ...] = ()
        """Sessions that the calling thread computes for."""

    @property
    def host_states(self) -> int:
        """Suspended sessions that the host memory holds at once, however large each is."""
        return self.options.host_bytes // self.backend.state_host_bytes

    @property
    def free_slots(self) -> int:
        """Sessions that can still be admitted or resumed."""
        return self.table.pool.free

    def admit(self, spec: SessionSpec, now: float, snapshot: Snapshot | None = None) -> None:
        """Take a session in: new, from the latents of a lost one (`spec.rebuild`), or from a snapshot.

        A snapshot's own prompt and counters win over the spec's, and its tensors must stay as they are until
        `SessionReady`. Raises `SlabsExhaustedError`, `DuplicateSessionError`, `InvalidRebuildError` or
        `SnapshotRejectedError`; then nothing has changed.
        """
        session = self.table.admit(spec, snapshot)
        session.playhead.reported_at_s = now
        session.isolated_until = session.state.next_chunk + spec.isolated_chunks
        if snapshot is None:
            first = Control(spec.control_seq, prompt=spec.prompt)
            session.controls.append(PendingControl(first))

    def control(self, session: str, control: Control) -> None:
        """Queue a control for the session's next chunk boundary. Raises `UnknownSessionError`."""
        self.table.active(session).controls.append(PendingControl(control))

    def playhead(self, session: str, seconds: float, *, now: float, playing: bool = True) -> None:
        """Tell where the session's viewer is. Raises `UnknownSessionError`."""
        playhead = self.table.active(session).playhead
        playhead.position_s, playhead.reported_at_s, playhead.playing = seconds, now, playing

    def suspend(self, session: str) -> None:
        """Ask for the session's state to move to the host at its next boundary: `Suspended` says when it has.

        Raises `UnknownSessionError`.
        """
        self.table.active(session).suspending = True

    def resume(self, session: str, now: float) -> None:
        """Begin to bring a suspended session back to the device; it goes on when it is there.

        Raises `UnknownSessionError` or `SlabsExhaustedError`; then it stays suspended.
        """
        self.table.resume(session).playhead.reported_at_s = now

    def snapshot(self, session: str) -> Snapshot:
        """State of a suspended session, for moving it elsewhere; it stays here until resumed or evicted, and
        so long the tensors are valid. Raises `UnknownSessionError`."""
        return self.table.suspended(session)

    def evict(self, session: str) -> None:
        """Drop a session, wherever it is, and free all it held. Raises `UnknownSessionError`."""
        self.table.evict(session)

    def step(self, now: float) -> list[Event]:
        """Do one batch of one stage, if any has work; returns what happened, in order.

        What one session raises ends that session. Raises what says that the device is lost
        (`streams.DEVICE_LOST`), and `RuntimeError` if a lane has broken down: the engine is at its end then.
        """
        events = self._collect()
        if self._held_back(now):
            return events
        for session in list(self.table.sessions.values()):
            events += self._cross(session, now)
        events += self._collect()
        self._step_of = ()
        for run in (self._run_decode, self._run_text, self._run_forward):
            ran = run(now)
            if ran is not None:
                return events + ran
        return events

    @property
    def computing(self) -> tuple[str, ...]:
        """Sessions that something is computed for, in this step or in the decode lane. After `step` has
        raised: those of the step that did."""
        lane = [session.name for session in self.table.sessions.values() if session.in_lane]
        return tuple(dict.fromkeys([*self._step_of, *lane]))

    def has_work(self, now: float) -> bool:
        """Whether `step` would do something now. False: wait for a call, for `wait`, or for `next_due`."""
        if self._decodes.finished or self.table.transfers.finished:
            return True
        if self._held_back(now):
            return False
        return any(self._waits(session, now) for session in self.table.sessions.values())

    def has_work_for(self, session: str, now: float) -> bool:
        """Whether `step` would do something for this session now."""
        held = self.table.sessions.get(session)
        return held is not None and not self._held_back(now) and self._waits(held, now)

    @property
    def executors_busy(self) -> bool:
        """Whether a lane is at work, so that there will be something to do without any call."""
        return bool(self._decodes.load or self.table.transfers.load)

    def wait(self, timeout_s: float) -> None:
        """Sleep until a lane has done something, or for `timeout_s` seconds."""
        if not (self._decodes.finished or self.table.transfers.finished):
            self._wakeup.wait(timeout_s)

    def when_done(self, notify: Callable[[], None]) -> None:
        """Have `notify` called, on another thread, whenever a lane has done something."""
        self._wakeup.notify = notify

    def next_due(self, now: float, session: str | None = None) -> float | None:
        """When the next idle session becomes due by its viewer's playing alone; None if no session will.

        `session`: look at this one alone.
        """
        sessions = self.table.sessions
        if session is not None:
            return self.pacing.due_at(sessions[session], now) if session in sessions else None
        times = [self.pacing.due_at(each, now) for each in sessions.values()]
        return min((t for t in times if t is not None), default=None)

    def _held_back(self, now: float) -> bool:
        """Whether the decode lane has to be empty before anything else may begin: what is computed alone
        waits, or is in it."""
        return bool(self._decodes.load) and any(
            session.isolated and (session.waits or self._boundary.pending(session, now))
            for session in self.table.sessions.values()
        )

    def _waits(self, session: Session, now: float) -> bool:
        return (
            session.forwarding
            or (session.decodable and self._decodes.load < LANE_DEPTH)
            or (session.transfer is None and any(not pending.ready for pending in session.controls))
            or self._boundary.pending(session, now)
        )

    def _cross(self, session: Session, now: float) -> Sequence[Event]:
        """Over a boundary a prompt is projected and noise drawn: what fails there is its session's too."""
        self._step_of = (session.name,)
        try:
            return self._boundary.cross(session, now)
        except DEVICE_LOST:
            raise
        except Exception as error:
            return [self._fail(session, error)]

    def _collect(self) -> list[Event]:
        """Scatter what the lanes have done."""
        self._wakeup.clear()
        events: list[Event] = []
        for job in self._decodes.collect():
            events += self._scatter_decoded(job)
        for transfer in self.table.transfers.collect():
            events += self._scatter_transferred(transfer)
        return events

    def _run_decode(self, now: float) -> list[Event] | None:
        while self._decodes.load < LANE_DEPTH and not self._held_back(now):
            waiting = self._isolation.choose(self.decode.waiting(self.table.sessions.values()), _same)
            batch = self.decode.gather(waiting, now)
            if not batch:
                return None
            self._decodes.submit(DecodeBatch(self.decode, batch))
            if not self._decodes.threaded:
                return self._collect()
        return [] if self._held_back(now) else None

    def _run_text(self, now: float) -> list[Event] | None:
        waiting = self.text.waiting(self.table.sessions.values())
        batch = self.text.gather(self._isolation.choose(waiting, lambda each: each.session), now)
        self._step_of = tuple(each.session.name for each in batch)
        events = self.text.scatter(self.text.run(batch), self._fail) if batch else None
        self._step_of = ()
        return events

    def _run_forward(self, now: float) -> list[Event] | None:
        waiting = self.forward.waiting(self.table.sessions.values())
        batch = self.forward.gather(self._isolation.choose(waiting, _same), now)
        self._step_of = tuple(session.name for session in batch)
        events = self.forward.scatter(self.forward.run(batch), self._fail) if batch else None
        self._step_of = ()
        return events

    def _scatter_decoded(self, job: DecodeBatch) -> list[Event]:
        if job.seconds is not None:
            self.decode.observe(job.batch, job.seconds)
        here = self.table.sessions
        # A session may have been evicted meanwhile, and another of its name come.
        left = [each for each in job.outcomes if here.get(each.item.session.name) is each.item.session]
        return self.decode.scatter(left, self._fail)

    def _scatter_transferred(self, transfer: Transfer) -> list[Event]:
        session = self.table.transferred(transfer)
        if session is None:
            return []
        if transfer.way is TransferDirection.LEAVING:
            if transfer.error is not None:
                return [SuspendRefused(session.name, repr(transfer.error))]
            snapshot = transfer.snapshot
            return [Suspended(session.name, snapshot.next_chunk, snapshot.total_bytes)]
        return [] if transfer.error is None else [self._fail(session, transfer.error)]

    def _fail(self, session: Session, error: Exception | None) -> Event:
        if session.name in self.table.sessions:
            self.table.evict(session.name)
        return SessionFailed(session.name, repr(error))


def _same(session: Session) -> Session:
    return session
