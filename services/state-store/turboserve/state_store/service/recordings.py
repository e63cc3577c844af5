"""Recordings: which sessions are recorded, what the recorder has stored, and what it has to delete."""

from __future__ import annotations

from turboserve import logs
from turboserve.clock import Clock
from turboserve.contracts.errors import NotFoundError
from turboserve.contracts.recordings import (
    ListRecordingOrders,
    ListRecordings,
    RecordingOrders,
    RecordingPage,
    RecordingRecord,
    RecordingRef,
    RecordingState,
    ReportRecording,
    StartRecording,
    StopRecording,
)
from turboserve.contracts.requests import Done
from turboserve.state_store.core import recordings as rules
from turboserve.state_store.core import sessions as session_rules
from turboserve.state_store.core.change import Change
from turboserve.state_store.ports.database import Database, UnitOfWork
from turboserve.state_store.publish.canaries import LogStatus
from turboserve.state_store.service.admission import Admission
from turboserve.state_store.service.transactions import PostCommit, locked
from turboserve.state_store.settings import Settings

log = logs.get("recordings")


class Recordings:
    """The endpoints of recordings, without their transport. All may raise UnavailableError.

    A transaction locks the session's row before the recording's.
    """

    def __init__(
        self,
        database: Database,
        post_commit: PostCommit,
        log_status: LogStatus,
        clock: Clock,
        settings: Settings,
    ) -> None:
        self._database, self._post_commit = database, post_commit
        self._admission = Admission(log_status, clock, settings)
        self._clock, self._settings = clock, settings

    # Requests of users

    async def start(self, request: StartRecording) -> RecordingRecord:
        """Record the session. Raises SessionNotFoundError, TransitionError and TenantLimitError."""
        async with self._database.transaction() as db:
            session = (await locked(db, request)).record
            newest = await db.recordings.newest(session.id)
            if newest is not None and newest.state is RecordingState.RECORDING and not session.phase.ended:
                return newest
            stored = await db.recordings.stored_bytes(session.tenant)
            limit_bytes, now = self._settings.tenant_recorded_bytes, self._clock.wall()
            change = session_rules.recorded(session, request.recording, now)
            record = rules.started(request.recording, session, stored, limit_bytes, now)
            tenant = await self._admission.pause(db, session)
            await db.recordings.insert(record)
            await db.changes.write(change, tenant=tenant)
        log.info("recording started", recording=record.id, session=session.id, chunk=record.from_chunk)
        await self._post_commit.changed(change.record)
        return record

    async def stop(self, request: StopRecording) -> RecordingRecord:
        """Stop the session's recording. Raises SessionNotFoundError, and NotFoundError without recordings."""
        async with self._database.transaction() as db:
            session = (await locked(db, request)).record
            record = await db.recordings.newest(session.id)
            if record is None:
                raise NotFoundError(f"session {session.id} has no recording", field="session")
            record = await db.recordings.get(record.id, lock=True) or record
            now = self._clock.wall()
            after = rules.stopped(record, session.next_chunk, now)
            if after is None:
                return record
            await db.recordings.write(after)
            change = None
            if not session.phase.ended:
                tenant = await self._admission.pause(db, session)
                change = session_rules.recorded(session, None, now)
                await db.changes.write(change, tenant=tenant)
        log.info("recording stopped", recording=after.id, session=session.id, chunk=after.until_chunk)
        if change is not None:
            await self._post_commit.changed(change.record)
        return after

    async def get(self, ref: RecordingRef) -> RecordingRecord:
        async with self._database.statement() as db:
            record = rules.visible(await db.recordings.get(ref.recording), ref)
        if record.state is RecordingState.DELETING:
            raise NotFoundError(f"there is no recording {ref.recording}", field="recording")
        return record

    async def page(self, request: ListRecordings) -> RecordingPage:
        async with self._database.statement() as db:
            return await db.recordings.page(request)

    async def delete(self, ref: RecordingRef) -> RecordingRecord:
        """Hide the recording; the recorder deletes its content. A repeat gets the same answer until then."""
        change = None
        async with self._database.transaction() as db:
            record = rules.visible(await db.recordings.get(ref.recording), ref)
            change = await self._closed(db, record)
            record = rules.visible(await db.recordings.get(ref.recording, lock=True), ref)
            after = rules.deleted(record, self._clock.wall())
            if after is not None:
                await db.recordings.write(after)
        if change is not None:
            await self._post_commit.changed(change.record)
        if after is None:
            return record
        log.info("recording deleted", recording=record.id, tenant=record.tenant, bytes=record.bytes)
        return after

    # Requests of the recorder

    async def orders(self, request: ListRecordingOrders) -> RecordingOrders:
        async with self._database.statement() as db:
            return await db.recordings.orders(request)

    async def report(self, report: ReportRecording) -> RecordingRecord:
        """Take over what object storage has. A tenant over its limit records no more."""
        change = None
        async with self._database.transaction() as db:
            ref = RecordingRef(recording=report.recording)
            record = rules.visible(await db.recordings.get(report.recording), ref)
            session = await db.sessions.get_row(record.session, lock=True)
            record = rules.visible(await db.recordings.get(report.recording, lock=True), ref)
            now = self._clock.wall()
            found = None if session is None else session.record
            after = rules.reported(record, report, found, self._settings.recording_retention_s, now)
            if after is None:
                return record
            stored = await db.recordings.stored_bytes(record.tenant) - record.bytes + after.bytes
            reason = rules.over_limit(stored, self._settings.tenant_recorded_bytes)
            stopped = rules.stopped(after, after.next_chunk, now, reason) if reason is not None else None
            if stopped is not None:
                after = stopped
                if session is not None and not session.record.phase.ended:
                    change = session_rules.recorded(session.record, None, now)
                    await db.changes.write(change)
            await db.recordings.write(after)
        if change is not None:
            await self._post_commit.changed(change.record)
        return after

    async def forget(self, ref: RecordingRef) -> Done:
        """Delete the row, after the content. A recording that is not being deleted stays."""
        async with self._database.statement() as db:
            await db.recordings.delete(ref.recording)
        return Done()

    async def _closed(self, db: UnitOfWork, record: RecordingRecord) -> Change | None:
        """Remove the recording from its session's row, and lock that row."""
        session = await db.sessions.get_row(record.session, lock=True)
        if session is None or session.record.phase.ended or session.record.recording != record.id:
            return None
        change = session_rules.recorded(session.record, None, self._clock.wall())
        await db.changes.write(change)
        return change
