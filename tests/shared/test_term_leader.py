"""The shell of leadership: when a term's run starts and ends, beside the requests to the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog.testing

from tests.helpers.waiting import eventually
from turboserve import subjects
from turboserve.contracts.base import Contract
from turboserve.contracts.errors import UnavailableError
from turboserve.contracts.leading import Campaign, CampaignResult, KeepLead, LeaderRecord
from turboserve.leadership import Leadership, Lease
from turboserve.service import Runtime
from turboserve.term_leader import REPEATED, TermLeader

LEASE = Lease(renew_s=0.01, lease_s=0.03, timeout_s=0.04)


class Store:
    """Answers as the state store. It keeps requests of the class `hangs` until `go` is set."""

    def __init__(self) -> None:
        self.term, self.beat = 0, 0
        self.holder: str | None = None
        self.hangs: type[Contract] | None = None
        self.away = False
        self.waiting, self.go = asyncio.Event(), asyncio.Event()
        self.given_up: list[int] = []

    async def call(self, subject: Any, request: Any, deadline_s: float = 0.0) -> Any:
        if subject is subjects.STEP_DOWN:
            self.given_up.append(request.term)
            return None
        if self.away:
            raise UnavailableError("away")
        if self.hangs is not None and isinstance(request, self.hangs):
            self.waiting.set()
            await self.go.wait()
        if isinstance(request, Campaign):
            self.term, self.holder = self.term + 1, request.holder
        self.beat += 1
        record = LeaderRecord(name="pool", holder=self.holder, term=self.term, beat=self.beat)
        if isinstance(request, Campaign):
            return CampaignResult(granted=True, record=record)
        return record


class Run:
    """The run of one term."""

    def __init__(self, term: int) -> None:
        self.term: int | None = term
        self.stopped = False

    async def start(self) -> None:
        """Do nothing."""

    async def stop(self) -> None:
        self.stopped = True


class Leader(TermLeader[Run]):
    def __init__(self, store: Store) -> None:
        self.time, self.runs = 100.0, list[Run]()
        self.stopping = asyncio.Event()
        runtime = SimpleNamespace(
            name="test", bus=store, stopping=self.stopping, clock=SimpleNamespace(monotonic=lambda: self.time)
        )
        super().__init__(cast(Runtime, runtime), "pool", Leadership("me", LEASE))

    def of_term(self, term: int) -> Run:
        self.runs.append(Run(term))
        return self.runs[-1]


@asynccontextmanager
async def running(store: Store) -> AsyncIterator[Leader]:
    leader = Leader(store)
    task = asyncio.create_task(leader.run())
    try:
        yield leader
    finally:
        leader.stopping.set()
        store.go.set()
        await task


async def leads(leader: Leader) -> Run:
    def does() -> bool:
        leader.time += LEASE.renew_s
        return leader.running is not None

    await eventually(does)
    return leader.runs[-1]


async def asked(store: Store, leader: Leader) -> None:
    """Let time pass until the store holds a request back."""

    def is_so() -> bool:
        leader.time += LEASE.renew_s
        return store.waiting.is_set()

    await eventually(is_so)


@pytest.fixture
async def store() -> Store:
    return Store()


async def test_a_run_ends_with_its_term_and_not_after_the_answer_to_the_next_request(store: Store) -> None:
    async with running(store) as leader:
        run = await leads(leader)
        store.hangs = Contract
        leader.time += LEASE.lease_s
        await store.waiting.wait()
        assert run.stopped
        assert leader.running is None


async def test_a_process_that_stops_starts_no_further_run(store: Store) -> None:
    async with running(store) as leader:
        run = await leads(leader)
        store.hangs = KeepLead
        leader.time += LEASE.renew_s
        await store.waiting.wait()
        leader.stopping.set()
        leaving = asyncio.create_task(leader.leave())
        await eventually(lambda: run.stopped)
        store.go.set()
        await leaving
    assert leader.runs == [run]
    assert store.given_up == [run.term]


async def test_a_lead_that_is_won_during_the_stop_is_given_up(store: Store) -> None:
    store.hangs = Campaign
    async with running(store) as leader:
        await asked(store, leader)
        leader.stopping.set()
        leaving = asyncio.create_task(leader.leave())
        await asyncio.sleep(0)
        store.go.set()
        await leaving
    assert leader.runs == []
    assert store.given_up == [1]


async def test_a_term_that_is_won_and_over_starts_nothing(store: Store) -> None:
    """Incident: a process that was suspended within its campaign started a run behind its successor's."""
    store.hangs = Campaign
    async with running(store) as leader:
        await asked(store, leader)
        leader.time += LEASE.lease_s
        store.go.set()
        await eventually(lambda: leader.runs)
        assert [run.term for run in leader.runs] == [2]


async def test_a_refused_request_of_an_old_term_does_not_end_the_new_one(store: Store) -> None:
    async with running(store) as leader:
        run = await leads(leader)
        assert run.term is not None
        leader.on_leadership_lost(run.term - 1)
        assert leader.leadership.term == run.term
        leader.on_leadership_lost(run.term)
        assert leader.leadership.term is None


async def test_requests_without_an_answer_are_warned_of_once(store: Store) -> None:
    store.away = True
    with structlog.testing.capture_logs() as logged:
        async with running(store) as leader:

            def failed() -> bool:
                leader.time += LEASE.renew_s
                return leader._unanswered > REPEATED + 1

            await eventually(failed)
    said = [line for line in logged if line["log_level"] == "warning"]
    assert [line["event"] for line in said] == ["campaign for leadership failed"]
