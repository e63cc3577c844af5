"""Sessions of a worker's failed step: which are failed, which are not, and in which transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.waiting import eventually
from tests.state_store.core_requests import FREE, active, begin_request, place_request
from tests.state_store.state_store_harness import Harness
from turboserve import subjects
from turboserve.bus import Entry
from turboserve.contracts.events import SessionEnded
from turboserve.contracts.requests import ListWorkers
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import Playhead, WorkerPhase
from turboserve.state_store.accounting import Accounting
from turboserve.state_store.core import session_migrations
from turboserve.state_store.core import sessions as rules
from turboserve.state_store.core.device_errors import PoisonLimits, count

SERVERS = ("real", "memory")
LIMITS = PoisonLimits(workers=3, window_s=100.0, chunks=4)


def elsewhere(record: SessionRecord, worker: str) -> SessionRecord:
    """Return the record as recovered by the scheduler."""
    return rules.place(record, place_request(record, worker), FREE, 5.0, 5.0).record


def died(record: SessionRecord, now: float, limits: PoisonLimits = LIMITS, among: int = 1) -> SessionRecord:
    counted = count(record, str(record.worker), among, limits, now)
    assert counted is not None
    return counted[0].record


def test_the_third_worker_in_a_row_is_one_too_many() -> None:
    record = active("w1")
    for errors in (1, 2):
        counted = count(record, str(record.worker), 5, LIMITS, 10.0 * errors)
        assert counted is not None
        change, decision = counted
        assert (change.record.device_errors, change.record.device_error_at) == (errors, 10.0 * errors)
        assert (change.record.version, change.events, change.decision) == (record.version, (), None)
        assert (decision.kind, decision.worker, decision.at) == ("device_error", record.worker, 10.0 * errors)
        assert decision.numbers == {"device_errors": errors, "limit": 3, "sessions_in_step": 5}
        record = elsewhere(change.record, f"w{errors + 1}")
        assert record.device_errors == errors
    counted = count(record, "w3", 1, LIMITS, 30.0)
    assert counted is not None
    change, _ = counted
    failed = change.record
    assert (failed.phase, failed.worker, failed.epoch) == (Phase.FAILED, None, record.epoch + 1)
    assert (
        failed.reason == "poisoned: 3 workers in a row failed with a device error in a step of this session"
    )
    assert [type(event) for event in change.events] == [SessionEnded]


def test_chunks_made_elsewhere_or_a_long_time_make_it_a_first_time_again() -> None:
    twice = elsewhere(died(elsewhere(died(active("w1"), 10.0), "w2"), 20.0), "w3")
    assert twice.device_errors == 2
    few, enough = (twice.model_copy(update={"next_chunk": twice.next_chunk + n}) for n in (3, 4))
    assert died(few, 30.0).phase is Phase.FAILED
    assert (died(enough, 30.0).device_errors, died(enough, 30.0).device_error_chunk) == (1, 4)
    assert died(twice, 120.0).phase is Phase.FAILED
    assert died(twice, 120.5).device_errors == 1


def test_only_the_workers_own_live_sessions_count() -> None:
    record = active("w1")
    assert count(record, "w2", 1, LIMITS, 1.0) is None
    ended = rules.end(record, "over", 2.0)
    assert ended is not None
    assert count(ended.record, "w1", 1, LIMITS, 3.0) is None


def test_a_limit_of_zero_fails_no_session() -> None:
    record = active("w1")
    for n in range(20):
        record = elsewhere(died(record, float(n), PoisonLimits(0, 100.0, 4)), f"w{n + 2}")
    assert (record.phase, record.device_errors) == (Phase.ACTIVE, 20)


def test_one_that_fails_while_it_migrates_migrates_no_further() -> None:
    record = elsewhere(died(elsewhere(died(active("w1"), 10.0), "w2"), 20.0), "w3")
    migrating = session_migrations.begin(record, begin_request(record, "w4"), FREE, 25.0, 5.0).record
    failed = died(migrating, 30.0)
    assert (failed.phase, failed.target, failed.migration) == (Phase.FAILED, None, None)


@given(
    st.lists(
        st.tuples(st.sets(st.integers(1, 5)), st.lists(st.integers(0, 5), min_size=5, max_size=5)),
        max_size=12,
    ),
    st.integers(1, 5),
)
@settings(max_examples=200, deadline=None)
def test_no_batch_mate_is_failed_before_the_poison(
    steps: list[tuple[set[int], list[int]]], limit: int
) -> None:
    """Session 0 breaks every step that it is in, with any other sessions.

    In between, the others make chunks or not. A session that made enough of them starts again from one.
    """
    limits = PoisonLimits(limit, 1e9, 4)
    rows = {n: active("w0").model_copy(update={"id": f"s{n}"}) for n in range(6)}
    for turn, (mates, chunks) in enumerate(steps):
        before = dict(rows)
        for n in {0, *mates}:
            if not rows[n].phase.ended:
                rows[n] = died(rows[n], float(turn), limits, 1 + len(mates))
        assert all(row.device_errors <= rows[0].device_errors for row in rows.values())
        for n in mates:
            rested = before[n].next_chunk - before[n].device_error_chunk >= limits.chunks
            if rested and not before[n].phase.ended:
                assert rows[n].device_errors == 1
        if rows[0].phase.ended:
            assert turn + 1 == limit
            return
        assert all(not row.phase.ended for row in rows.values())
        for n, made in enumerate(chunks, 1):
            rows[n] = rows[n].model_copy(update={"next_chunk": rows[n].next_chunk + made})
        rows = {n: elsewhere(row, f"w{turn + 1}") for n, row in rows.items()}


@given(st.lists(st.permutations(range(6)), min_size=12, max_size=12), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_where_suspects_compute_alone_no_mate_is_failed_at_all(orders: list[list[int]], width: int) -> None:
    """Workers run a session of a failing step in steps of its own, until it has made chunks."""
    limits = PoisonLimits(3, 1e9, 4)
    rows = {n: active("w0").model_copy(update={"id": f"s{n}"}) for n in range(6)}
    deaths = 0
    for turn, order in enumerate(orders):
        suspects = [n for n in order if rows[n].device_errors]
        others = [n for n in order if not rows[n].device_errors]
        queue = [[n] for n in suspects] + [others[n : n + width] for n in range(0, len(others), width)]
        for step in queue:
            if 0 in step:
                deaths += 1
                for n in step:
                    rows[n] = died(rows[n], float(turn), limits, len(step))
                break
            for n in step:
                rows[n] = rows[n].model_copy(update={"next_chunk": rows[n].next_chunk + 1})
        if rows[0].phase.ended:
            break
        rows = {n: elsewhere(row, f"w{turn + 1}") for n, row in rows.items()}
    assert (rows[0].phase, deaths) == (Phase.FAILED, 3)
    assert all(rows[n].device_errors <= 1 and not rows[n].phase.ended for n in range(1, 6))


async def leave(api: Harness, worker: str, *named: str) -> None:
    await api.renew(worker, "poison", phase=WorkerPhase.GONE, device_error_sessions=named)


async def test_a_goodbye_after_a_device_error_counts_for_the_sessions_of_the_last_step(api: Harness) -> None:
    workers = [await api.worker("poison") for _ in range(4)]
    poison, mate, other = [await api.place(await api.create("poison"), workers[0]) for _ in range(3)]
    stranger = await api.place(await api.create("poison"), workers[3])

    async def heard() -> bool:
        return (await api.get(poison.id)).playhead_s == 1.5

    for turn, worker in enumerate(workers[:3]):
        named = [poison.id, "ses_never", stranger.id] + [mate.id] * (turn == 0)
        await leave(api, worker, *named)
        # Repeated, the report changes nothing: the worker is gone already.
        await leave(api, worker, *named)
        if turn < 2:
            row = await api.get(poison.id)
            assert (row.phase, row.device_errors, row.worker) == (Phase.ACTIVE, turn + 1, worker)
            poison = await api.place(row, workers[turn + 1], kind="recover")
        if turn == 1:
            seen = Playhead(session=poison.id, playhead_s=1.5, viewers=1)
            await api.bus.publish(subjects.PLAYHEAD, poison.id, seen)
            await eventually(heard)
    failed = await api.get(poison.id)
    # No chunk was counted after the last report of its viewer.
    assert (failed.phase, failed.worker, failed.playhead_s) == (Phase.FAILED, None, 1.5)
    assert str(failed.reason).startswith("poisoned: 3 workers")
    await api.until_events(poison.id, "session.created", *["session.placed"] * 3, "session.ended")
    assert (await api.get(mate.id)).device_errors == 1
    assert (await api.get(other.id)).device_errors == 0
    assert (await api.get(stranger.id)).device_errors == 0
    page = await api.bus.call(subjects.LIST_WORKERS, ListWorkers())
    assert {row.id for row in page.workers} >= {workers[3]}
    assert not {row.id for row in page.workers} & set(workers[:3])


async def test_a_step_of_chunks_counted_in_between_clears_a_session(api: Harness) -> None:
    first, second = await api.worker("poison"), await api.worker("poison")
    record = await api.place(await api.create("poison"), first)
    await leave(api, first, record.id)
    record = await api.place(await api.get(record.id), second, kind="recover")
    assert record.device_errors == 1
    for index in range(8):
        await api.chunk(record, index)

    async def counted() -> bool:
        return (await api.get(record.id)).next_chunk == 8

    await eventually(counted)
    await leave(api, second, record.id)
    row = await api.get(record.id)
    assert (row.device_errors, row.device_error_chunk) == (1, 8)


async def test_chunks_in_the_log_clear_a_session_whose_row_lags_behind(
    api: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A healthy session failed as poisoned: no instance counted chunks between its workers' device errors."""
    counting = asyncio.Event()
    counts = Accounting.count

    async def late(accounting: Accounting, entries: Sequence[Entry], position: int) -> None:
        await counting.wait()
        await counts(accounting, entries, position)

    monkeypatch.setattr(Accounting, "count", late)
    workers = [await api.worker("poison") for _ in range(3)]
    record = await api.place(await api.create("poison"), workers[0])
    for turn, worker in enumerate(workers):
        for index in range(8 * turn, 8 * turn + 8):
            await api.chunk(record, index)
        await leave(api, worker, record.id)
        row = await api.get(record.id)
        assert (row.phase, row.next_chunk) == (Phase.ACTIVE, 0)
        assert (row.device_errors, row.device_error_chunk) == (1, 8 * turn + 8)
        if turn < 2:
            record = await api.place(row, workers[turn + 1], kind="recover")
    counting.set()


async def test_two_that_leave_at_once_with_each_others_sessions_do_not_wait_for_each_other(
    api: Harness,
) -> None:
    for _ in range(5):
        one, two = [await api.worker("poison", capacity=40) for _ in range(2)]
        rows = [
            await api.place(await api.create("poison"), worker) for worker in (one, two) for _ in range(2)
        ]
        for row, target in ((rows[0], two), (rows[2], one)):
            await api.begin_migration(await api.get(row.id), target)
        await asyncio.gather(leave(api, one, rows[0].id, rows[1].id), leave(api, two, rows[2].id, rows[3].id))
        assert [(await api.get(row.id)).device_errors for row in rows] == [1] * 4
