"""The requests of one block: workers that renew, sessions that are created and placed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from turboserve import subjects
from turboserve.bus import Bus
from turboserve.config import Settings
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.requests import CreateSession, ListWorkers, PlaceSession, Renew
from turboserve.contracts.sessions import Decision, SessionRecord
from turboserve.contracts.workers import HeldSession, LoadReport

Item = TypeVar("Item")
MODEL = "bench"
CONCURRENT = 4
"""Creations and placements at the same time."""
READY_S = 90.0
HEARTBEAT_S = 1.0
SLOTS = 64
DEADLINE_S = 60.0


@dataclass
class Caller:
    """Gateway, scheduler and workers of one state store."""

    bus: Bus
    workers: Sequence[str]
    chance: random.Random
    placed: dict[str, list[SessionRecord]] = field(default_factory=dict)
    """Sessions by worker."""

    @classmethod
    @asynccontextmanager
    async def connected(cls, nats_url: str, workers: int) -> AsyncIterator[Caller]:
        """Connect, wait until the state store answers, and let the workers join."""
        bus = await Bus.connect("bench", Settings(nats_url=nats_url, request_deadline_s=DEADLINE_S))
        try:
            end = time.monotonic() + READY_S
            while not await _answers(bus) and time.monotonic() < end:
                await asyncio.sleep(0.2)
            caller = cls(bus, [f"wk{number}_1" for number in range(workers)], random.Random(1))
            await _each(caller.workers, caller.renew)
            yield caller
        finally:
            await bus.close()

    async def renew(self, worker: str) -> float:
        """Renew one lease. Returns the seconds until the answer."""
        held = tuple(
            HeldSession(session=record.id, epoch=record.epoch, next_chunk=0)
            for record in self.placed.get(worker, ())
        )
        load = LoadReport(
            worker=worker,
            model=MODEL,
            capacity=SLOTS,
            sessions=held,
            chunk_latency_s={slots: 0.01 * slots for slots in range(1, 9)},
            started_at=1.0,
        )
        began = time.monotonic()
        await self.bus.call(subjects.RENEW, Renew(load=load))
        return time.monotonic() - began

    async def renew_for(self, seconds: float) -> list[float]:
        """Let each worker renew every second, in phases of its own. Returns the seconds until the answers."""
        began = time.monotonic()
        answers: list[float] = []

        async def renew(worker: str) -> None:
            at = self.chance.uniform(0.0, HEARTBEAT_S)
            while at < seconds:
                await asyncio.sleep(max(0.0, began + at - time.monotonic()))
                answers.append(await self.renew(worker))
                at += HEARTBEAT_S

        await asyncio.gather(*(renew(worker) for worker in self.workers))
        return answers

    async def create(self, sessions: int, prefix: str) -> list[SessionRecord]:
        """Create sessions, whose ids begin with `prefix`."""
        found: list[SessionRecord] = []

        async def one(number: int) -> None:
            request = CreateSession(
                id=f"{prefix}_{number:06}", tenant="bench", model=MODEL, prompt="a red circle", seed=number
            )
            found.append(await self.bus.call(subjects.CREATE_SESSION, request))

        await _each(range(sessions), one)
        return found

    async def place(self, records: Sequence[SessionRecord]) -> None:
        """Place the sessions on the workers in turn."""

        async def one(place: tuple[int, SessionRecord]) -> None:
            number, record = place
            worker = self.workers[number % len(self.workers)]
            decision = Decision(session=record.id, epoch=record.epoch, kind="place", reason="in turn")
            request = PlaceSession(
                session=record.id, expected_version=record.version, worker=worker, decision=decision
            )
            placed = await self.bus.call(subjects.PLACE_SESSION, request)
            self.placed.setdefault(worker, []).append(placed)

        await _each(list(enumerate(records)), one)


async def _answers(bus: Bus) -> bool:
    try:
        await bus.call(subjects.LIST_WORKERS, ListWorkers())
    except TurboServeError:
        return False
    return True


async def _each(items: Sequence[Item], work: Callable[[Item], Awaitable[object]]) -> None:
    """Await `work` of each item, `CONCURRENT` at a time."""
    waiting = iter(items)

    async def some() -> None:
        for item in waiting:
            await work(item)

    await asyncio.gather(*(some() for _ in range(CONCURRENT)))
