"""The engine: sessions in, chunks out. One thread owns it and calls `step`; it does no I/O.

A step runs the end of the pipeline first: a viewer waits for a decoded chunk. With `overlap`, stream
executors decode and transfer state while the next forward is computed.
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
"""Batches in the decode executor at once: one in progress, and one ready, so that the executor need not wait
for the engine. Further latents stay with their sessions, where the most urgent ones go first."""
COMPILER = "inductor"
"""torch's own compiler, which generates Triton for a GPU and C++ for a CPU."""
TEXT_BATCH = 4
"""Largest number of prompts encoded at once, to bound memory."""


@dataclass(frozen=True, eq=False)
class Models:
    """One replica of all networks."""

    transformer: CausalWanTransformer
    text: TextEncoder
    decoder: Decoder
    weights: str = ""
    """`weights_digest` of all three networks; empty where replicas are not compared, as in benchmarks."""

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
        """Allocate the slabs. Raises the errors of `Replica.backend`.

        `profiles`: initial measured seconds by batch size, by stage (`profile_file.STAGES`).
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
        """L(b) of packaging. The engine does not package: the packager refines this profile."""
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
        """Sessions for which the calling thread computes."""

    @property
    def host_states(self) -> int:
        """Number of suspended sessions that the host memory holds at once, at their largest size."""
        return self.options.host_bytes // self.backend.state_host_bytes

    @property
    def free_slots(self) -> int:
        """Number of sessions that can still be admitted or resumed."""
        return self.table.pool.free

    def admit(self, spec: SessionSpec, now: float, snapshot: Snapshot | None = None) -> None:
        """Admit a session: new, from the latents of a lost one (`spec.rebuild`), or from a snapshot.

        A snapshot's own prompt and counters override the spec's. Its tensors must not change until
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
        """Set the position of the session's viewer. Raises `UnknownSessionError`."""
        playhead = self.table.active(session).playhead
        playhead.position_s, playhead.reported_at_s, playhead.playing = seconds, now, playing

    def generate_next(self, session: str) -> None:
        """Make the current or next chunk due wherever its viewer is. Raises `UnknownSessionError`."""
        active = self.table.active(session)
        active.unpaced_until = active.state.next_chunk + 1

    def suspend(self, session: str) -> None:
        """Request that the session's state move to the host at the next boundary; `Suspended` reports it.

        Raises `UnknownSessionError`.
        """
        self.table.active(session).suspending = True

    def resume(self, session: str, now: float) -> None:
        """Begin to bring a suspended session back to the device; it continues when its state has arrived.

        Raises `UnknownSessionError` or `SlabsExhaustedError`; then the session stays suspended.
        """
        self.table.resume(session).playhead.reported_at_s = now

    def snapshot(self, session: str) -> Snapshot:
        """State of a suspended session. The snapshot's tensors are valid until the session is resumed or
        evicted. Raises `UnknownSessionError`."""
        return self.table.suspended(session)

    def evict(self, session: str) -> None:
        """Drop a session, active or suspended, and free its memory. Raises `UnknownSessionError`."""
        self.table.evict(session)

    def step(self, now: float) -> list[Event]:
        """Run one batch of one stage, if any has work. Returns the events, in order.

        An error of one session ends that session only. Raises the errors of a lost device
        (`streams.DEVICE_LOST`), and `RuntimeError` if a stream executor has failed: the engine cannot
        continue then.
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
        """Sessions for which something is computed, in this step or in the decode executor. After an error of
        `step`: the sessions of that step."""
        lane = [session.name for session in self.table.sessions.values() if session.in_lane]
        return tuple(dict.fromkeys([*self._step_of, *lane]))

    def has_work(self, now: float) -> bool:
        """Whether `step` would do something now. If not, wait for a call, for `wait`, or for `next_due`."""
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
        """Whether a stream executor has jobs, so that there will be something to do without any call."""
        return bool(self._decodes.load or self.table.transfers.load)

    def wait(self, timeout_s: float) -> None:
        """Wait until a stream executor has finished a job, or for `timeout_s` seconds."""
        if not (self._decodes.finished or self.table.transfers.finished):
            self._wakeup.wait(timeout_s)

    def when_done(self, notify: Callable[[], None]) -> None:
        """Call `notify`, on another thread, whenever a stream executor has finished a job."""
        self._wakeup.notify = notify

    def next_due(self, now: float, session: str | None = None) -> float | None:
        """Time at which the next idle session becomes due while its viewer plays; None if no session will.

        `session`: consider only this session.
        """
        sessions = self.table.sessions
        if session is not None:
            return self.pacing.due_at(sessions[session], now) if session in sessions else None
        times = [self.pacing.due_at(each, now) for each in sessions.values()]
        return min((t for t in times if t is not None), default=None)

    def _held_back(self, now: float) -> bool:
        """Whether the decode executor must become empty first: an isolated session waits, or is in it."""
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
        """At a boundary a prompt is projected and noise is drawn. An error there ends only this session."""
        self._step_of = (session.name,)
        try:
            return self._boundary.cross(session, now)
        except DEVICE_LOST:
            raise
        except Exception as error:
            return [self._fail(session, error)]

    def _collect(self) -> list[Event]:
        """Scatter the results of the stream executors."""
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
        # A session may have been evicted meanwhile, and replaced by another of its name.
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
