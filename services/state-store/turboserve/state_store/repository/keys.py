"""Rows of API keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from operator import itemgetter

from sqlalchemy import ColumnElement, Select, Text, and_, bindparam, func, insert, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.keys import KeyLimits, KeyPage, KeyRecord, ListKeys, ValidKey
from turboserve.state_store.access_tables import api_keys, key_editions, key_rates, usage_days
from turboserve.state_store.core.key_limits import KeyRates, KeyUsage
from turboserve.state_store.core.paging import first_page
from turboserve.state_store.ports.records import KeyEdition
from turboserve.state_store.repository.admission import TAKES_SLOT
from turboserve.state_store.tables import sessions

NAME = "api_keys"
"""Name of the only row of `key_editions`."""


def _usage_query() -> Select[tuple[int, int, float]]:
    key = bindparam("key", type_=Text)
    today = select(func.coalesce(func.sum(usage_days.c.gpu_seconds), 0.0)).where(
        usage_days.c.key == key, usage_days.c.day == bindparam("day")
    )
    return select(
        func.count().label("live"),
        func.count().filter(TAKES_SLOT).label("slots"),
        today.scalar_subquery().label("gpu_seconds"),
    ).where(sessions.c.key == key, sessions.c.ended_at.is_(None))


_USAGE = _usage_query()
_EDITION = select(key_editions.c.salt, key_editions.c.version).where(key_editions.c.name == NAME)
_RECORD = [api_keys.c[name] for name in KeyRecord.model_fields]
_VALID = [api_keys.c[name] for name in ValidKey.model_fields]
# The rows are locked in the order of their ids, so that two instances never wait for each other.
_USES = text(
    "with uses as ("
    "select * from unnest(cast(:ids as text[]), cast(:times as double precision[])) as use(id, at)),"
    " locked as (select api_keys.id, uses.at from api_keys join uses on uses.id = api_keys.id"
    " where last_used_at is null or last_used_at + :interval_s <= uses.at"
    " order by api_keys.id for no key update of api_keys)"
    " update api_keys set last_used_at = locked.at from locked where api_keys.id = locked.id"
)


class SqlKeys:
    """`KeyRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def edition(self) -> KeyEdition | None:
        row = (await self._db.execute(_EDITION)).first()
        return None if row is None else KeyEdition(row.salt, row.version)

    async def lock(self, salt: str) -> KeyEdition:
        query = _EDITION.with_for_update()
        row = (await self._db.execute(query)).first()
        if row is None:
            # This waits if another transaction inserts the row at the same time.
            first = pg_insert(key_editions).values(name=NAME, salt=salt, version=0)
            await self._db.execute(first.on_conflict_do_nothing(index_elements=[key_editions.c.name]))
            row = (await self._db.execute(query)).one()
        return KeyEdition(row.salt, row.version)

    async def write_version(self, version: int) -> None:
        await self._db.execute(
            update(key_editions).where(key_editions.c.name == NAME).values(version=version)
        )

    async def get(self, key: str) -> KeyRecord | None:
        row = (await self._db.execute(select(*_RECORD).where(api_keys.c.id == key))).mappings().first()
        return None if row is None else KeyRecord.model_validate(dict(row))

    async def insert(self, record: KeyRecord, key_hash: str) -> None:
        limits = record.limits.model_dump(mode="json", exclude_none=True)
        values = record.model_dump(mode="json") | {"hash": key_hash, "limits": limits}
        await self._db.execute(insert(api_keys).values(values))

    async def revoke(self, key: str, at: float) -> None:
        query = update(api_keys).where(api_keys.c.id == key, api_keys.c.revoked_at.is_(None))
        await self._db.execute(query.values(revoked_at=at))

    async def change(self, key: str, limits: KeyLimits) -> None:
        query = update(api_keys).where(api_keys.c.id == key)
        await self._db.execute(query.values(limits=limits.model_dump(mode="json", exclude_none=True)))

    async def usage(self, key: str, day: int) -> KeyUsage:
        query = select(api_keys.c.limits).where(api_keys.c.id == key)
        limits = KeyLimits.model_validate((await self._db.execute(query)).scalar_one_or_none() or {})
        if limits == KeyLimits():
            return KeyUsage()
        row = (await self._db.execute(_USAGE, {"key": key, "day": day})).one()
        return KeyUsage(limits, row.live, row.slots, row.gpu_seconds)

    async def lock_rates(self, key: str) -> KeyRates:
        query = select(key_rates).where(key_rates.c.key == key).with_for_update()
        row = (await self._db.execute(query)).mappings().first()
        if row is None:
            # This waits if another transaction inserts the row at the same time.
            await self._db.execute(pg_insert(key_rates).values(key=key).on_conflict_do_nothing())
            row = (await self._db.execute(query)).mappings().one()
        return KeyRates(**row)

    async def write_rates(self, rates: KeyRates) -> None:
        values = asdict(rates)
        await self._db.execute(update(key_rates).where(key_rates.c.key == values.pop("key")).values(values))

    async def page(self, request: ListKeys) -> KeyPage:
        query = select(api_keys.c.number, *_RECORD).order_by(api_keys.c.number.desc())
        if request.tenant is not None:
            query = query.where(api_keys.c.tenant == request.tenant)
        if request.after is not None:
            query = query.where(api_keys.c.number < request.after)
        rows = (await self._db.execute(query.limit(request.limit + 1))).mappings().all()
        shown, after = first_page(rows, request.limit, itemgetter("number"))
        return KeyPage(
            keys=tuple(KeyRecord.model_validate(dict(row)) for row in shown),
            next=after,
        )

    async def valid(self, now: float) -> list[ValidKey]:
        query = select(*_VALID).where(_is_valid(now)).order_by(api_keys.c.number)
        return [ValidKey.model_validate(dict(row)) for row in (await self._db.execute(query)).mappings()]

    async def count_valid(self, now: float) -> int:
        return int((await self._db.execute(select(func.count()).where(_is_valid(now)))).scalar_one())

    async def note_uses(self, uses: Mapping[str, float], interval_s: float) -> None:
        values = {"ids": list(uses), "times": list(uses.values()), "interval_s": interval_s}
        await self._db.execute(_USES, values)


def _is_valid(now: float) -> ColumnElement[bool]:
    expires_at = api_keys.c.expires_at
    return and_(api_keys.c.revoked_at.is_(None), or_(expires_at.is_(None), expires_at > now))
