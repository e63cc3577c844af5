"""The schema: made by migrations, by several instances at once, and the same as the tables in the code."""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from pydantic import SecretStr
from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import IntegrityError

from tests.state_store.state_store_harness import PATIENT
from turboserve.state_store.database import PostgresDatabase
from turboserve.state_store.migrate import SCRIPTS, SchemaTooNewError, config, migrate, newest
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


NEWER = """
import sqlalchemy as sa
from alembic import op
from turboserve.state_store.migrations.compatibility import needs_revision

revision, down_revision, branch_labels, depends_on = {revision!r}, {before!r}, None, None


def upgrade():
    {change}
"""


async def test_a_state_store_works_with_a_newer_schema_until_that_takes_something_away(
    database: PostgresDatabase, tmp_path: Path
) -> None:
    """After an update, a state store of the version before found no such revision and did not start."""
    await migrate(database.engine)
    for revision, before, change in (
        ("expand", newest(), 'op.add_column("cursors", sa.Column("later", sa.Text()))'),
        ("contract", "expand", f'op.drop_column("cursors", "later"); needs_revision("{newest()}")'),
        ("too_new", "contract", 'needs_revision("expand")'),
    ):
        (tmp_path / f"{revision}.py").write_text(
            NEWER.format(revision=revision, before=before, change=change)
        )

    def upgrade(connection: Connection, revision: str) -> None:
        newer = config(connection)
        newer.set_main_option("path_separator", "newline")
        newer.set_main_option("version_locations", f"{SCRIPTS}/versions\n{tmp_path}")
        command.upgrade(newer, revision)

    for revision in ("expand", "contract"):
        async with database.engine.begin() as connection:
            await connection.run_sync(upgrade, revision)
        await database.migrate()
        assert await database.ping()
    async with database.engine.begin() as connection:
        await connection.run_sync(upgrade, "too_new")
    with pytest.raises(SchemaTooNewError, match=r"revision too_new and needs .* knows revision expand"):
        await database.migrate()
    async with database.engine.begin() as connection:
        await connection.exec_driver_sql("drop schema public cascade")
        await connection.exec_driver_sql("create schema public")


def test_a_migration_that_takes_something_away_says_what_it_needs() -> None:
    """Migrations up to 0033 came before the rule."""
    for script in ScriptDirectory(SCRIPTS).walk_revisions():
        assert script.revision <= "0033" or not breaks_older_code(Path(script.path).read_text()), script.path
    expanding = """
    op.create_table("a", sa.Column("b", sa.Text(), nullable=False))
    op.add_column("a", sa.Column("c", sa.Text()))
    op.add_column("a", sa.Column("d", sa.Text(), nullable=False, server_default=sa.text("''")))
"""
    assert not breaks_older_code(f"def upgrade():{expanding}")
    for change in (
        'op.drop_column("a", "b")',
        'op.alter_column("a", "b", new_column_name="c")',
        'op.add_column("a", sa.Column("c", sa.Text(), nullable=False))',
        'op.create_check_constraint("name", "a", "b > 0")',
        'op.execute("alter table a rename to b")',
        'op.execute(f"drop table {name}")',
    ):
        assert breaks_older_code(f"def upgrade():{expanding}    {change}"), change
        assert not breaks_older_code(f"def upgrade():{expanding}    {change}\n    needs_revision('0040')")


def breaks_older_code(source: str) -> bool:
    """Return whether `upgrade` of a migration may break the state store before it, and does not say so."""
    [upgrade] = [one for one in ast.parse(source).body if getattr(one, "name", "") == "upgrade"]
    breaks = False
    for call in [node for node in ast.walk(upgrade) if isinstance(node, ast.Call)]:
        words = ast.unparse(call)
        function = ast.unparse(call.func)
        if function == "needs_revision":
            return False
        if function == "op.add_column":
            breaks |= "nullable=False" in words and "server_default" not in words
        elif function == "op.execute":
            breaks |= re.search(r"\b(alter|drop|rename|truncate)\b", words, re.IGNORECASE) is not None
        elif function.startswith("op."):
            breaks |= function not in ("op.create_table", "op.create_index", "op.drop_index")
    return breaks


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
