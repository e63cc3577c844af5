"""The session table: what this worker holds, and what is to be done next. Pure: (input, time) → commands.

Level-triggered: an input changes what is known, and the conductor then compares what each row wants with
where the state is. So an input that is lost, repeated or late costs time and nothing else. Invariants (tests
hold them): at most one publication in flight per session; a session's chunks are published contiguously;
nothing is published under an ownership for which the log's end was not read, nor after the broker refused it;
slots never exceed the capacity; nothing is generated once the lease is over.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import HeldSession, Incoming, Refusal
from turboserve.worker.service import commands as do
from turboserve.worker.service import inputs as told
from turboserve.worker.service.arrivals import Arrivals
from turboserve.worker.service.conductor import REFUSAL_S, RETRY_LIMIT_S, RETRY_S, Conductor
from turboserve.worker.service.entry import Awaiting, Entry, Place
from turboserve.worker.service.lease import Lease

LEFT_KEPT = 1_024
"""Sessions remembered after they left, so that an old row cannot bring them back."""
_DOUBLINGS = 16
_LOCAL = (told.ChunkPackaged, told.ControlTaken, told.PlayheadMoved, told.Published)
"""Inputs that concern their session alone, unless it takes or leaves a place."""


class Table:
    """All sessions of one worker. `now` is monotonic seconds throughout."""

    def __init__(self, worker: str, model: str, capacity: int, lease_s: float) -> None:
        """`capacity`: slots, K. The lease begins with the first renewal."""
        self.worker = worker
        self.entries: dict[str, Entry] = {}
        self.draining = False
        self.generating = False
        self._generates_until = -math.inf
        out: list[do.Command] = []
        self.arrivals = Arrivals(worker, model, out)
        self._conductor = Conductor(model, capacity, self.entries, out, lambda: self.arrivals.slots)
        self._lease = Lease(lease_s)
        self._left: OrderedDict[str, tuple[int, bool]] = OrderedDict()

    def tell(self, message: told.Input, now: float) -> list[do.Command]:
        """Take in one input; what is to be done because of it, in order."""
        if isinstance(message, _LOCAL):
            self._tell_one(message, now)
        else:
            self._tell_all(message, now)
        self._heed_lease(now)
        commands = list(self._conductor.out)
        self._conductor.out.clear()
        return commands

    def _tell_one(self, message: told.SessionInput, now: float) -> None:
        entry = self.entries.get(message.session)
        before = None if entry is None else (entry.place, entry.takes_slot)
        self._about_one(message, now)
        if entry is not None:
            self._conductor.settle(entry, now)
            if (entry.place, entry.takes_slot) != before:
                self._settle_all(now)

    def _tell_all(self, message: told.Input, now: float) -> None:
        match message:
            case told.Renewed():
                self._lease.renewed(message.asked_at)
                self._renewed(message, now)
            case told.NobodyRenews():
                self._lease.excused(message.asked_at)
            case told.Assigned():
                self._learn(message.record, now)
                if message.incoming is not None:
                    self._expect(message.incoming, now)
                elif message.record.target != self.worker and message.record.id not in self.entries:
                    self._not_expected(message.record)
            case told.Tick():
                pass
            case told.CopyBegins() | told.Arrived() | told.ArrivalFailed():
                self.arrivals.told(message)
            case _:
                self._about_one(message, now)
        self._settle_all(now)

    def _settle_all(self, now: float) -> None:
        for entry in list(self.entries.values()):
            self._conductor.settle(entry, now)

    def _heed_lease(self, now: float) -> None:
        """The engine is told the end of the lease, and told again whenever that is later than it was."""
        self.generating, generated = self._lease.valid(now), self.generating
        if self.generating and self._generates_until < self._lease.until:
            self._generates_until = self._lease.until
            self._say(do.GenerateUntil(self._lease.until))
        elif generated and not self.generating:
            self._say(do.StopGenerating())

    def check(self, session: str, move: int, target: str) -> None:
        """Whether this target may have the state. Changes nothing.

        Raises `NotOffered`, `NotReady` or `NoState`.
        """
        self._conductor.departures.check(self.entries.get(session), session, move, target)

    def offer(self, session: str, move: int, target: str) -> bool:
        """The target of a move comes for the state: whether that is on the host. Raises what `check` does."""
        return self._conductor.departures.offer(self.entries.get(session), session, move, target)

    # What is reported

    @property
    def slots_used(self) -> int:
        return self._conductor.slots_used

    @property
    def capacity(self) -> int:
        """K, less the slabs of sessions that should be on the host but do not fit there."""
        return max(0, self._conductor.capacity - sum(entry.parked for entry in self.entries.values()))

    @property
    def watched(self) -> set[str]:
        """Sessions whose playheads matter here."""
        return self.entries.keys() | {arrival.record.id for arrival in self.arrivals}

    @property
    def unpublished(self) -> int:
        """Chunks made and not known to be in the log."""
        return sum(len(entry.pending) for entry in self.entries.values())

    def held(self, media_start_s: Callable[[int], float]) -> tuple[HeldSession, ...]:
        """What is here, on the device or the host. `media_start_s`: chunk index → its start, seconds."""
        return tuple(
            HeldSession(
                session=entry.session,
                epoch=entry.record.epoch,
                next_chunk=entry.next_publish,
                resident=entry.place is not Place.HOST,
                lead_s=media_start_s(entry.made_next) - entry.playhead_s,
                control_seq=entry.control_taken,
            )
            for entry in self.entries.values()
            if entry.place is not Place.NOWHERE
        )

    def refusals(self) -> tuple[Refusal, ...]:
        return tuple(
            Refusal(session=entry.session, epoch=entry.record.epoch, reason=entry.refusal)
            for entry in self.entries.values()
            if entry.refusal is not None
        )

    # Rows

    def _renewed(self, message: told.Renewed, now: float) -> None:
        self.draining = message.drain
        for record in message.records:
            self._learn(record, now)
        listed = {record.id for record in message.records}
        for entry in list(self.entries.values()):
            # A row learned after the question was asked may be missing from the answer and still be ours.
            if entry.session not in listed and entry.learned_at < message.asked_at:
                self._leave(entry)
                # An old hint must not bring back what the store has said is not ours.
                self._remember_left(entry.session, (entry.record.version + 1, False))
            elif entry.failure is not None:
                self._say(do.FailSession(entry.session, entry.record.epoch, entry.failure))
        for incoming in message.incoming:
            self._expect(incoming, now)
        expected = {incoming.record.id for incoming in message.incoming}
        for arrival in self.arrivals:
            if arrival.record.id not in expected:
                self.arrivals.forget(arrival.record.id, learned_before=message.asked_at)

    def _expect(self, incoming: Incoming, now: float) -> None:
        """The row names this worker as the target of a move."""
        record = incoming.record
        self._learn(record, now)
        if record.id not in self.entries and _age(record) >= self._left.get(record.id, (0, False)):
            # Sessions that are parked hold slots too: `capacity` has left them out already.
            free = self._conductor.capacity - self.slots_used
            self.arrivals.expect(incoming, now, self._conductor.number(), free)

    def _not_expected(self, record: SessionRecord) -> None:
        arrival = self.arrivals.get(record.id)
        if arrival is not None and record.version > arrival.record.version:
            self.arrivals.forget(record.id)

    def _learn(self, record: SessionRecord, now: float) -> None:
        entry = self.entries.get(record.id)
        if _age(record) < (_age(entry.record) if entry else self._left.get(record.id, (0, False))):
            return
        if record.worker != self.worker or record.phase.ended:
            if entry is not None:
                self._leave(entry)
            self._remember_left(record.id, _age(record))
            return
        if entry is None:
            entry = self._newcomer(record, now)
            self.entries[record.id] = entry
            self._say(do.Report())
        if entry.ownership != (record.epoch, record.own_revision or 0):
            # Answers to what was asked under another ownership prove nothing now.
            entry.awaiting, entry.have_latents = None, False
            entry.refusal, entry.refused_until, entry.failure = None, 0.0, None
        if entry.place in (Place.NOWHERE, Place.HOST):
            entry.playhead_s = record.playhead_s
        entry.record, entry.learned_at = record, now

    def _newcomer(self, record: SessionRecord, now: float) -> Entry:
        """An entry for a row that names this worker: with the state that was copied here for it, if any."""
        arrival = self.arrivals.take(record)
        if arrival is None:
            return Entry(record, now, self._conductor.number())
        entry = Entry(record, now, arrival.run)
        entry.place = Place.HOST if arrival.on_host else Place.SLAB
        entry.frozen = not arrival.on_host
        entry.made_next = entry.next_publish = arrival.next_chunk
        entry.control_sent = entry.control_taken = arrival.control_seq
        entry.shelved = self._conductor.number()
        entry.playhead_s = max(record.playhead_s, arrival.playhead_s)
        if entry.frozen:
            # The next report may come after its chunk has become due.
            told_here = arrival.playing and entry.playhead_s == arrival.playhead_s
            age_s = now - arrival.playhead_at if told_here else 0.0
            self._say(do.SetPlayhead(entry.session, entry.run, entry.playhead_s, arrival.playing, age_s))
        return entry

    def _leave(self, entry: Entry) -> None:
        self._conductor.evict(entry)
        del self.entries[entry.session]
        self._say(do.Report())

    def _remember_left(self, session: str, age: tuple[int, bool]) -> None:
        """Only rows of this age or newer are believed from now on."""
        self._left[session] = max(age, self._left.get(session, age))
        self._left.move_to_end(session)
        if len(self._left) > LEFT_KEPT:
            self._left.popitem(last=False)

    def _say(self, command: do.Command) -> None:
        self._conductor.out.append(command)

    # One session's inputs

    def _about_one(self, message: told.SessionInput, now: float) -> None:
        if isinstance(message, told.Published):
            self._conductor.in_flight.discard(message.session)
        entry = self.entries.get(message.session)
        arrival = self.arrivals.get(message.session)
        if arrival is not None and isinstance(message, told.PlayheadMoved):
            arrival.playhead_s, arrival.playing = message.playhead_s, message.playing
            arrival.playhead_at = now
        run = getattr(message, "run", None)
        if entry is None or run not in (None, entry.run):
            if isinstance(message, told.ChunkPackaged):
                self._say(do.ForgetChunk(message.session, message.run, message.index))
            return
        match message:
            case told.FreezeWanted() | told.Frozen() | told.GiftSealed() | told.GiftBroken():
                self._conductor.departures.told(entry, message, now)
            case told.PlayheadMoved():
                entry.playhead_s = message.playhead_s
                if entry.place in (Place.SLAB, Place.LEAVING):
                    self._say(do.SetPlayhead(entry.session, entry.run, message.playhead_s, message.playing))
            case told.LogEndRead():
                if entry.awaiting is Awaiting.LOG_END and message.query == entry.query:
                    self._log_end_read(entry, message)
            case told.LatentsFetched():
                if entry.awaiting is Awaiting.LATENTS and message.query == entry.query:
                    entry.awaiting, entry.have_latents = None, True
            case told.ChunkPackaged():
                self._packaged(entry, message)
            case told.ControlTaken():
                entry.control_taken = max(entry.control_taken, message.control_seq)
            case told.MovedToHost():
                if entry.place is Place.LEAVING:
                    entry.place, entry.refusal = Place.HOST, None
                    entry.shelved = self._conductor.number()
                    self._say(do.Report())
            case told.SuspendRefused():
                if entry.place is Place.LEAVING:
                    entry.place = Place.SLAB
                    if not self._conductor.make_room_on_host():
                        self._conductor.refuse(entry, message.reason, now + REFUSAL_S)
            case told.AdmissionRefused():
                if entry.place is Place.SLAB:
                    entry.place = Place.HOST if message.on_host else Place.NOWHERE
                    # What was sent after it has not been taken: it is said again with the next attempt.
                    entry.control_sent, entry.halted = entry.control_taken, message.on_host
                    self._conductor.refuse(entry, message.reason, now + REFUSAL_S)
            case told.RunFailed():
                self._conductor.fail(entry, message.reason)
            case told.RunFinished():
                entry.finished = message.reason
            case told.Published():
                self._published(entry, message, now)

    def _log_end_read(self, entry: Entry, message: told.LogEndRead) -> None:
        entry.awaiting = None
        # The log may have dropped old chunks of a session that slept long, or be lost whole. The row has
        # counted them, and so have we: no index that a viewer has seen comes again.
        end = max(message.next_chunk, entry.record.next_chunk, entry.next_publish)
        if entry.place is not Place.NOWHERE:
            # Whatever was written since the last chunk we know of must have come from this very state.
            ours = end == entry.next_publish or (message.mine and entry.next_publish < end <= entry.made_next)
            if not ours:
                self._conductor.evict(entry)
        if entry.place is Place.NOWHERE:
            entry.made_next = end
        while entry.pending and entry.pending[0] < end:
            self._say(do.ForgetChunk(entry.session, entry.run, entry.pending.popleft()))
        if message.next_chunk == end:
            entry.last_epoch = message.epoch
        elif end != entry.next_publish:
            entry.last_epoch = 0
        entry.next_publish, entry.checked = end, entry.ownership
        if entry.began is None or entry.last_epoch != entry.record.epoch:
            entry.began, entry.before = end, entry.last_epoch
        entry.attempts, entry.retry_at = 0, 0.0

    def _packaged(self, entry: Entry, message: told.ChunkPackaged) -> None:
        if message.index == entry.made_next:
            entry.made_next += 1
            entry.pending.append(message.index)
        else:
            self._conductor.fail(entry, f"the engine made chunk {message.index}, not {entry.made_next}")

    def _published(self, entry: Entry, message: told.Published, now: float) -> None:
        if message.outcome is told.Outcome.UNKNOWN:
            entry.retry_at = now + min(RETRY_LIMIT_S, RETRY_S * 2**entry.attempts)
            entry.attempts = min(entry.attempts + 1, _DOUBLINGS)
        elif message.outcome is told.Outcome.FENCED:
            if message.ownership == entry.ownership:
                entry.fenced = message.ownership
                self._say(do.Report())
        elif entry.pending and entry.pending[0] == message.index:
            entry.pending.popleft()
            entry.next_publish, entry.last_epoch = message.index + 1, message.ownership[0]
            entry.attempts, entry.retry_at = 0, 0.0
            self._say(do.ForgetChunk(entry.session, entry.run, message.index))


def _age(record: SessionRecord) -> tuple[int, bool]:
    """Rows compare by version; that the fence is in the log is noted without raising it."""
    return record.version, record.own_revision is not None
