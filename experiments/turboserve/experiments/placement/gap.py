"""Distance of placements from the optimum, on small random clusters."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from turboserve.experiments.placement.oracle import optimum
from turboserve.scheduler.placement import (
    Assigner,
    Cluster,
    Demand,
    Links,
    Rebalancer,
    SessionState,
    WorkerState,
)
from turboserve.scheduler.placement.links import kind_between

MODEL = "video"
GB = 1_000_000_000


@dataclass(frozen=True)
class Instance:
    """Workers with sessions as departures left them, and sessions that arrive."""

    workers: tuple[WorkerState, ...]
    sessions: tuple[SessionState, ...]
    arriving: tuple[SessionState, ...]


@dataclass(frozen=True)
class PlacementOutcome:
    """Result of a controller on an instance."""

    latency_s: float
    """L at the end."""
    cost_s: float
    """Sum of κ."""
    migrations: int


def instance(seed: int) -> Instance:
    """Draw an instance.

    It has 3 to 5 workers on one to four hosts, with 2 to 5 slots and different speeds; 40 to 95 % of the
    slots in use, anywhere; up to four arrivals; states of 1 to 8 GB.
    """
    rng = random.Random(seed)
    workers = []
    for index in range(rng.randint(3, 5)):
        first_s, more_s = rng.uniform(0.05, 0.15), rng.uniform(0.08, 0.16)
        profile = {n: first_s + more_s * n for n in range(1, 6)}
        host = f"node-{rng.randint(0, 1)}/host-{rng.randint(0, 1)}"
        workers.append(WorkerState(f"w{index}", MODEL, rng.randint(2, 5), chunk_latency_s=profile, host=host))
    slots = [worker.id for worker in workers for _ in range(worker.capacity)]
    rng.shuffle(slots)
    used = round(rng.uniform(0.4, 0.95) * len(slots))
    arrivals = min(rng.randint(0, 4), used)
    sizes = [rng.choice((1, 2, 4, 8)) * GB for _ in range(used)]
    there = [SessionState(f"s{i:02}", MODEL, slots[i], state_bytes=sizes[i]) for i in range(used - arrivals)]
    new = [SessionState(f"s{i:02}", MODEL, state_bytes=sizes[i]) for i in range(used - arrivals, used)]
    return Instance(tuple(workers), tuple(there), tuple(new))


def decide(
    given: Instance, assigner: Assigner, rebalancer: Rebalancer, links: Links
) -> tuple[PlacementOutcome, Cluster]:
    """Assign the arrivals, then migrate until nothing is proposed. Raises RuntimeError if that never ends."""
    cluster = Cluster(given.workers, given.sessions)
    demands = [Demand(s.id, s.model, "place") for s in given.arriving]
    choices = assigner.assign(cluster, demands)
    for session, choice in zip(given.arriving, choices, strict=True):
        cluster.put_session(replace(session, worker=choice.worker))
    cost_s, made = 0.0, 0
    for _ in range(100):
        migrations = rebalancer.propose(cluster, 0.0)
        if not migrations:
            return PlacementOutcome(cluster.pool(MODEL).bottleneck_s, cost_s, made), cluster
        for migration in migrations:
            session = cluster.sessions[migration.session]
            source, target = cluster.entries[migration.source], cluster.entries[migration.target]
            kind = kind_between(source.state.host, target.state.host)
            cost_s += links.seconds(kind, session.state_bytes)
            made += 1
            cluster.put_session(replace(session, worker=migration.target))
    raise RuntimeError("the migrations do not end")


def gap_percent(
    given: Instance, assigner: Assigner, rebalancer: Rebalancer, links: Links, eta: float
) -> tuple[float, int]:
    """Return (L + η Σ κ) over the oracle's, minus one, in percent; and the migrations made."""
    best = optimum(given.workers, given.sessions + given.arriving, links, eta)
    outcome, _ = decide(given, assigner, rebalancer, links)
    objective_s = outcome.latency_s + eta * outcome.cost_s
    return 100.0 * (objective_s / best.objective_s - 1.0), outcome.migrations


def gaps_percent(
    seeds: Sequence[int], assigner: Assigner, rebalancer: Rebalancer, eta: float
) -> tuple[list[float], int]:
    """Return `gap_percent` of the instance of each seed, and the sum of the migrations."""
    links = Links()
    found = [gap_percent(instance(seed), assigner, rebalancer, links, eta) for seed in seeds]
    return [gap for gap, _ in found], sum(migrations for _, migrations in found)
