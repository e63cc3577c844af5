"""Rows of links to sessions and of signing keys."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.links import LinkRecord, SigningKey
from turboserve.state_store.access_tables import key_editions, session_links, signing_keys
from turboserve.state_store.core.links import LinkCounts
from turboserve.state_store.ports.records import SigningEdition

NAME = "links"
"""Name of the row of `key_editions`."""

_EDITION = select(key_editions.c.salt, key_editions.c.version).where(key_editions.c.name == NAME)
_RECORD = [session_links.c[name] for name in LinkRecord.model_fields]
_KEY = [signing_keys.c[name] for name in SigningKey.model_fields]


class SqlLinks:
    """`LinkRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def edition(self) -> SigningEdition | None:
        row = (await self._db.execute(_EDITION)).first()
        return None if row is None else SigningEdition(row.salt, row.version)

    async def lock(self, database: str) -> SigningEdition:
        query = _EDITION.with_for_update()
        row = (await self._db.execute(query)).first()
        if row is None:
            # This waits if another transaction inserts the row at the same time.
            first = pg_insert(key_editions).values(name=NAME, salt=database, version=0)
            await self._db.execute(first.on_conflict_do_nothing(index_elements=[key_editions.c.name]))
            row = (await self._db.execute(query)).one()
        return SigningEdition(row.salt, row.version)

    async def change(self, version: int) -> None:
        await self._db.execute(
            update(key_editions).where(key_editions.c.name == NAME).values(version=version)
        )

    async def keys(self) -> list[SigningKey]:
        query = select(*_KEY).order_by(signing_keys.c.created_at, signing_keys.c.id)
        rows = (await self._db.execute(query)).mappings()
        return [SigningKey.model_validate(dict(row)) for row in rows]

    async def insert_key(self, key: SigningKey) -> None:
        await self._db.execute(insert(signing_keys).values(key.model_dump(mode="json")))

    async def delete_keys(self, ids: Iterable[str]) -> None:
        await self._db.execute(delete(signing_keys).where(signing_keys.c.id.in_(list(ids))))

    async def get(self, link: str) -> LinkRecord | None:
        query = select(*_RECORD).where(session_links.c.id == link)
        row = (await self._db.execute(query)).mappings().first()
        return None if row is None else LinkRecord.model_validate(dict(row))

    async def insert(self, record: LinkRecord) -> None:
        await self._db.execute(insert(session_links).values(record.model_dump(mode="json")))

    async def revoke(self, link: str, at: float) -> None:
        await self._db.execute(update(session_links).where(session_links.c.id == link).values(revoked_at=at))

    async def of_session(self, session: str, now: float) -> list[LinkRecord]:
        query = (
            select(*_RECORD)
            .where(session_links.c.session == session, session_links.c.expires_at > now)
            .order_by(session_links.c.number.desc())
        )
        return [LinkRecord.model_validate(dict(row)) for row in (await self._db.execute(query)).mappings()]

    async def counts(self, session: str, tenant: str, now: float) -> LinkCounts:
        columns = session_links.c
        query = select(
            func.count().filter(columns.session == session),
            func.count().filter(columns.tenant == tenant),
            func.count(),
        ).where(columns.expires_at > now)
        of_session, of_tenant, all_links = (await self._db.execute(query)).one()
        return LinkCounts(of_session, of_tenant, all_links)

    async def revoked(self, now: float) -> list[str]:
        query = select(session_links.c.id).where(
            session_links.c.expires_at > now, session_links.c.revoked_at.is_not(None)
        )
        return list((await self._db.execute(query.order_by(session_links.c.number))).scalars())

    async def delete_expired(self, before: float) -> None:
        await self._db.execute(delete(session_links).where(session_links.c.expires_at < before))
