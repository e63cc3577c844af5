"""The placement benchmark at a small size, and the oracle against counting by hand."""

from __future__ import annotations

import itertools

import pytest

from turboserve.experiments.placement.command import run, table
from turboserve.experiments.placement.gap import decide, instance
from turboserve.experiments.placement.oracle import optimum
from turboserve.scheduler.placement import Links, MinMax, MinMaxRebalancer, SessionState, WorkerState
from turboserve.scheduler.placement.links import kind_between

GB = 10**9


def test_all_keys_are_there() -> None:
    result = run(most=8, events=20, instances=5, seed=3)
    for event, least in (("arrival", 20), ("departure", 20), ("rebalance", 4)):
        for workers in ("4", "8"):
            found = result["decision_s"][event][workers]
            assert 0 < found["p50"] <= found["p99"] <= found["max"]
            assert found["decisions"] == least
    assert result["oracle_gap_percent"]["max"] >= result["oracle_gap_percent"]["mean"] >= 0
    assert {"round-robin", "load-aware", "memory-aware", "least-loaded"} <= result["baselines"].keys()
    for event, least in (("report", 20), ("tick", 2)):
        for streams in ("64", "128"):
            found = result["slack_decision_s"][event][streams]
            assert 0 < found["p50"] <= found["p99"] <= found["max"]
            assert found["decisions"] == least
    assert sum(result["slack_moves"]["report"].values()) > 0
    pool = result["events"]["8, 64"]
    assert pool["report"]["events"] == pool["decode"]["events"] == 16
    assert pool["arrival"]["events"] == 16
    assert pool["reports_per_cpu_s"] > 0
    assert table(result).row_count == 2 + 2 + 1 + 9


def test_a_rebalance_has_something_to_migrate() -> None:
    assert all(
        migrations > 0 for migrations in run(most=8, events=20, instances=1)["moves"]["rebalance"].values()
    )


@pytest.mark.parametrize("seed", range(8))
def test_no_policy_beats_the_oracle(seed: int) -> None:
    given, links = instance(seed), Links()
    best = optimum(given.workers, given.sessions + given.arriving, links, 0.1)
    rebalancer = MinMaxRebalancer()
    outcome, cluster = decide(given, MinMax(rebalancer), rebalancer, links)
    assert outcome.latency_s + 0.1 * outcome.cost_s >= best.objective_s - 1e-9
    assert all(entry.held <= entry.slots for entry in cluster.entries.values())


def test_the_oracle_finds_what_trying_everything_finds() -> None:
    hosts = ("n/1", "n/2", "m/1")
    workers = [
        WorkerState(f"w{n}", "toy", 3, chunk_latency_s={k: (1 + n / 2) * k for k in (1, 2, 3)}, host=hosts[n])
        for n in range(3)
    ]
    sessions = [SessionState(f"s{n}", "toy", f"w{n // 3}", state_bytes=n * GB) for n in range(5)]
    sessions.append(SessionState("new", "toy"))
    links, eta = Links(), 5.0

    def objective_s(chosen: tuple[int, ...]) -> float:
        counts = [chosen.count(n) for n in range(3)]
        if max(counts) > 3:
            return float("inf")
        cost_s = sum(
            links.seconds(kind_between(hosts[int(s.worker[1])], hosts[to]), s.state_bytes)
            for s, to in zip(sessions, chosen, strict=True)
            if s.worker is not None and s.worker != f"w{to}"
        )
        return max((1 + n / 2) * count for n, count in enumerate(counts)) + eta * cost_s

    every = min(objective_s(chosen) for chosen in itertools.product(range(3), repeat=len(sessions)))
    assert optimum(workers, sessions, links, eta).objective_s == pytest.approx(every)
