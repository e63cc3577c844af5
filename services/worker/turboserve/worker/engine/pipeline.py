"""The engine's pipeline: batches of prompts, forwards and decodes, over all sessions.

A step runs the end of the pipeline first: a viewer waits for a decoded chunk. With `overlap`, stream
executors decode and transfer state while the next forward is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from turboserve.worker.engine.admission import SessionTable
from turboserve.worker.engine.backend import JobExecutor, Replica
from turboserve.worker.engine.boundary import Boundary
from turboserve.worker.engine.fidelity_chooser import FidelityChooser
from turboserve.worker.engine.fidelity_ladder import FidelityLadder
from turboserve.worker.engine.fidelity_policy import FIDELITY_POLICIES
from turboserve.worker.engine.forwarding import Forecaster, ForwardStage, record_steps
from turboserve.worker.engine.gather import GATHER_POLICIES, Candidate, LatencyProfile
from turboserve.worker.engine.interface import (
    EngineOptions,
    Event,
    SessionFailed,
    SessionQuiesced,
    Step,
    Suspended,
    SuspendRefused,
)
from turboserve.worker.engine.pacing import ContextWork, Pacing
from turboserve.worker.engine.profile_file import STAGES
from turboserve.worker.engine.residency_controller import ResidencyController
from turboserve.worker.engine.session import Session
from turboserve.worker.engine.stages import Clock, DecodeBatch, DecodeStage, Isolation
from turboserve.worker.engine.state_transfer import Transfer, TransferDirection, TransferPurpose
from turboserve.worker.engine.streams import DEVICE_LOST, Wakeup
from turboserve.worker.engine.text_stage import TextStage

DECODE_EXECUTOR_DEPTH = 2
"""Batches in the decode executor at once: one in progress, and one ready, so that the executor need not wait
for the engine. Further latents stay with their sessions, where the most urgent ones go first."""
TEXT_BATCH = 4
"""Largest number of prompts encoded at once, to bound memory."""


class Pipeline:
    """Runs the stages for the sessions of one engine, and knows when there is work. Not thread-safe."""

    def __init__(
        self,
        models: Replica,
        options: EngineOptions,
        clock: Clock = time.monotonic,
        profiles: Mapping[str, Mapping[int, float]] | None = None,
        ladder: FidelityLadder | None = None,
    ) -> None:
        """Allocate the slabs. Raises the errors of `Replica.backend`.

        `profiles`: initial measured seconds by batch size, by stage (`profile_file.STAGES`).
        `ladder`: configurations that the policy `EngineOptions.fidelity` may choose. None: the best alone.
        """
        known = {stage: LatencyProfile((profiles or {}).get(stage)) for stage in STAGES}
        self.models = models
        self.backend = backend = models.backend(options)
        self.fingerprint = backend.fingerprint
        self.config = backend.config
        ladder = ladder or FidelityLadder.of_best(self.config)
        self.options = options
        self._wakeup = Wakeup()
        self._clock = clock
        self._table = SessionTable(backend, options, self._wakeup)
        device = self._table.device
        self.package = known["package"]
        """L(b) of packaging. The engine does not package: the packager refines this profile."""
        stages = known["forward"], known["decode"], self.package
        self.pacing = Pacing(self.config, options, *stages, backend.end_frame)
        self.text = TextStage(
            backend.text,
            backend.controls,
            device,
            clock,
            min(options.max_batch, TEXT_BATCH),
            known["text"],
            self._wakeup.notify_done,
        )
        self.forward = ForwardStage(
            backend,
            GATHER_POLICIES.make(options.policy),
            options.max_batch,
            clock,
            self.pacing,
            known["forward"],
            known["recache"],
            ladder,
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
        context = ContextWork(
            self.config, self.text.profile, self.forward.profile, self.forward.recache_profile
        )
        self._exchanges = bool(options.host_sessions)
        self.residency = ResidencyController(backend, self._table, self.pacing, known["forward"], options)
        self.fidelity = FidelityChooser(
            self.config,
            ladder,
            FIDELITY_POLICIES.make(options.fidelity),
            known["forward"],
            self.pacing,
            options.max_batch,
            backend.end_frame,
            context,
            self.residency.returns_s,
        )
        self._boundary = Boundary(backend, self._table, self.pacing, self.fidelity)
        self._forecaster = Forecaster(
            self.config,
            self.pacing,
            self.forward,
            GATHER_POLICIES.make(options.policy),
            context,
            self.residency.returns_s,
        )
        self._isolation = Isolation()
        self._step_of: tuple[str, ...] = ()
        """Sessions for which the calling thread computes."""
        self.records_steps = False
        """Whether `ChunkTimings.steps` is recorded."""

    def step(self, now: float, *, forward: bool = True) -> list[Event]:
        """Return what the executors have finished, or else run one batch of one stage, if any has work.

        Returns the events, in order. A finished chunk does not wait for the next batch: its viewer may.
        Neither does a quiesced session, whose viewer has its buffer alone until another worker continues it.
        `forward`: whether a forward may be computed.

        An error of one session ends that session only. Raises the errors of a lost device
        (`streams.DEVICE_LOST`), and `RuntimeError` if a stream executor has failed: the engine cannot
        continue then.
        """
        events = self._collect()
        if events or self._held_back(now):
            return events
        events += self.residency.exchange(now, self._fail) if self._exchanges else []
        for session in list(self._table.sessions.values()):
            if self._boundary.pending(session, now):
                events += self._cross(session, now)
        events += self._collect()
        self._step_of = ()
        if events and any(isinstance(event, SessionQuiesced) for event in events):
            return events
        for run in (self._run_decode, self._run_text, self._run_forward)[: 2 + forward]:
            ran = run(now)
            if ran is not None:
                return events + ran
        return events

    def precedes_forward(self, now: float) -> bool:
        """Whether `step` would do something other than a forward now."""
        if self._finished:
            return True
        return not self._held_back(now) and any(
            (session.decodable and self._decodes.load < DECODE_EXECUTOR_DEPTH)
            or session.encoding
            or (not session.forwarding and self._boundary.pending(session, now))
            for session in self._table.sessions.values()
        )

    def forward_candidates(self, now: float) -> tuple[list[Candidate], bool]:
        """The sessions that wait for a forward which may begin now, for a gather policy, and whether they
        come first because they leave their slots."""
        if self._held_back(now):
            return [], False
        waiting = self.forward.waiting(self._table.sessions.values())
        leaving = self.forward.leaving(waiting, now)
        return [self.pacing.candidate(session, now) for session in leaving or waiting], bool(leaving)

    @property
    def computing(self) -> tuple[str, ...]:
        """Sessions for which something is computed, in this step or in the decode executor. After an error of
        `step`: the sessions of that step."""
        lane = [session.name for session in self._table.sessions.values() if session.in_decode_executor]
        return tuple(dict.fromkeys([*self._step_of, *lane]))

    def has_work(self, now: float) -> bool:
        """Whether `step` would do something now. If not, wait for a call, for `wait`, or for `next_due`."""
        if self._finished:
            return True
        if self._held_back(now):
            return False
        return (self._exchanges and self.residency.waits(now)) or any(
            self._waits(session, now) for session in self._table.sessions.values()
        )

    def has_work_for(self, session: str, now: float) -> bool:
        """Whether `step` would do something for this session now."""
        held = self._table.sessions.get(session)
        return held is not None and not self._held_back(now) and self._waits(held, now)

    @property
    def executors_busy(self) -> bool:
        """Whether a stream executor has jobs, so that there will be something to do without any call."""
        return bool(self._decodes.load or self._table.transfers.load or self.text.asking)

    def wait(self, timeout_s: float) -> None:
        """Wait until a stream executor has finished a job, or for `timeout_s` seconds."""
        if not self._finished:
            self._wakeup.wait(timeout_s)

    @property
    def _finished(self) -> bool:
        """Whether a stream executor, or another worker, has finished something that no step has taken."""
        transfers = self._table.transfers
        return bool(
            self._decodes.finished or transfers.finished or self._table.first_layers or self.text.answered
        )

    def when_done(self, notify: Callable[[], None]) -> None:
        """Call `notify`, on another thread, whenever a stream executor has finished a job."""
        self._wakeup.notify = notify

    def next_due(self, now: float, session: str | None = None) -> float | None:
        """Time at which the next idle session becomes due while its viewer plays; None if no session will.

        `session`: consider only this session.
        """
        sessions = self._table.sessions
        if session is not None:
            return self.pacing.due_at(sessions[session], now) if session in sessions else None
        # A session in the middle of a chunk becomes due by no time.
        times = [self.pacing.due_at(each, now) for each in sessions.values() if each.task is None]
        times.append(self.residency.next_at(now) if self._exchanges else None)
        return min((t for t in times if t is not None), default=None)

    def _held_back(self, now: float) -> bool:
        """Whether the decode executor must become empty first: an isolated session waits, or is in it."""
        if not self._decodes.load:
            return False
        # Each step asks: nearly always, no session is isolated.
        here = self._table.sessions.values()
        isolated = [session for session in here if session.delivered < session.isolated_until]
        return any(session.waits or self._boundary.pending(session, now) for session in isolated)

    def _waits(self, session: Session, now: float) -> bool:
        return (
            (session.task is not None and session.forwarding)
            or (bool(session.undecoded) and session.decodable and self._decodes.load < DECODE_EXECUTOR_DEPTH)
            or (bool(session.controls) and session.encoding)
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
        self.text.collect()
        events: list[Event] = []
        for job in self._decodes.collect():
            events += self._scatter_decoded(job)
        for transfer in self._table.transfers.collect():
            events += self._scatter_transferred(transfer)
        for transfer in self._table.first_layers:
            self._table.begin(transfer)
            self.residency.came(transfer, self._clock())
        return events

    def _run_decode(self, now: float) -> list[Event] | None:
        while self._decodes.load < DECODE_EXECUTOR_DEPTH and not self._held_back(now):
            waiting = self.decode.waiting(self._table.sessions.values())
            if not waiting:
                return None
            batch = self.decode.gather(self._isolation.choose(waiting, lambda each: each), now)
            if not batch:
                return None
            self._decodes.submit(DecodeBatch(self.decode, batch))
            if not self._decodes.threaded:
                return self._collect()
        return [] if self._held_back(now) else None

    def _run_text(self, now: float) -> list[Event] | None:
        waiting = self.text.waiting(self._table.sessions.values())
        if not waiting:
            return None
        batch = self.text.gather(self._isolation.choose(waiting, lambda each: each.session), now)
        self._step_of = tuple(each.session.name for each in batch)
        began = self._clock() if self.records_steps else 0.0
        outcomes = self.text.run(batch) if batch else []
        if self.records_steps:
            step = Step("text", began, self._clock(), self._step_of)
            for each in batch:
                # The session may still compute the chunk before the prompt.
                each.pending.encoded = step
        events = self.text.scatter(outcomes, self._fail) if batch else None
        self._step_of = ()
        return events

    def _run_forward(self, now: float) -> list[Event] | None:
        waiting = self.forward.waiting(self._table.sessions.values())
        if not waiting:
            return None
        batch = self.forward.gather(self._isolation.choose(waiting, lambda each: each), now)
        self._step_of = tuple(session.name for session in batch)
        began = self._clock() if self.records_steps else 0.0
        outcomes = self.forward.run(batch) if batch else []
        if self.records_steps:
            record_steps(batch, began, self._clock())
        events = self.forward.scatter(outcomes, self._fail) if batch else None
        self._step_of = ()
        return events

    def _scatter_decoded(self, job: DecodeBatch) -> list[Event]:
        if job.seconds is not None:
            self.decode.observe(job.batch, job.seconds)
        here = self._table.sessions
        # A session may have been evicted meanwhile, and replaced by another of its name.
        left = [each for each in job.outcomes if here.get(each.item.session.name) is each.item.session]
        return self.decode.scatter(left, self._fail)

    def _scatter_transferred(self, transfer: Transfer) -> list[Event]:
        session = self._table.transferred(transfer)
        if session is None:
            return []
        if transfer.way is TransferDirection.ARRIVING:
            self.residency.came(transfer, self._clock())
        elif transfer.purpose is TransferPurpose.RESIDENCY:
            # A session whose copy failed keeps its slab.
            self.residency.left(transfer, self._clock())
            return []
        else:
            if transfer.error is not None:
                return [SuspendRefused(session.name, repr(transfer.error))]
            snapshot = transfer.snapshot
            return [Suspended(session.name, snapshot.next_chunk, snapshot.total_bytes)]
        return [] if transfer.error is None else [self._fail(session, transfer.error)]

    def _fail(self, session: Session, error: Exception | None) -> Event:
        if session.name in self._table.sessions:
            self._table.evict(session.name)
        return SessionFailed(session.name, repr(error))
