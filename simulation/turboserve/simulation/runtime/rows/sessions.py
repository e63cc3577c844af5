"""Reads of the rows of sessions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping

from pydantic import SecretStr

from turboserve.contracts.requests import CreateSession, ListSessions
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import Incoming, MigrationKey
from turboserve.simulation.runtime.rows.locks import LockMode
from turboserve.simulation.runtime.rows.session import Session
from turboserve.simulation.runtime.rows.tables import SessionEntry
from turboserve.state_store.core.sessions import listed_in_renewal
from turboserve.state_store.ports.records import SessionRow, WorkerSessions


def by_number(found: list[tuple[str, SessionEntry]]) -> list[SessionEntry]:
    """Sort entries in the order of creation."""
    return sorted((entry for _, entry in found), key=lambda entry: entry.number)


class MemorySessions:
    """`SessionRepository` in one session of the server."""

    def __init__(self, session: Session) -> None:
        self._db, self._rows = session, session.tables.sessions

    async def get(self, session: str) -> SessionRecord | None:
        def run() -> SessionRecord | None:
            entry = self._db.get(self._rows, session)
            return None if entry is None else entry.record

        return await self._db.execute(run)

    async def get_row(self, session: str, *, lock: bool = False) -> SessionRow | None:
        def run() -> SessionRow | None:
            if lock:
                entry = self._db.lock(self._rows, session, LockMode.UPDATE)
            else:
                entry = self._db.get(self._rows, session)
            return None if entry is None else SessionRow(entry.record, entry.fence_revision)

        return await self._db.execute(run)

    async def created_by(self, request: CreateSession) -> bool:
        def run() -> bool:
            entry = self._db.get(self._rows, request.id)
            return (
                entry is not None
                and entry.record.tenant == request.tenant
                and entry.record.model == request.model
                and entry.first_prompt == request.prompt
                and entry.record.seed == request.seed
                and entry.record.metadata == request.metadata
            )

        return await self._db.execute(run)

    async def page(self, request: ListSessions, before: int | None) -> list[tuple[int, SessionRecord]]:
        live = bool(request.phases) and not any(phase.ended for phase in request.phases)

        def run() -> list[tuple[int, SessionRecord]]:
            if live:
                models = list(self._rows.values("live"))
                models += [
                    entry.record.model
                    for entry in self._db.writes.get(self._rows, {}).values()
                    if entry is not None and entry.record.model not in models
                ]
                entries = [e for model in dict.fromkeys(models) for _, e in self._find("live", model)]
            else:
                entries = [entry for _, entry in self._db.all(self._rows)]
            found = [
                (entry.number, entry.record)
                for entry in entries
                if (request.tenant is None or entry.record.tenant == request.tenant)
                and (not request.phases or entry.record.phase in request.phases)
                and (before is None or entry.number < before)
            ]
            found.sort(key=lambda row: -row[0])
            return found[: request.limit + 1]

        return await self._db.execute(run)

    async def suspended_since(self, before: float, limit: int) -> list[SessionRecord]:
        def run() -> list[SessionRecord]:
            records = [entry.record for _, entry in self._find("suspended", True)]
            due = [record for record in records if record.updated_at < before]
            return sorted(due, key=lambda record: record.updated_at)[:limit]

        return await self._db.execute(run)

    async def of_workers(
        self, held: Mapping[str, Collection[str]]
    ) -> Callable[[], dict[str, WorkerSessions]]:
        found = await self._db.execute(
            lambda: {worker: self._of_worker(worker, sessions) for worker, sessions in held.items()}
        )
        return lambda: found

    def _of_worker(self, worker: str, held: Collection[str]) -> WorkerSessions:
        owned = [entry.record for entry in by_number(self._find("worker", worker))]
        assigned = [record for record in owned if listed_in_renewal(record, held)]
        return WorkerSessions(assigned, self._migrating_to(worker), list(self._keys(worker)))

    async def migration_keys(self, worker: str, session: str | None = None) -> tuple[MigrationKey, ...]:
        return await self._db.execute(lambda: self._keys(worker, session))

    def _keys(self, worker: str, session: str | None = None) -> tuple[MigrationKey, ...]:
        found = dict(self._find("worker", worker)) | dict(self._find("target", worker))
        return tuple(
            MigrationKey(
                session=entry.record.id,
                migration=entry.record.migration,
                key=SecretStr(entry.migration_key),
            )
            for entry in by_number(list(found.items()))
            if entry.record.target is not None
            and entry.record.migration is not None
            and entry.migration_key is not None
            and entry.ended_at is None
            and session in (None, entry.record.id)
        )

    async def migrating_to(self, worker: str) -> list[Incoming]:
        return await self._db.execute(lambda: self._migrating_to(worker))

    def _migrating_to(self, worker: str) -> list[Incoming]:
        found = []
        for entry in by_number(self._find("target", worker)):
            if entry.ended_at is not None:
                continue
            name = entry.record.worker
            source = None if name is None else self._db.get(self._db.tables.workers, name)
            transfer = () if source is None else source.record.transfer
            found.append(Incoming(record=entry.record, source=transfer))
        return found

    def _find(self, index: str, value: Hashable) -> list[tuple[str, SessionEntry]]:
        return self._db.find(self._rows, index, value)
