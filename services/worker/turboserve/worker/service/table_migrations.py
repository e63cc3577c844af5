"""Migrations in the session table, as their target and as their source see them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import Incoming, MigrationReport, MigrationStage
from turboserve.worker.service import commands, events, migration_commands
from turboserve.worker.service.session_entry import (
    DesiredState,
    Failed,
    InSlab,
    OnHost,
    OutgoingMigration,
    Present,
    SessionEntry,
)
from turboserve.worker.transfer.errors import MigrationNotOfferedError, NoStateError, SourceNotReadyError


@dataclass(eq=False)
class IncomingMigration:
    """One migration to this worker."""

    record: SessionRecord
    """The source's row, with target and migration."""
    learned_at: float
    run: int
    stage: MigrationStage = MigrationStage.COPYING
    next_chunk: int = 0
    control_seq: int = 0
    """Number of the newest control that the state was generated under."""
    digest: str | None = None
    bytes_copied: int = 0
    state_bytes: int = 0
    seconds: float = 0.0
    limit_s: float = 0.0
    """Time after which the copy is given up, from its beginning, seconds. 0: the copy has not begun."""
    reason: str | None = None
    code: str | None = None
    playhead_s: float = 0.0
    playhead_at: float = 0.0
    """When `playhead_s` was reported, monotonic seconds."""
    playing: bool = False

    @property
    def migration(self) -> int:
        return self.record.migration or 0

    @property
    def on_host(self) -> bool:
        """Whether the session is suspended and goes to host memory."""
        return self.record.phase is Phase.SUSPENDED

    @property
    def takes_slot(self) -> bool:
        return not self.on_host and self.stage is not MigrationStage.FAILED

    def report(self) -> MigrationReport:
        return MigrationReport(
            session=self.record.id,
            migration=self.migration,
            stage=self.stage,
            next_chunk=self.next_chunk,
            digest=self.digest,
            bytes_copied=self.bytes_copied,
            state_bytes=self.state_bytes,
            seconds=self.seconds,
            limit_s=self.limit_s,
            reason=self.reason,
            code=self.code,
        )


class IncomingMigrations:
    """All migrations to this worker. Commands go to `out`.

    A copied state belongs to no worker until the row names the owner. It then becomes an entry of the table,
    or is dropped.
    """

    def __init__(self, worker: str, models: str, out: list[commands.Command]) -> None:
        """`models`: the classes that the worker serves, for reasons."""
        self._worker, self._models, self._out = worker, models, out
        self._all: dict[str, IncomingMigration] = {}

    def __iter__(self) -> Iterator[IncomingMigration]:
        return iter(list(self._all.values()))

    def get(self, session: str) -> IncomingMigration | None:
        return self._all.get(session)

    @property
    def slots(self) -> int:
        """Slots that are kept for arriving sessions."""
        return sum(arrival.takes_slot for arrival in self._all.values())

    def reports(self) -> tuple[MigrationReport, ...]:
        return tuple(arrival.report() for arrival in self._all.values())

    def expect(self, incoming: Incoming, now: float, run: int, free_slots: int, serves: bool) -> None:
        """Handle a row that names this worker as its target. `run`: number of a new migration's copy.
        `serves`: whether the worker serves the session's class, of which `free_slots` more fit."""
        record = incoming.record
        if record.target != self._worker or record.migration is None:
            return
        known = self._all.get(record.id)
        if known is not None and known.migration == record.migration:
            known.record, known.learned_at = record, now
            return
        if known is not None:
            free_slots += known.takes_slot
            self.drop(record.id)
        arrival = IncomingMigration(record, now, run)
        self._all[record.id] = arrival
        self._out.append(commands.Report())
        if not serves:
            self._fail(arrival, f"model: this worker serves {self._models}, not {record.model}")
        elif arrival.takes_slot and free_slots < 1:
            self._fail(arrival, "slots: all are in use or reserved")
        else:
            self._out.append(
                migration_commands.FetchState(
                    record.id,
                    run,
                    record.migration,
                    incoming.source,
                    on_host=arrival.on_host,
                    traceparent=record.migration_traceparent,
                )
            )

    def forget(self, session: str, learned_before: float | None = None) -> None:
        """Drop the migration: the row does not name this worker as its target any more."""
        arrival = self._all.get(session)
        if arrival is not None and (learned_before is None or arrival.learned_at < learned_before):
            self.drop(session)
            self._out.append(commands.Report())

    def drop(self, session: str) -> None:
        """Release what was copied."""
        arrival = self._all.pop(session)
        if arrival.stage is not MigrationStage.FAILED:
            self._out.append(migration_commands.CancelFetch(session, arrival.run))

    def take(self, record: SessionRecord) -> IncomingMigration | None:
        """Return the verified state for a row that names this worker as its owner; None if there is none.

        Drops a state that is not verified, or whose epoch is not the one before the row's.
        """
        arrival = self._all.get(record.id)
        if arrival is None:
            return None
        if arrival.stage is MigrationStage.VERIFIED and record.epoch == arrival.record.epoch + 1:
            return self._all.pop(record.id)
        self.drop(record.id)
        return None

    def handle(self, message: events.CopyStarted | events.StateReceived | events.StateFetchFailed) -> None:
        """Handle the outcome of a copy."""
        arrival = self._all.get(message.session)
        if arrival is None or arrival.run != message.run or arrival.stage is not MigrationStage.COPYING:
            return
        if isinstance(message, events.CopyStarted):
            arrival.limit_s = message.limit_s
        elif isinstance(message, events.StateFetchFailed):
            self._fail(arrival, message.reason, message.code)
        else:
            arrival.stage = MigrationStage.VERIFIED
            arrival.next_chunk, arrival.control_seq = message.next_chunk, message.control_seq
            arrival.digest, arrival.bytes_copied = message.digest, message.bytes_copied
            arrival.seconds, arrival.state_bytes = message.seconds, message.state_bytes
        self._out.append(commands.Report())

    def _fail(self, arrival: IncomingMigration, reason: str, code: str | None = None) -> None:
        """Mark a copy as failed, its memory already released. Reports repeat this until the row changes."""
        arrival.stage, arrival.reason, arrival.code = MigrationStage.FAILED, reason, code


