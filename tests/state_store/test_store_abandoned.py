"""Sessions to which no viewer returns are ended; all others are not changed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import redis
from sqlalchemy import text

from tests.helpers.waiting import CompletedCalls, eventually
from tests.state_store.state_store_harness import Harness, Store
from turboserve import subjects
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import Playhead
from turboserve.ids import new_id
from turboserve.state_store.core import sessions as rules
from turboserve.state_store.database import PostgresDatabase
from turboserve.state_store.hot.probe import since_key
from turboserve.state_store.retention import Retention
from turboserve.state_store.settings import Settings

LIMIT_S = 3_600.0


@asynccontextmanager
async def store(
    settings: Settings, abandoned_after_s: float, redis_since: float | None = 1.0
) -> AsyncIterator[tuple[Harness, PostgresDatabase]]:
    """`redis_since` is the wall-clock time since which Redis has existed; None: it restarted empty."""
    with redis.Redis.from_url(settings.redis_url.get_secret_value()) as client:
        key = since_key(client.info("server")["run_id"])
        client.delete(key)
        if redis_since is not None:
            client.set(key, redis_since)
    changed = settings.model_copy(update={"abandoned_after_s": abandoned_after_s, "purge_s": 0.1})
    database = PostgresDatabase(settings)
    try:
        async with Harness.connected(settings) as api, Store.running(changed):
            yield api, database
    finally:
        await database.close()


async def long_ago(database: PostgresDatabase, record: SessionRecord) -> None:
    async with database.transaction() as db:
        shift = text("update sessions set updated_at = updated_at - :s where id = :id")
        await db.connection.execute(shift, {"s": LIMIT_S + 1.0, "id": record.id})


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> CompletedCalls:
    """Rounds of retention; each looks for abandoned sessions."""
    return CompletedCalls(monkeypatch, Retention, "purge")


async def test_only_sessions_suspended_and_unwatched_for_too_long_are_ended(
    settings: Settings, rounds: CompletedCalls
) -> None:
    async with store(settings, LIMIT_S) as (api, database):
        left, watched, fresh, playing = [await api.running(new_id("m")) for _ in range(4)]
        for record in (left, watched, fresh):
            await api.pause(record.id)
        seen = Playhead(session=watched.id, playhead_s=1.0, viewers=1)
        await api.bus.publish(subjects.PLAYHEAD, watched.id, seen)

        async def is_seen() -> bool:
            return (await api.get(watched.id)).playhead_s == 1.0

        await eventually(is_seen)
        for record in (left, watched, playing):
            await long_ago(database, record)

        async def ended() -> bool:
            return (await api.get(left.id)).phase is Phase.TERMINATED

        await eventually(ended)
        row = await api.get(left.id)
        assert (row.worker, row.reason) == (None, "no viewer for 3600 s")
        await api.until_events(
            left.id, "session.created", "session.placed", "session.suspended", "session.ended"
        )
        await rounds.more(3)
        phases = [(await api.get(record.id)).phase for record in (watched, fresh, playing)]
        assert phases == [Phase.SUSPENDED, Phase.SUSPENDED, Phase.ACTIVE]


async def test_no_session_ends_before_redis_has_recorded_viewers_for_long_enough(
    settings: Settings, rounds: CompletedCalls
) -> None:
    async with store(settings, LIMIT_S, redis_since=None) as (api, database):
        record = await api.running(new_id("m"))
        await api.pause(record.id)
        await long_ago(database, record)
        await rounds.more(3)
        assert (await api.get(record.id)).phase is Phase.SUSPENDED


async def test_without_a_limit_no_session_is_ended(settings: Settings, rounds: CompletedCalls) -> None:
    async with store(settings, 0.0) as (api, database):
        record = await api.running(new_id("m"))
        await api.pause(record.id)
        await long_ago(database, record)
        await rounds.more(3)
        assert (await api.get(record.id)).phase is Phase.SUSPENDED


@pytest.mark.parametrize("phase", [phase for phase in Phase if not phase.ended])
def test_who_came_back_in_the_meantime_stays(phase: Phase) -> None:
    fields = {"id": "s", "tenant": "t", "model": "m", "prompt": "p", "seed": 1, "version": 5, "epoch": 1}
    times = {"created_at": 1.0, "updated_at": 1.0}
    record = SessionRecord.model_validate({**fields, **times, "phase": phase})
    assert rules.abandon(record, 4, "left", 9.0) is None
    ended = rules.abandon(record, 5, "left", 9.0)
    assert (ended is not None) == (phase is Phase.SUSPENDED)
