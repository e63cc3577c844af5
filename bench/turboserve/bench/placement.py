"""Duration of one decision in a running cluster, by its number of workers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from turboserve.scheduler.placement import (
    Assigner,
    Cluster,
    Demand,
    Migration,
    Rebalancer,
    SessionState,
    WorkerState,
)

MODEL = "video"
SLOTS = 5
LOAD = 0.8
PER_SESSION_S = 0.1336
"""L(n) = 133.6 ms × n: the paper's latencies (Tables 7 to 10) are linear in n."""
NOISE = 0.03
"""Relative spread of measured profiles: no two workers report the same L(n)."""
STATE_BYTES = 2_000_000_000
PER_HOST = 8
TO_THE_LAST = "to the last migration"
HOSTS_PER_NODE = 4


@dataclass
class Samples:
    """Seconds of decisions by event: the thread's processor time, and the wall clock's."""

    cpu_s: dict[str, list[float]] = field(default_factory=dict)
    wall_s: dict[str, list[float]] = field(default_factory=dict)
    migrations: dict[str, int] = field(default_factory=dict)

    def time(self, event: str, decide: Callable[[], list[Migration]]) -> list[Migration]:
        wall, cpu = time.perf_counter(), time.thread_time()
        migrations = decide()
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        self.cpu_s.setdefault(event, []).append(cpu)
        self.wall_s.setdefault(event, []).append(wall)
        self.migrations[event] = self.migrations.get(event, 0) + len(migrations)
        return migrations


class Running:
    """A cluster that runs on as in the scheduler.

    Each event enters the index and is decided on. The decision is in the index before the next event. Its end
    enters the index later, outside of the measured time.
    """

    def __init__(
        self, workers: int, seed: int, assigner: Assigner, rebalancer: Rebalancer, slots: int = SLOTS
    ) -> None:
        self._slots = slots
        self.rng = random.Random(seed)
        self.cluster = Cluster()
        self.samples = Samples()
        self._assigner = assigner
        self._rebalancer = rebalancer
        self._sessions: list[str] = []
        self._made = 0
        self._workers: list[WorkerState] = []
        for _ in range(workers):
            self._workers.append(self._worker())
            self.cluster.put_worker(self._workers[-1])
        for _ in range(round(LOAD * slots * workers)):
            demand = self._demand()
            self._reserve(demand)
            self._settle([], demand.session)

    def arrival(self) -> None:
        """Add a session: place it, reserve its slot, and decide the migrations that now pay."""
        demand = self._demand()

        def decide() -> list[Migration]:
            self._reserve(demand)
            return self._propose()

        self._settle(self.samples.time("arrival", decide), demand.session)

    def departure(self) -> None:
        """End a session, and decide the migrations that now pay."""
        place = self.rng.randrange(len(self._sessions))
        self._sessions[place], self._sessions[-1] = self._sessions[-1], self._sessions[place]
        gone = self._sessions.pop()

        def decide() -> list[Migration]:
            self.cluster.drop_session(gone)
            return self._propose()

        self._settle(self.samples.time("departure", decide))

    def rebalance(self) -> None:
        """Add a ready worker, then drain one, and decide all migrations that follow.

        Each is repeated until no session migrates. `rebalance` is the first decision, `to the last migration`
        the sum of all.
        """
        place = self.rng.randrange(len(self._workers))
        old, new = self._workers[place], self._worker()
        self.cluster.put_worker(new)
        self._migrate_all(self._propose)
        draining = replace(old, ready=False, draining=True)

        def drain() -> list[Migration]:
            self.cluster.put_worker(draining)
            return self._propose()

        self._migrate_all(drain)
        self.cluster.drop_worker(old.id)
        self._workers[place] = new

    def _migrate_all(self, decide: Callable[[], list[Migration]]) -> None:
        samples = self.samples
        migrations = samples.time("rebalance", decide)
        cpu_s, wall_s = samples.cpu_s["rebalance"][-1], samples.wall_s["rebalance"][-1]
        while migrations:
            self._settle(migrations)
            migrations = samples.time("further", self._propose)
            cpu_s += samples.cpu_s["further"][-1]
            wall_s += samples.wall_s["further"][-1]
        samples.cpu_s.setdefault(TO_THE_LAST, []).append(cpu_s)
        samples.wall_s.setdefault(TO_THE_LAST, []).append(wall_s)

    def _propose(self) -> list[Migration]:
        migrations = self._rebalancer.propose(self.cluster, 0.0)
        for migration in migrations:
            session = self.cluster.sessions[migration.session]
            self.cluster.put_session(replace(session, target=migration.target))
        return migrations

    def _reserve(self, demand: Demand) -> None:
        [choice] = self._assigner.assign(self.cluster, [demand])
        session = SessionState(demand.session, MODEL, reserved=choice.worker, state_bytes=STATE_BYTES)
        self.cluster.put_session(session)

    def _settle(self, migrations: list[Migration], placed: str | None = None) -> None:
        """Apply the decisions, as the rows would."""
        for migration in migrations:
            session = self.cluster.sessions[migration.session]
            self.cluster.put_session(replace(session, worker=migration.target, target=None))
        if placed is not None:
            session = self.cluster.sessions[placed]
            self.cluster.put_session(replace(session, worker=session.reserved, reserved=None))
            self._sessions.append(placed)

    def _demand(self) -> Demand:
        self._made += 1
        return Demand(f"s{self._made:07}", MODEL, "place")

    def _worker(self) -> WorkerState:
        self._made += 1
        index = self._made
        scale = PER_SESSION_S * self.rng.uniform(1 - NOISE, 1 + NOISE)
        host = f"node-{index // (PER_HOST * HOSTS_PER_NODE)}/host-{index // PER_HOST}"
        profile = {n: scale * n for n in range(1, self._slots + 1)}
        return WorkerState(f"w{index:07}", MODEL, self._slots, chunk_latency_s=profile, host=host)


def measure(
    workers: int,
    events: int,
    seed: int,
    assigner: Assigner,
    rebalancer: Rebalancer,
    slots: int = SLOTS,
) -> Samples:
    """Measure `events` departures and arrivals each, and a tenth as many changes of the pool.

    The cluster has 80 % of its slots in use.
    """
    running = Running(workers, seed, assigner, rebalancer, slots)
    for event in range(events):
        running.departure()
        running.arrival()
        if event % 10 == 9:
            running.rebalance()
    return running.samples
