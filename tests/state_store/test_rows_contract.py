"""Every repository method returns the same in memory as in Postgres: the same random calls on both."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, is_dataclass
from typing import Any

import pytest
from pydantic import BaseModel

from tests.state_store.database_servers import DatabaseServer
from tests.state_store.random_rows import RandomRows
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import WorkerRecord
from turboserve.state_store.ports.database import Database
from turboserve.state_store.ports.records import SESSION_FIELDS, WORKER_FIELDS
from turboserve.state_store.tables import sessions, workers

SEEDS = 8
TRANSACTIONS = 60


class RollBackError(Exception):
    """Raised to end a transaction without its commit."""


def plain(value: Any) -> Any:
    """Return the value without classes, with floats that a sum in another order does not change."""
    if isinstance(value, BaseModel):
        return {name: plain(getattr(value, name)) for name in type(value).model_fields}
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return round(value, 6) if isinstance(value, float) else value


async def run_scenario(database: Database, seed: int) -> list[tuple[str, Any]]:
    """Run the seed's calls, up to four per transaction. Returns the name and result of each."""
    draw, log = RandomRows(seed), []
    for _ in range(TRANSACTIONS):
        calls = [draw.call() for _ in range(draw.random.randrange(1, 5))]
        rolls_back = draw.random.random() < 0.15
        with suppress(RollBackError):
            try:
                async with database.transaction(durable=draw.random.random() < 0.5) as unit:
                    for name, call in calls:
                        log.append((name, plain(await call(unit))))
                    if rolls_back:
                        raise RollBackError
            except TurboServeError as error:
                log.append(("refused", type(error).__name__))
    return log


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_the_same_calls_give_the_same(postgres_url: str, seed: int) -> None:
    async with (
        DatabaseServer.running("postgres", postgres_url) as real,
        DatabaseServer.running("memory", None) as memory,
    ):
        expected = await run_scenario(real.connect(), seed)
        found = await run_scenario(memory.connect(), seed)
    for number, (wanted, given) in enumerate(zip(expected, found, strict=False)):
        assert given == wanted, f"call {number}"
    assert len(found) == len(expected)


def test_the_calls_reach_every_method() -> None:
    """A method that is added to a port needs a call here."""
    from inspect import getsource

    from turboserve.state_store.ports import deployment, keys, recordings
    from turboserve.state_store.ports import sessions as ports

    repositories = {
        name: protocol
        for module in (deployment, keys, recordings, ports)
        for name, protocol in vars(module).items()
        if isinstance(protocol, type) and name.endswith("Repository")
    }
    assert {"SessionRepository", "WorkerRepository", "OutboxRepository"} <= repositories.keys()
    source = getsource(RandomRows)
    methods = {
        (name, method)
        for name, protocol in repositories.items()
        for method in vars(protocol)
        if not method.startswith("_")
    }
    assert {(name, method) for name, method in methods if f".{method}(" not in source} == set()


def test_the_fields_of_records_are_the_tables_columns() -> None:
    assert set(SESSION_FIELDS) == {name for name in SessionRecord.model_fields if name in sessions.c}
    assert set(WORKER_FIELDS) == {name for name in WorkerRecord.model_fields if name in workers.c}
