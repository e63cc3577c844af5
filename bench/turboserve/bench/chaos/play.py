"""One run: a stack of its own, people who watch, and the plan's faults; then everything is checked."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import nats

from turboserve.bench.chaos import chunklog
from turboserve.bench.chaos.blows import Blows
from turboserve.bench.chaos.invariants import (
    Owned,
    Violations,
    check_capacity,
    check_log,
    check_oldest,
    takeovers,
)
from turboserve.bench.chaos.people import TROUBLE, Person, patiently
from turboserve.bench.chaos.plan import WORKER, Blow, Fault, Plan
from turboserve.bench.chaos.surroundings import Surroundings
from turboserve.bench.report import percentile
from turboserve.cli.stack.background import BackgroundStack
from turboserve.tasks import stop

UP = (sys.executable, "-m", "turboserve.bench.chaos.up")
FIRST_CHUNK_S = 120.0
SETTLE_S = 90.0
"""Once faults stop, every session has to play on within this."""
SETTLED_CHUNKS = 3
LOOK_S = 1.0
ROOM_S = 6.0
"""After a disk has room again, the store has looked by then; less than the time to the next fault."""
SILENCE_S = 8.0
"""A log that was silent for so long before its owner changed: the old one died (12 s) or stood still."""
SLOTS = 4
"""Sessions per worker: the others must hold those of one that dies."""


@dataclass(frozen=True)
class Hit:
    """A fault and when it was, monotonic."""

    fault: Fault
    began_s: float
    ended_s: float

    @property
    def recovers_from_s(self) -> float:
        """Recovery counts from the end of a fault that has one, else from its beginning."""
        return self.ended_s if self.fault.lasts else self.began_s


@dataclass
class Run:
    """What one run found."""

    violations: Violations = field(default_factory=Violations)
    hits: list[Hit] = field(default_factory=list)
    """Faults that found somebody to hit."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Groups of faults that are not possible on this machine, and why."""
    oldest: dict[str, int] = field(default_factory=dict)
    """Session → index of the oldest chunk that the last full disk left in its log; none: 0."""
    missed: int = 0
    people: list[Person] = field(default_factory=list)
    chunks: int = 0
    owners: int = 0
    """Changes of owner in the log."""
    takeovers: list[float] = field(default_factory=list)
    settle_s: float | None = None

    def report(self) -> dict[str, Any]:
        waits = [(hit.fault, self._recovery(hit.recovers_from_s)) for hit in self.hits]
        known = [(fault, wait) for fault, wait in waits if wait is not None]
        deeds: Counter[str] = sum((person.done for person in self.people), Counter())
        return {
            "violations": dict(self.violations.counts),
            "messages": self.violations.messages,
            "recovery_s": _spread([wait for fault, wait in known if not fault.lasts]),
            "playing_again_s": _spread([wait for fault, wait in known if fault.lasts]),
            "worker_recovery_s": _spread([wait for fault, wait in known if fault.target == WORKER]),
            "takeover_s": _spread(self.takeovers),
            "settle_s": self.settle_s,
            "chunks_lost": sum(person.viewer.player.lost for person in self.people),
            "chunks_repeated": sum(person.viewer.player.repeated for person in self.people),
            "chunks": self.chunks,
            "owner_changes": self.owners,
            "reconnects": sum(person.viewer.connections for person in self.people) - len(self.people),
            "stall_s": sum(person.viewer.player.stall_s for person in self.people),
            "faults": dict(sorted(Counter(_name(hit.fault) for hit in self.hits).items())),
            "faults_missed": self.missed,
            "left_out": self.left_out,
            "deeds": dict(sorted(deeds.items())),
            "timeline": [
                {"fault": fault.describe(), "recovery_s": None if wait is None else round(wait, 3)}
                for fault, wait in waits
            ],
        }

    def _recovery(self, at_s: float) -> float | None:
        """Until the last of those who wanted to play had a new chunk."""
        waits = [wait for person in self.people if (wait := person.wait_after(at_s)) is not None]
        return max(waits, default=None)


async def play(
    plan: Plan, seconds: float, surroundings: Surroundings, workers: int, schedulers: int, sessions: int
) -> Run:
    """Start a stack in `surroundings`, play the plan, check. Raises DidNotStart; leaves nothing running."""
    stack = BackgroundStack(
        surroundings.data,
        *("--workers", str(workers), "--schedulers", str(schedulers)),
        environment={
            "TURBOSERVE_WORKER_MAX_SESSIONS": str(SLOTS),
            "TURBOSERVE_CHUNKS_KEPT": "100000",
            **surroundings.environment,
        },
        command=UP,
    )
    await asyncio.to_thread(stack.start)
    try:
        async with httpx.AsyncClient(base_url=stack.url) as api:
            return await _play(plan, seconds, stack, Blows(stack, surroundings), api, sessions)
    finally:
        await asyncio.to_thread(stack.stop)


