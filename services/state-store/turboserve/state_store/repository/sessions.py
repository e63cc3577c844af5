"""Rows of sessions, their controls and decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import delete, func, insert, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.requests import CreateSession, ListSessions
from turboserve.contracts.sessions import Activity, Decision, Phase, PromptReceipt, SessionRecord
from turboserve.state_store.tables import controls, decisions, sessions

ADMISSION_LOCK = 0x7475_7262_0003

_FIELDS = tuple(name for name in SessionRecord.model_fields if name in sessions.c)
_RECORD = tuple(sessions.c[name] for name in _FIELDS)
# What only `insert_session` writes, and what other statements own.
_FIXED = {
    "id",
    "tenant",
    "model",
    "seed",
    "metadata",
    "created_at",
    "next_chunk",
    "applied_control_seq",
    "playhead_s",
}
_CHANGING = tuple(name for name in _FIELDS if name not in _FIXED)

_LIVE = sessions.c.ended_at.is_(None)
_HOLDS = sessions.c.phase.in_([phase.value for phase in Phase if phase.holds_slot])
_WAITS = or_(
    sessions.c.phase == Phase.REQUESTED.value,
    (sessions.c.phase == Phase.SUSPENDED.value) & (sessions.c.activity == Activity.WATCHING.value),
)


def record_of(row: RowMapping | Mapping[str, Any]) -> SessionRecord:
    return SessionRecord.model_validate({name: row[name] for name in _FIELDS})


async def insert_session(db: AsyncConnection, record: SessionRecord) -> bool:
    """False if there is a row of this id already; waits for whoever is just inserting it."""
    values = record.model_dump(mode="json", include=set(_FIELDS)) | {"first_prompt": record.prompt}
    query = pg_insert(sessions).values(values).on_conflict_do_nothing(index_elements=[sessions.c.id])
    return (await db.execute(query.returning(sessions.c.id))).first() is not None


async def get(db: AsyncConnection, session: str, *, lock: bool = False) -> SessionRecord | None:
    query = select(*_RECORD).where(sessions.c.id == session)
    row = (await db.execute(query.with_for_update() if lock else query)).mappings().first()
    return None if row is None else record_of(row)


async def created_by(db: AsyncConnection, request: CreateSession) -> bool:
    """Whether the row of this id was made by this very request."""
    query = select(sessions.c.id).where(
        sessions.c.id == request.id,
        sessions.c.tenant == request.tenant,
        sessions.c.model == request.model,
        sessions.c.first_prompt == request.prompt,
        sessions.c.seed == request.seed,
        sessions.c.metadata == request.metadata,
    )
    return (await db.execute(query)).first() is not None


async def write(db: AsyncConnection, record: SessionRecord) -> None:
    """Replace what changes; the caller holds the row's lock and has compared its version."""
    values = record.model_dump(mode="json", include=set(_CHANGING))
    if record.phase.ended:
        values["ended_at"] = record.updated_at
    await db.execute(update(sessions).where(sessions.c.id == record.id).values(values))


async def page(
    db: AsyncConnection, request: ListSessions, before: int | None
) -> list[tuple[int, SessionRecord]]:
    """Newest first, each with its number; one more than the limit, to show if there is more."""
    query = select(sessions.c.number, *_RECORD).order_by(sessions.c.number.desc()).limit(request.limit + 1)
    if request.tenant is not None:
        query = query.where(sessions.c.tenant == request.tenant)
    if request.phases:
        query = query.where(sessions.c.phase.in_([phase.value for phase in request.phases]))
        if not any(phase.ended for phase in request.phases):
            query = query.where(_LIVE)
    if before is not None:
        query = query.where(sessions.c.number < before)
    return [(row["number"], record_of(row)) for row in (await db.execute(query)).mappings()]


async def assigned(db: AsyncConnection, worker: str) -> list[SessionRecord]:
    """All that have not ended and name this worker, oldest first."""
    query = select(*_RECORD).where(sessions.c.worker == worker, _LIVE).order_by(sessions.c.number)
    return [record_of(row) for row in (await db.execute(query)).mappings()]


async def lock_admission(db: AsyncConnection) -> None:
    """Let one transaction at a time count and admit, so that two never take the same last place."""
    await db.execute(text("select pg_advisory_xact_lock(:key)"), {"key": ADMISSION_LOCK})


async def demand(db: AsyncConnection, model: str) -> int:
    """Sessions of this model that hold a slot or wait for one."""
    query = select(func.count()).where(sessions.c.model == model, _LIVE, or_(_HOLDS, _WAITS))
    return int((await db.execute(query)).scalar_one())


