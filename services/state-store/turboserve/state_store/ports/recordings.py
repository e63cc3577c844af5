"""The repository of recordings. For its errors, see `ports.sessions`."""

from __future__ import annotations

from typing import Protocol

from turboserve.contracts.recordings import (
    ListRecordingOrders,
    ListRecordings,
    RecordingOrders,
    RecordingPage,
    RecordingRecord,
)


class RecordingRepository(Protocol):
    async def get(self, recording: str, *, lock: bool = False) -> RecordingRecord | None: ...

    async def newest(self, session: str) -> RecordingRecord | None:
        """Return the session's newest recording that is not being deleted."""

    async def insert(self, record: RecordingRecord) -> None:
        """Insert a recording. Raises ConflictError if its id exists."""

    async def write(self, record: RecordingRecord) -> None:
        """Write the fields that change; the caller holds the row's lock."""

    async def page(self, request: ListRecordings) -> RecordingPage:
        """Return recordings that are not being deleted, newest first."""

    async def orders(self, request: ListRecordingOrders) -> RecordingOrders:
        """Return the recordings that are not complete, oldest first, with the progress of their sessions."""

    async def stored_bytes(self, tenant: str) -> int:
        """Return the bytes of all recordings of the tenant, those that are being deleted included."""

    async def expire(self, now: float) -> int:
        """Begin to delete complete recordings whose `expires_at` is not after `now`. Returns how many."""

    async def delete(self, recording: str) -> None:
        """Delete the row of a recording that is being deleted."""
