"""Recordings: their rows at the state store, and their content at the recorder."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from turboserve.bus import Bus
from turboserve.contracts.recordings import (
    READ_LIMIT,
    ListRecordings,
    ReadRecording,
    RecordingBytes,
    RecordingPage,
    RecordingRecord,
    RecordingRef,
    RecordingState,
    StartRecording,
    StopRecording,
)
from turboserve.gateway.sessions.service import Sessions
from turboserve.ids import new_id
from turboserve.recording_subjects import (
    DELETE_RECORDING,
    GET_RECORDING,
    LIST_RECORDINGS,
    READ_RECORDING,
    START_RECORDING,
    STOP_RECORDING,
)

READ_S = 30.0
"""Deadline of a read, seconds: the recorder may wait for object storage."""


class Recordings:
    """Raises the typed errors of both services."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def start(self, tenant: str, session: str) -> RecordingRecord:
        Sessions.check_id(session)
        request = StartRecording(session=session, tenant=tenant, recording=new_id("rec"))
        return await self._bus.call(START_RECORDING, request)

    async def stop(self, tenant: str, session: str) -> RecordingRecord:
        Sessions.check_id(session)
        return await self._bus.call(STOP_RECORDING, StopRecording(session=session, tenant=tenant))

    async def get(self, tenant: str, recording: str) -> RecordingRecord:
        return await self._bus.call(GET_RECORDING, RecordingRef(recording=recording, tenant=tenant))

    async def page(self, tenant: str, session: str | None, limit: int, after: int | None) -> RecordingPage:
        request = ListRecordings(tenant=tenant, session=session, limit=limit, after=after)
        return await self._bus.call(LIST_RECORDINGS, request)

    async def delete(self, tenant: str, recording: str) -> None:
        await self._bus.call(DELETE_RECORDING, RecordingRef(recording=recording, tenant=tenant))

    async def describe(self, record: RecordingRecord, item: str, part: int) -> RecordingBytes:
        """Return size, version and type of an item. Raises NotFoundError."""
        described, _ = await self._read(record, item, part, 0, 0, None)
        return described

    async def read(
        self, record: RecordingRecord, item: str, part: int, start: int, end: int, etag: str
    ) -> AsyncGenerator[bytes, None]:
        """Yield bytes `start` to before `end`. Raises ConflictError if the item is replaced meanwhile."""
        while start < end:
            length = min(READ_LIMIT, end - start)
            _, data = await self._read(record, item, part, start, length, etag)
            if not data:
                return
            yield data
            start += len(data)

    async def _read(
        self, record: RecordingRecord, item: str, part: int, start: int, length: int, etag: str | None
    ) -> tuple[RecordingBytes, bytes]:
        request = ReadRecording(
            recording=record.id,
            tenant=record.tenant,
            item=item,
            part=part,
            complete=record.state is RecordingState.COMPLETE,
            start=start,
            length=length,
            etag=etag,
        )
        return await self._bus.call_raw(READ_RECORDING, request, deadline_s=READ_S)
