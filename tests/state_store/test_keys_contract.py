"""Transactions on API keys: the same in Postgres and in the database in memory."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from tests.state_store.database_servers import DatabaseServer
from turboserve.contracts.errors import ConflictError
from turboserve.contracts.keys import KeyRecord
from turboserve.state_store.ports.database import Database
from turboserve.state_store.ports.records import KeyEdition

SALTS = tuple(f"{number:032x}" for number in range(1, 9))


def key(name: str = "k1", **fields: object) -> KeyRecord:
    return KeyRecord.model_validate(
        {"id": name, "tenant": "acme", "scopes": ("admin",), "created_at": 1.0, **fields}
    )


def digest(number: int) -> str:
    return f"{number:064x}"


async def insert(database: Database, record: KeyRecord, number: int) -> None:
    async with database.transaction() as db:
        edition = await db.keys.lock(SALTS[0])
        await db.keys.insert(record, digest(number))
        await db.keys.write_version(edition.version + 1)


async def last_used(database: Database, name: str = "k1") -> float | None:
    async with database.statement() as db:
        found = await db.keys.get(name)
    assert found is not None
    return found.last_used_at


async def test_of_many_salts_the_first_stays(server: DatabaseServer, database: Database) -> None:
    async def make(salt: str) -> KeyEdition:
        async with server.connect().transaction() as db:
            return await db.keys.lock(salt)

    async with database.statement() as db:
        assert await db.keys.edition() is None
    made = await asyncio.gather(*(make(salt) for salt in SALTS))
    assert len(set(made)) == 1
    async with database.statement() as db:
        assert await db.keys.edition() == made[0]


async def test_changes_of_the_keys_take_turns(server: DatabaseServer, database: Database) -> None:
    await asyncio.gather(*(insert(server.connect(), key(f"k{n}"), n) for n in range(6)))
    async with database.statement() as db:
        edition = await db.keys.edition()
        assert edition is not None
        assert edition.version == 6
        assert {one.id for one in await db.keys.valid(2.0)} == {f"k{n}" for n in range(6)}


async def test_a_key_that_was_rolled_back_does_not_exist(database: Database) -> None:
    with suppress(ZeroDivisionError):
        async with database.transaction() as db:
            await db.keys.lock(SALTS[0])
            await db.keys.insert(key(), digest(1))
            await db.keys.write_version(1)
            raise ZeroDivisionError
    async with database.statement() as db:
        assert await db.keys.edition() is None
    async with database.statement() as db:
        assert await db.keys.get("k1") is None


@pytest.mark.parametrize(("name", "number"), [("k1", 2), ("k2", 1)])
async def test_ids_and_hashes_are_unique(database: Database, name: str, number: int) -> None:
    await insert(database, key(), 1)
    with pytest.raises(ConflictError):
        await insert(database, key(name), number)
    async with database.statement() as db:
        assert [one.hash for one in await db.keys.valid(2.0)] == [digest(1)]


async def test_uses_of_two_gateways_do_not_wait_for_each_other(
    server: DatabaseServer, database: Database
) -> None:
    names = [f"k{n}" for n in range(8)]
    for number, name in enumerate(names):
        await insert(database, key(name), number)

    async def note(order: list[str], at: float) -> None:
        async with server.connect().transaction(durable=False) as db:
            await db.keys.note_uses(dict.fromkeys(order, at), 0.0)

    await asyncio.gather(*(note(names[::step], 10.0 + n) for n in range(6) for step in (1, -1)))
    assert {await last_used(database, name) for name in names} == {15.0}


async def test_a_use_is_written_once_in_an_interval_and_never_goes_back(database: Database) -> None:
    await insert(database, key(), 1)
    for at, written in ((100.0, 100.0), (159.0, 100.0), (160.0, 160.0), (90.0, 160.0)):
        async with database.transaction(durable=False) as db:
            await db.keys.note_uses({"k1": at, "unknown": at}, 60.0)
        assert await last_used(database) == written


async def test_the_first_revocation_counts(database: Database) -> None:
    await insert(database, key(), 1)
    for at in (5.0, 6.0):
        async with database.transaction() as db:
            await db.keys.revoke("k1", at)
    async with database.statement() as db:
        found = await db.keys.get("k1")
    assert found is not None
    assert found.revoked_at == 5.0
    async with database.statement() as db:
        assert await db.keys.valid(2.0) == []
