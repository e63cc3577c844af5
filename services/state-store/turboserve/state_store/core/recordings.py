"""Rules of a recording's row. No I/O, no clock: `now` is Unix seconds."""

from __future__ import annotations

from turboserve.contracts.errors import NotFoundError, TenantLimitError
from turboserve.contracts.recordings import RecordingRecord, RecordingRef, RecordingState, ReportRecording
from turboserve.contracts.sessions import Phase, SessionRecord

LIMIT = "tenant_recorded_bytes"


def started(
    recording: str, session: SessionRecord, stored_bytes: int, limit_bytes: int, now: float
) -> RecordingRecord:
    """Return the row of a new recording, which begins with the session's next chunk.

    `stored_bytes`: bytes of the tenant's recordings; `limit_bytes` 0: no limit. Raises TenantLimitError.
    """
    if 0 < limit_bytes <= stored_bytes:
        raise TenantLimitError(
            f"this tenant's recordings have {stored_bytes} bytes, at most {limit_bytes} may be: delete some",
            field=LIMIT,
            limit=limit_bytes,
        )
    return RecordingRecord(
        id=recording,
        session=session.id,
        tenant=session.tenant,
        model=session.model,
        prompt=session.prompt,
        state=RecordingState.RECORDING,
        from_chunk=session.next_chunk,
        next_chunk=session.next_chunk,
        created_at=now,
        updated_at=now,
    )


def stopped(
    record: RecordingRecord, until_chunk: int, now: float, reason: str | None = None
) -> RecordingRecord | None:
    """Stop before `until_chunk`. None: the recording has stopped already."""
    if record.state is not RecordingState.RECORDING:
        return None
    until = max(until_chunk, record.next_chunk)
    return record.model_copy(
        update={
            "state": RecordingState.STOPPING,
            "until_chunk": until,
            "reason": reason,
            "updated_at": now,
        }
    )


def reported(
    record: RecordingRecord,
    report: ReportRecording,
    session: SessionRecord | None,
    retention_s: float,
    now: float,
) -> RecordingRecord | None:
    """Take over what object storage has. `retention_s` 0: recordings do not expire.

    `session`: the recorded session; None: its row is gone. Returns None if nothing changes. A complete
    recording and one that is deleted change no more.
    """
    if not record.state.open or report.chunks < record.chunks:
        return None
    names = ("next_chunk", "chunks", "missing_chunks", "bytes", "duration_s", "parts")
    updates: dict[str, object] = {name: getattr(report, name) for name in names}
    if not report.complete and all(getattr(record, name) == value for name, value in updates.items()):
        return None
    updates["updated_at"] = now
    if report.complete:
        updates["state"] = RecordingState.COMPLETE
        updates["completed_at"] = now
        updates["expires_at"] = now + retention_s if retention_s else None
        stopped_before = record.state is RecordingState.STOPPING
        if session is not None and session.phase is Phase.FAILED and not stopped_before:
            updates |= {"session_failed": True, "reason": session.reason}
    return record.model_copy(update=updates)


def over_limit(stored_bytes: int, limit_bytes: int) -> str | None:
    """Return why a tenant's recordings stop; None: they go on."""
    if limit_bytes <= 0 or stored_bytes < limit_bytes:
        return None
    return f"the tenant's recordings have {stored_bytes} bytes, the limit is {limit_bytes} ({LIMIT})"


def deleted(record: RecordingRecord, now: float) -> RecordingRecord | None:
    """Hide the recording from clients until its content is deleted. None: it is hidden already."""
    if record.state is RecordingState.DELETING:
        return None
    return record.model_copy(update={"state": RecordingState.DELETING, "updated_at": now})


def visible(record: RecordingRecord | None, ref: RecordingRef) -> RecordingRecord:
    """Return the record. Raises NotFoundError if there is none, or it is another tenant's."""
    if record is None or (ref.tenant is not None and record.tenant != ref.tenant):
        raise NotFoundError(f"there is no recording {ref.recording}", field="recording")
    return record
