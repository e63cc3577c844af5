"""The schema: made by migrations, by several instances at once, and the same as the tables in the code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from pydantic import SecretStr
from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import IntegrityError

from tests.state_store.state_store_harness import PATIENT
from turboserve.state_store.database import PostgresDatabase
from turboserve.state_store.migrate import config, migrate
from turboserve.state_store.settings import Settings
from turboserve.state_store.tables import metadata


@pytest.fixture
async def database(empty_postgres_url: str) -> AsyncIterator[PostgresDatabase]:
    # On a busy machine the comparison takes longer than a transaction of the store may.
    database = PostgresDatabase(Settings(postgres_url=SecretStr(empty_postgres_url), **PATIENT))
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
        await connection.run_sync(lambda sync: command.downgrade(config(sync), "0030"))
        await connection.exec_driver_sql(
            "insert into usage_days (day, tenant, key, gpu_seconds, money, chunks, viewer_seconds) "
            "values (3, 't', 'k', 1.5, 2, 4, 8)"
        )
        await connection.run_sync(lambda sync: command.upgrade(config(sync), "head"))
        [row] = (await connection.exec_driver_sql("select * from usage_hours")).mappings()
        # What was counted before stands in the first hour of its day, of no model.
        assert (row["hour"], row["tenant"], row["key"], row["model"], row["chunks"]) == (72, "t", "k", "", 4)
        await connection.run_sync(lambda sync: command.downgrade(config(sync), "base"))
    async with database.engine.connect() as connection:
        names = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
        assert names == ["alembic_version"]
    await migrate(database.engine)
    await migrate(database.engine)
    async with database.engine.connect() as connection:
        names = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
        assert set(names) == {*metadata.tables, "alembic_version"}


ROWS_BEFORE = """
insert into sessions (
    id, tenant, model, first_prompt, prompt, seed, metadata, phase, activity, version, epoch, worker, target,
    move, migration_key, next_chunk, control_seq, applied_control_seq, playhead_s, created_at, updated_at
) values (
    's', 't', 'm', 'p', 'p', 1, '{}', 'migrating', 'watching', 5, 1, 'a', 'b', 5, 'ab', 3, 0, 0, 0, 1, 1
);
insert into decisions (session, version, epoch, worker, kind, reason, numbers, at) values
    ('s', 1, 1, 'a', 'place', 'free', '{"move": 0.5, "latency_s": 0.25}', 1),
    ('s', 4, 1, 'b', 'moved', 'verified', '{"move": 4, "bytes_moved": 8, "moves_together": 2}', 2);
insert into workers (
    id, model, phase, capacity, device, pool_slot, chunk_latency_s, started_at, renewed_at
) values ('a', 'm', 'ready', 2, 'cpu', 'local-0', '[]', 1, 1);
insert into rentals (
    worker, pool, slot, kind, gpus, price_hour, started_at, seen_at, ready, paid_s, starting_s, estimated_s,
    accrued_s, source_s, meter, meter_s
) values ('a', 'local', 'local-0', 'h100', 1, 1, 1, 1, true, 1, 0, 0, 0, 1, 'x', 1);
"""
INSERT_EVENT = text("insert into outbox (event_id, subject, body, created_at) values (:id, 'e', :body, 1)")
EVENTS_BEFORE = {
    "s:4:moved": {
        "type": "session.moved",
        "record": {"id": "s", "move": None, "seed": 2**53 - 1},
        "at": 1.25,
    },
    "s:6:move_abandoned": {
        "type": "session.move_abandoned",
        "record": {"id": "s", "move": 5},
        "reason": 'session.moved "é"',
    },
    "w:1:joined": {"type": "worker.joined", "worker": {"id": "a", "pool_slot": "local-0"}},
    "s:1:prompt": {
        "type": "prompt.accepted",
        "record": {"id": "s", "move": None},
        "event_id": "evt_1",
        "prompt": "move: session.moved",
    },
}


async def test_rows_of_the_time_before_0012_get_the_words_of_today_and_lose_them_again(
    database: PostgresDatabase,
) -> None:
    await migrate(database.engine)
    async with database.engine.begin() as connection:
        await connection.run_sync(lambda sync: command.downgrade(config(sync), "base"))
        await connection.run_sync(lambda sync: command.upgrade(config(sync), "0011"))
        for statement in ROWS_BEFORE.strip().rstrip(";").split(";\n"):
            await connection.exec_driver_sql(statement)
        for event_id, body in EVENTS_BEFORE.items():
            await connection.execute(INSERT_EVENT, {"id": event_id, "body": json.dumps(body)})
    before = await rows(database)
    await migrate(database.engine)
    after = await rows(database)

    [session], [worker], [rental] = after["sessions"], after["workers"], after["rentals"]
    assert (session["migration"], session["target"], "move" in session) == (5, "b", False)
    assert (worker["pool_member"], rental["member"]) == ("local-0", "local-0")
    assert [(one["kind"], one["numbers"]) for one in after["decisions"]] == [
        ("place", {"migration": 0.5, "latency_s": 0.25}),
        ("migrated", {"migration": 4, "bytes_copied": 8, "migrations_together": 2}),
    ]
    assert {one["event_id"]: json.loads(str(one["body"])) for one in after["outbox"]} == {
        "s:4:moved": {
            "schema_version": "1.0",
            "type": "session.migrated",
            "record": {"id": "s", "migration": None, "seed": 2**53 - 1},
            "at": 1.25,
        },
        "s:6:move_abandoned": {
            "schema_version": "1.0",
            "type": "session.migration_abandoned",
            "record": {"id": "s", "migration": 5},
            "reason": 'session.moved "é"',
        },
        "w:1:joined": {
            "schema_version": "1.0",
            "type": "worker.joined",
            "worker": {"id": "a", "pool_member": "local-0"},
        },
        "s:1:prompt": {
            "schema_version": "1.0",
            "type": "prompt.accepted",
            "record": {"id": "s", "migration": None},
            "prompt_id": "evt_1",
            "prompt": "move: session.moved",
        },
    }
    with pytest.raises(IntegrityError, match="target_with_migration"):
        async with database.engine.begin() as connection:
            await connection.exec_driver_sql("update sessions set migration = null")

    async with database.engine.begin() as connection:
        await connection.run_sync(lambda sync: command.downgrade(config(sync), "0011"))
    assert await rows(database) == before
    async with database.engine.begin() as connection:
        await connection.run_sync(lambda sync: command.downgrade(config(sync), "base"))
    await migrate(database.engine)


async def rows(database: PostgresDatabase) -> dict[str, list[dict[str, object]]]:
    """Return the rows of the tables with old words. The bodies of events are normalized JSON."""
    found: dict[str, list[dict[str, object]]] = {}
    async with database.engine.connect() as connection:
        for name in ("sessions", "decisions", "workers", "rentals", "outbox"):
            result = await connection.execute(text(f"select * from {name} order by 1"))
            found[name] = [dict(row) for row in result.mappings()]
    for event in found["outbox"]:
        event["body"] = json.dumps(json.loads(str(event["body"])), sort_keys=True)
    return found


def test_the_address_is_taken_as_people_write_it() -> None:
    for url in ("postgresql://u:p@h:5/d", "postgres://u:p@h:5/d", "postgresql+asyncpg://u:p@h:5/d"):
        assert Settings(postgres_url=SecretStr(url)).sqlalchemy_url == "postgresql+asyncpg://u:p@h:5/d"
