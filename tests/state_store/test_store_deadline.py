"""A transaction's deadline cuts its connection, whatever the driver is doing with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from pydantic import SecretStr, ValidationError
from sqlalchemy import text

from tests.helpers.waiting import eventually
from tests.state_store.state_store_harness import PATIENT
from turboserve.config import SettingsError
from turboserve.contracts.errors import UnavailableError
from turboserve.state_store.database import PostgresDatabase
from turboserve.state_store.migrate import LOCK
from turboserve.state_store.settings import Settings

DEADLINE_S = 2.0


@pytest.fixture
async def database(postgres_url: str) -> AsyncIterator[PostgresDatabase]:
    database = PostgresDatabase(
        Settings(postgres_url=SecretStr(postgres_url), transaction_deadline_s=DEADLINE_S)
    )
    yield database
    await database.close()


def test_a_transaction_may_not_take_longer_than_its_callers_wait() -> None:
    with pytest.raises(ValidationError) as refused:
        Settings(transaction_deadline_s=3.0, request_deadline_s=3.0)
    [reason] = SettingsError.of(refused.value).reasons
    assert reason == "transaction_deadline_s: below request_deadline_s, 3.0"


async def test_what_the_driver_trips_over_after_the_cut_is_unavailable(database: PostgresDatabase) -> None:
    """Incident: on a starved machine the cut came between two steps of a statement, and ended the service."""

    async def late() -> None:
        async with database.transaction() as db:
            await db.connection.execute(text("select 1"))
            driver = (await db.connection.get_raw_connection()).driver_connection
            await asyncio.sleep(DEADLINE_S + 0.2)
            # asyncpg does this when it looks up the types of a statement that it has just prepared.
            driver._protocol.bind_execute(None)  # type: ignore[union-attr]

    with pytest.raises(UnavailableError):
        await late()

    async def works() -> bool:
        with suppress(UnavailableError):
            async with database.transaction() as db:
                return (await db.connection.execute(text("select 2"))).scalar() == 2
        return False

    await eventually(works)


async def test_a_mistake_of_ours_is_not_taken_for_an_outage(postgres_url: str) -> None:
    database = PostgresDatabase(Settings(postgres_url=SecretStr(postgres_url), **PATIENT))
    with pytest.raises(AttributeError, match="no_such_thing"):
        async with database.transaction() as db:
            db.no_such_thing  # type: ignore[attr-defined]  # noqa: B018
    await database.close()


async def test_a_migration_may_take_longer_than_a_transaction(
    database: PostgresDatabase, postgres_url: str
) -> None:
    """It waits here for another instance's, as it would for the rewrite of a large table."""
    other = PostgresDatabase(Settings(postgres_url=SecretStr(postgres_url), **PATIENT))
    late = text(
        "select exists (select from pg_stat_activity where datname = current_database() "
        "and wait_event = 'advisory' and xact_start < clock_timestamp() - make_interval(secs => :least_s))"
    )
    migrations: list[asyncio.Task[None]] = []

    async def waits_longer() -> bool:
        # A busy machine may take longer than the deadline to connect.
        if not migrations or migrations[-1].done():
            migrations.append(asyncio.create_task(database.migrate()))
        async with other.statement() as unit:
            return bool((await unit.connection.execute(late, {"least_s": DEADLINE_S + 0.2})).scalar_one())

    async with other.transaction() as db:
        await db.connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": LOCK})
        await eventually(waits_longer)
    *earlier, last = migrations
    await last
    await asyncio.gather(*earlier, return_exceptions=True)
    await other.close()
