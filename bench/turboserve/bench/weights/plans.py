"""Makespans of plans of weight transfers on declared fleets, in virtual time."""

from __future__ import annotations

import time
from typing import Any

from turboserve.bench.weights.exhaustive import least_rounds, rounds_bound
from turboserve.bench.weights.oserve import OServePlan
from turboserve.bench.weights.virtual import Fleet, Planner, VirtualResult, new_plan, run
from turboserve.worker.weight_transfer.plan_messages import PlanEvent, PlanLimits, SlackChanged, WorkerLost

NEAR_BYTES_PER_S = 400e9
"""NVLink, as OServe's evaluation has it."""
FAR_BYTES_PER_S = 25e9
"""InfiniBand: within OServe's 10 to 200 GB/s."""
LIMITS = PlanLimits(sends=2, receives=2, wait_s=1e9)
PLANNERS = ("ours", "oserve", "oserve_in_total")
SMALL = ((1, 1, 3), (1, 2, 3), (1, 3, 1), (1, 3, 2), (1, 3, 3), (2, 2, 3), (2, 3, 2), (2, 3, 3), (1, 4, 2))
"""Holders, receivers and shards of the cases that are solved exactly."""


def fleets(shards: int, shard_bytes: int) -> dict[str, Fleet]:
    """The declared cases. Hosts are letters."""

    def fleet(holders: str, receivers: str) -> Fleet:
        return Fleet(tuple(holders), tuple(receivers), shards, shard_bytes, NEAR_BYTES_PER_S, FAR_BYTES_PER_S)

    return {
        "1 to 1, another host": fleet("a", "b"),
        "1 to 7, same host": fleet("a", "a" * 7),
        "1 to 8, one other host": fleet("a", "b" * 8),
        "1 to 7, each another host": fleet("a", "bcdefgh"),
        "2 to 14, two other hosts": fleet("ab", "c" * 7 + "d" * 7),
        "4 to 28, one holder a host": fleet("abcd", "abcd" * 7),
        "8 to 24, one host to three": fleet("a" * 8, "bcd" * 8),
    }


def planner_of(name: str, fleet: Fleet, limits: PlanLimits) -> Planner:
    """The product's plan, or OServe's by its algorithm or by its text."""
    if name == "ours":
        return new_plan(fleet, limits)
    return OServePlan(fleet.shards, fleet.shard_bytes, limits, in_total=name == "oserve_in_total")


def makespans(shards: int, total_bytes: int) -> dict[str, Any]:
    """Makespans of all planners on all declared fleets, with the bytes between hosts."""
    found: dict[str, Any] = {}
    for case, fleet in fleets(shards, total_bytes // shards).items():
        results: dict[str, VirtualResult] = {}
        decided_s = 0.0
        for name in PLANNERS:
            began = time.process_time()
            results[name] = run(fleet, planner_of(name, fleet, LIMITS))
            if name == "ours":
                decided_s = time.process_time() - began
        found[case] = {
            "seconds": {name: one.seconds for name, one in results.items()},
            "far_bytes": {name: one.far_bytes for name, one in results.items()},
            "most_sent_bytes": {name: max(one.sent_bytes.values()) for name, one in results.items()},
            "gain": results["oserve"].seconds / results["ours"].seconds,
            "cpu_s": decided_s,
        }
    return found


def small_cases() -> dict[str, Any]:
    """Rounds of ours and of OServe's plan against the best of all plans, where each sends one at a time."""
    one = PlanLimits(sends=1, receives=1, wait_s=1e9)
    found: dict[str, Any] = {}
    for holders, receivers, shards in SMALL:
        # Each worker on a host of its own, and one shard a second.
        hosts = [f"host{number}" for number in range(holders + receivers)]
        fleet = Fleet(tuple(hosts[:holders]), tuple(hosts[holders:]), shards, 1, 1.0, 1.0)
        rounds = {name: round(run(fleet, planner_of(name, fleet, one)).seconds) for name in PLANNERS}
        found[f"{holders} to {receivers}, {shards} shards"] = {
            "best": least_rounds(holders, receivers, shards),
            "bound": rounds_bound(holders, receivers, shards),
            **rounds,
        }
    return found


def disturbances(shards: int, total_bytes: int) -> dict[str, Any]:
    """What a death and a lack of slack cost: two holders, six receivers, each on a host of its own."""
    fleet = Fleet(
        ("a", "b"),
        tuple("cdefgh"),
        shards,
        total_bytes // shards,
        NEAR_BYTES_PER_S,
        FAR_BYTES_PER_S,
    )
    calm = run(fleet, new_plan(fleet, LIMITS))
    half = calm.seconds / 2
    short: list[tuple[float, PlanEvent]] = [(0.0, SlackChanged("h0", 0)), (half, SlackChanged("h0", 2))]
    cases: dict[str, tuple[str, list[tuple[float, PlanEvent]]]] = {
        "calm": ("ours", []),
        "a holder dies halfway": ("ours", [(half, WorkerLost("h0"))]),
        "a receiver dies halfway": ("ours", [(half, WorkerLost("r0"))]),
        "a holder lacks slack until halfway": ("ours", short),
        "oserve, a holder lacks slack until halfway": ("oserve", short),
    }
    found = {}
    for case, (name, events) in cases.items():
        result = run(fleet, planner_of(name, fleet, LIMITS), events)
        found[case] = {"seconds": result.seconds, "bytes_without_slack": result.short_bytes}
    return found
