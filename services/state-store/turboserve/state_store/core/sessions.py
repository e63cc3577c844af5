"""The rules of a session's row, one function per change. No I/O, no clock: `now` is Unix seconds."""

from __future__ import annotations

from collections.abc import Collection

from turboserve.contracts import events
from turboserve.contracts.errors import ForbiddenError, InvalidInputError, StaleEpochError
from turboserve.contracts.requests import (
    ChangeSession,
    CreateSession,
    FailSession,
    PlaceSession,
    ReleaseSession,
    SuspendIdle,
)
from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.state_store.core.change import (
    NO_MIGRATION,
    Change,
    assign_owner,
    change_id,
    expect_version,
    not_allowed,
    step,
)
from turboserve.state_store.core.workers import Slots

REASON_LIMIT = 2_000
"""Maximum number of characters kept of a reason."""


def create(request: CreateSession, now: float) -> Change:
    """Create a row that waits for a worker."""
    storable("prompt", request.prompt)
    for key, value in request.metadata.items():
        storable("metadata", key + value)
    record = SessionRecord(
        id=request.id,
        tenant=request.tenant,
        model=request.model,
        prompt=request.prompt,
        seed=request.seed,
        metadata=request.metadata,
        controls={name: value for name, value in request.controls.items() if value is not None},
        quality=request.quality,
        max_lead_s=request.max_lead_s,
        recording=request.recording,
        key=request.key,
        requested_at=now,
        phase=Phase.REQUESTED,
        version=1,
        epoch=0,
        event_sequence=1,
        created_at=now,
        updated_at=now,
    )
    event = events.SessionCreated(id=change_id(record, "created"), at=now, record=record)
    return Change(record, (event,))


def pause(record: SessionRecord, now: float) -> Change | None:
    """Suspend the session at once: its slot is free, its state stays with the worker. Idle becomes paused.

    None: the session is paused already.
    """
    if record.phase is Phase.SUSPENDED and record.activity is Activity.PAUSED:
        return None
    return _suspend(record, Activity.PAUSED, now)


def suspend_idle(record: SessionRecord, request: SuspendIdle, now: float) -> Change | None:
    """Suspend the session for the scheduler until a viewer returns. None: the session is idle already."""
    if record.phase is Phase.SUSPENDED and record.activity is Activity.IDLE:
        return None
    expect_version(record, request.expected_version)
    if record.phase is Phase.SUSPENDED and record.activity is Activity.PAUSED:
        raise not_allowed(record, "idle")
    return _suspend(record, Activity.IDLE, now)


def _suspend(record: SessionRecord, activity: Activity, now: float) -> Change:
    after = step(record, now, to=Phase.SUSPENDED, activity=activity, **NO_MIGRATION)
    event = events.SessionSuspended(id=change_id(after, "suspended"), at=now, record=after)
    return Change(after, (event,))


def resume(record: SessionRecord, now: float) -> Change | None:
    """Ask for the session to run again, once the scheduler has placed it.

    None: the session runs, or shall run already.
    """
    if record.phase.ended:
        raise not_allowed(record, "resumed")
    if record.phase is not Phase.SUSPENDED or record.activity is Activity.WATCHING:
        return None
    after = step(record, now, to=Phase.SUSPENDED, activity=Activity.WATCHING, requested_at=now)
    event = events.SessionResumeRequested(id=change_id(after, "resume"), at=now, record=after)
    return Change(after, (event,))


def change(record: SessionRecord, request: ChangeSession, now: float) -> Change | None:
    """Set what the owner allows. Also allowed while suspended. None: the row has these values already."""
    updates = {name: getattr(request, name) for name in request.changes}
    if not record.phase.ended and all(getattr(record, name) == value for name, value in updates.items()):
        return None
    after = step(record, now, **updates)
    event = events.SessionChanged(id=change_id(after, "changed"), at=now, record=after)
    return Change(after, (event,))


def recorded(record: SessionRecord, recording: str | None, now: float) -> Change:
    """Note the recording that runs; None: none does. Raises TransitionError if the session has ended."""
    after = step(record, now, recording=recording)
    event = events.SessionChanged(id=change_id(after, "recorded"), at=now, record=after)
    return Change(after, (event,))


def end(record: SessionRecord, reason: str, now: float) -> Change | None:
    """Terminate the session, which then has no owner. None: it has ended already."""
    if record.phase.ended:
        return None
    return _end(record, Phase.TERMINATED, reason, now)


def abandon(record: SessionRecord, version: int, reason: str, now: float) -> Change | None:
    """End a session to which no viewer returned. None: its row has changed since `version`."""
    if record.version != version or record.phase is not Phase.SUSPENDED:
        return None
    return _end(record, Phase.TERMINATED, reason, now)


