"""Models and frame sizes: what a session may ask for, over HTTP on a real pool."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import StartSession, Watch
from tests.helpers.pool_harness import DRAWN_WORKER, Pool
from tests.helpers.problem import problem
from tests.helpers.waiting import eventually
from turboserve.allocation.classes import SessionClass
from turboserve.contracts.worker_offers import FrameSize, WorkerPrice
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.gateway.model_offers import class_for, refused
from turboserve.gateway.workers.schemas import ModelSize

NUMBERS = itertools.count()
Serve = Callable[[str], Awaitable[None]]


def record(name: str, model: str = "m", **more: Any) -> WorkerRecord:
    known: dict[str, Any] = {"phase": WorkerPhase.READY, "capacity": 4, "started_at": 1, "renewed_at": 1}
    return WorkerRecord(id=name, model=model, **known | more)


@pytest.fixture
def model() -> str:
    """A model that no other test uses."""
    return f"sizes-{next(NUMBERS)}"


@pytest.fixture
async def serve(pool: Pool, api: httpx.AsyncClient) -> AsyncIterator[Serve]:
    """`await serve(name)` starts a worker of this class and waits until it is listed."""
    started: list[str] = []

    async def start(name: str) -> None:
        started.append(f"worker-{name}")
        pool.start(
            started[-1], str(DRAWN_WORKER), {"DRAWN_MODEL": name, "DRAWN_CAPACITY": "2"}, user="worker"
        )
        wanted = SessionClass.of_name(name)

        async def listed() -> bool:
            models = (await api.get("/v1/models")).json()["models"]
            sizes = [size for one in models if one["id"] == wanted.model for size in one["sizes"]]
            return any(wanted.width in (0, size["width"]) for size in sizes)

        await eventually(listed, 120.0)

    yield start
    for name in started:
        pool.stop(name)


async def test_a_session_gets_the_size_that_it_asks_for(
    api: httpx.AsyncClient, start: StartSession, watch: Watch, serve: Serve, model: str
) -> None:
    await serve(model)
    await serve(f"{model}_96x96")
    [listed] = [one for one in (await api.get("/v1/models")).json()["models"] if one["id"] == model]
    assert [(one["width"], one["height"], one["default"]) for one in listed["sizes"]] == [
        (64, 64, True),
        (96, 96, False),
    ]
    assert (listed["workers"], listed["capacity"], listed["default"]) == (2, 4, False)
    for size in listed["sizes"]:
        [kind] = size["kinds"]
        assert (kind["kind"], kind["workers"], kind["sessions_per_worker"]) == ("cpu", 1, 2.0)
        assert kind["price_per_worker_hour"] is kind["price_per_session_hour"] is kind["currency"] is None

    shown = {}
    for asked in ({}, {"width": 64, "height": 64}, {"width": 96, "height": 96}):
        session = await start(model=model, **asked)
        assert session["model"] == model
        viewer = await watch(session["id"])
        hello = await viewer.until("hello")
        assert hello["model"] == model
        shown[asked.get("width")] = (await viewer.until("init"))["width"]
        row = (await api.get(session["links"]["self"])).json()
        # The size that is the model's own is not stored.
        named = (96, 96) if asked.get("width") == 96 else (None, None)
        assert (row["width"], row["height"]) == named
        workers = {one["id"]: one for one in (await api.get("/v1/workers")).json()["workers"]}
        worker = workers[row["worker"]]
        assert (worker["model"], worker["width"]) == (model, asked.get("width", 64))
        await api.delete(session["links"]["self"])
    assert shown == {None: 64, 64: 64, 96: 96}


async def test_what_is_not_offered_is_refused_with_what_is(
    api: httpx.AsyncClient, serve: Serve, model: str
) -> None:
    await serve(f"{model}_96x96")

    async def refused(code: str, field: str, **asked: Any) -> str:
        answer = await api.post("/v1/sessions", json={"prompt": "x", "model": model, **asked})
        return str(problem(answer, 422, code, field).get("limit"))

    assert await refused("invalid_input", "width", width=64, height=96) == "96x96"
    assert await refused("invalid_input", "height", width=96, height=64) == "96x96"
    assert await refused("invalid_input", "width") == "96x96", "no worker has the model's own size"
    assert await refused("invalid_input", "height", width=96) == "None"
    assert await refused("invalid_input", "width", width=0, height=1) == "1"
    for unknown in ("wan-900b", "a" * 64):
        limit = await refused("unknown_model", "model", model=unknown, width=96, height=96)
        offered = limit.split(", ")
        assert {"toyworld", model} <= set(offered)
    assert offered == sorted(offered), "models by name, each once"


def test_a_size_is_the_models_own_if_a_worker_has_said_so() -> None:
    """Gone workers count: a pool may have none at the moment."""
    small, large = FrameSize(width=64, height=64), FrameSize(width=96, height=64)
    workers = [
        record("a", frame=small, phase=WorkerPhase.GONE),
        record("b", "m_96x64", frame=large),
        record("c", "other", frame=large),
    ]
    assert class_for(workers, "m", (64, 64)) == "m"
    assert class_for(workers, "m", (96, 64)) == "m_96x64"
    assert class_for(workers, "m", (32, 32)) == "m_32x32", "a pool may be for it, without a worker yet"
    changed = [*workers, record("d", frame=large)]
    assert [class_for(changed, "m", size) for size in ((64, 64), (96, 64))] == ["m_64x64", "m"]


def test_a_refusal_offers_no_size_where_workers_do_not_say_theirs() -> None:
    """Workers of an earlier release report no size."""
    error = refused([record("a")], "m", (64, 64))
    assert (error.field, error.limit) == ("width", None)
    assert error.detail == "no worker serves m at 64x64; name no size: none is known yet"


def test_prices_are_by_kind_and_by_session() -> None:
    def priced(name: str, kind: str, hour: float, capacity: int) -> WorkerRecord:
        price = WorkerPrice(kind=kind, per_hour=hour, currency="EUR")
        return record(name, capacity=capacity, price=price, device="cuda")

    size = ModelSize.of(
        "m", [priced("a", "h100", 4.0, 10), priced("b", "h100", 2.0, 5), record("c")], default=True
    )
    cpu, h100 = size.kinds
    assert (cpu.kind, cpu.price_per_worker_hour, cpu.price_per_session_hour) == ("cpu", None, None)
    assert (h100.workers, h100.sessions_per_worker, h100.currency) == (2, 7.5, "EUR")
    assert (h100.price_per_worker_hour, h100.price_per_session_hour) == (3.0, 0.4)
    assert (size.width, size.capacity) == (None, 19), "workers of an earlier release say no size"
    unpriced = ModelSize.of("m", [record(f"w{n}", device=f"cuda:{n}") for n in range(2)], default=True)
    assert [(one.kind, one.workers) for one in unpriced.kinds] == [("cuda", 2)]
