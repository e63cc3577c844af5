"""Rows of recordings."""

from __future__ import annotations

from operator import itemgetter

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.recordings import (
    ListRecordingOrders,
    ListRecordings,
    RecordingOrder,
    RecordingOrders,
    RecordingPage,
    RecordingRecord,
    RecordingState,
)
from turboserve.state_store.core.paging import first_page
from turboserve.state_store.recording_tables import recordings
from turboserve.state_store.tables import sessions

FIXED = frozenset({"id", "session", "tenant", "model", "prompt", "from_chunk", "created_at"})
_FIELDS = [recordings.c[name] for name in RecordingRecord.model_fields]
_CHANGING = frozenset(RecordingRecord.model_fields) - FIXED
_VISIBLE = recordings.c.state != RecordingState.DELETING.value


class SqlRecordings:
    """`RecordingRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def get(self, recording: str, *, lock: bool = False) -> RecordingRecord | None:
        query = select(*_FIELDS).where(recordings.c.id == recording)
        row = (await self._db.execute(query.with_for_update() if lock else query)).mappings().first()
        return None if row is None else RecordingRecord.model_validate(dict(row))

    async def newest(self, session: str) -> RecordingRecord | None:
        query = (
            select(*_FIELDS)
            .where(recordings.c.session == session, _VISIBLE)
            .order_by(recordings.c.number.desc())
            .limit(1)
        )
        row = (await self._db.execute(query)).mappings().first()
        return None if row is None else RecordingRecord.model_validate(dict(row))

    async def insert(self, record: RecordingRecord) -> None:
        await self._db.execute(insert(recordings).values(record.model_dump(mode="json")))

    async def write(self, record: RecordingRecord) -> None:
        values = record.model_dump(mode="json", include=set(_CHANGING))
        await self._db.execute(update(recordings).where(recordings.c.id == record.id).values(values))

    async def page(self, request: ListRecordings) -> RecordingPage:
        query = select(recordings.c.number, *_FIELDS).where(_VISIBLE).order_by(recordings.c.number.desc())
        if request.tenant is not None:
            query = query.where(recordings.c.tenant == request.tenant)
        if request.session is not None:
            query = query.where(recordings.c.session == request.session)
        if request.after is not None:
            query = query.where(recordings.c.number < request.after)
        rows = (await self._db.execute(query.limit(request.limit + 1))).mappings().all()
        shown, after = first_page(rows, request.limit, itemgetter("number"))
        return RecordingPage(
            recordings=tuple(RecordingRecord.model_validate(dict(row)) for row in shown),
            next=after,
        )

    async def orders(self, request: ListRecordingOrders) -> RecordingOrders:
        r, s = recordings.c, sessions.c
        query = (
            select(
                r.number,
                r.id.label("recording"),
                *(r[name] for name in ("session", "tenant", "state", "from_chunk", "until_chunk")),
                r.next_chunk,
                (s.id.is_(None) | s.ended_at.is_not(None)).label("session_ended"),
                func.coalesce(s.next_chunk, 0).label("made"),
            )
            .join(sessions, s.id == r.session, isouter=True)
            .where(r.state != RecordingState.COMPLETE.value)
            .order_by(r.number)
        )
        if request.after is not None:
            query = query.where(r.number > request.after)
        rows = (await self._db.execute(query.limit(request.limit + 1))).mappings().all()
        shown, after = first_page(rows, request.limit, itemgetter("number"))
        return RecordingOrders(
            orders=tuple(RecordingOrder.model_validate(dict(row)) for row in shown),
            next=after,
        )

    async def stored_bytes(self, tenant: str) -> int:
        query = select(func.coalesce(func.sum(recordings.c.bytes), 0)).where(recordings.c.tenant == tenant)
        return int((await self._db.execute(query)).scalar_one())

    async def expire(self, now: float) -> int:
        query = (
            update(recordings)
            .where(recordings.c.state == RecordingState.COMPLETE.value, recordings.c.expires_at <= now)
            .values(state=RecordingState.DELETING.value, updated_at=now)
            .returning(recordings.c.id)
        )
        return len((await self._db.execute(query)).all())

    async def delete(self, recording: str) -> None:
        deleting = recordings.c.state == RecordingState.DELETING.value
        await self._db.execute(delete(recordings).where(recordings.c.id == recording, deleting))
