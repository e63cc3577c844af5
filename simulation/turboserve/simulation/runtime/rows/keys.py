"""Rows of API keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from turboserve.contracts.keys import KeyLimits, KeyPage, KeyRecord, ListKeys, ValidKey
from turboserve.simulation.runtime.rows.admission import takes_slot
from turboserve.simulation.runtime.rows.locks import LockMode
from turboserve.simulation.runtime.rows.session import Session
from turboserve.simulation.runtime.rows.tables import KeyEntry
from turboserve.state_store.core.key_limits import KeyRates, KeyUsage
from turboserve.state_store.core.paging import first_page
from turboserve.state_store.ports.records import KeyEdition

NAME = "api_keys"


class MemoryKeys:
    """`KeyRepository` in one session of the server."""

    def __init__(self, session: Session) -> None:
        self._db, self._rows = session, session.tables.api_keys
        self._editions = session.tables.key_editions

    async def edition(self) -> KeyEdition | None:
        return await self._db.execute(lambda: self._db.get(self._editions, NAME))

    async def lock(self, salt: str) -> KeyEdition:
        return await self._db.lock_or_insert(self._editions, NAME, KeyEdition(salt, 0))

    async def write_version(self, version: int) -> None:
        def run() -> None:
            row = self._db.lock(self._editions, NAME, LockMode.NO_KEY_UPDATE)
            if row is not None:
                self._db.update(self._editions, NAME, replace(row, version=version))

        await self._db.execute(run)

    async def get(self, key: str) -> KeyRecord | None:
        def run() -> KeyRecord | None:
            entry = self._db.get(self._rows, key)
            return None if entry is None else entry.record

        return await self._db.execute(run)

    async def insert(self, record: KeyRecord, key_hash: str) -> None:
        def run() -> None:
            number = self._db.tables.number(self._rows)
            self._db.insert(self._rows, record.id, KeyEntry(record, key_hash, number))

        await self._db.execute(run)

    async def revoke(self, key: str, at: float) -> None:
        def run() -> None:
            entry = self._db.lock(self._rows, key, LockMode.NO_KEY_UPDATE)
            if entry is not None and entry.record.revoked_at is None:
                self._write(entry, "revoked_at", at)

        await self._db.execute(run)

    async def change(self, key: str, limits: KeyLimits) -> None:
        def run() -> None:
            entry = self._db.lock(self._rows, key, LockMode.NO_KEY_UPDATE)
            if entry is not None:
                self._write(entry, "limits", limits)

        await self._db.execute(run)

    async def usage(self, key: str, day: int) -> KeyUsage:
        def read() -> KeyLimits:
            entry = self._db.get(self._rows, key)
            return KeyLimits() if entry is None else entry.record.limits

        def count() -> KeyUsage:
            records = [entry.record for _, entry in self._db.find(self._db.tables.sessions, "key", key)]
            today = (
                row.gpu_seconds
                for (of_day, _, of_key), row in self._db.all(self._db.tables.usage_days)
                if (of_day, of_key) == (day, key)
            )
            return KeyUsage(limits, len(records), sum(map(takes_slot, records)), sum(today))

        limits = await self._db.execute(read)
        return KeyUsage() if limits == KeyLimits() else await self._db.execute(count)

    async def lock_rates(self, key: str) -> KeyRates:
        return await self._db.lock_or_insert(self._db.tables.key_rates, key, KeyRates(key))

    async def write_rates(self, rates: KeyRates) -> None:
        rows = self._db.tables.key_rates

        def run() -> None:
            if self._db.lock(rows, rates.key, LockMode.NO_KEY_UPDATE) is not None:
                self._db.update(rows, rates.key, rates)

        await self._db.execute(run)

    async def page(self, request: ListKeys) -> KeyPage:
        def run() -> KeyPage:
            entries = [
                entry
                for entry in self._newest_first()
                if request.tenant in (None, entry.record.tenant)
                and (request.after is None or entry.number < request.after)
            ]
            shown, after = first_page(entries, request.limit, lambda entry: entry.number)
            return KeyPage(keys=tuple(entry.record for entry in shown), next=after)

        return await self._db.execute(run)

    async def valid(self, now: float) -> list[ValidKey]:
        def run() -> list[ValidKey]:
            return [
                ValidKey(
                    id=entry.record.id,
                    tenant=entry.record.tenant,
                    scopes=entry.record.scopes,
                    hash=entry.hash,
                    expires_at=entry.record.expires_at,
                    limits=entry.record.limits,
                )
                for entry in reversed(self._newest_first())
                if _is_valid(entry.record, now)
            ]

        return await self._db.execute(run)

    async def count_valid(self, now: float) -> int:
        return await self._db.execute(
            lambda: sum(_is_valid(entry.record, now) for _, entry in self._db.all(self._rows))
        )

    async def note_uses(self, uses: Mapping[str, float], interval_s: float) -> None:
        def run() -> None:
            for key, at in sorted(uses.items()):
                entry = self._db.get(self._rows, key)
                if entry is None or not _is_due(entry.record, at, interval_s):
                    continue
                entry = self._db.lock(self._rows, key, LockMode.NO_KEY_UPDATE)
                if entry is not None and _is_due(entry.record, at, interval_s):
                    self._write(entry, "last_used_at", at)

        await self._db.execute(run)

    def _newest_first(self) -> list[KeyEntry]:
        return sorted((entry for _, entry in self._db.all(self._rows)), key=lambda entry: -entry.number)

    def _write(self, entry: KeyEntry, column: str, value: float | KeyLimits) -> None:
        after = replace(entry, record=entry.record.model_copy(update={column: value}))
        self._db.update(self._rows, entry.record.id, after)


def _is_valid(record: KeyRecord, now: float) -> bool:
    return record.revoked_at is None and (record.expires_at is None or record.expires_at > now)


def _is_due(record: KeyRecord, at: float, interval_s: float) -> bool:
    return record.last_used_at is None or record.last_used_at + interval_s <= at
