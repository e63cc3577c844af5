"""A session that is moving away, as its source sees it. Pure.

The row says that it moves; the target comes and asks for the state; the session stands still for the end of
it, and after that it does what its row says, and nothing before it is read again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from turboserve.contracts.sessions import SessionRecord
from turboserve.worker.service import commands, events
from turboserve.worker.service.session_entry import (
    DesiredState,
    OutgoingMigration,
    SessionEntry,
    StateLocation,
)
from turboserve.worker.transfer.errors import MigrationNotOfferedError, NoStateError, SourceNotReadyError

ASK_S = 2.0
"""A session that stands still for a move asks for its row this often."""


@dataclass(frozen=True)
class OutgoingMigrations:
    """What the session table does for those that leave."""

    out: list[commands.Command]
    """Takes the commands."""
    number: Callable[[], int]
    """Gives a number that was never given before."""

    @staticmethod
    def check(entry: SessionEntry | None, session: str, move: int, target: str) -> SessionEntry:
        """Whether this target may have the state now: its entry. Changes nothing.

        Raises `MigrationNotOfferedError`, `SourceNotReadyError` or `NoStateError`.
        """
        if entry is None or not _moves(entry.record, move) or entry.record.target != target:
            raise MigrationNotOfferedError(f"session {session}: no move {move} to {target} is known here")
        # Before the next check: the log is not read for a suspended session without state, so that its
        # ownership would never be settled.
        if entry.place is StateLocation.NOWHERE and not entry.takes_slot:
            raise NoStateError(f"session {session}: its state is not here")
        if entry.is_fenced or entry.failure is not None or entry.checked != entry.ownership:
            raise SourceNotReadyError(f"session {session}: its ownership is not settled")
        if entry.place is not (
            StateLocation.HOST if entry.wanted is DesiredState.HOST else StateLocation.SLAB
        ):
            raise SourceNotReadyError(f"session {session}: its state is on its way to where it belongs")
        return entry

    def offer(self, entry: SessionEntry | None, session: str, move: int, target: str) -> bool:
        """The target comes for the state: whether it is on the host. Raises what `check` does."""
        entry = self.check(entry, session, move, target)
        suspended = entry.wanted is DesiredState.HOST
        if entry.outgoing_migration is not None and entry.outgoing_migration.move == move:
            # Asked for again. What stands still, or may be the target's already, stays so.
            entry.outgoing_migration.whole = False
        else:
            entry.outgoing_migration = OutgoingMigration(
                move, quiesced_at=entry.made_next if suspended else None
            )
        return suspended

    def handle(self, entry: SessionEntry, message: events.TransferEvent, now: float) -> None:
        """An input about the gift."""
        outgoing_migration = entry.outgoing_migration
        if outgoing_migration is None:
            return
        match message:
            case events.QuiesceRequested() if message.move == outgoing_migration.move:
                if outgoing_migration.quiesced_at is not None:
                    self.out.append(commands.SendFinalDelta(entry.session, outgoing_migration.move))
                elif entry.place is StateLocation.SLAB and outgoing_migration.quiesce is None:
                    entry.quiesced, outgoing_migration.quiesce = True, self.number()
                    self.out.append(commands.Quiesce(entry.session, entry.run, outgoing_migration.quiesce))
            case events.Quiesced() if message.number == outgoing_migration.quiesce:
                outgoing_migration.quiesced_at, outgoing_migration.whole, outgoing_migration.asked_at = (
                    message.next_chunk,
                    False,
                    now,
                )
                self.out.append(commands.SendFinalDelta(entry.session, outgoing_migration.move))
            case events.ManifestSent() if message.move == outgoing_migration.move:
                outgoing_migration.manifest_sent = True
            case events.TransferEnded() if message.move == outgoing_migration.move:
                self._broken(entry, outgoing_migration)

    def settle(self, entry: SessionEntry, now: float) -> None:
        """Compare the gift with the row."""
        outgoing_migration = entry.outgoing_migration
        if outgoing_migration is None:
            return
        if not _moves(entry.record, outgoing_migration.move):
            self.end(entry)
        elif outgoing_migration.quiesced_at is not None:
            whole = (
                not entry.pending and entry.next_publish == entry.made_next == outgoing_migration.quiesced_at
            )
            if whole and not outgoing_migration.whole:
                outgoing_migration.whole = True
                self.out.append(
                    commands.SendManifest(
                        entry.session, outgoing_migration.move, outgoing_migration.quiesced_at
                    )
                )
            if entry.quiesced and now - outgoing_migration.asked_at >= ASK_S:
                outgoing_migration.asked_at = now
                self.out.append(commands.Report())

    def end(self, entry: SessionEntry) -> None:
        """It does not move any more, or there is nothing left of it here."""
        if entry.outgoing_migration is not None:
            entry.outgoing_migration = None
            self.out.append(commands.CancelTransfer(entry.session))

    def _broken(self, entry: SessionEntry, outgoing_migration: OutgoingMigration) -> None:
        if outgoing_migration.manifest_sent:
            # The target may have verified it: only the row can say whose it is.
            self.out.append(commands.Report())
        else:
            entry.outgoing_migration = None


def _moves(record: SessionRecord, move: int) -> bool:
    return record.move == move and record.target is not None
