"""The rows of the pools' history, in Postgres and in memory."""

from __future__ import annotations

import itertools

import pytest

from turboserve.contracts.errors import InvalidInputError
from turboserve.contracts.pool_history import (
    ListLanes,
    ListMigrations,
    ListPoolDecisions,
    ListWaiting,
    PoolDecision,
    PoolRange,
    PoolSample,
)
from turboserve.contracts.sessions import Decision, Phase, SessionRecord
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.state_store.core.change import Change
from turboserve.state_store.core.chunk_history import ChunkRow
from turboserve.state_store.core.pool_history import ChunkCount
from turboserve.state_store.core.rentals import RentalRow
from turboserve.state_store.ports.database import Database
from turboserve.state_store.ports.pool_history import HistoryTable
from turboserve.state_store.service import pool_history as service
from turboserve.state_store.settings import Settings

T0 = 1_700_000_000
ALL = PoolRange(pool="p", since=T0, until=T0 + 600)


def rental(worker: str, pool: str | None, **more: object) -> RentalRow:
    values = dict.fromkeys(("paid_s", "starting_s", "estimated_s", "accrued_s", "source_s", "meter_s"), 0.0)
    fields = {"worker": worker, "pool": pool, "member": None, "kind": "test", "gpus": 2.0, "meter": "m"}
    times = {"price_hour": 3_600.0, "started_at": T0, "seen_at": T0, "ended_at": None, "source": None}
    return RentalRow(**{**values, **fields, **times, "ready": True, **more})  # type: ignore[arg-type]


def worker(name: str, started_at: float = T0) -> WorkerRecord:
    return WorkerRecord(
        id=name,
        model="m",
        phase=WorkerPhase.READY,
        capacity=5,
        pool_member=f"{name}-0",
        started_at=started_at,
        renewed_at=T0,
    )


async def test_one_answer_makes_bars_of_a_limited_number_of_chunks(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "CHUNKS_LIMIT", 5)
    names = ("wk_1", "wk_2", "wk_3")
    async with database.transaction() as db:
        for name in names:
            await db.workers.insert(worker(name))
            body = "".join(f"\ns/{index}/{index}:1:4" for index in range(3))
            await db.pool_history.add_chunks([ChunkRow(name, T0, 3, 0, 0, body)])
    histories = service.PoolHistories(database, Settings())
    whole = {"pool": "p", "managed": False, "since": T0, "until": T0 + 600.0}
    found: list[str] = []
    after: str | None = None
    for _ in names:
        page = await histories.lanes(ListLanes.model_validate(whole | {"after": after}))
        [lane] = page.workers
        assert sum(bar.chunks for one in lane.sessions for bar in one.bars) == 3
        found.append(lane.worker)
        after = page.next
    assert (found, after) == (list(names), None)
    async with database.transaction() as db:
        await db.pool_history.add_chunks([ChunkRow("wk_2", T0 + 10, 3, 0, 0, "\ns/3/1:1:4;2:1:4;3:1:4")])
    with pytest.raises(InvalidInputError, match="wk_2 made 6 chunks") as refused:
        await histories.lanes(ListLanes.model_validate(whole | {"after": "wk_1"}))
    assert (refused.value.field, refused.value.limit) == ("from", 5)


async def test_a_step_keeps_the_last_size_and_the_greatest_demand(database: Database) -> None:
    async with database.transaction() as db:
        first = PoolSample(ready=3, target=3, capacity=15, required=9, rho_max=0.9)
        await db.pool_history.add_sample("p", T0, first)
        # The scheduler was away: nothing is known of the load.
        await db.pool_history.add_sample("p", T0, PoolSample(ready=2, target=4))
        await db.pool_history.add_sample("p", T0, PoolSample(ready=2, target=4, capacity=10, required=4))
        await db.pool_history.add_sample("p", T0 + 10, PoolSample(ready=1))
        await db.pool_history.add_sample("other", T0, PoolSample(ready=7))
        found = await db.pool_history.samples(ALL)
    merged = PoolSample(ready=2, target=4, capacity=10, required=9, rho_max=0.9)
    assert found == [(T0, merged), (T0 + 10, PoolSample(ready=1))]


