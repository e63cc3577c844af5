"""Duration of one decision of the rebalancer by slack, by the number of streams."""

from __future__ import annotations

import random
from dataclasses import replace

from turboserve.bench.placement import LOAD, MODEL, PER_SESSION_S, SLOTS, STATE_BYTES, Samples
from turboserve.contracts.fidelity import Tier
from turboserve.scheduler.placement import (
    Cluster,
    Migration,
    Rebalancer,
    ReportedSlack,
    SessionState,
    WorkerState,
)

PARTS = 10
"""A worker reports each second and the rebalancer is called ten times a second: a tenth of the workers has
reported since the last call."""
POOR = 0.1
"""Share of sessions that lose their slack between two reports, as by a prompt switch."""
COOLDOWN_S = 30.0


class Reporting:
    """A running cluster whose workers report slacks. Every migration ends before the next decision."""

    def __init__(self, streams: int, seed: int, rebalancer: Rebalancer) -> None:
        self.rng = random.Random(seed)
        self.samples = Samples()
        self.cluster = Cluster()
        self._rebalancer = rebalancer
        workers = max(2, round(streams / (LOAD * SLOTS)))
        self._names = [f"w{number:05}" for number in range(workers)]
        # A chunk takes its playing time with all slots taken, so that a worker is slow to recover.
        for number, name in enumerate(self._names):
            profile = {n: 1.1 * PER_SESSION_S * n for n in range(1, SLOTS + 1)}
            state = WorkerState(
                name, MODEL, SLOTS, chunk_latency_s=profile, host=f"n{number // 32}/h{number // 8}"
            )
            self.cluster.put_worker(state)
        slots = [name for name in self._names for _ in range(SLOTS)]
        for number, worker in enumerate(self.rng.sample(slots, streams)):
            self.cluster.put_session(SessionState(f"s{number:05}", MODEL, worker, state_bytes=STATE_BYTES))

    def decide(self, event: str, workers: list[str], now: float) -> None:
        """Apply the reports of `workers` and decide; only that is measured."""
        reports = [(name, self._slack(now)) for w in workers for name in sorted(self.cluster.entries[w].here)]

        def decision() -> list[Migration]:
            for name, slack in reports:
                self.cluster.put_slack(name, slack)
            return self._rebalancer.propose(self.cluster, now)

        for migration in self.samples.time(event, decision):
            session = self.cluster.sessions[migration.session]
            rested = replace(session, worker=migration.target, rests_until=now + COOLDOWN_S)
            self.cluster.put_session(rested)

    def run(self, decisions: int) -> None:
        """Decide after the reports of a tenth of the workers each, and every ten times after all reports."""
        for number in range(decisions):
            now = number / PARTS
            self.decide("report", self._names[number % PARTS :: PARTS], now)
            if number % PARTS == PARTS - 1:
                self.decide("tick", self._names, now)

    def _slack(self, now: float) -> ReportedSlack:
        slack_s = self.rng.uniform(0.0, 0.8) if self.rng.random() < POOR else self.rng.uniform(1.5, 3.0)
        return ReportedSlack(slack_s, slack_s - PER_SESSION_S, now, Tier.NORMAL)


def measure_reports(streams: int, decisions: int, seed: int, rebalancer: Rebalancer) -> Samples:
    """Measure `decisions` decisions after reports and a tenth as many after reports of all workers."""
    reporting = Reporting(streams, seed, rebalancer)
    # The first reports of all workers are a start, which is not measured.
    reporting.decide("start", reporting._names, 0.0)
    reporting.run(decisions)
    return reporting.samples
