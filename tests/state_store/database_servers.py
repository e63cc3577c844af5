"""Both implementations of the database port, as the contract's tests use them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pydantic import SecretStr
from sqlalchemy import text

from tests.helpers.waiting import eventually
from turboserve.simulation.runtime.rows.database import MemoryDatabase
from turboserve.simulation.runtime.rows.server import MemoryPostgres
from turboserve.state_store.database import PostgresDatabase
from turboserve.state_store.ports.database import Database
from turboserve.state_store.settings import Settings
from turboserve.state_store.tables import metadata

KINDS = ("postgres", "memory")


class DatabaseServer:
    """One server with an empty database. Each `connect` is another instance of the state store."""

    def __init__(self, kind: str, postgres_url: str | None) -> None:
        self._url = postgres_url if kind == "postgres" else None
        self.memory = MemoryPostgres() if kind == "memory" else None
        self._open: list[Database] = []

    @classmethod
    @asynccontextmanager
    async def running(cls, kind: str, postgres_url: str | None) -> AsyncIterator[DatabaseServer]:
        server = cls(kind, postgres_url)
        try:
            database = server.connect(60.0)
            await database.migrate()
            if isinstance(database, PostgresDatabase):
                names = ", ".join(f'"{table.name}"' for table in metadata.sorted_tables)
                async with database.transaction() as unit:
                    await unit.connection.execute(text(f"truncate {names} restart identity cascade"))
            yield server
        finally:
            for database in server._open:
                await database.close()

    def connect(self, deadline_s: float = 60.0) -> Database:
        database: Database
        if self.memory is not None:
            database = MemoryDatabase(self.memory, deadline_s=deadline_s)
        else:
            assert self._url is not None
            settings = Settings(
                postgres_url=SecretStr(self._url),
                transaction_deadline_s=deadline_s,
                request_deadline_s=deadline_s + 0.5,
            )
            database = PostgresDatabase(settings)
        self._open.append(database)
        return database

    async def until_waiting(self, sessions: int = 1) -> None:
        """Wait until `sessions` sessions wait for a lock."""

        async def waits() -> bool:
            return await self._waiting() == sessions

        await eventually(waits)

    async def _waiting(self) -> int:
        if self.memory is not None:
            return self.memory.locks.waiting
        return await self._sessions("wait_event_type = 'Lock'")

    async def open_transactions(self) -> int:
        """Count the transactions that wait for their client's next statement."""
        if self.memory is not None:
            return self.memory.idle_transactions
        return await self._sessions("state = 'idle in transaction'")

    async def _sessions(self, condition: str) -> int:
        database = self._open[0]
        assert isinstance(database, PostgresDatabase)
        query = f"select count(*) from pg_stat_activity where datname = current_database() and {condition}"
        async with database.statement() as unit:
            return int((await unit.connection.execute(text(query))).scalar_one())
