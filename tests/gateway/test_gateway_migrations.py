"""A session is migrated to another worker while a client watches: over HTTP, on a real pool."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.helpers.pool_harness import DRAWN_WORKER, Pool

NUMBERS = itertools.count()


class MigratingWorkers:
    """Workers of a model that no other test uses."""

    def __init__(self, pool: Pool, api: httpx.AsyncClient) -> None:
        self.model = f"migrations-{next(NUMBERS)}"
        self._pool, self._api = pool, api
        self.started: list[str] = []

    async def listed(self) -> dict[str, dict[str, Any]]:
        workers = (await self._api.get("/v1/workers")).json()["workers"]
        return {one["id"]: one for one in workers if one["model"] == self.model}

    async def start(self, migrations: str = "yes", capacity: int = 2) -> str:
        """Start one more worker. Returns the id of the newest once all have joined."""
        self.started.append(f"{self.model}-{len(self.started)}")
        self._pool.start(
            self.started[-1],
            str(DRAWN_WORKER),
            {
                "DRAWN_MODEL": self.model,
                "DRAWN_MIGRATIONS": migrations,
                "DRAWN_CAPACITY": str(capacity),
            },
            user="worker",
        )
        async with asyncio.timeout(120):
            while len(found := await self.listed()) < len(self.started):
                await asyncio.sleep(0.1)
        return str(max(found, key=lambda name: found[name]["started_at"]))


@pytest.fixture
async def migrating_workers(pool: Pool, api: httpx.AsyncClient) -> AsyncIterator[MigratingWorkers]:
    migrating_workers = MigratingWorkers(pool, api)
    yield migrating_workers
    for name in migrating_workers.started:
        pool.stop(name)


async def placed(api: httpx.AsyncClient, session: dict[str, Any]) -> dict[str, Any]:
    async with asyncio.timeout(120):
        while True:
            row: dict[str, Any] = (await api.get(session["links"]["self"])).json()
            if row["worker"] is not None and row["phase"] == "active":
                return row
            await asyncio.sleep(0.1)


async def migrate(api: httpx.AsyncClient, session: dict[str, Any], worker: str | None = None) -> Any:
    """Request a migration until it begins. The scheduler may learn of the other worker a moment late."""
    async with asyncio.timeout(120):
        while True:
            answer = await settled(api, session["links"]["migrate"], {"worker": worker} if worker else None)
            if answer.status_code not in (404, 429):
                return answer
            await asyncio.sleep(0.1)


async def settled(api: httpx.AsyncClient, path: str, body: Any = None) -> httpx.Response:
    """Return the first answer that needs no retry.

    The row may just have changed, or the lead of the schedulers may be changing.
    """
    async with asyncio.timeout(120):
        while True:
            answer = await api.post(path, json=body)
            if answer.status_code not in (409, 503, 504) or "retry_after_s" not in answer.json():
                return answer
            await asyncio.sleep(answer.json()["retry_after_s"])


async def other_than(migrating_workers: MigratingWorkers, worker: str) -> str:
    [other] = set(await migrating_workers.listed()) - {worker}
    return other


async def refused(api: httpx.AsyncClient, path: str, body: Any = None) -> tuple[int, str]:
    problem = (await settled(api, path, body)).json()
    return problem["status"], problem["code"]


async def test_a_session_migrates_while_it_is_watched(
    api: Any, start: Any, watch: Any, migrating_workers: MigratingWorkers
) -> None:
    await asyncio.gather(migrating_workers.start(), migrating_workers.start())
    session = await start("a red circle", model=migrating_workers.model)
    viewer = await watch(session["id"])
    await viewer.chunks(3)
    first = (await placed(api, session))["worker"]
    second = await other_than(migrating_workers, first)
    answer = await migrate(api, session, second)
    assert answer.status_code == 202, answer.text
    begun = answer.json()
    assert (begun["session"], begun["worker"], begun["target"]) == (session["id"], first, second)
    assert (begun["epoch"], begun["decision"]["kind"]) == (1, "migrate")
    assert "operator" in begun["decision"]["reason"]

    migrating = await viewer.until("session.migrating")
    assert (migrating["worker"], migrating["target"], migrating["phase"]) == (first, second, "migrating")
    migrated = await viewer.until("session.migrated")
    assert (migrated["worker"], migrated["previous_worker"], migrated["epoch"]) == (second, first, 2)
    assert "target" not in migrated
    await viewer.until("chunk", worker=second)
    await viewer.chunks(2)
    chunks = [message for message in viewer.seen if message["type"] == "chunk"]
    assert [chunk["index"] for chunk in chunks] == list(range(len(chunks)))
    owners = [(chunk["worker"], chunk["epoch"]) for chunk in chunks]
    assert list(dict.fromkeys(owners)) == [(first, 1), (second, 2)]

    row = (await api.get(session["links"]["self"])).json()
    assert (row["worker"], row["target"], row["epoch"]) == (second, None, 2)
    decisions = (await api.get(session["links"]["decisions"])).json()["decisions"]
    assert [one["kind"] for one in decisions] == ["place", "migrate", "migrated"]
    assert decisions[2]["numbers"]["bytes_copied"] == 8


async def test_without_a_name_the_best_of_the_others_is_taken(
    api: Any, start: Any, migrating_workers: MigratingWorkers
) -> None:
    await asyncio.gather(migrating_workers.start(), migrating_workers.start())
    session = await start(model=migrating_workers.model)
    first = (await placed(api, session))["worker"]
    second = await other_than(migrating_workers, first)
    answer = await migrate(api, session)
    assert (answer.status_code, answer.json()["target"]) == (202, second)
    async with asyncio.timeout(120):
        while (await api.get(session["links"]["self"])).json()["worker"] != second:
            await asyncio.sleep(0.1)
    workers = await migrating_workers.listed()
    assert [workers[name]["sessions"] for name in (first, second)] == [0, 1]
    assert workers[second]["host"] == "drawn"


async def test_a_migration_that_fails_leaves_the_session_where_it_is(
    api: Any, start: Any, watch: Any, migrating_workers: MigratingWorkers
) -> None:
    await asyncio.gather(migrating_workers.start("fail"), migrating_workers.start("fail"))
    session = await start("a red circle", model=migrating_workers.model)
    viewer = await watch(session["id"])
    first = (await placed(api, session))["worker"]
    second = await other_than(migrating_workers, first)
    assert (await migrate(api, session, second)).status_code == 202
    stays = await viewer.until("session.migration_abandoned")
    assert (stays["worker"], stays["target"], stays["reason"]) == (first, second, "told to fail")
    assert (stays["phase"], stays["epoch"]) == ("active", 1)
    before = max((m["index"] for m in viewer.seen if m["type"] == "chunk"), default=-1)
    await viewer.until("chunk", index=before + 2)
    decisions = (await api.get(session["links"]["decisions"])).json()["decisions"]
    assert [one["kind"] for one in decisions] == ["place", "migrate", "stay"]


async def test_what_cannot_be_migrated_is_said_in_problems(
    api: Any, start: Any, watch: Any, migrating_workers: MigratingWorkers
) -> None:
    first = await migrating_workers.start(capacity=1)
    session = await start(model=migrating_workers.model)
    watching = asyncio.create_task((await watch(session["id"])).closed())
    await placed(api, session)
    links, path = session["links"], session["links"]["migrate"]
    assert await refused(api, path) == (429, "no_capacity")
    assert await refused(api, path, {"worker": first}) == (422, "invalid_input")
    assert await refused(api, path, {"worker": "wk_never"}) == (404, "not_found")
    assert await refused(api, path, {"worker": "no good"}) == (422, "invalid_input")
    assert await refused(api, path, {"to": first}) == (422, "invalid_input")
    assert await refused(api, "/v1/sessions/ses_never/migrate") == (404, "session_not_found")
    silent = await migrating_workers.start("never", capacity=1)
    assert (await migrate(api, session, silent)).status_code == 202
    assert await refused(api, path, {"worker": silent}) == (409, "transition_not_allowed")
    workers = await migrating_workers.listed()
    assert (workers[silent]["sessions"], workers[silent]["incoming"]) == (0, 1)
    # A pause ends the migration at once; an ended session cannot be migrated at all.
    assert (await api.post(links["pause"])).json()["target"] is None
    assert (await migrating_workers.listed())[silent]["incoming"] == 0
    await api.delete(links["self"])
    assert await watching == 1000
    code = await refused(api, path, {"worker": silent})
    assert code in ((409, "transition_not_allowed"), (404, "session_not_found"))