async def _play(
    plan: Plan,
    seconds: float,
    stack: BackgroundStack,
    blows: Blows,
    api: httpx.AsyncClient,
    sessions: int,
) -> Run:
    run = Run()
    watches: list[asyncio.Task[None]] = []
    try:
        for number in range(sessions):
            person = await Person.begin(number, api)
            run.people.append(person)
            watches.append(asyncio.create_task(person.watch()))
        for person in run.people:
            await person.viewer.until(lambda person=person: bool(person.seen), FIRST_CHUNK_S, "first chunk")  # type: ignore[misc]
        watches.append(asyncio.create_task(_watch_capacity(api, run.violations)))
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for person in run.people:
                deeds = [deed for deed in plan.deeds if deed.session == person.number]
                group.create_task(person.live(deeds, began_s))
            for fault in plan.faults:
                group.create_task(_strike(run, stack, blows, fault, began_s))
            group.create_task(asyncio.sleep(seconds))
        await _settle(run, api)
        await _check(run, stack)
        for person in run.people:
            await person.end()
        return run
    finally:
        blows.wake_all()
        await stop(*watches)


async def _strike(run: Run, stack: BackgroundStack, blows: Blows, fault: Fault, began_s: float) -> None:
    await asyncio.sleep(max(began_s + fault.at_s - time.monotonic(), 0.0))
    fills = fault.blow is Blow.DISK_FULL
    if fills:
        before = f"before the disk is full at {fault.at_s:.0f} s"
        check_oldest(await _oldest(run, stack), run.oldest, before, run.violations)
    at_s = time.monotonic()
    if await blows.hit(fault):
        run.hits.append(Hit(fault, at_s, time.monotonic()))
        run.hits.sort(key=lambda hit: hit.began_s)
    else:
        run.missed += 1
    if fills:
        await asyncio.sleep(ROOM_S)
        run.oldest = await _oldest(run, stack)


async def _oldest(run: Run, stack: BackgroundStack) -> dict[str, int]:
    """As `chunklog.oldest` of all sessions, asking until the broker answers. Raises TimeoutError."""
    sessions = [person.viewer.session for person in run.people]
    async with asyncio.timeout(SETTLE_S):
        while True:
            with suppress(nats.errors.Error, OSError):
                return await chunklog.oldest(stack.record.nats_url, sessions)
            await asyncio.sleep(LOOK_S)


async def _settle(run: Run, api: httpx.AsyncClient) -> None:
    """Faults are over: everyone wants to play, and has to."""
    began_s = time.monotonic()

    async def one(person: Person) -> None:
        name = person.viewer.session
        wanted = person.viewer.player.chunks + SETTLED_CHUNKS
        try:
            await person.resume()
            left_s = max(began_s + SETTLE_S - time.monotonic(), 1.0)
            await person.viewer.until(lambda: person.viewer.player.chunks >= wanted, left_s, "chunks")
            row = await patiently(person.viewer.get)
            if row["phase"] not in ("active", "migrating"):
                run.violations.add("converges_after_faults", f"{name} is {row['phase']}: {row.get('reason')}")
        except TROUBLE as error:
            run.violations.add("converges_after_faults", f"{name}: {error}")

    await asyncio.gather(*(one(person) for person in run.people))
    run.settle_s = time.monotonic() - began_s


async def _check(run: Run, stack: BackgroundStack) -> None:
    seen = {person.viewer.session: list(person.seen) for person in run.people}
    log = await chunklog.read(stack.record.nats_url)
    for session, chunks in seen.items():
        entries = log.get(session, [])
        check_log(session, entries, chunks, run.violations, first=run.oldest.get(session, 0))
        run.takeovers += takeovers(entries, SILENCE_S)
        owners = sum(isinstance(entry, Owned) for entry in entries)
        run.chunks += len(entries) - owners
        run.owners += max(owners - 1, 0)


async def _watch_capacity(api: httpx.AsyncClient, found: Violations) -> None:
    while True:
        with suppress(*TROUBLE):
            answer = await api.get("/v1/workers", timeout=2.0)
            if answer.is_success:
                check_capacity(answer.json()["workers"], found)
        await asyncio.sleep(LOOK_S)


def _name(fault: Fault) -> str:
    return fault.blow.value if fault.lasts else f"{fault.blow.value} {fault.target}"


def _spread(values: list[float]) -> dict[str, float | None]:
    return {"p50": percentile(values, 0.5), "max": max(values, default=None)}
