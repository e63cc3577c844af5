"""Room of workers that serve several classes: the rules, and a state store over a real database."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.state_store.conftest import StartStore
from tests.state_store.database_servers import DatabaseServer
from tests.state_store.state_store_harness import Harness
from turboserve import subjects
from turboserve.contracts.errors import InvalidInputError, NoCapacityError, UnknownModelError
from turboserve.contracts.pool import PoolReport
from turboserve.contracts.requests import ListWorkers
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.worker_offers import ServedClass
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.state_store.core.class_room import SharedWorker, class_capacity

LARGE, SMALL, THIRD = "room-large", "room-small", "room-third"
CLASSES = (
    {"model": LARGE, "capacity": 2, "weights_digest": "1" * 32},
    {"model": SMALL, "capacity": 6, "weights_digest": "2" * 32},
)


async def report_pool(api: Harness, pool: str, model: str, maximum: int) -> None:
    """Report a pool whose workers' first class is `model`."""
    report = PoolReport(pool=pool, model=model, maximum=maximum, process="asc_1")
    await api.bus.call(subjects.REPORT_POOL, report)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_the_room_of_one_class_is_the_sum_of_capacities(workers: list[tuple[int, int]]) -> None:
    shared = [SharedWorker({"a": capacity}, {"a": min(held, capacity)}) for capacity, held in workers]
    assert class_capacity("a", shared, {}) == sum(capacity for capacity, _ in workers)


def test_sessions_of_other_classes_take_room_and_those_that_wait_come_first() -> None:
    served = {"large": 2, "small": 6}
    half = SharedWorker(served, {"large": 1})
    assert class_capacity("small", [half], {}) == 3
    assert class_capacity("small", [half], {"large": 1}) == 0
    assert class_capacity("large", [SharedWorker(served, {"small": 1})], {}) == 1
    assert class_capacity("large", [SharedWorker(served, {"small": 4}), half], {}) == 2


async def place(api: Harness, model: str, worker: str) -> SessionRecord:
    return await api.place(await api.create(model), worker)


async def test_a_worker_of_two_classes_is_filled_to_its_polytope(
    api: Harness, start_store: StartStore
) -> None:
    await start_store()
    worker = await api.worker(LARGE, capacity=2, weights_digest="1" * 32, classes=CLASSES)
    first = await place(api, LARGE, worker)
    assert first.weights_digest == "1" * 32
    small = [await place(api, SMALL, worker) for _ in range(3)]
    assert {row.weights_digest for row in small} == {"2" * 32}
    # 1 / 2 + 3 / 6 of the worker are taken.
    for model in (LARGE, SMALL):
        with pytest.raises(NoCapacityError):
            await api.create(model)
    [record] = [
        one for one in (await api.bus.call(subjects.LIST_WORKERS, ListWorkers())).workers if one.id == worker
    ]
    assert record.classes is not None
    assert {one.model: one.sessions for one in record.classes} == {LARGE: 1, SMALL: 3}
    await api.pause(first.id)
    later = [await api.create(SMALL) for _ in range(3)]
    with pytest.raises(NoCapacityError):
        await api.create(SMALL)
    for row in later[:2]:
        await api.place(row, worker)
    other = await api.worker(THIRD, capacity=4)
    with pytest.raises(InvalidInputError, match=f"serves {THIRD}, not {SMALL}"):
        await api.place(later[2], other)
    # A worker that has filled up meanwhile, as by the decision of a scheduler that did not know.
    await api.place(later[2], worker)
    wide = await api.worker(LARGE, capacity=2, weights_digest="1" * 32, classes=CLASSES)
    queued = await api.create(LARGE)
    with pytest.raises(NoCapacityError):
        await api.place(queued, worker)
    assert (await api.place(queued, wide)).worker == wide


async def test_workers_that_a_pool_may_add_count_for_all_classes_of_its_workers(
    api: Harness, start_store: StartStore
) -> None:
    await start_store()
    large, small = "grown-large", "grown-small"
    classes = ({"model": large, "capacity": 1}, {"model": small, "capacity": 2})
    await api.worker(large, capacity=1, classes=classes)
    # The pool reports its workers' first class.
    await report_pool(api, "grown", large, 2)
    for _ in range(4):
        await api.create(small)
    for model in (large, small):
        with pytest.raises(NoCapacityError):
            await api.create(model)