def fail(record: SessionRecord, request: FailSession, now: float) -> Change | None:
    """Fail the session for its owner. None: it has failed already. Raises StaleEpochError to others."""
    if record.phase.ended and record.epoch == request.epoch + 1:
        return None
    if record.epoch != request.epoch or record.worker != request.worker:
        raise StaleEpochError(
            f"session {record.id} is at epoch {record.epoch} of {record.worker or 'no worker'}, "
            f"not {request.epoch} of {request.worker}",
            field="epoch",
            limit=record.epoch,
        )
    return _end(record, Phase.FAILED, request.reason, now)


def check_owner(record: SessionRecord, worker: str | None) -> None:
    """Raise ForbiddenError unless `worker` owns the session."""
    if worker is None or record.worker != worker:
        raise ForbiddenError(
            f"worker: session {record.id} belongs to {record.worker or 'no worker'}, "
            f"not to {worker or 'a worker without a name'}",
            field="worker",
            limit=record.worker,
        )


def _end(record: SessionRecord, to: Phase, reason: str, now: float) -> Change:
    reason = reason.replace("\x00", "")[:REASON_LIMIT]
    after = step(record, now, to=to, reason=reason, **NO_MIGRATION, **assign_owner(record, None))
    event = events.SessionEnded(id=change_id(after, "ended"), at=now, record=after)
    return Change(after, (event,))


def place(record: SessionRecord, request: PlaceSession, slots: Slots, now: float, retry_s: float) -> Change:
    """Give the session to the worker under the next epoch.

    A session with chunks goes only to a worker with the weights that made them, unless the request allows
    other weights; the event then shows the previous weights. `slots` are the worker's without this session.
    Raises ConflictError (the row changed), TransitionError (the session shall not run), WorkerGoneError,
    NoCapacityError or InvalidInputError (the worker cannot take it).
    """
    expect_version(record, request.expected_version)
    if record.phase is Phase.SUSPENDED and record.activity is not Activity.WATCHING:
        raise not_allowed(record, "placed")
    slots.check(request.worker)
    slots.check_model(request.worker, record.model)
    if record.next_chunk > 0 and not request.other_weights:
        slots.check_weights(request.worker, record.weights_digest)
    slots.check_room(request.worker, retry_s)
    owned = assign_owner(record, request.worker) | {
        "weights_digest": slots.weights_digest or record.weights_digest
    }
    if record.phase.holds_slot and record.next_chunk > 0:
        # The session has lost its worker. Its chunks have answered the request for it.
        owned["requested_at"] = None
    after = step(record, now, to=Phase.ACTIVE, reason=None, **NO_MIGRATION, **owned)
    changed = record.next_chunk > 0 and record.weights_digest not in (None, after.weights_digest)
    decision = request.decision.model_copy(
        update={"session": record.id, "epoch": after.epoch, "worker": request.worker, "at": now}
    )
    event = events.SessionPlaced(
        id=change_id(after, "placed"),
        at=now,
        record=after,
        kind=decision.kind,
        previous_worker=record.worker,
        previous_weights=record.weights_digest if changed else None,
    )
    return Change(after, (event,), decision)


def release(record: SessionRecord, request: ReleaseSession, now: float) -> Change | None:
    """Take the suspended session from its owner. None: it has no owner already."""
    if record.phase is not Phase.SUSPENDED:
        raise not_allowed(record, "released")
    if record.worker is None:
        return None
    expect_version(record, request.expected_version)
    after = step(record, now, to=Phase.SUSPENDED, **NO_MIGRATION, **assign_owner(record, None))
    decision = request.decision.model_copy(
        update={"session": record.id, "epoch": after.epoch, "worker": None, "kind": "release", "at": now}
    )
    event = events.SessionSuspended(id=change_id(after, "released"), at=now, record=after)
    return Change(after, (event,), decision)


def listed_in_renewal(record: SessionRecord, held: Collection[str]) -> bool:
    """Return whether a renewal of the session's owner, which holds `held`, lists the session.

    Suspended ones only if the worker holds them or they migrate: the target of a migration requests the state
    from this worker, which has to answer even if it has none.
    """
    return record.phase is not Phase.SUSPENDED or record.target is not None or record.id in held


def storable(field: str, text: str) -> None:
    """Raise InvalidInputError if Postgres cannot store `text`."""
    if "\x00" in text:
        raise InvalidInputError(
            f"{field}: the character U+0000 cannot be stored", field=field, limit="no U+0000"
        )
