"""A session's row, locked or shown to whoever may see it."""

from __future__ import annotations

from turboserve.contracts.errors import SessionNotFoundError
from turboserve.contracts.requests import SessionRef
from turboserve.contracts.sessions import SessionRecord
from turboserve.state_store.ports.database import UnitOfWork
from turboserve.state_store.ports.records import SessionRow


async def locked(db: UnitOfWork, ref: SessionRef) -> SessionRow:
    """The row, which nobody else changes until the transaction ends. Raises SessionNotFoundError."""
    row = await db.sessions.get_row(ref.session, lock=True)
    visible(None if row is None else row.record, ref)
    assert row is not None
    return row


def visible(record: SessionRecord | None, ref: SessionRef) -> SessionRecord:
    """The row, to whoever may see it; to others there is none."""
    if record is None or (ref.tenant is not None and record.tenant != ref.tenant):
        raise SessionNotFoundError(f"there is no session {ref.session}", field="session")
    return record
