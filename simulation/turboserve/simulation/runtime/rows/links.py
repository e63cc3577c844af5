"""Rows of links to sessions and of signing keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from turboserve.contracts.links import LinkRecord, SigningKey
from turboserve.simulation.runtime.rows.locks import LockMode
from turboserve.simulation.runtime.rows.session import Session
from turboserve.state_store.core.links import LinkCounts
from turboserve.state_store.ports.records import SigningEdition

NAME = "links"


class MemorySessionLinks:
    """`LinkRepository` in one session of the server."""

    def __init__(self, session: Session) -> None:
        self._db, tables = session, session.tables
        self._rows, self._keys = tables.session_links, tables.signing_keys
        self._editions = tables.signing_editions

    async def edition(self) -> SigningEdition | None:
        return await self._db.execute(lambda: self._db.get(self._editions, NAME))

    async def lock(self, database: str) -> SigningEdition:
        return await self._db.lock_or_insert(self._editions, NAME, SigningEdition(database, 0))

    async def change(self, version: int) -> None:
        def run() -> None:
            row = self._db.lock(self._editions, NAME, LockMode.NO_KEY_UPDATE)
            if row is not None:
                self._db.update(self._editions, NAME, replace(row, version=version))

        await self._db.execute(run)

    async def keys(self) -> list[SigningKey]:
        return await self._db.execute(
            lambda: sorted(
                (key for _, key in self._db.all(self._keys)), key=lambda key: (key.created_at, key.id)
            )
        )

    async def insert_key(self, key: SigningKey) -> None:
        await self._db.execute(lambda: self._db.insert(self._keys, key.id, key))

    async def delete_keys(self, ids: Iterable[str]) -> None:
        def run() -> None:
            for name in ids:
                self._db.delete(self._keys, name)

        await self._db.execute(run)

    async def get(self, link: str) -> LinkRecord | None:
        return await self._db.execute(lambda: self._db.get(self._rows, link))

    async def insert(self, record: LinkRecord) -> None:
        await self._db.execute(lambda: self._db.insert(self._rows, record.id, record))

    async def revoke(self, link: str, at: float) -> None:
        def run() -> None:
            found = self._db.lock(self._rows, link, LockMode.NO_KEY_UPDATE)
            if found is not None:
                self._db.update(self._rows, link, found.model_copy(update={"revoked_at": at}))

        await self._db.execute(run)

    async def of_session(self, session: str, now: float) -> list[LinkRecord]:
        def run() -> list[LinkRecord]:
            found = [row for _, row in self._db.find(self._rows, "session", session) if row.expires_at > now]
            return found[::-1]

        return await self._db.execute(run)

    async def counts(self, session: str, tenant: str, now: float) -> LinkCounts:
        def run() -> LinkCounts:
            rows = [row for _, row in self._db.all(self._rows) if row.expires_at > now]
            return LinkCounts(
                session=sum(row.session == session for row in rows),
                tenant=sum(row.tenant == tenant for row in rows),
                all=len(rows),
            )

        return await self._db.execute(run)

    async def revoked(self, now: float) -> list[str]:
        def run() -> list[str]:
            rows = [row for _, row in self._db.all(self._rows)]
            return [row.id for row in rows if row.expires_at > now and row.revoked_at is not None]

        return await self._db.execute(run)

    async def delete_expired(self, before: float) -> None:
        def run() -> None:
            for link, row in self._db.all(self._rows):
                if row.expires_at < before:
                    self._db.delete(self._rows, link)

        await self._db.execute(run)
