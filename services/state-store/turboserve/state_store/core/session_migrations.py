"""The rules of a migration to another worker: begin, then commit or abandon.

Worker and epoch stay the source's until the commit, so that exactly one worker owns the session at any time.
A pause, an end or a placement ends the migration in the row, so that a late commit is refused.
"""

from __future__ import annotations

from turboserve.contracts import events
from turboserve.contracts.errors import InvalidInputError, MigrationOverError, StaleStateError
from turboserve.contracts.requests import BeginMigration, CommitMigration
from turboserve.contracts.sessions import Decision, Phase, SessionRecord
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


def begin(record: SessionRecord, request: BeginMigration, slots: Slots, now: float, retry_s: float) -> Change:
    """Begin a migration to the target. The session continues at the source, or stays suspended.

    `slots` are the target's without this session. Raises ConflictError (the row changed), TransitionError
    (the session has no state to migrate, or migrates already), WorkerGoneError, NoCapacityError or
    InvalidInputError (the target cannot take the session).
    """
    expect_version(record, request.expected_version)
    quiesced = record.phase in (Phase.ACTIVE, Phase.SUSPENDED) and record.migration is None
    if not quiesced or record.worker is None:
        raise not_allowed(record, "migrated")
    if request.target == record.worker:
        raise InvalidInputError(f"session {record.id} is on {record.worker} already", field="target")
    slots.check(request.target)
    slots.check_model(request.target, record.model)
    slots.check_weights(request.target, record.weights_digest)
    if record.phase.holds_slot:
        slots.check_room(request.target, retry_s)
    to = Phase.MIGRATING if record.phase is Phase.ACTIVE else Phase.SUSPENDED
    after = step(record, now, to=to, target=request.target, migration=record.version + 1)
    decision = request.decision.model_copy(
        update={"session": record.id, "epoch": record.epoch, "worker": request.target, "at": now}
    )
    event = events.SessionMigrating(
        id=change_id(after, "migrating"), at=now, record=after, reason=decision.reason
    )
    return Change(after, (event,), decision)


def began(record: SessionRecord, request: BeginMigration) -> bool:
    """Return whether this request began the row's migration before, and so is a repetition."""
    return record.migration == request.expected_version + 1 and record.target == request.target


def commit(record: SessionRecord, request: CommitMigration, now: float) -> Change:
    """Give the session to the target, which has verified the state, under the next epoch.

    Raises MigrationOverError if this migration is not under way, StaleStateError if a chunk was accepted
    since.
    """
    if record.migration != request.migration or record.target != request.target:
        raise MigrationOverError(
            f"migration {request.migration} of session {record.id} to {request.target} is over",
            field="migration",
            limit=record.migration,
        )
    if record.next_chunk > request.next_chunk:
        raise StaleStateError(
            f"the state of session {record.id} on {request.target} continues at chunk {request.next_chunk}, "
            f"and the log at chunk {record.next_chunk}",
            field="next_chunk",
            limit=record.next_chunk,
        )
    owned = assign_owner(record, request.target)
    after = step(record, now, to=_settled_phase(record), state_digest=request.digest, **NO_MIGRATION, **owned)
    decision = Decision(
        session=record.id,
        epoch=after.epoch,
        worker=request.target,
        kind="migrated",
        reason=f"state verified on the target, migration {request.migration}",
        numbers={**request.numbers, "migration": request.migration, "next_chunk": request.next_chunk},
        at=now,
    )
    event = events.SessionMigrated(
        id=change_id(after, "migrated"), at=now, record=after, previous_worker=record.worker
    )
    return Change(after, (event,), decision)


def abandon(
    record: SessionRecord, migration: int, reason: str, now: float, *, release: bool = False
) -> Change | None:
    """End the migration. The session stays at the source, under the same epoch. None: it is over already.

    With `release`, a suspended session loses its owner, which has no state of it. Otherwise a worker that
    drains would wait for the session forever.
    """
    if record.migration != migration or record.target is None:
        return None
    reason = reason.replace("\x00", "")[:REASON_LIMIT]
    released = release and record.phase is Phase.SUSPENDED
    owned = assign_owner(record, None) if released else {}
    after = step(record, now, to=_settled_phase(record), **NO_MIGRATION, **owned)
    decision = Decision(
        session=record.id,
        epoch=after.epoch,
        worker=after.worker,
        kind="release" if released else "stay",
        reason=f"not migrated to {record.target}: {reason}",
        numbers={"migration": migration},
        at=now,
    )
    event = events.SessionMigrationAbandoned(
        id=change_id(after, "migration_abandoned"), at=now, record=after, target=record.target, reason=reason
    )
    return Change(after, (event,), decision)


def _settled_phase(record: SessionRecord) -> Phase:
    """Return the phase without a migration."""
    return Phase.ACTIVE if record.phase is Phase.MIGRATING else record.phase
