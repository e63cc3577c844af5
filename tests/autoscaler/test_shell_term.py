"""The autoscaler's shell at the limits of its term: its end, its status, and where the next one begins."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.autoscaler.autoscaler_bench import row
from tests.helpers.waiting import eventually
from turboserve.autoscaler.__main__ import provider_of
from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.messages import SizeWanted
from turboserve.autoscaler.pool_term import PoolTerm
from turboserve.autoscaler.providers.base import ProviderWorker
from turboserve.autoscaler.providers.external import ExternalProvider
from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.autoscaler.shell import STATUS_S, Shell
from turboserve.clock import SystemClock
from turboserve.contracts.errors import UnavailableError
from turboserve.contracts.requests import WorkerPage
from turboserve.contracts.workers import WorkerPhase
from turboserve.service import Runtime


class Listing(ExternalProvider):
    """Lists these workers; None: never answers."""

    managed = True

    def __init__(self, workers: list[ProviderWorker] | None = None) -> None:
        self._workers = workers
        self.error: Exception | None = None
        """What each request for the list raises; None: nothing."""
        self.tasks: list[asyncio.Task[Any]] = []
        self.asked = asyncio.Event()
        self.all_ended: bool | None = None
        self.released: list[tuple[str, str | None]] = []

    async def adopt(self) -> list[ProviderWorker]:
        self.asked.set()
        if self.error is not None:
            raise self.error
        if self._workers is None:
            await asyncio.Event().wait()
        return self._workers or []

    async def release(self, member: str, worker: str | None, grace_s: float) -> None:
        self.released.append((member, worker))

    async def close(self) -> None:
        self.all_ended = all(task.done() for task in self.tasks)


class StatusBus:
    """Keeps what is published, and lists these workers of the store."""

    def __init__(self, *workers: Any) -> None:
        self.published: list[Any] = []
        self.unanswered: int | None = None
        """Number of requests without an answer so far. None: the store answers."""
        self._workers = workers

    async def publish(self, _topic: object, _token: str, status: Any) -> None:
        self.published.append(status)

    async def call(self, _subject: object, _request: object, *, deadline_s: float | None = None) -> Any:
        if self.unanswered is not None:
            self.unanswered += 1
            raise UnavailableError("no state store")
        return WorkerPage(workers=self._workers)


def shell_on(provider: Listing, bus: StatusBus, term: PoolTerm, **settings: Any) -> Shell:
    def spawn(work: Any, _name: str) -> asyncio.Task[Any]:
        provider.tasks.append(asyncio.create_task(work))
        return provider.tasks[-1]

    runtime = SimpleNamespace(bus=bus, clock=SystemClock(), spawn=spawn)
    pool = Pool("local", lambda: "wrk_a")
    return Shell(cast(Runtime, runtime), pool, provider, AutoscalerSettings(**settings), term)


def term(leads: list[bool]) -> PoolTerm:
    return PoolTerm("local", 3, lambda now: leads[-1], lambda: None)


async def test_the_provider_is_closed_after_the_last_command() -> None:
    provider = Listing()
    shell = shell_on(provider, StatusBus(), term([True]))
    await shell.start()
    await provider.asked.wait()
    await shell.stop()
    assert provider.all_ended is True


async def test_a_term_that_is_over_says_nothing_of_the_pool() -> None:
    bus, leads = StatusBus(), [True]
    shell = shell_on(Listing(), bus, term(leads))
    await shell.start()
    await eventually(lambda: bus.published)
    leads.append(False)
    before = len(bus.published)
    await asyncio.sleep(1.5 * STATUS_S)
    assert len(bus.published) == before
    await shell.stop()


async def test_the_first_size_leaves_out_workers_that_drain_once_the_store_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Incident: beside a silent store, a worker that drained counted, and another one was started."""
    monkeypatch.setattr("turboserve.autoscaler.pool_start.RETRY_S", 0.0)
    provider = Listing([ProviderWorker(f"local-{n}", f"wrk_{n}") for n in range(3)])
    bus = StatusBus(row("wrk_0", WorkerPhase.DRAINING), row("wrk_1"))
    bus.unanswered = 0
    shell = shell_on(provider, bus, term([True]), pool_size=5, pool_min=1, pool_max=9)
    size = asyncio.create_task(shell._first_size())
    await eventually(lambda: size.done() or (bus.unanswered or 0) > 1)
    assert not size.done()
    assert shell.status().reason == "waiting for the state store to say which workers drain"
    provider.error = RuntimeError("no list")
    await eventually(lambda: shell.status().provider_error == "no list")
    assert shell.status().reason == "waiting for the provider's list of workers"
    provider.error = bus.unanswered = None
    assert await size == SizeWanted(2, "2 already running")
    assert shell.pool.leaving == {"wrk_0"}
    assert shell.status().reason == "waiting for the provider's list of workers"


async def test_a_pool_that_waits_for_the_store_ends_its_workers_with_itself() -> None:
    """They were left running: the core had not adopted them."""
    provider = Listing([ProviderWorker("local-0", "wrk_0")])
    bus = StatusBus()
    bus.unanswered = 0
    shell = shell_on(provider, bus, term([True]))
    await shell.start()
    await eventually(lambda: bus.unanswered)
    await shell.stop(end_workers=True)
    assert provider.released == [("local-0", "wrk_0")]
    assert provider.all_ended


def test_pods_belong_to_their_namespace_whatever_the_address_of_the_broker() -> None:
    """Incident: with three brokers instead of one, the autoscaler left the earlier workers' pods alone."""
    template = {"spec": {"containers": [{"name": "worker", "image": "w"}]}}

    def pool_of(**changes: Any) -> str:
        settings = AutoscalerSettings.model_construct(
            **{**AutoscalerSettings().model_dump(), "provider": "kubernetes", **changes}
        )
        provider: Any = provider_of(settings, template)
        return str(provider._pool)

    assert pool_of(nats_url="nats://one:4222") == pool_of(nats_url="nats://two:4222,nats://three:4222")
    assert pool_of(kubernetes_namespace="here") != pool_of(kubernetes_namespace="there")
    assert pool_of(pool_name="one") != pool_of(pool_name="two")
