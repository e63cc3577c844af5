"""Events that are committed and not yet in the log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, func, insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.events import Event, WorkerJoined, WorkerLeft
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
    for event in events:
        await db.execute(insert(outbox).values(values_of(event)))


def values_of(event: Event) -> dict[str, Any]:
    """The columns of its row."""
    if isinstance(event, WorkerJoined | WorkerLeft):
        subject = WORKER_EVENT.of(event.worker.id)
    else:
        subject = EVENT.of(event.record.id)
    return {
        "event_id": event.id,
        "subject": subject,
        "body": event.to_bytes().decode(),
        "created_at": event.at,
    }


async def lock(db: AsyncConnection) -> None:
    """Wait for the turn to publish; held until the transaction ends, which does not wait for the disk.

    A removal that a crash of Postgres takes back is a repetition, and repetitions are recognised.
    """
    query = "select set_config('synchronous_commit', 'off', true), pg_advisory_xact_lock(:key)"
    await db.execute(text(query), {"key": LOCK})


async def oldest(db: AsyncConnection, limit: int) -> Sequence[Pending]:
    query = select(outbox).order_by(outbox.c.number).limit(limit)
    return [Pending(**row) for row in (await db.execute(query)).mappings()]


async def remove(db: AsyncConnection, numbers: Iterable[int]) -> None:
    await db.execute(delete(outbox).where(outbox.c.number.in_(list(numbers))))


async def backlog(db: AsyncConnection) -> tuple[int, float | None]:
    """How many wait, and since when the oldest does (wall-clock seconds)."""
    count, since = (await db.execute(select(func.count(), func.min(outbox.c.created_at)))).one()
    return int(count), since