async def test_a_repeated_report_adds_no_second_decision(database: Database) -> None:
    def decision(number: int) -> PoolDecision:
        return PoolDecision(
            number=number,
            at=T0 + number,
            kind="scaling",
            action="out",
            reason="load",
            numbers={"required": 9},
        )

    async with database.transaction() as db:
        await db.pool_history.add_decisions("p", "asc_1", [decision(1), decision(2)])
        await db.pool_history.add_decisions("p", "asc_1", [decision(1), decision(2), decision(3)])
        # Another process counts from the beginning.
        await db.pool_history.add_decisions("p", "asc_2", [decision(1)])
        page = await db.pool_history.decisions(ListPoolDecisions(**ALL.model_dump(), limit=3))
        rest = await db.pool_history.decisions(
            ListPoolDecisions(**ALL.model_dump(), limit=3, after=page.next)
        )
    assert [one.number for one in page.decisions] == [1, 3, 2]
    assert [one.number for one in rest.decisions] == [1]
    assert rest.next is None
    assert PoolDecision.model_validate(page.decisions[1].model_dump()) == decision(3)
    assert len({one.id for one in (*page.decisions, *rest.decisions)}) == 4


async def test_chunks_of_one_step_add_up_and_belong_to_the_pool(database: Database) -> None:
    async with database.transaction() as db:
        await db.rentals.put([rental("wk_1", "p"), rental("wk_2", "p"), rental("wk_3", None)])
        for name in ("wk_1", "wk_2", "wk_3", "wk_4"):
            await db.workers.insert(worker(name))
        await db.workers.write(worker("wk_4"), gone_at=T0 - 1.0)
        await db.workers.insert(worker("wk_late", T0 + 601))
        line = "\nses_1/0/0:1:0"
        await db.pool_history.add_chunks([ChunkRow("wk_1", T0, 2, 1, 0, line)])
        await db.pool_history.add_chunks(
            [ChunkRow("wk_1", T0, 1, 0, 1, "\nses_1/1/5:1:1"), ChunkRow("wk_2", T0, 4, 0, 0, line)]
        )
        await db.pool_history.add_chunks([ChunkRow("wk_3", T0 + 10, 8, 0, 0, line)])
        counts = await db.pool_history.chunk_counts(ALL)
        unmanaged = ALL.model_copy(update={"managed": False})
        others = await db.pool_history.chunk_counts(unmanaged)
        [row] = await db.pool_history.chunks("wk_1", ALL)
        lanes = await db.pool_history.lanes(ListLanes(**ALL.model_dump()))
        after = await db.pool_history.lanes(ListLanes(**ALL.model_dump(), after="wk_1"))
        free = await db.pool_history.lanes(ListLanes(**unmanaged.model_dump()))
    assert counts == [ChunkCount(T0, 7, 1, 1)]
    assert others == [ChunkCount(T0 + 10, 8, 0, 0)]
    assert row == ChunkRow("wk_1", T0, 3, 1, 1, f"{line}\nses_1/1/5:1:1")
    assert [lane.worker for lane in lanes] == ["wk_1", "wk_2"]
    assert [lane.worker for lane in after] == ["wk_2"]
    assert [(lane.worker, lane.member) for lane in free] == [("wk_3", "wk_3-0")]


async def session(database: Database, name: str, tenant: str, **more: object) -> SessionRecord:
    async with database.transaction() as db:
        record = SessionRecord(
            id=name,
            tenant=tenant,
            model="m",
            prompt="a",
            seed=1,
            version=1,
            epoch=0,
            phase=Phase.REQUESTED,
            created_at=T0,
            updated_at=T0,
            requested_at=T0,
        ).model_copy(update=more)
        await db.changes.create(Change(record, (), None))
        return record


async def test_the_cost_of_a_minute_is_shared_by_tenants_and_the_idle_rest(database: Database) -> None:
    for name, tenant in (("ses_1", "a"), ("ses_2", "b")):
        more = {"model": "m_64x64"} if tenant == "b" else {}
        await session(database, name, tenant, phase=Phase.ACTIVE, worker="wk_1", epoch=1, **more)
    async with database.transaction() as db:
        rows = [rental("wk_1", "p", paid_s=10.0), rental("wk_2", "p", paid_s=3.0), rental("wk_3", None)]
        await db.rentals.put(rows)
        await db.rentals.accrue(0, T0)
        await db.rentals.put([rental("wk_1", "p", paid_s=14.0), rental("wk_3", None, paid_s=1.0)])
        await db.rentals.accrue(0, T0)
        await db.rentals.put([rental("wk_2", "p", paid_s=4.0)])
        await db.rentals.accrue(0, T0 + 60)
        costs = await db.pool_history.costs(ALL)
        tenants = await db.pool_history.tenant_costs(ALL)
        models = await db.pool_history.model_costs(ALL)
        free = await db.pool_history.costs(ALL.model_copy(update={"managed": False}))
    assert costs == {T0: (34.0, 34.0), T0 + 60: (2.0, 2.0)}
    assert [(one.tenant, one.gpu_seconds) for one in tenants] == [("a", 14.0), ("b", 14.0), (None, 8.0)]
    assert {one.model: one.gpu_seconds for one in models} == {"m": 14.0, "m_64x64": 14.0, None: 8.0}
    assert free == {T0: (2.0, 2.0)}


