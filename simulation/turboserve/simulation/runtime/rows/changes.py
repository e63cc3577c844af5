"""Writes to the rows of sessions: changes, and the columns of the fence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from turboserve.contracts.errors import ConflictError
from turboserve.contracts.sessions import Decision, Phase, SessionRecord
from turboserve.simulation.runtime.rows.deployment import insert_events
from turboserve.simulation.runtime.rows.locks import LockMode
from turboserve.simulation.runtime.rows.session import Session
from turboserve.simulation.runtime.rows.tables import DecisionEntry, SessionEntry, Table
from turboserve.simulation.runtime.rows.tenants import write_tenant
from turboserve.state_store.core.change import Change
from turboserve.state_store.core.tenants import Tenant, controls_bytes
from turboserve.state_store.ports.records import (
    SESSION_CHANGING,
    SESSION_COUNTED,
    SESSION_FIXED,
    SESSION_MEASURED,
)

_STAYING = tuple(SESSION_FIXED | SESSION_COUNTED)
_UNMEASURED = {name: SessionRecord.model_fields[name].default for name in SESSION_MEASURED}


def stored(record: SessionRecord) -> SessionRecord:
    """Return the record without the values that no column keeps."""
    if all(getattr(record, name) == value for name, value in _UNMEASURED.items()):
        return record
    return record.model_copy(update=_UNMEASURED)


def written(before: SessionRecord, after: SessionRecord) -> SessionRecord:
    """Return `before` with the columns that a change writes."""
    if all(getattr(before, name) == getattr(after, name) for name in _STAYING):
        return stored(after)
    return before.model_copy(update={name: getattr(after, name) for name in SESSION_CHANGING})


def insert_decision(db: Session, decision: Decision, version: int | None) -> None:
    """Insert a decision. Raises ConflictError if the session does not exist or the version has a decision."""
    db.refer(db.tables.sessions, decision.session)
    table: Table[int, DecisionEntry] = db.tables.decisions
    db.insert(table, db.tables.number(table), DecisionEntry(decision, version))


def _suspended_at(before: SessionEntry, record: SessionRecord) -> float | None:
    if record.phase is not Phase.SUSPENDED:
        return None
    return record.updated_at if before.suspended_at is None else before.suspended_at


class MemoryChanges:
    """`ChangeRepository` in one session of the server."""

    def __init__(self, session: Session) -> None:
        self._db, self._rows = session, session.tables.sessions

    async def create(self, change: Change, tenant: Tenant | None = None) -> None:
        record = stored(change.record)

        def run() -> None:
            if tenant is not None:
                write_tenant(self._db, tenant)
            _check(record)
            number = self._db.tables.number(self._rows)
            entry = SessionEntry(record, number, record.prompt, controls_bytes(record.controls))
            self._db.insert(self._rows, record.id, entry)
            insert_events(self._db, change.events)

        await self._db.execute(run)

    async def write(
        self, change: Change, *, migration_key: str | None = None, tenant: Tenant | None = None
    ) -> None:
        record = change.record

        def run() -> None:
            if tenant is not None:
                write_tenant(self._db, tenant)
            before = self._db.lock(self._rows, record.id, LockMode.NO_KEY_UPDATE)
            if before is not None:
                _check(record)
                self._db.update(
                    self._rows,
                    record.id,
                    SessionEntry(
                        record=written(before.record, record),
                        number=before.number,
                        first_prompt=before.first_prompt,
                        controls_bytes=before.controls_bytes,
                        migration_key=(
                            migration_key
                            if record.migration is None or migration_key is not None
                            else before.migration_key
                        ),
                        fence_revision=before.fence_revision,
                        ended_at=record.updated_at if record.phase.ended else before.ended_at,
                        suspended_at=_suspended_at(before, record),
                        purged_at=before.purged_at,
                    ),
                )
            if change.decision is not None:
                insert_decision(self._db, change.decision, record.version)
            insert_events(self._db, change.events)

        await self._db.execute(run)


class MemoryFence:
    """`FenceRepository` in one session of the server."""

    def __init__(self, session: Session) -> None:
        self._db, self._rows = session, session.tables.sessions

    async def store(self, session: str, epoch: int, revision: int) -> SessionRecord | None:
        def run() -> SessionRecord | None:
            entry = self._at(session, epoch)
            if entry is None or entry.fence_revision >= revision:
                return None
            record = entry.record.model_copy(update={"own_revision": revision})
            self._db.update(self._rows, session, replace(entry, record=record, fence_revision=revision))
            return record

        return await self._db.execute(run)

    async def store_seen(self, session: str, epoch: int, revision: int) -> None:
        def run() -> None:
            entry = self._at(session, epoch)
            if entry is not None:
                greatest = max(entry.fence_revision, revision)
                self._db.update(self._rows, session, replace(entry, fence_revision=greatest))

        await self._db.execute(run)

    async def newest(self) -> int:
        def run() -> int:
            return max((entry.fence_revision for _, entry in self._db.all(self._rows)), default=0)

        return await self._db.execute(run)

    async def reopen(self, session: str, epoch: int, stored: int) -> bool:
        def run() -> bool:
            entry = self._at(session, epoch)
            if entry is None or entry.record.own_revision != stored:
                return False
            update = {
                "own_revision": None,
                "version": entry.record.version + 1,
                "log_losses": entry.record.log_losses + 1,
            }
            record = entry.record.model_copy(update=update)
            self._db.update(self._rows, session, replace(entry, record=record))
            return True

        return await self._db.execute(run)

    async def missing(self, limit: int) -> Sequence[str]:
        def run() -> list[str]:
            records = [entry.record for _, entry in self._db.find(self._rows, "unfenced", True)]
            return [record.id for record in sorted(records, key=lambda record: record.updated_at)[:limit]]

        return await self._db.execute(run)

    async def settled(self) -> Sequence[tuple[str, int, int]]:
        def run() -> list[tuple[str, int, int]]:
            return [
                (entry.record.id, entry.record.epoch, entry.record.own_revision)
                for _, entry in self._db.all(self._rows)
                if entry.ended_at is None and entry.record.own_revision is not None
            ]

        return await self._db.execute(run)

    def _at(self, session: str, epoch: int) -> SessionEntry | None:
        """Return the locked row, if it is at this epoch before and after the wait for its lock."""
        entry = self._db.get(self._rows, session)
        if entry is None or entry.record.epoch != epoch:
            return None
        entry = self._db.lock(self._rows, session, LockMode.NO_KEY_UPDATE)
        return entry if entry is not None and entry.record.epoch == epoch else None


def _check(record: SessionRecord) -> None:
    """Check the constraint `target_with_migration`."""
    if (record.target is None) != (record.migration is None):
        raise ConflictError("another request did this first: target without migration")


def lock_all(db: Session, ids: Iterable[str]) -> list[tuple[str, SessionEntry]]:
    """Return the existing rows, locked one after the other before any is written."""
    rows = ((session, db.lock(db.tables.sessions, session, LockMode.NO_KEY_UPDATE)) for session in ids)
    return [(session, entry) for session, entry in rows if entry is not None]
