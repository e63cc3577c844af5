"""The repository of the audit log. For its errors, see `ports.sessions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from turboserve.contracts.audit import AuditEntry, AuditPage, ListAudit


class AuditRepository(Protocol):
    async def add(self, entries: Sequence[AuditEntry]) -> None:
        """Insert the entries whose ids do not exist."""

    async def page(self, request: ListAudit) -> AuditPage: ...

    async def delete_before(self, at: float) -> None:
        """Delete the entries from before this time."""