async def test_all_classes_of_a_worker_that_loads_are_known(api: Harness, start_store: StartStore) -> None:
    await start_store()
    named = ({"model": "loads-large", "capacity": 0}, {"model": "loads-small", "capacity": 0})
    await api.worker("loads-large", capacity=0, phase=WorkerPhase.STARTING, classes=named)
    for model in ("loads-large", "loads-small"):
        with pytest.raises(NoCapacityError, match="is ready yet"):
            await api.create(model)
    with pytest.raises(UnknownModelError):
        await api.create("loads-neither")


async def test_sessions_of_other_classes_that_wait_count_while_no_worker_runs(
    api: Harness, start_store: StartStore
) -> None:
    await start_store()
    large, small = "absent-large", "absent-small"
    classes = ({"model": large, "capacity": 2}, {"model": small, "capacity": 4})
    worker = await api.worker(large, capacity=2, classes=classes)
    await report_pool(api, "absent", large, 1)
    await api.gone(worker)
    # Both classes wait for the worker that the pool will start.
    for _ in range(3):
        await api.create(small)
    with pytest.raises(NoCapacityError):
        await api.create(large)
    await api.create(small)
    with pytest.raises(NoCapacityError):
        await api.create(small)


async def test_sessions_on_a_draining_worker_need_room_on_the_others(
    api: Harness, start_store: StartStore
) -> None:
    await start_store()
    large, small = "leaving-large", "leaving-small"
    classes = ({"model": large, "capacity": 2}, {"model": small, "capacity": 6})
    leaving = await api.worker(large, capacity=2, classes=classes)
    await place(api, large, leaving)
    await api.renew(leaving, large, capacity=2, classes=classes, phase=WorkerPhase.DRAINING)
    await api.worker(large, capacity=2, classes=classes)
    # The large session will take three of six small ones.
    for _ in range(3):
        await api.create(small)
    with pytest.raises(NoCapacityError):
        await api.create(small)


async def test_a_pool_that_was_split_by_class_has_no_room_of_its_former_workers(
    api: Harness, start_store: StartStore
) -> None:
    await start_store()
    large, small = "split-large", "split-small"
    classes = ({"model": large, "capacity": 2}, {"model": small, "capacity": 4})
    await api.gone(await api.worker(large, capacity=2, classes=classes))
    for model, capacity, maximum in ((large, 2, 3), (small, 4, 1)):
        await api.worker(model, capacity=capacity)
        await report_pool(api, model, model, maximum)
    for model, room in ((small, 4), (large, 6)):
        for _ in range(room):
            await api.create(model)
        with pytest.raises(NoCapacityError):
            await api.create(model)


async def test_workers_of_one_class_are_not_taken_for_free_places_of_a_pool(
    api: Harness, start_store: StartStore
) -> None:
    await start_store()
    large, small = "beside-large", "beside-small"
    classes = ({"model": large, "capacity": 1}, {"model": small, "capacity": 2})
    await api.worker(large, capacity=1, classes=classes)
    await api.worker(large, capacity=1)
    await report_pool(api, "beside", large, 2)
    for _ in range(2):
        await api.create(small)
    with pytest.raises(NoCapacityError):
        await api.create(small)


@pytest.mark.parametrize("kind", ["postgres", "memory"])
async def test_the_forecast_counts_workers_that_a_pool_may_add_apart(postgres_url: str, kind: str) -> None:
    classes = (ServedClass(model=LARGE, capacity=2), ServedClass(model=SMALL, capacity=6))
    record = WorkerRecord(
        id="wk_1",
        model=LARGE,
        phase=WorkerPhase.READY,
        capacity=2,
        classes=classes,
        started_at=10.0,
        renewed_at=10.0,
    )
    url = postgres_url if kind == "postgres" else None
    async with DatabaseServer.running(kind, url) as server, server.connect().transaction() as db:
        await db.workers.insert(record)
        await db.pools.reported(PoolReport(pool="p", model=LARGE, maximum=3, process="asc_1"), 10.0)
        for model, slots in ((LARGE, 2), (SMALL, 6)):
            outlook = await db.admission.outlook(model, since=0.0, renewed_after=1.0)
            assert (outlook.ready_slots, outlook.coming, outlook.slots) == (slots, 2, slots)
