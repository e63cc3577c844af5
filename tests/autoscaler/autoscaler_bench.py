"""Feeds the pool's core by hand, event by event."""

from __future__ import annotations

import itertools
from typing import TypeVar

from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.lifecycle import Policy
from turboserve.autoscaler.messages import (
    Command,
    Done,
    Event,
    Launch,
    ListProviderWorkers,
    ListWorkers,
    LoadReported,
    ProviderWorkersListed,
    Reserve,
    RunningWorker,
    SizeWanted,
    Tick,
    WorkersListed,
)
from turboserve.contracts.pool import PoolMemberPhase
from turboserve.contracts.workers import HeldSession, LoadReport, WorkerPhase, WorkerRecord

Kind = TypeVar("Kind")


def row(
    worker: str, phase: WorkerPhase = WorkerPhase.READY, sessions: int = 0, suspended: int = 0
) -> WorkerRecord:
    return WorkerRecord(
        id=worker,
        model="m",
        phase=phase,
        capacity=4,
        sessions=sessions,
        suspended=suspended,
        pool_member="local-0",
        started_at=1,
        renewed_at=1,
    )


class Bench:
    """Feeds the core by hand; commands wait in `open` until they are answered."""

    def __init__(self, size: int = 1, policy: Policy | None = None) -> None:
        names = itertools.count()
        self.now = 0.0
        self.pool = Pool("local", lambda: f"wrk_{next(names)}", policy or Policy())
        self.open: list[Command] = []
        self.feed(SizeWanted(size, "test"))

    def feed(self, event: Event, after: float = 0.0) -> None:
        self.now += after
        self.open += self.pool.handle(event, self.now)

    def take(self, kind: type[Kind]) -> Kind:
        """Take the oldest open command of this kind."""
        found = next(command for command in self.open if isinstance(command, kind))
        self.open.remove(found)
        return found

    def has(self, kind: type[Command]) -> bool:
        return any(isinstance(command, kind) for command in self.open)

    def do(self, kind: type[Kind]) -> Kind:
        """Let the oldest open command of this kind succeed."""
        command = self.take(kind)
        self.feed(Done(command.ticket, 42 if isinstance(command, Launch) else None))  # type: ignore[attr-defined]
        return command

    def list_workers(self, *rows: WorkerRecord, asked: ListWorkers | None = None) -> None:
        self.feed(Tick(), after=2.0)
        self.feed(WorkersListed((asked or self.take(ListWorkers)).ticket, rows))

    def list_members(self, *provider_workers: RunningWorker) -> None:
        self.feed(ProviderWorkersListed(self.take(ListProviderWorkers).ticket, provider_workers))

    def report(self, worker: str, phase: WorkerPhase = WorkerPhase.READY, sessions: int = 0) -> None:
        held = tuple(HeldSession(session=f"ses_{n}", epoch=1, next_chunk=0) for n in range(sessions))
        self.feed(LoadReported(LoadReport(worker=worker, model="m", capacity=4, phase=phase, sessions=held)))

    @property
    def phase(self) -> PoolMemberPhase:
        [member] = self.pool.members.values()
        return member.phase

    def start(self) -> str:
        """Start the core and bring it from no worker to a ready one."""
        self.list_members()
        worker = self.launch()
        assert self.phase is PoolMemberPhase.READY
        return worker

    def launch(self) -> str:
        """Give a ready worker to one pool member that waits for its reservation."""
        self.do(Reserve)
        worker = self.do(Launch).worker
        self.report(worker)
        return worker
