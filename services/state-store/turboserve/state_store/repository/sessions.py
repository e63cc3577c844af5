"""Reads and writes rows of sessions, their prompts and controls, and the decisions about them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy import (
    ARRAY,
    Text,
    and_,
    any_,
    bindparam,
    case,
    cast,
    false,
    func,
    insert,
    null,
    or_,
    select,
    true,
    union_all,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.requests import CreateSession, ListSessions
from turboserve.contracts.sessions import ControlReceipt, Decision, Phase, PromptReceipt, SessionRecord
from turboserve.contracts.workers import Incoming, MigrationKey
from turboserve.state_store.core.receipts import Receipt, SettledControl, receipt_id, receipt_text
from turboserve.state_store.core.sessions import listed_in_renewal
from turboserve.state_store.ports.records import SESSION_FIELDS, SessionRow, WorkerSessions
from turboserve.state_store.tables import controls, decisions, sessions, workers

COLUMNS = tuple(sessions.c[name] for name in SESSION_FIELDS)
LIVE = sessions.c.ended_at.is_(None)


def record_of(row: RowMapping | Mapping[str, Any]) -> SessionRecord:
    return SessionRecord.model_validate({name: row[name] for name in SESSION_FIELDS})


# Built once: SQLAlchemy takes longer to build such a statement and its cache key than to execute it.
_SESSION = select(*COLUMNS).where(sessions.c.id == bindparam("session"))
_ROW = select(*COLUMNS, sessions.c.fence_revision).where(sessions.c.id == bindparam("session"))
_ROW_LOCKED = _ROW.with_for_update()
_SOURCE = workers.alias("source")
_MIGRATING_TO = (
    select(*COLUMNS, _SOURCE.c.transfer)
    .join(_SOURCE, _SOURCE.c.id == sessions.c.worker, isouter=True)
    .where(sessions.c.target == bindparam("worker"), LIVE)
    .order_by(sessions.c.number)
)
_THESE = any_(bindparam("workers", type_=ARRAY(Text)))
_OF_WORKERS = union_all(
    select(
        *COLUMNS,
        sessions.c.number,
        sessions.c.migration_key,
        false().label("comes"),
        cast(null(), JSONB).label("transfer"),
    ).where(
        sessions.c.worker == _THESE,
        LIVE,
        # As `listed_in_renewal`, which decides for each worker. There may be many suspended sessions.
        or_(
            sessions.c.phase != Phase.SUSPENDED.value,
            sessions.c.id == any_(bindparam("held", type_=ARRAY(Text))),
            sessions.c.target.is_not(None),
        ),
    ),
    select(
        *COLUMNS,
        sessions.c.number,
        sessions.c.migration_key,
        true().label("comes"),
        _SOURCE.c.transfer,
    )
    .join(_SOURCE, _SOURCE.c.id == sessions.c.worker, isouter=True)
    .where(sessions.c.target == _THESE, LIVE),
).order_by("number")


class SqlSessions:
    """`SessionRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def get(self, session: str) -> SessionRecord | None:
        row = (await self._db.execute(_SESSION, {"session": session})).mappings().first()
        return None if row is None else record_of(row)

    async def get_row(self, session: str, *, lock: bool = False) -> SessionRow | None:
        found = await self._db.execute(_ROW_LOCKED if lock else _ROW, {"session": session})
        row = found.mappings().first()
        return None if row is None else SessionRow(record_of(row), row["fence_revision"])

    async def created_by(self, request: CreateSession) -> bool:
        query = select(sessions.c.id).where(
            sessions.c.id == request.id,
            sessions.c.tenant == request.tenant,
            sessions.c.model == request.model,
            sessions.c.first_prompt == request.prompt,
            sessions.c.seed == request.seed,
            sessions.c.metadata == request.metadata,
        )
        return (await self._db.execute(query)).first() is not None

    async def page(self, request: ListSessions, before: int | None) -> list[tuple[int, SessionRecord]]:
        query = (
            select(sessions.c.number, *COLUMNS).order_by(sessions.c.number.desc()).limit(request.limit + 1)
        )
        if request.tenant is not None:
            query = query.where(sessions.c.tenant == request.tenant)
        if request.phases:
            query = query.where(sessions.c.phase.in_([phase.value for phase in request.phases]))
            if not any(phase.ended for phase in request.phases):
                query = query.where(LIVE)
        if before is not None:
            query = query.where(sessions.c.number < before)
        return [(row["number"], record_of(row)) for row in (await self._db.execute(query)).mappings()]

    async def suspended_since(self, before: float, limit: int) -> list[SessionRecord]:
        suspended = and_(sessions.c.phase == Phase.SUSPENDED.value, sessions.c.updated_at < before, LIVE)
        query = select(*COLUMNS).where(suspended).order_by(sessions.c.updated_at).limit(limit)
        return [record_of(row) for row in (await self._db.execute(query)).mappings()]

    async def of_workers(
        self, held: Mapping[str, Collection[str]]
    ) -> Callable[[], dict[str, WorkerSessions]]:
        every = [session for names in held.values() for session in names]
        values = {"workers": list(held), "held": every}
        rows = (await self._db.execute(_OF_WORKERS, values)).mappings().all()
        return partial(_by_worker, held, rows)

    async def migration_keys(self, worker: str, session: str | None = None) -> tuple[MigrationKey, ...]:
        mine = or_(sessions.c.worker == worker, sessions.c.target == worker)
        query = (
            select(sessions.c.id, sessions.c.migration, sessions.c.migration_key)
            .where(mine, sessions.c.target.is_not(None), sessions.c.migration_key.is_not(None), LIVE)
            .order_by(sessions.c.number)
        )
        if session is not None:
            query = query.where(sessions.c.id == session)
        return tuple(
            MigrationKey(session=row["id"], migration=row["migration"], key=row["migration_key"])
            for row in (await self._db.execute(query)).mappings()
        )

    async def migrating_to(self, worker: str) -> list[Incoming]:
        found = await self._db.execute(_MIGRATING_TO, {"worker": worker})
        return [
            Incoming(record=record_of(row), source=tuple(row["transfer"] or ())) for row in found.mappings()
        ]


def _by_worker(held: Mapping[str, Collection[str]], rows: Sequence[RowMapping]) -> dict[str, WorkerSessions]:
    found = {worker: WorkerSessions([], [], []) for worker in held}
    for row in rows:
        record = record_of(row)
        theirs = found[row["target"] if row["comes"] else row["worker"]]
        if row["comes"]:
            theirs.incoming.append(Incoming(record=record, source=tuple(row["transfer"] or ())))
        elif listed_in_renewal(record, held[row["worker"]]):
            theirs.assigned.append(record)
        if row["target"] is not None and row["migration_key"] is not None:
            key = MigrationKey(session=record.id, migration=row["migration"], key=row["migration_key"])
            theirs.keys.append(key)
    return found


def _receipt(row: RowMapping) -> Receipt:
    common = {"session": row["session"], "control_seq": row["seq"], "accepted_at": row["accepted_at"]}
    if row["name"] is None:
        return PromptReceipt(**common, prompt_id=row["prompt_id"], prompt=row["prompt"])
    value = json.loads(row["prompt"])
    return ControlReceipt(**common, control_id=row["prompt_id"], name=row["name"], value=value)


class SqlControls:
    """`ControlRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def insert(self, receipt: Receipt) -> None:
        name = receipt.name if isinstance(receipt, ControlReceipt) else None
        values = {
            "session": receipt.session,
            "seq": receipt.control_seq,
            "prompt_id": receipt_id(receipt),
            "kind": "prompt" if name is None else "control",
            "name": name,
            "prompt": receipt_text(receipt),
            "accepted_at": receipt.accepted_at,
        }
        await self._db.execute(insert(controls).values(values))

    async def receipt(self, receipt_id: str) -> Receipt | None:
        query = select(controls).where(controls.c.prompt_id == receipt_id)
        row = (await self._db.execute(query)).mappings().first()
        return None if row is None else _receipt(row)

    async def settle(
        self, session: str, control_seq: int, chunk_index: int, now: float
    ) -> list[SettledControl]:
        unsettled = and_(
            controls.c.session == session,
            controls.c.seq <= control_seq,
            controls.c.applied_at.is_(None),
            controls.c.superseded_by.is_(None),
        )
        # All prompts have the name NULL, which is one partition.
        newest = func.max(controls.c.seq).over(partition_by=controls.c.name).label("newest")
        due = select(controls.c.seq, newest).where(unsettled).cte("due")
        applied = due.c.seq == due.c.newest
        query = (
            update(controls)
            .where(unsettled, controls.c.seq == due.c.seq)
            .values(
                applied_at=case((applied, now)),
                chunk_index=case((applied, chunk_index)),
                superseded_by=case((~applied, due.c.newest)),
            )
            .returning(controls)
        )
        rows = {row["seq"]: row for row in (await self._db.execute(query)).mappings()}
        ids = {seq: row["prompt_id"] for seq, row in rows.items()}
        return [
            SettledControl(_receipt(row), ids.get(row["superseded_by"])) for _, row in sorted(rows.items())
        ]

    async def decided(self, record: SessionRecord, version: int, worker: str) -> bool:
        query = select(decisions.c.version).where(
            decisions.c.session == record.id,
            decisions.c.version == version,
            decisions.c.epoch == record.epoch,
            decisions.c.worker == worker,
        )
        return (await self._db.execute(query)).first() is not None

    async def migrated(self, record: SessionRecord, migration: int) -> bool:
        query = select(decisions.c.version).where(
            decisions.c.session == record.id,
            decisions.c.epoch == record.epoch,
            decisions.c.kind == "migrated",
            decisions.c.numbers["migration"].as_float() == float(migration),
        )
        return (await self._db.execute(query)).first() is not None

    async def note(self, decision: Decision) -> None:
        last = (
            select(decisions)
            .where(decisions.c.session == decision.session)
            .order_by(decisions.c.number.desc())
            .limit(1)
        )
        values = decision.model_dump(mode="json")
        row = (await self._db.execute(last)).mappings().first()
        same = ("epoch", "worker", "kind", "reason")
        if row is not None and row["version"] is None and all(row[name] == values[name] for name in same):
            query = update(decisions).where(decisions.c.number == row["number"])
            await self._db.execute(query.values(numbers=decision.numbers, at=decision.at))
        else:
            await self._db.execute(insert(decisions).values(values))

    async def decisions_of(self, session: str, limit: int) -> list[Decision]:
        query = (
            select(decisions)
            .where(decisions.c.session == session)
            .order_by(decisions.c.number.desc())
            .limit(limit)
        )
        rows = (await self._db.execute(query)).mappings().all()
        return [Decision.model_validate(dict(row)) for row in reversed(rows)]
