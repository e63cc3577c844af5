"""Rows of the audit log."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from turboserve.contracts.audit import AuditEntry, AuditPage, ListAudit
from turboserve.simulation.runtime.rows.session import Session
from turboserve.state_store.core.paging import first_page


class MemoryAudit:
    """`AuditRepository` in one session of the server."""

    def __init__(self, session: Session) -> None:
        self._db, self._rows = session, session.tables.audit_log

    async def add(self, entries: Sequence[AuditEntry]) -> None:
        def run() -> None:
            known = {entry.id for _, entry in self._db.all(self._rows)}
            for entry in entries:
                if entry.id not in known:
                    self._db.insert(self._rows, self._db.tables.number(self._rows), entry)

        await self._db.execute(run)

    async def page(self, request: ListAudit) -> AuditPage:
        def run() -> AuditPage:
            found = [
                (number, entry)
                for number, entry in sorted(self._db.all(self._rows), reverse=True, key=lambda row: row[0])
                if _matches(entry, request) and (request.after is None or number < request.after)
            ]
            shown, after = first_page(found, request.limit, itemgetter(0))
            return AuditPage(entries=tuple(entry for _, entry in shown), next=after)

        return await self._db.execute(run)

    async def delete_before(self, at: float) -> None:
        def run() -> None:
            for number, entry in self._db.all(self._rows):
                if entry.at < at:
                    self._db.delete(self._rows, number)

        await self._db.execute(run)


def _matches(entry: AuditEntry, request: ListAudit) -> bool:
    names = ("tenant", "key", "operation")
    return (
        all(getattr(request, name) in (None, getattr(entry, name)) for name in names)
        and request.refused in (None, entry.code is not None)
        and (request.since is None or entry.at >= request.since)
        and (request.until is None or entry.at < request.until)
    )
