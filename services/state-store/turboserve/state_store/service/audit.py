"""The audit log: gateways add entries, and read them by page."""

from __future__ import annotations

from turboserve.clock import Clock
from turboserve.contracts.audit import AuditPage, ListAudit, NoteAudit
from turboserve.contracts.requests import Done
from turboserve.state_store.ports.database import Database


class Audit:
    """The endpoints of the audit log, without their transport. All may raise UnavailableError."""

    def __init__(self, database: Database, clock: Clock, retention_s: float) -> None:
        self._database, self._clock, self._retention_s = database, clock, retention_s

    async def note(self, request: NoteAudit) -> Done:
        """Add the entries, on disk when this returns, and delete those beyond the retention."""
        async with self._database.transaction() as db:
            await db.audit.add(request.entries)
            await db.audit.delete_before(self._clock.wall() - self._retention_s)
        return Done()

    async def list(self, request: ListAudit) -> AuditPage:
        async with self._database.statement() as db:
            return await db.audit.page(request)
