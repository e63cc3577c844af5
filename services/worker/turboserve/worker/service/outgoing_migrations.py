"""A session that is migrating away, as its source sees it. Pure.

1. The row says that the session migrates, and the target asks for the state.
2. The session is quiesced while the end of its state is sent.
3. Then the session follows its row. Nothing generated earlier is read again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from turboserve.contracts.sessions import SessionRecord
from turboserve.worker.service import commands, events
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

ASK_S = 2.0
"""Interval at which the row of a quiesced session is requested, seconds."""


@dataclass(frozen=True)
class OutgoingMigrations:
    """The session table's side of migrations away."""

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
                    self.out.append(commands.SendFinalDelta(entry.session, outgoing_migration.migration))
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
                self.out.append(commands.SendFinalDelta(entry.session, outgoing_migration.migration))
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
                    commands.SendManifest(
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
            self.out.append(commands.CancelTransfer(entry.session))

    def _broken(self, entry: SessionEntry, outgoing_migration: OutgoingMigration) -> None:
        if outgoing_migration.manifest_sent:
            # The target may have verified the state: only the row says which worker owns the session.
            self.out.append(commands.Report())
        else:
            entry.outgoing_migration = None


def _migrates(record: SessionRecord, migration: int) -> bool:
    return record.migration == migration and record.target is not None
