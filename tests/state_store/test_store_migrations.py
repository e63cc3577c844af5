"""The schema: made by migrations, by several instances at once, and the same as the tables in the code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from pydantic import SecretStr
from sqlalchemy import Connection, inspect

from turboserve.state_store.database import PostgresDatabase
from turboserve.state_store.migrate import config, migrate
from turboserve.state_store.settings import Settings
from turboserve.state_store.tables import metadata


@pytest.fixture
async def database(postgres_url: str) -> AsyncIterator[PostgresDatabase]:
    # On a busy machine the comparison takes longer than a transaction of the store may.
    database = PostgresDatabase(Settings(postgres_url=SecretStr(postgres_url), transaction_deadline_s=60.0))
    yield database
    await database.close()


async def test_several_instances_migrate_at_once_and_the_schema_is_the_codes(
    database: PostgresDatabase,
) -> None:
    await asyncio.gather(*(migrate(database.engine) for _ in range(4)))

    def differences(connection: Connection) -> list[object]:
        return list(compare_metadata(MigrationContext.configure(connection), metadata))

    async with database.engine.connect() as connection:
        assert await connection.run_sync(differences) == []


async def test_every_migration_can_be_undone_and_done_again(database: PostgresDatabase) -> None:
    await migrate(database.engine)
    async with database.engine.begin() as connection:
        await connection.run_sync(lambda sync: command.downgrade(config(sync), "base"))
    async with database.engine.connect() as connection:
        names = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
        assert names == ["alembic_version"]
    await migrate(database.engine)
    await migrate(database.engine)
    async with database.engine.connect() as connection:
        names = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
        assert set(names) == {*metadata.tables, "alembic_version"}


def test_the_address_is_taken_as_people_write_it() -> None:
    for url in ("postgresql://u:p@h:5/d", "postgres://u:p@h:5/d", "postgresql+asyncpg://u:p@h:5/d"):
        assert Settings(postgres_url=SecretStr(url)).sqlalchemy_url == "postgresql+asyncpg://u:p@h:5/d"