async def test_a_migration_has_its_source_and_its_end(database: Database) -> None:
    records = [
        await session(database, f"ses_{n}", "a", phase=Phase.ACTIVE, worker="wk_1", epoch=1) for n in range(4)
    ]
    versions = itertools.count(10)

    async def decide(record: SessionRecord, kind: str, on: str | None, at: float, **numbers: float) -> int:
        version = next(versions)
        runs = record.id == "ses_3" and kind == "migrate"
        after = record.model_copy(
            update={
                "version": version,
                "migration": version if runs else None,
                "target": on if runs else None,
            }
        )
        decision = Decision(
            session=record.id, epoch=1, worker=on, kind=kind, reason=f"why {kind}", numbers=numbers, at=at
        )
        async with database.transaction() as db:
            await db.changes.write(Change(after, (), decision))
        return version

    begun = {}
    for number, record in enumerate(records):
        await decide(record, "place", "wk_1", T0)
        begun[record.id] = await decide(record, "migrate", "wk_2", T0 + 1 + number, gain_s=0.5)
    await decide(records[0], "migrated", "wk_2", T0 + 9, migration=begun["ses_0"])
    await decide(records[1], "stay", "wk_1", T0 + 9, migration=begun["ses_1"])
    async with database.transaction() as db:
        await db.rentals.put([rental("wk_2", "p")])
        page = await db.pool_history.migrations(ListMigrations(**ALL.model_dump(), limit=3))
        rest = await db.pool_history.migrations(ListMigrations(**ALL.model_dump(), after=page.next))
        elsewhere = ListMigrations(**(ALL.model_dump() | {"pool": "other"}))
        assert (await db.pool_history.migrations(elsewhere)).migrations == ()
    found = (*page.migrations, *rest.migrations)
    outcomes = [(one.session, one.outcome, one.ended_at) for one in found]
    assert outcomes == [
        ("ses_3", "running", None),
        ("ses_2", "ended", None),
        ("ses_1", "abandoned", T0 + 9),
        ("ses_0", "committed", T0 + 9),
    ]
    assert {(one.source, one.target, one.tenant) for one in found} == {("wk_1", "wk_2", "a")}
    assert found[3].numbers == {"gain_s": 0.5}
    assert found[2].detail == "why stay"


async def test_who_waits_longest_is_first(database: Database) -> None:
    await session(database, "ses_1", "a", requested_at=T0 + 5.0)
    second = await session(database, "ses_2", "b", requested_at=T0 + 1.0)
    await session(database, "ses_3", "b", phase=Phase.ACTIVE, worker="wk_1", epoch=1)
    await session(database, "ses_4", "b", model="other")
    async with database.transaction() as db:
        wait = Decision(session=second.id, epoch=0, kind="wait", reason="no free slot", at=T0)
        await db.controls.note(wait)
        page = await db.pool_history.waiting(ListWaiting(model="m"))
        one = await db.pool_history.waiting(ListWaiting(limit=1))
    assert [(row.session, row.reason) for row in page.sessions] == [
        ("ses_2", "no free slot"),
        ("ses_1", None),
    ]
    assert page.total == 2
    assert (len(one.sessions), one.total) == (1, 3)


async def test_old_rows_and_rows_beyond_the_number_are_found(database: Database) -> None:
    async with database.transaction() as db:
        for table in HistoryTable:
            assert await db.pool_history.oldest(table) is None
        for step in range(5):
            await db.pool_history.add_sample("p", T0 + 10 * step, PoolSample())
            await db.pool_history.add_chunks([ChunkRow("wk_1", T0 + 10 * step, 1, 0, 0, "")])
        decision = PoolDecision(number=1, at=T0 + 0.5, kind="action", action="launch", reason="")
        await db.pool_history.add_decisions("p", "asc_1", [decision])
        assert await db.pool_history.oldest(HistoryTable.SAMPLES) == T0
        assert await db.pool_history.beyond(HistoryTable.SAMPLES, 3) == T0 + 10
        assert await db.pool_history.beyond(HistoryTable.SAMPLES, 5) is None
        assert await db.pool_history.oldest(HistoryTable.DECISIONS) == T0
        for table in HistoryTable:
            await db.pool_history.delete_before(table, T0 + 20)
        assert [at for at, _ in await db.pool_history.samples(ALL)] == [T0 + 20, T0 + 30, T0 + 40]
        assert [row.at for row in await db.pool_history.chunks("wk_1", ALL)] == [T0 + 20, T0 + 30, T0 + 40]
        assert (await db.pool_history.decisions(ListPoolDecisions(**ALL.model_dump()))).decisions == ()
        assert await db.pool_history.tenants(["ses_none"]) == {}
