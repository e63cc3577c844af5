"""The session table: what this worker holds, and what to do next. Pure: (event, time) → commands.

The table is level-triggered: an event changes what is known, and the session reconciler then compares each
row with the state's location. An event that is lost, repeated or late costs time and nothing else. Invariants
(tests check them):

- At most one publication is in flight per session.
- A session's chunks are published contiguously.
- Nothing is published under an ownership for which the log's end was not read, nor after the broker refused
  it, until the row changes.
- Slots never exceed the capacity.
- Nothing is generated once the lease is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from turboserve.backoff import backoff_s
from turboserve.contracts.workers import HeldSession, SessionRefusal
from turboserve.worker.service import commands, events
from turboserve.worker.service.assignments import Assignments, Lease
from turboserve.worker.service.class_slots import ONE_CLASS, ClassSlots, MediaStarts
from turboserve.worker.service.session_entry import (
    Absent,
    FetchingLatents,
    InSlab,
    LatentsReady,
    LeavingSlab,
    OnHost,
    Present,
    SessionEntry,
)
from turboserve.worker.service.session_reconciler import REFUSAL_S, RETRY_LIMIT_S, RETRY_S, SessionReconciler
from turboserve.worker.service.table_migrations import IncomingMigrations

_LOCAL = (events.ChunkPackaged, events.ControlTookEffect, events.PlayheadMoved, events.Published)
"""Events that affect only their session, unless its location or slot changes."""
_IN_SLAB = (InSlab, LeavingSlab)


class Table:
    """All sessions of one worker. `now` is monotonic seconds throughout."""

    def __init__(
        self,
        worker: str,
        model: str,
        capacity: int,
        lease_s: float,
        floor_capacity: int | None = None,
        classes: ClassSlots | None = None,
    ) -> None:
        """`capacity`: slots, K. `floor_capacity`: slots while the quality of chunks is lowered; None: K.
        `classes`: the slots of a worker that serves more classes than `model`.

        The lease begins with the first renewal.
        """
        self.worker = worker
        self.entries: dict[str, SessionEntry] = {}
        self.draining = False
        self.generating = False
        self._generates_until = -math.inf
        out: list[commands.Command] = []
        self.incoming = IncomingMigrations(worker, model if classes is None else classes.names, out)
        self._reconciler = SessionReconciler(
            model, max(capacity, floor_capacity or 0), self.entries, out, lambda: self.incoming.slots, classes
        )
        if classes is not None:
            classes.counts(self.entries, self.incoming)
        self._model, self._capacity = model, capacity
        self._lease = Lease(lease_s)
        self._assignments = Assignments(worker, self.entries, self.incoming, self._reconciler)

    def handle(self, message: events.Input, now: float) -> list[commands.Command]:
        """Handle one event. Returns the commands that follow from it, in order."""
        if isinstance(message, _LOCAL):
            self._handle_one(message, now)
        else:
            self._handle_all(message, now)
        self._heed_lease(now)
        commands = list(self._reconciler.out)
        self._reconciler.out.clear()
        return commands

    def _handle_one(self, message: events.SessionInput, now: float) -> None:
        entry = self.entries.get(message.session)
        before = None if entry is None else type(entry.state)
        self._about_one(message, now)
        if entry is not None:
            self._reconciler.settle(entry, now)
            if type(entry.state) is not before:
                self._settle_all(now)

    def _handle_all(self, message: events.Input, now: float) -> None:
        match message:
            case events.Renewed():
                self._lease.renewed(message.asked_at)
                if message.drain and not self.draining:
                    # No session leaves before the scheduler knows. Until then the worker is paid for in vain.
                    self._say(commands.Report())
                self.draining = message.drain
                self._assignments.renewed(message, now)
            case events.RenewalUnavailable():
                self._lease.excused(message.asked_at)
            case events.Assigned():
                self._assignments.assigned(message, now)
            case events.Tick():
                pass
            case events.Reconnected():
                for entry in self.entries.values():
                    entry.log_doubted, entry.doubted = True, entry.doubted or entry.newest
            case events.CopyStarted() | events.StateReceived() | events.StateFetchFailed():
                self.incoming.handle(message)
            case _:
                self._about_one(message, now)
        self._settle_all(now)

    def _settle_all(self, now: float) -> None:
        for entry in list(self.entries.values()):
            self._reconciler.settle(entry, now)

    def _heed_lease(self, now: float) -> None:
        """Send the engine each later end of the lease; stop generation when the lease is over."""
        self.generating, generated = self._lease.valid(now), self.generating
        if self.generating and self._generates_until < self._lease.until:
            self._generates_until = self._lease.until
            self._say(commands.GenerateUntil(self._lease.until))
        elif generated and not self.generating:
            self._say(commands.StopGenerating())

    def check(self, session: str, migration: int, target: str) -> None:
        """Check that this target may have the state. Changes nothing.

        Raises `MigrationNotOfferedError`, `SourceNotReadyError` or `NoStateError`.
        """
        self._reconciler.outgoing.check(self.entries.get(session), session, migration, target)

    def offer(self, session: str, migration: int, target: str) -> bool:
        """Offer the state to a target. Returns whether it is on the host. Raises the errors of `check`."""
        return self._reconciler.outgoing.offer(self.entries.get(session), session, migration, target)

    # Reports

    @property
    def slots_used(self) -> int:
        return self._reconciler.slots_used

    @property
    def capacity(self) -> int:
        """K, less the slabs of sessions that should be on the host but do not fit there."""
        return max(0, self._capacity - self._paused)

    @property
    def floor_capacity(self) -> int:
        """K_floor, less the same slabs: the most sessions that may hold a slot."""
        return max(0, self._reconciler.capacity - self._paused)

    @property
    def _paused(self) -> int:
        return sum(one.paused_in_slab and one.record.model == self._model for one in self.entries.values())

    @property
    def watched(self) -> set[str]:
        """Sessions whose playheads matter here."""
        return self.entries.keys() | {arrival.record.id for arrival in self.incoming}

    @property
    def unpublished(self) -> int:
        """Chunks generated and not known to be in the log."""
        return sum(len(entry.pending) for entry in self.entries.values())

    def held(
        self, media_start_s: Callable[[int], float], by_class: MediaStarts = ONE_CLASS
    ) -> tuple[HeldSession, ...]:
        """The states on the device or the host. `media_start_s`: chunk index → its start, seconds.
        `by_class`: the same for classes that differ."""
        present = (entry for entry in self.entries.values() if isinstance(entry.state, Present))
        return tuple(entry.held(by_class.get(entry.record.model, media_start_s)) for entry in present)

    def refusals(self) -> tuple[SessionRefusal, ...]:
        return tuple(
            SessionRefusal(session=entry.session, epoch=entry.record.epoch, reason=entry.refusal)
            for entry in self.entries.values()
            if entry.refusal is not None
        )

    def _say(self, command: commands.Command) -> None:
        self._reconciler.out.append(command)

    # Events of one session

    def _about_one(self, message: events.SessionInput, now: float) -> None:
        if isinstance(message, events.Published):
            self._reconciler.in_flight.discard(message.session)
        entry = self.entries.get(message.session)
        if isinstance(message, events.PlayheadMoved) and (arrival := self.incoming.get(message.session)):
            arrival.playhead_s, arrival.playing = message.playhead_s, message.playing
            arrival.playhead_at = now if message.observed_at is None else message.observed_at
        run = getattr(message, "run", None)
        if entry is None or run not in (None, entry.run):
            if isinstance(message, events.ChunkPackaged):
                self._say(commands.ForgetChunk(message.session, message.run, message.index))
            return
        # The most frequent ones first.
        match message:
            case events.ChunkPackaged():
                self._packaged(entry, message)
            case events.Published():
                self._published(entry, message, now)
            case events.PlayheadMoved():
                entry.playhead_s = message.playhead_s
                if isinstance(entry.state, _IN_SLAB):
                    at = now if message.observed_at is None else message.observed_at
                    position = message.session, entry.run, message.playhead_s
                    self._say(commands.SetPlayhead(*position, message.playing, at))
            case (
                events.QuiesceRequested() | events.Quiesced() | events.ManifestSent() | events.TransferEnded()
            ):
                self._reconciler.outgoing.handle(entry, message, now)
            case events.LogEndRead():
                if message.query == entry.log_end_query:
                    self._log_end_read(entry, message)
            case events.LatentsFetched():
                if entry.state == FetchingLatents(message.query):
                    entry.state = LatentsReady()
            case events.ControlTookEffect():
                entry.control_taken = max(entry.control_taken, message.control_seq)
            case events.MovedToHost():
                if isinstance(entry.state, LeavingSlab):
                    paused, quiesced = entry.state.paused, entry.state.quiesced
                    entry.state = OnHost(paused, quiesced, self._reconciler.number())
                    entry.refusal = None
                    self._say(commands.Report())
            case events.SuspendFailed():
                if isinstance(entry.state, LeavingSlab):
                    entry.state = InSlab(entry.state.paused, entry.state.quiesced)
                    if not self._reconciler.make_room_on_host(entry.record.model):
                        self._reconciler.refuse(entry, message.reason, now + REFUSAL_S)
            case events.AdmissionRefused():
                if isinstance(entry.state, InSlab):
                    quiesced, order = entry.state.quiesced, self._reconciler.number()
                    # The engine did not take the commands after it: the next attempt repeats them.
                    entry.state = OnHost(True, quiesced, order) if message.on_host else Absent()
                    entry.control_sent, entry.drop_sent = entry.control_taken, 0
                    entry.limits_sent = None
                    self._reconciler.refuse(entry, message.reason, now + REFUSAL_S)
            case events.RunFailed():
                self._reconciler.fail(entry, message.reason)
            case events.RunFinished():
                entry.finished = message.reason

    def _log_end_read(self, entry: SessionEntry, message: events.LogEndRead) -> None:
        entry.log_end_query = None
        # The log may have dropped old chunks of a session that was suspended for long, or be lost whole. The
        # row and this entry have counted those chunks: an index that a viewer has seen is never used again.
        end = max(message.next_chunk, entry.record.next_chunk, entry.next_publish)
        counted = False
        if isinstance(entry.state, Present):
            # Chunks after the last known one must have come from this state; otherwise the state is evicted.
            counted = self._counted_here(entry, end)
            made_here = message.mine or counted
            if not (end == entry.next_publish or (made_here and entry.next_publish < end <= entry.made_next)):
                self._reconciler.evict(entry)
                counted = False
        if not isinstance(entry.state, Present):
            entry.made_next = end
        while entry.pending and entry.pending[0] < end:
            self._say(commands.ForgetChunk(entry.session, entry.run, entry.pending.popleft()))
        entry.log_read(message, end, counted=counted)

    def _counted_here(self, entry: SessionEntry, end: int) -> bool:
        """Whether the row has counted the chunks up to `end`, and no other worker can have made them.

        The log may have lost chunks that it had accepted. Since the last known chunk, the session has had no
        other owner.
        """
        same_owner = (entry.record.worker, entry.record.epoch) == (self.worker, entry.last_epoch)
        return same_owner and end == entry.record.next_chunk

    def _packaged(self, entry: SessionEntry, message: events.ChunkPackaged) -> None:
        if message.index == entry.made_next:
            entry.made_next += 1
            entry.pending.append(message.index)
        else:
            self._reconciler.fail(entry, f"the engine made chunk {message.index}, not {entry.made_next}")

    def _published(self, entry: SessionEntry, message: events.Published, now: float) -> None:
        if message.outcome is events.PublishOutcome.UNKNOWN:
            entry.attempts += 1
            entry.retry_at = now + backoff_s(entry.attempts, RETRY_S, RETRY_LIMIT_S)
        elif message.outcome is events.PublishOutcome.FENCED:
            # A refusal from before a change of the row proves nothing: the fence may be in the log by now.
            if (message.ownership, entry.tried_version) == (entry.ownership, entry.record.version):
                entry.fenced = message.ownership, entry.record.version
                self._say(commands.Report())
        elif entry.pending and entry.pending[0] == message.index:
            entry.published(message)
            self._say(commands.ForgetChunk(entry.session, entry.run, message.index))
