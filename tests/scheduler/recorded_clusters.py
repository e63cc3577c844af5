"""Clusters by number, and what the min-max rebalancer decides on them. The decisions are recorded."""

from __future__ import annotations

import random

from turboserve.scheduler.placement import Cluster, MinMaxRebalancer, SessionState, WorkerState

NUMBERS = range(120)


def cluster_by_number(number: int) -> Cluster:
    chance = random.Random(f"cluster {number}")
    cluster = Cluster()
    names = [f"w{n}" for n in range(chance.randint(2, 9))]
    for name in names:
        fixed_s, each_s = chance.choice((0.0, 0.1, 0.4)), chance.choice((0.05, 0.1, 0.2, 0.7))
        cluster.put_worker(
            WorkerState(
                name,
                "m",
                capacity=8,
                chunk_latency_s={n: fixed_s + each_s * n for n in (1, 2, 4, 8)},
                host=chance.choice(("n/1", "n/2", "m/1")),
                draining=chance.random() < 0.1,
                suspect=chance.random() < 0.05,
            )
        )
    for index in range(chance.randint(0, 4 * len(names))):
        name = chance.choice(names)
        if cluster.entries[name].held < 8:
            cluster.put_session(
                SessionState(
                    f"s{index:02}",
                    "m",
                    name,
                    suspended=chance.random() < 0.1,
                    state_bytes=chance.choice((10**9, 4 * 10**9)),
                    movable=chance.random() < 0.9,
                    rests_until=chance.choice((0.0, 0.0, 0.0, 5.0)),
                )
            )
    return cluster


def decided(cluster: Cluster) -> list[list[str | float]]:
    """Return the proposals for a cluster, without slack."""
    return [
        [one.session, one.source, one.target, one.kind.value, round(one.gain_s, 9)]
        for one in MinMaxRebalancer().propose(cluster, 1.0)
    ]


def decisions() -> list[list[list[str | float]]]:
    return [decided(cluster_by_number(number)) for number in NUMBERS]