async def count_live(db: AsyncConnection) -> int:
    return int((await db.execute(select(func.count()).where(_LIVE))).scalar_one())


async def slots_used(db: AsyncConnection, worker: str, *, besides: str) -> int:
    """Sessions other than `besides` that hold a slot of this worker."""
    query = select(func.count()).where(sessions.c.worker == worker, _LIVE, _HOLDS, sessions.c.id != besides)
    return int((await db.execute(query)).scalar_one())


# Controls and decisions


async def insert_prompt(db: AsyncConnection, receipt: PromptReceipt) -> None:
    await db.execute(
        insert(controls).values(
            kind="prompt", seq=receipt.control_seq, **receipt.model_dump(exclude={"control_seq"})
        )
    )


async def prompt_of_event(db: AsyncConnection, event_id: str) -> PromptReceipt | None:
    row = (await db.execute(select(controls).where(controls.c.event_id == event_id))).mappings().first()
    return None if row is None else _receipt(row)


async def mark_applied(
    db: AsyncConnection, session: str, control_seq: int, chunk_index: int, now: float
) -> list[PromptReceipt]:
    """Prompts up to `control_seq` that no chunk was made under before; each is returned once, in order."""
    query = (
        update(controls)
        .where(controls.c.session == session, controls.c.seq <= control_seq, controls.c.applied_at.is_(None))
        .values(applied_at=now, chunk_index=chunk_index)
        .returning(controls)
    )
    rows = (await db.execute(query)).mappings().all()
    return sorted((_receipt(row) for row in rows), key=lambda receipt: receipt.control_seq)


def _receipt(row: RowMapping) -> PromptReceipt:
    return PromptReceipt.model_validate({**row, "control_seq": row["seq"]})


async def insert_decision(db: AsyncConnection, version: int, decision: Decision) -> None:
    await db.execute(insert(decisions).values(version=version, **decision.model_dump(mode="json")))


async def decided(db: AsyncConnection, record: SessionRecord, version: int, worker: str) -> bool:
    """Whether the row's `version` was made by placing it on `worker`, under the epoch it still has."""
    query = select(decisions.c.version).where(
        decisions.c.session == record.id,
        decisions.c.version == version,
        decisions.c.epoch == record.epoch,
        decisions.c.worker == worker,
    )
    return (await db.execute(query)).first() is not None


async def decisions_of(db: AsyncConnection, session: str, limit: int) -> list[Decision]:
    """The newest, in the order in which they were made."""
    query = (
        select(decisions)
        .where(decisions.c.session == session)
        .order_by(decisions.c.version.desc())
        .limit(limit)
    )
    rows = (await db.execute(query)).mappings().all()
    return [Decision.model_validate(dict(row)) for row in reversed(rows)]


# Chunks


async def count_chunk(
    db: AsyncConnection, session: str, next_chunk: int, control_seq: int, playhead_s: float | None
) -> SessionRecord | None:
    """Note how far the log has come; never backwards. The row after it, or None if there is none."""
    values: dict[str, Any] = {
        "next_chunk": func.greatest(sessions.c.next_chunk, next_chunk),
        "applied_control_seq": func.greatest(sessions.c.applied_control_seq, control_seq),
    }
    if playhead_s is not None:
        values["playhead_s"] = playhead_s
    query = update(sessions).where(sessions.c.id == session).values(values).returning(*_RECORD)
    row = (await db.execute(query)).mappings().first()
    return None if row is None else record_of(row)


# Retention


async def unpurged(db: AsyncConnection, ended_before: float, limit: int) -> Sequence[str]:
    query = (
        select(sessions.c.id)
        .where(sessions.c.purged_at.is_(None), sessions.c.ended_at < ended_before)
        .order_by(sessions.c.ended_at)
        .limit(limit)
    )
    return (await db.execute(query)).scalars().all()


async def mark_purged(db: AsyncConnection, ids: Iterable[str], now: float) -> None:
    await db.execute(update(sessions).where(sessions.c.id.in_(list(ids))).values(purged_at=now))


async def delete_ended(db: AsyncConnection, ended_before: float) -> int:
    """Delete rows whose chunks are gone from the log; controls and decisions go with them."""
    query = delete(sessions).where(sessions.c.ended_at < ended_before, sessions.c.purged_at.is_not(None))
    return (await db.execute(query)).rowcount