ASK_S = 2.0
"""Interval at which the row of a quiesced session is requested, seconds."""


@dataclass(frozen=True)
class OutgoingMigrations:
    """The session table's side of migrations away.

    1. The row says that the session migrates, and the target asks for the state.
    2. The session is quiesced while the end of its state is sent.
    3. Then the session follows its row. Nothing generated earlier is read again.
    """

    out: list[commands.Command]
    """Receives the commands."""
    number: Callable[[], int]
    """Returns a number that was never returned before."""

    @staticmethod
    def check(entry: SessionEntry | None, session: str, migration: int, target: str) -> SessionEntry:
        """Return the session's entry if this target may have the state now. Changes nothing.

        Raises `MigrationNotOfferedError`, `SourceNotReadyError` or `NoStateError`.
        """
        if entry is None or not _migrates(entry.record, migration) or entry.record.target != target:
            raise MigrationNotOfferedError(
                f"session {session}: no migration {migration} to {target} is known here"
            )
        # This check comes before the next: the log of a suspended session without state is not read, so that
        # its ownership is never settled.
        if not isinstance(entry.state, Present) and not entry.takes_slot:
            raise NoStateError(f"session {session}: its state is not here")
        if entry.is_fenced or isinstance(entry.state, Failed) or entry.checked != entry.ownership:
            raise SourceNotReadyError(f"session {session}: its ownership is not settled")
        if not isinstance(entry.state, OnHost if entry.wanted is DesiredState.HOST else InSlab):
            raise SourceNotReadyError(f"session {session}: its state is being copied between host and device")
        return entry

    def offer(self, entry: SessionEntry | None, session: str, migration: int, target: str) -> bool:
        """Offer the state to the target. Returns whether it is on the host. Raises the errors of `check`."""
        entry = self.check(entry, session, migration, target)
        suspended = entry.wanted is DesiredState.HOST
        if entry.outgoing_migration is not None and entry.outgoing_migration.migration == migration:
            # The target asks again. A quiesced session, or one that the target may already have, stays so.
            entry.outgoing_migration.whole = False
        else:
            entry.outgoing_migration = OutgoingMigration(
                migration, quiesced_at=entry.made_next if suspended else None
            )
        return suspended

    def handle(self, entry: SessionEntry, message: events.TransferEvent, now: float) -> None:
        """Handle an event of the migration."""
        outgoing_migration = entry.outgoing_migration
        if outgoing_migration is None:
            return
        match message:
            case events.QuiesceRequested() if message.migration == outgoing_migration.migration:
                if outgoing_migration.quiesced_at is not None:
                    self.out.append(
                        migration_commands.SendFinalDelta(entry.session, outgoing_migration.migration)
                    )
                elif isinstance(entry.state, InSlab) and outgoing_migration.quiesce is None:
                    entry.state = replace(entry.state, quiesced=True)
                    outgoing_migration.quiesce = self.number()
                    self.out.append(commands.Quiesce(entry.session, entry.run, outgoing_migration.quiesce))
            case events.Quiesced() if message.number == outgoing_migration.quiesce:
                outgoing_migration.quiesced_at, outgoing_migration.whole, outgoing_migration.asked_at = (
                    message.next_chunk,
                    False,
                    now,
                )
                self.out.append(
                    migration_commands.SendFinalDelta(entry.session, outgoing_migration.migration)
                )
            case events.ManifestSent() if message.migration == outgoing_migration.migration:
                outgoing_migration.manifest_sent = True
            case events.TransferEnded() if message.migration == outgoing_migration.migration:
                self._broken(entry, outgoing_migration)

    def settle(self, entry: SessionEntry, now: float) -> None:
        """Compare the migration with the row."""
        outgoing_migration = entry.outgoing_migration
        if outgoing_migration is None:
            return
        if not _migrates(entry.record, outgoing_migration.migration):
            self.end(entry)
        elif outgoing_migration.quiesced_at is not None:
            whole = (
                not entry.pending and entry.next_publish == entry.made_next == outgoing_migration.quiesced_at
            )
            if whole and not outgoing_migration.whole:
                outgoing_migration.whole = True
                self.out.append(
                    migration_commands.SendManifest(
                        entry.session, outgoing_migration.migration, outgoing_migration.quiesced_at
                    )
                )
            quiesced = isinstance(entry.state, Present) and entry.state.quiesced
            if quiesced and now - outgoing_migration.asked_at >= ASK_S:
                outgoing_migration.asked_at = now
                self.out.append(commands.Report())

    def end(self, entry: SessionEntry) -> None:
        """End the migration: the session does not migrate any more, or its state is not here any more."""
        if entry.outgoing_migration is not None:
            entry.outgoing_migration = None
            self.out.append(migration_commands.CancelTransfer(entry.session))

    def _broken(self, entry: SessionEntry, outgoing_migration: OutgoingMigration) -> None:
        if outgoing_migration.manifest_sent:
            # The target may have verified the state: only the row says which worker owns the session.
            self.out.append(commands.Report())
        else:
            entry.outgoing_migration = None


def _migrates(record: SessionRecord, migration: int) -> bool:
    return record.migration == migration and record.target is not None
