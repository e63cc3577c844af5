"""A closed loop around the pure core: workers generate, viewers play, and the rebalancer migrates."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from turboserve.scheduler.placement import (
    Cluster,
    Migration,
    MigrationKind,
    MinMaxRebalancer,
    ReportedSlack,
    SessionState,
    WorkerState,
)
from turboserve.scheduler.placement.lateness import LEAD_S, _batch
from turboserve.scheduler.placement.pool import CHUNK_S
from turboserve.scheduler.placement.urgency import FIRST_CHUNK

REST_S = 30.0


class Playing:
    """A pool of workers, second by second. Slacks change as workers generate and viewers play.

    A migration takes effect at once or, if `delayed`, one second later. The harness keeps what the
    scheduler's view keeps: the rests of sessions, the workers that they left, and the changes from outside.
    """

    def __init__(
        self, profiles: Mapping[str, Mapping[int, float]], capacity: int = 12, pause_s: float = 0.0
    ) -> None:
        """`profiles`: L(b) of each worker. `pause_s`: slack that a migration costs its session."""
        self.cluster = Cluster()
        self.slacks: dict[str, float] = {}
        self.landed = 0
        self.late = 0
        self.rest_s = REST_S
        self.noise = random.Random(0)
        self.noise_s = 0.0
        """Largest error of a reported slack, seconds."""
        self.delayed = False
        self._pause_s = pause_s
        self._now = 0.0
        self._stamp = 0
        self._busy_s = dict.fromkeys(profiles, 0.0)
        self._under_way: list[Migration] = []
        for name, profile in profiles.items():
            self.cluster.put_worker(WorkerState(name, "m", capacity, chunk_latency_s=profile))

    # Changes from outside

    def add(self, name: str, worker: str, slack_s: float) -> None:
        self.cluster.put_session(SessionState(name, "m", worker))
        self.slacks[name] = slack_s
        self._report(name, worker)
        self._changed(worker)

    def end(self, name: str) -> None:
        worker = self.cluster.sessions[name].worker
        self._under_way = [one for one in self._under_way if one.session != name]
        self.cluster.drop_session(name)
        del self.slacks[name]
        self._changed(worker)

    def prompt(self, name: str) -> None:
        """The viewer discards the buffer. The next chunk has the deadline of a first chunk."""
        worker = self.cluster.sessions[name].worker or ""
        self.slacks[name] = FIRST_CHUNK * self.cluster.entries[worker].curve(1)
        self._report(name, worker)
        self._changed(worker)

    def drain(self, worker: str) -> None:
        """The worker must be emptied. Its stamp stays, so that only the kind of the migrations counts."""
        state = self.cluster.workers[worker]
        self.cluster.put_worker(replace(state, ready=False, draining=True))

    def _changed(self, worker: str | None) -> None:
        self._stamp += 1
        state = self.cluster.workers[worker or ""]
        self.cluster.put_worker(replace(state, changed_outside=self._stamp))

    # The loop

    def second(self, now: float, rebalancer: MinMaxRebalancer) -> list[Migration]:
        """Call the rebalancer, then play one second; returns what the rebalancer proposes."""
        for migration in self._under_way:
            self._land(migration, now)
        self._under_way = proposed = rebalancer.propose(self.cluster, now)
        for migration in proposed:
            session = self.cluster.sessions[migration.session]
            self.cluster.put_session(replace(session, target=migration.target, movable=False))
        if not self.delayed:
            for migration in proposed:
                self._land(migration, now)
            self._under_way = []
        self._now = now + 1.0
        for entry in list(self.cluster.entries.values()):
            names = sorted(entry.here)
            self._generate(entry.id, names)
            for name in names:
                if self.slacks[name] < 0:
                    self.late += 1
                    self.slacks[name] = 0.0
                self._report(name, entry.id)
        return proposed

    def _report(self, name: str, worker: str) -> None:
        slack_s = self.slacks[name] + self.noise.uniform(-self.noise_s, self.noise_s)
        credit_s = slack_s - self.cluster.entries[worker].curve(1)
        self.cluster.put_slack(name, ReportedSlack(slack_s, credit_s, self._now))

    def _land(self, migration: Migration, now: float) -> None:
        self._stamp += 1
        session = self.cluster.sessions[migration.session]
        self.slacks[session.id] -= self._pause_s
        self.landed += 1
        left = dict(session.left)
        if migration.kind is MigrationKind.DRAIN:
            self._changed(migration.target)
        else:
            left[migration.source] = self._stamp
        self.cluster.put_session(
            replace(
                session,
                worker=migration.target,
                target=None,
                movable=True,
                rests_until=now + self.rest_s,
                left=left,
            )
        )

    def _generate(self, worker: str, names: list[str]) -> None:
        """Generate for one second, in the order and the batches of the worker's own policy."""
        curve = self.cluster.entries[worker].curve
        at_s = self._busy_s[worker]
        due = {name: self.slacks[name] for name in names}
        while at_s < 1.0 and names:
            ready = sorted((due[name], name) for name in names if due[name] - at_s <= LEAD_S)
            if not ready:
                at_s += 0.05
                continue
            size = _batch(curve, [slack_s for slack_s, _ in ready], len(ready), at_s)
            at_s += curve(size)
            for slack_s, name in ready[:size]:
                # A late chunk stalls its viewer, which shifts all later deadlines.
                self.late += slack_s < at_s
                due[name] = max(slack_s, at_s) + CHUNK_S
        self._busy_s[worker] = max(0.0, at_s - 1.0)
        for name in names:
            self.slacks[name] = due[name] - 1.0
