"""Helpers that lock a session's row, and that check whether a tenant may see it."""

from __future__ import annotations

from turboserve.contracts.errors import SessionNotFoundError
from turboserve.contracts.requests import SessionRef
from turboserve.contracts.sessions import SessionRecord
from turboserve.state_store.ports.database import UnitOfWork
from turboserve.state_store.ports.records import SessionRow


async def locked(db: UnitOfWork, ref: SessionRef) -> SessionRow:
    """Lock the row until the transaction ends, and return it. Raises SessionNotFoundError."""
    row = await db.sessions.get_row(ref.session, lock=True)
    visible(None if row is None else row.record, ref)
    assert row is not None
    return row


def visible(record: SessionRecord | None, ref: SessionRef) -> SessionRecord:
    """Return the record. Raises SessionNotFoundError if there is none, or it is another tenant's."""
    if record is None or (ref.tenant is not None and record.tenant != ref.tenant):
        raise SessionNotFoundError(f"there is no session {ref.session}", field="session")
    return record
