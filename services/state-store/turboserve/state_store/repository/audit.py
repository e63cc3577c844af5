"""Rows of the audit log."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from sqlalchemy import delete, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.audit import AuditEntry, AuditPage, ListAudit
from turboserve.state_store.access_tables import audit_log
from turboserve.state_store.core.paging import first_page

_ENTRY = [audit_log.c[name] for name in AuditEntry.model_fields]


class SqlAudit:
    """`AuditRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def add(self, entries: Sequence[AuditEntry]) -> None:
        rows = [entry.model_dump(mode="json") for entry in entries]
        await self._db.execute(insert(audit_log).on_conflict_do_nothing(), rows)

    async def page(self, request: ListAudit) -> AuditPage:
        columns = audit_log.c
        query = select(columns.number, *_ENTRY).order_by(columns.number.desc()).limit(request.limit + 1)
        for name in ("tenant", "key", "operation"):
            if (value := getattr(request, name)) is not None:
                query = query.where(columns[name] == value)
        if request.refused is not None:
            query = query.where(columns.code.is_not(None) if request.refused else columns.code.is_(None))
        if request.since is not None:
            query = query.where(columns.at >= request.since)
        if request.until is not None:
            query = query.where(columns.at < request.until)
        if request.after is not None:
            query = query.where(columns.number < request.after)
        rows = (await self._db.execute(query)).mappings().all()
        shown, after = first_page(rows, request.limit, itemgetter("number"))
        return AuditPage(
            entries=tuple(AuditEntry.model_validate(dict(row)) for row in shown),
            next=after,
        )

    async def delete_before(self, at: float) -> None:
        await self._db.execute(delete(audit_log).where(audit_log.c.at < at))
