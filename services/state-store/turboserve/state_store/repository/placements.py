"""Locks the rows that a placement or a migration depends on."""

from __future__ import annotations

from sqlalchemy import CTE, ColumnElement, bindparam, func, literal_column, select, true
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.leading import LeaderRecord
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import WorkerRecord
from turboserve.state_store.ports.records import SESSION_FIELDS, WORKER_FIELDS, LockedPlacement, SessionRow
from turboserve.state_store.tables import leaders, sessions, workers

_LEADER_FIELDS = tuple(LeaderRecord.model_fields)


def _after(locked: CTE) -> ColumnElement[bool]:
    """Return a condition that is true, and that the database can only evaluate once it has locked `locked`.

    The condition needs no column of the table that is read, so it is evaluated before the table's row is
    found.
    """
    return select(func.count()).select_from(locked).scalar_subquery() >= literal_column("0")


# Built once: SQLAlchemy takes longer to build such a statement and its cache key than to execute it.
_LEADER = (
    select(leaders)
    .where(leaders.c.name == bindparam("service"))
    .with_for_update(read=True, key_share=True)
    .cte("leader_row")
)
_WORKER = (
    select(*(workers.c[name] for name in WORKER_FIELDS))
    .where(workers.c.id == bindparam("worker"), _after(_LEADER))
    .with_for_update()
    .cte("worker_row")
)
_SESSION = (
    select(*(sessions.c[name] for name in SESSION_FIELDS), sessions.c.fence_revision)
    .where(sessions.c.id == bindparam("session"), _after(_WORKER))
    .with_for_update()
    .cte("session_row")
)
_LOCK = select(
    *(_LEADER.c[name].label(f"leader_{name}") for name in _LEADER_FIELDS),
    *(_WORKER.c[name].label(f"worker_{name}") for name in WORKER_FIELDS),
    *(_SESSION.c[name].label(f"session_{name}") for name in (*SESSION_FIELDS, "fence_revision")),
).select_from(
    # One row, also if one of the three is missing.
    select(literal_column("1").label("one"))
    .subquery("one")
    .outerjoin(_LEADER, true())
    .outerjoin(_WORKER, true())
    .outerjoin(_SESSION, true())
)
_WORKER_AT = len(_LEADER_FIELDS)
_SESSION_AT = _WORKER_AT + len(WORKER_FIELDS)


class SqlPlacements:
    """`PlacementRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def lock(self, leader: str, worker: str, session: str) -> LockedPlacement:
        found = await self._db.execute(_LOCK, {"service": leader, "worker": worker, "session": session})
        row = found.one()
        named = dict(zip(_LEADER_FIELDS, row[:_WORKER_AT], strict=True))
        owner = dict(zip(WORKER_FIELDS, row[_WORKER_AT:_SESSION_AT], strict=True))
        values = dict(zip(SESSION_FIELDS, row[_SESSION_AT:-1], strict=True))
        return LockedPlacement(
            leader=LeaderRecord(name=leader) if named["name"] is None else LeaderRecord.model_validate(named),
            worker=None if owner["id"] is None else WorkerRecord.model_validate(owner),
            session=(
                None if values["id"] is None else SessionRow(SessionRecord.model_validate(values), row[-1])
            ),
        )
