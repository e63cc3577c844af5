"""Rows of recordings."""

from __future__ import annotations

from dataclasses import replace

from turboserve.contracts.recordings import (
    ListRecordingOrders,
    ListRecordings,
    RecordingOrder,
    RecordingOrders,
    RecordingPage,
    RecordingRecord,
    RecordingState,
)
from turboserve.simulation.runtime.rows.locks import LockMode
from turboserve.simulation.runtime.rows.session import Session
from turboserve.simulation.runtime.rows.tables import RecordingEntry
from turboserve.state_store.core.paging import first_page

_FIXED = ("id", "session", "tenant", "model", "prompt", "from_chunk", "created_at")


class MemoryRecordings:
    """`RecordingRepository` in one session of the server."""

    def __init__(self, session: Session) -> None:
        self._db, self._rows = session, session.tables.recordings

    async def get(self, recording: str, *, lock: bool = False) -> RecordingRecord | None:
        def run() -> RecordingRecord | None:
            find = self._db.lock if lock else self._db.get
            entry = find(self._rows, recording)
            return None if entry is None else entry.record

        return await self._db.execute(run)

    async def newest(self, session: str) -> RecordingRecord | None:
        def run() -> RecordingRecord | None:
            found = [entry for _, entry in self._db.find(self._rows, "session", session) if _visible(entry)]
            return max(found, key=lambda entry: entry.number).record if found else None

        return await self._db.execute(run)

    async def insert(self, record: RecordingRecord) -> None:
        def run() -> None:
            number = self._db.tables.number(self._rows)
            self._db.insert(self._rows, record.id, RecordingEntry(record, number))

        await self._db.execute(run)

    async def write(self, record: RecordingRecord) -> None:
        def run() -> None:
            entry = self._db.lock(self._rows, record.id, LockMode.NO_KEY_UPDATE)
            if entry is not None:
                kept = {name: getattr(entry.record, name) for name in _FIXED}
                self._db.update(self._rows, record.id, replace(entry, record=record.model_copy(update=kept)))

        await self._db.execute(run)

    async def page(self, request: ListRecordings) -> RecordingPage:
        def run() -> RecordingPage:
            found = [
                entry
                for _, entry in self._db.all(self._rows)
                if _visible(entry)
                and request.tenant in (None, entry.record.tenant)
                and request.session in (None, entry.record.session)
                and (request.after is None or entry.number < request.after)
            ]
            found.sort(key=lambda entry: -entry.number)
            shown, after = first_page(found, request.limit, lambda entry: entry.number)
            return RecordingPage(recordings=tuple(entry.record for entry in shown), next=after)

        return await self._db.execute(run)

    async def orders(self, request: ListRecordingOrders) -> RecordingOrders:
        def run() -> RecordingOrders:
            found = [
                entry
                for _, entry in self._db.all(self._rows)
                if entry.record.state is not RecordingState.COMPLETE
                and (request.after is None or entry.number > request.after)
            ]
            found.sort(key=lambda entry: entry.number)
            shown, after = first_page(found, request.limit, lambda entry: entry.number)
            return RecordingOrders(
                orders=tuple(self._order(entry.record) for entry in shown),
                next=after,
            )

        return await self._db.execute(run)

    def _order(self, record: RecordingRecord) -> RecordingOrder:
        session = self._db.get(self._db.tables.sessions, record.session)
        return RecordingOrder(
            recording=record.id,
            session=record.session,
            tenant=record.tenant,
            state=record.state,
            from_chunk=record.from_chunk,
            until_chunk=record.until_chunk,
            next_chunk=record.next_chunk,
            session_ended=session is None or session.ended_at is not None,
            made=0 if session is None else session.record.next_chunk,
        )

    async def stored_bytes(self, tenant: str) -> int:
        return await self._db.execute(
            lambda: sum(entry.record.bytes for _, entry in self._db.find(self._rows, "tenant", tenant))
        )

    async def expire(self, now: float) -> int:
        def run() -> int:
            expired = [
                entry
                for _, entry in self._db.find(self._rows, "state", RecordingState.COMPLETE)
                if entry.record.expires_at is not None and entry.record.expires_at <= now
            ]
            for entry in sorted(expired, key=lambda entry: entry.number):
                updates = {"state": RecordingState.DELETING, "updated_at": now}
                after = replace(entry, record=entry.record.model_copy(update=updates))
                self._db.update(self._rows, entry.record.id, after)
            return len(expired)

        return await self._db.execute(run)

    async def delete(self, recording: str) -> None:
        def run() -> None:
            entry = self._db.get(self._rows, recording)
            if entry is not None and entry.record.state is RecordingState.DELETING:
                self._db.delete(self._rows, recording)

        await self._db.execute(run)


def _visible(entry: RecordingEntry) -> bool:
    return entry.record.state is not RecordingState.DELETING
