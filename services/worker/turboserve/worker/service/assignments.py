"""What a worker is assigned by renewals and changed rows: sessions, a lease, keys of migrations. Pure.

An event is a whole row or all rows. An older row changes nothing.
"""

from __future__ import annotations

import math

from cachetools import FIFOCache

from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import Incoming, MigrationKey
from turboserve.worker.service import commands, events
from turboserve.worker.service.session_entry import (
    Absent,
    Failed,
    InSlab,
    LeavingSlab,
    OnHost,
    Present,
    SessionEntry,
)
from turboserve.worker.service.session_reconciler import SessionReconciler
from turboserve.worker.service.table_migrations import IncomingMigrations

LEFT_KEPT = 1_024
"""Number of sessions remembered after they left, so that an old row cannot bring them back."""


class Lease:
    """The time until which a worker may generate: without confirmed renewals it stops.

    The lease counts from the time a renewal was sent, not answered. A process that waits for the lease to end
    starts counting no earlier.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self.until = -math.inf
        """Time before which chunks may be generated, monotonic seconds. -inf before the first renewal."""

    def renewed(self, asked_at: float) -> None:
        """Extend the lease: the state store confirmed a renewal sent at `asked_at`."""
        self.until = max(self.until, asked_at + self._lease_s)

    def excused(self, asked_at: float) -> None:
        """Extend a valid lease, because no session could be reassigned at `asked_at`: no state store was
        reachable.

        Sessions may have been reassigned after a lease ended. An excuse therefore extends a lease that is
        valid, and never restores one that is over.
        """
        if self.valid(asked_at):
            self.renewed(asked_at)

    def valid(self, now: float) -> bool:
        """Whether chunks may be generated."""
        return now < self.until


class MigrationKeys:
    """The newest key of each session that migrates to or from this worker, from its rows."""

    def __init__(self) -> None:
        self._keys: dict[str, tuple[MigrationKey, float]] = {}
        """By session: the key, and when it was learned, monotonic seconds."""

    def __len__(self) -> int:
        return len(self._keys)

    def learn(self, message: events.Input, now: float) -> None:
        """Store the keys of a message, and drop the keys of migrations that are over by it."""
        match message:
            case events.Renewed():
                # An answer does not cover keys learned after the renewal was sent.
                for session, (_, learned_at) in list(self._keys.items()):
                    if learned_at < message.asked_at:
                        del self._keys[session]
                for key in message.keys:
                    self._keep(key, now)
            case events.Assigned():
                if message.key is not None:
                    self._keep(message.key, now)
                elif message.record.target is None:
                    self._keys.pop(message.record.id, None)

    def of(self, session: str, migration: int) -> bytes | None:
        """The key, 32 bytes; None: no such migration is known."""
        found = self._keys.get(session)
        if found is None or found[0].migration != migration:
            return None
        return bytes.fromhex(found[0].key.get_secret_value())

    def _keep(self, key: MigrationKey, now: float) -> None:
        known = self._keys.get(key.session)
        if known is None or known[0].migration <= key.migration:
            self._keys[key.session] = key, now


class Assignments:
    """Adds, changes and removes the entries of the session table as their rows do."""

    def __init__(
        self,
        worker: str,
        entries: dict[str, SessionEntry],
        incoming: IncomingMigrations,
        reconciler: SessionReconciler,
    ) -> None:
        self._worker, self._entries = worker, entries
        self._incoming, self._reconciler = incoming, reconciler
        self._left: FIFOCache[str, tuple[int, bool]] = FIFOCache(LEFT_KEPT)

    def renewed(self, message: events.Renewed, now: float) -> None:
        """Handle the answer to a renewal: it lists all rows that name this worker."""
        for record in message.records:
            self._learn(record, now)
        listed = {record.id for record in message.records}
        for entry in list(self._entries.values()):
            # A row learned after the renewal was sent may be missing from the answer and still name this
            # worker.
            if entry.session not in listed and entry.learned_at < message.asked_at:
                self._leave(entry)
                # An older row must not bring back a session that the answer does not list.
                self._remember_left(entry.session, (entry.record.version + 1, False))
            elif isinstance(entry.state, Failed):
                self._reconciler.out.append(
                    commands.FailSession(entry.session, entry.record.epoch, entry.state.reason)
                )
        for incoming in message.incoming:
            self._expect(incoming, now)
        expected = {incoming.record.id for incoming in message.incoming}
        for arrival in self._incoming:
            if arrival.record.id not in expected:
                self._incoming.forget(arrival.record.id, learned_before=message.asked_at)

    def assigned(self, message: events.Assigned, now: float) -> None:
        """Handle one changed row."""
        self._learn(message.record, now)
        if message.incoming is not None:
            self._expect(message.incoming, now)
        elif message.record.target != self._worker and message.record.id not in self._entries:
            self._not_expected(message.record)

    def _expect(self, incoming: Incoming, now: float) -> None:
        """Handle a row that names this worker as the target of a migration."""
        record = incoming.record
        self._learn(record, now)
        if record.id not in self._entries and _age(record) >= self._left.get(record.id, (0, False)):
            free, serves = self._reconciler.free(record.model), self._reconciler.serves(record.model)
            self._incoming.expect(incoming, now, self._reconciler.number(), free, serves)

    def _not_expected(self, record: SessionRecord) -> None:
        arrival = self._incoming.get(record.id)
        if arrival is not None and record.version > arrival.record.version:
            self._incoming.forget(record.id)

    def _learn(self, record: SessionRecord, now: float) -> None:
        entry = self._entries.get(record.id)
        if _age(record) < (_age(entry.record) if entry else self._left.get(record.id, (0, False))):
            return
        if record.worker != self._worker or record.phase.ended:
            if entry is not None:
                self._leave(entry)
            self._remember_left(record.id, _age(record))
            return
        if entry is None:
            entry = self._new_entry(record, now)
            self._entries[record.id] = entry
            self._reconciler.out.append(commands.Report())
        knows = entry.values is not None and record.control_seq == entry.record.control_seq
        if knows and "controls" not in record.model_fields_set:
            # A state store that knows no values has sent the row, as during an upgrade.
            record = record.model_copy(update={"controls": entry.values})
        lost = record.own_revision is None or record.log_losses != entry.record.log_losses
        if lost:
            # The log is lost, and the next fence may be at the same sequence.
            entry.checked = None
        if lost or entry.ownership != (record.epoch, record.own_revision or 0):
            # Answers to queries under another ownership, or of the lost log, prove nothing now.
            entry.log_end_query = None
            if not isinstance(entry.state, Present):
                entry.state = Absent()
            entry.refusal, entry.refused_until = None, 0.0
        if not isinstance(entry.state, InSlab | LeavingSlab):
            entry.playhead_s = record.playhead_s
        entry.record, entry.learned_at = record, now

    def _new_entry(self, record: SessionRecord, now: float) -> SessionEntry:
        """An entry for a row that names this worker, with the state that was copied here for it, if any."""
        arrival = self._incoming.take(record)
        if arrival is None:
            return SessionEntry(record, now, self._reconciler.number())
        entry = SessionEntry(record, now, arrival.run)
        order = self._reconciler.number()
        entry.state = OnHost(order=order) if arrival.on_host else InSlab(quiesced=True)
        entry.made_next = entry.next_publish = arrival.next_chunk
        entry.control_sent = entry.control_taken = arrival.control_seq
        entry.playhead_s = max(record.playhead_s, arrival.playhead_s)
        if not arrival.on_host:
            # The next playhead may be reported after the session's chunk has become due.
            reported_here = arrival.playing and entry.playhead_s == arrival.playhead_s
            at = arrival.playhead_at if reported_here else now
            self._reconciler.out.append(
                commands.SetPlayhead(entry.session, entry.run, entry.playhead_s, arrival.playing, at)
            )
        return entry

    def _leave(self, entry: SessionEntry) -> None:
        self._reconciler.evict(entry)
        del self._entries[entry.session]
        self._reconciler.out.append(commands.Report())

    def _remember_left(self, session: str, age: tuple[int, bool]) -> None:
        """Ignore rows older than `age` from now on."""
        self._left[session] = max(age, self._left.get(session, age))


def _age(record: SessionRecord) -> tuple[int, bool]:
    """Order of a row: its version, then whether its fence is in the log, which does not raise the version."""
    return record.version, record.own_revision is not None
