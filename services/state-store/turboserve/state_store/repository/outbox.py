"""Events that are committed and not yet in the log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import delete, func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.events import Event
from turboserve.state_store.tables import outbox
from turboserve.subjects import EVENT, WORKER_EVENT

LOCK = 0x7475_7262_0002
"""Number of the advisory lock that lets one instance at a time publish: their order is the log's order."""


@dataclass(frozen=True)
class Pending:
    number: int
    event_id: str
    subject: str
    body: str
    created_at: float


async def add(db: AsyncConnection, events: Iterable[Event]) -> None:
    """Write the events of a change with the change itself."""
    rows = [
        {
            "event_id": event.id,
            "subject": _subject(event),
            "body": event.to_bytes().decode(),
            "created_at": event.at,
        }
        for event in events
    ]
    if rows:
        await db.execute(insert(outbox).values(rows).on_conflict_do_nothing(constraint="outbox_event_id"))


def _subject(event: Event) -> str:
    worker = getattr(event, "worker", None)
    return EVENT.of(event.record.id) if worker is None else WORKER_EVENT.of(worker.id)  # type: ignore[union-attr]


async def lock(db: AsyncConnection) -> None:
    """Wait for the turn to publish; held until the transaction ends."""
    await db.execute(text("select pg_advisory_xact_lock(:key)"), {"key": LOCK})


async def oldest(db: AsyncConnection, limit: int) -> Sequence[Pending]:
    query = select(outbox).order_by(outbox.c.number).limit(limit)
    return [Pending(**row) for row in (await db.execute(query)).mappings()]


async def remove(db: AsyncConnection, numbers: Iterable[int]) -> None:
    await db.execute(delete(outbox).where(outbox.c.number.in_(list(numbers))))


async def backlog(db: AsyncConnection) -> tuple[int, float | None]:
    """How many wait, and since when the oldest does (wall-clock seconds)."""
    count, since = (await db.execute(select(func.count(), func.min(outbox.c.created_at)))).one()
    return int(count), since
