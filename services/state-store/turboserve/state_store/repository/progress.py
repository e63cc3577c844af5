"""What rows know of the logs: progress, fences, waiting events; and rows whose retention is over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Double,
    Text,
    and_,
    bindparam,
    cast,
    delete,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.events import Event
from turboserve.contracts.sessions import SessionRecord
from turboserve.state_store.core.tenants import ROW_BYTES
from turboserve.state_store.ports.records import LogProgress, PendingEvent, UsageShare, ViewerUse
from turboserve.state_store.publish.outbox import outbox_values
from turboserve.state_store.repository import usage
from turboserve.state_store.repository.sessions import COLUMNS, record_of
from turboserve.state_store.repository.webhooks import FROM_OUTBOX
from turboserve.state_store.tables import controls, cursors, outbox, sessions, tenants

# Built once: SQLAlchemy takes longer to build such a statement and its cache key than to execute it.
_MOVE = update(cursors).where(
    cursors.c.name == bindparam("cursor"), cursors.c.sequence == bindparam("before")
)
_NEWS = (
    func.unnest(
        *(
            cast(bindparam(f"reached_{name}"), ARRAY(kind))
            for name, kind in {
                "session": Text,
                "next_chunk": BigInteger,
                "control_seq": BigInteger,
                "playhead_s": Double,
            }.items()
        )
    )
    .table_valued("session", "next_chunk", "control_seq", "playhead_s", name="news")
    .render_derived()
)
_COUNT = (
    update(sessions)
    .where(sessions.c.id == _NEWS.c.session)
    .values(
        next_chunk=func.greatest(sessions.c.next_chunk, _NEWS.c.next_chunk),
        applied_control_seq=func.greatest(sessions.c.applied_control_seq, _NEWS.c.control_seq),
        playhead_s=func.coalesce(_NEWS.c.playhead_s, sessions.c.playhead_s),
    )
    .returning(*COLUMNS)
)
_FENCE_MISSING = (
    select(sessions.c.id)
    .where(sessions.c.own_revision.is_(None), text("epoch > 0"), sessions.c.purged_at.is_(None))
    .order_by(sessions.c.updated_at)
    .limit(bindparam("most"))
)
_REVISION = bindparam("revision", type_=BigInteger)
_STORE_FENCE = (
    update(sessions)
    .where(
        sessions.c.id == bindparam("session"),
        sessions.c.epoch == bindparam("at_epoch"),
        sessions.c.fence_revision < _REVISION,
    )
    .values(own_revision=_REVISION, fence_revision=_REVISION)
    .returning(*COLUMNS)
)
_OLDEST_EVENTS = select(outbox).order_by(outbox.c.number).limit(bindparam("most"))


class SqlProgress:
    """`ProgressRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def position(self, cursor: str) -> int:
        await self._db.execute(pg_insert(cursors).values(name=cursor, sequence=0).on_conflict_do_nothing())
        query = select(cursors.c.sequence).where(cursors.c.name == cursor)
        return int((await self._db.execute(query)).scalar_one())

    async def move(self, cursor: str, before: int, after: int) -> bool:
        values = {"cursor": cursor, "before": before, "sequence": after}
        return (await self._db.execute(_MOVE, values)).rowcount == 1

    async def count(self, reached: Sequence[LogProgress]) -> dict[str, SessionRecord]:
        if not reached:
            return {}
        news = {
            "reached_session": [item.session for item in reached],
            "reached_next_chunk": [item.next_chunk for item in reached],
            "reached_control_seq": [item.control_seq for item in reached],
            "reached_playhead_s": [item.playhead_s for item in reached],
        }
        return {row["id"]: record_of(row) for row in (await self._db.execute(_COUNT, news)).mappings()}

    async def add_usage(self, hour: int, shares: Iterable[UsageShare]) -> None:
        await usage.add(self._db, hour, shares)

    async def add_viewer_use(self, hour: int, used: Mapping[str, ViewerUse]) -> None:
        columns = sessions.c
        query = select(columns.id, columns.tenant, columns.key, columns.model).where(columns.id.in_(used))
        rows = (await self._db.execute(query)).all()
        await self.add_usage(hour, [used[row.id].share(row.tenant, row.key, row.model) for row in rows])

    async def number_events(self, session: str, event_sequence: int) -> None:
        query = update(sessions).where(sessions.c.id == session)
        await self._db.execute(query.values(event_sequence=event_sequence))

    async def unpurged(self, ended_before: float, limit: int) -> Sequence[str]:
        query = (
            select(sessions.c.id)
            .where(sessions.c.purged_at.is_(None), sessions.c.ended_at < ended_before)
            .order_by(sessions.c.ended_at)
            .limit(limit)
        )
        return (await self._db.execute(query)).scalars().all()

    async def unknown(self, ids: Sequence[str]) -> Sequence[str]:
        query = select(sessions.c.id).where(sessions.c.id.in_(list(ids)))
        known = set((await self._db.execute(query)).scalars().all())
        return [session for session in ids if session not in known]

    async def mark_purged(self, ids: Iterable[str], now: float) -> None:
        await self._db.execute(update(sessions).where(sessions.c.id.in_(list(ids))).values(purged_at=now))

    async def delete_ended(self, ended_before: float, limit: int) -> int:
        due = and_(sessions.c.ended_at < ended_before, sessions.c.purged_at.is_not(None))
        # Lock the rows before counting them, in a fixed order: another instance may delete the same rows.
        order = sessions.c.ended_at, sessions.c.number
        locked = select(sessions.c.id).where(due).order_by(*order).limit(limit).with_for_update()
        ids = (await self._db.execute(locked)).scalars().all()
        if not ids:
            return 0
        prompts = select(func.sum(func.octet_length(controls.c.prompt))).where(
            controls.c.session == sessions.c.id
        )
        entries = func.jsonb_each_text(sessions.c.metadata).table_valued("key", "value", name="entries")
        texts = select(func.sum(func.octet_length(entries.c.key) + func.octet_length(entries.c.value)))
        size = (
            ROW_BYTES
            + func.octet_length(sessions.c.first_prompt)
            + sessions.c.controls_bytes
            + func.coalesce(prompts.scalar_subquery(), 0)
            + func.coalesce(texts.scalar_subquery(), 0)
        )
        these = sessions.c.id.in_(ids)
        freed = (
            select(sessions.c.tenant, func.sum(size).label("bytes"))
            .where(these)
            .group_by(sessions.c.tenant)
            .order_by(sessions.c.tenant)
        )
        for row in (await self._db.execute(freed)).mappings().all():
            left = func.greatest(tenants.c.stored_bytes - row["bytes"], 0)
            query = update(tenants).where(tenants.c.id == row["tenant"]).values(stored_bytes=left)
            await self._db.execute(query)
        return (await self._db.execute(delete(sessions).where(these))).rowcount


class SqlFence:
    """`FenceRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def store(self, session: str, epoch: int, revision: int) -> SessionRecord | None:
        values = {"session": session, "at_epoch": epoch, "revision": revision}
        row = (await self._db.execute(_STORE_FENCE, values)).mappings().first()
        return None if row is None else record_of(row)

    async def store_seen(self, session: str, epoch: int, revision: int) -> None:
        query = update(sessions).where(sessions.c.id == session, sessions.c.epoch == epoch)
        await self._db.execute(
            query.values(fence_revision=func.greatest(sessions.c.fence_revision, revision))
        )

    async def newest(self) -> int:
        query = select(func.coalesce(func.max(sessions.c.fence_revision), 0))
        return int((await self._db.execute(query)).scalar_one())

    async def reopen(self, session: str, epoch: int, stored: int) -> bool:
        done = await self._db.execute(
            update(sessions)
            .where(sessions.c.id == session, sessions.c.epoch == epoch, sessions.c.own_revision == stored)
            .values(
                own_revision=None,
                version=sessions.c.version + 1,
                log_losses=sessions.c.log_losses + 1,
            )
        )
        return done.rowcount == 1

    async def missing(self, limit: int) -> Sequence[str]:
        return (await self._db.execute(_FENCE_MISSING, {"most": limit})).scalars().all()

    async def settled(self) -> Sequence[tuple[str, int, int]]:
        query = select(sessions.c.id, sessions.c.epoch, sessions.c.own_revision).where(
            sessions.c.ended_at.is_(None), sessions.c.own_revision.is_not(None)
        )
        return [(row.id, row.epoch, row.own_revision) for row in await self._db.execute(query)]


class SqlOutbox:
    """`OutboxRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def add(self, events: Iterable[Event]) -> None:
        values = [outbox_values(event) for event in events]
        if values:
            await self._db.execute(insert(outbox), values)

    async def oldest(self, limit: int) -> Sequence[PendingEvent]:
        rows = (await self._db.execute(_OLDEST_EVENTS, {"most": limit})).mappings()
        return [PendingEvent(**row) for row in rows]

    async def remove(self, numbers: Iterable[int]) -> None:
        # The statement sets synchronous_commit itself, so that the removal needs no transaction around it.
        await self._db.execute(FROM_OUTBOX, {"numbers": list(numbers)})

    async def backlog(self) -> tuple[int, float | None]:
        count, since = (await self._db.execute(select(func.count(), func.min(outbox.c.created_at)))).one()
        return int(count), since
