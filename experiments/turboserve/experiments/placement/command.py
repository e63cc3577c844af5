"""Placement: time per decision by number of workers, and distance from an exhaustive oracle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from turboserve.bench.load_reports import ReportingPool, measure_events
from turboserve.bench.placement import LOAD, NOISE, SLOTS, Samples, measure
from turboserve.bench.report import percentile
from turboserve.bench.slack_decisions import measure_reports
from turboserve.experiments.placement.gap import gaps_percent
from turboserve.scheduler.placement import (
    PLACEMENTS,
    Assigner,
    MinMax,
    MinMaxRebalancer,
    NeverMigrates,
    Rebalancer,
    Weights,
)

WORKERS = (4, 8, 16, 32, 64, 256, 1024, 4096)
EVENTS = ("arrival", "departure", "rebalance")
STREAMS = (64, 128, 256, 512, 1024)
SLACK_EVENTS = ("report", "tick")
RESCUE_HORIZON_S = 6.0
POOLS = ((8, 64), (40, 300), (200, 2_000))
"""Workers and sessions of the pools whose load reports are measured."""


def run(
    most: Annotated[int, typer.Option(min=4, help="Number of workers in the largest cluster.")] = WORKERS[-1],
    events: Annotated[
        int, typer.Option(min=10, help="Number of arrivals and of departures in each cluster.")
    ] = 1000,
    instances: Annotated[
        int, typer.Option(min=1, help="Number of random clusters that are compared with the oracle.")
    ] = 400,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random choices.")] = 0,
) -> dict[str, Any]:
    """Measure decision time by event and number of workers, and the distance from an exhaustive oracle.

    Decisions use the index that the scheduler keeps. The baselines are measured in the same run.
    """
    rebalancer = MinMaxRebalancer()
    samples = {n: measure(n, events, seed, MinMax(rebalancer), rebalancer) for n in WORKERS if n <= most}
    rescuer = MinMaxRebalancer(Weights(rescue_horizon_s=RESCUE_HORIZON_S))
    pools = {
        f"{workers}, {sessions}": by_event(measure_events(workers, sessions, max(2, events // 100), seed))
        for workers, sessions in POOLS
        if workers <= most
    }
    reports = {n: measure_reports(n, events, seed, rescuer) for n in STREAMS if n <= most * 16}
    eta = rebalancer.weights.eta
    seeds = range(seed, seed + instances)
    ours, strict = (
        gap(seeds, MinMax(rebalancer), rebalancer, eta)
        for rebalancer in (
            MinMaxRebalancer(Weights(migrations_at_once=1000, spreads=spreads)) for spreads in (True, False)
        )
    )
    return {
        "definitions": {
            "decision": "Apply the event to the index, assign the session, propose and apply migrations.",
            "decision_s": "Processor time of the deciding thread.",
            "decision_wall_s": "Elapsed time, which includes other work of the machine.",
            "rebalance": "A worker joins or drains.",
            "report": "A tenth of the workers reports slacks; sessions are migrated to save late chunks.",
            "tick": "The same after reports of all workers, as SlackServe's tick.",
            "events": "Processor time of the scheduler's whole core by event and size of the pool (workers, "
            "sessions). decode: to read the message of a load report. arrival: from a session's event to the "
            "command that places it.",
            "reports_per_cpu_s": "Load reports that are read and handled in a second of processor time.",
            "oracle_gap_percent": f"L + {eta:g} * sum of migration costs, above the exhaustive oracle's.",
            "oracle_gap_objective_only_percent": "The same, without migrations that only spread sessions.",
        },
        "scene": {"slots": SLOTS, "load": LOAD, "profile_noise": NOISE, "instances": instances},
        "decision_s": {event: by_workers(samples, event, "cpu_s") for event in EVENTS},
        "decision_wall_s": {event: by_workers(samples, event, "wall_s") for event in EVENTS},
        "slack_decision_s": {event: by_workers(reports, event, "cpu_s") for event in SLACK_EVENTS},
        "events": pools,
        "slack_moves": {e: {str(n): s.migrations[e] for n, s in reports.items()} for e in SLACK_EVENTS},
        "moves": {event: {str(n): s.migrations[event] for n, s in samples.items()} for event in EVENTS},
        "oracle_gap_percent": ours,
        "oracle_gap_objective_only_percent": strict,
        "baselines": {
            name if name != "min-max" else "min-max, no moves": {
                "oracle_gap_percent": gap(seeds, PLACEMENTS.make(name), NeverMigrates(), eta)
            }
            for name in PLACEMENTS.names
        },
    }


def by_workers(samples: Mapping[int, Samples], event: str, clock: str) -> dict[str, dict[str, float | None]]:
    """Return p50, p99 and max in seconds by number of workers or streams, and the number of decisions."""
    found: dict[str, dict[str, float | None]] = {}
    for workers, of in samples.items():
        seconds = getattr(of, clock)[event]
        found[str(workers)] = {
            "p50": percentile(seconds, 0.5),
            "p99": percentile(seconds, 0.99),
            "max": max(seconds),
            "decisions": len(seconds),
        }
    return found


def by_event(pool: ReportingPool) -> dict[str, Any]:
    """Return the seconds by event, and the load reports per second of processor time."""
    reports = pool.seconds["report"]
    return {
        "reports_per_cpu_s": len(reports) / (sum(reports) + sum(pool.seconds["decode"])),
        "migrations": pool.migrations,
        **{
            event: {
                "p50": percentile(of, 0.5),
                "p99": percentile(of, 0.99),
                "sum": sum(of),
                "events": len(of),
            }
            for event, of in pool.seconds.items()
        },
    }


def gap(seeds: range, assigner: Assigner, rebalancer: Rebalancer, eta: float) -> dict[str, float]:
    """Return the mean and worst gap over the instances, the share of optima, and the migrations per
    instance."""
    percent, migrations = gaps_percent(seeds, assigner, rebalancer, eta)
    return {
        "mean": sum(percent) / len(percent),
        "max": max(percent),
        "optimal_share": sum(p < 1e-6 for p in percent) / len(percent),
        "moves": migrations / len(percent),
    }


def table(result: Mapping[str, Any]) -> Table:
    """Format the times in milliseconds by number of workers, then the gaps."""
    shown = Table("workers", *(f"{event}: p50, p99 (ms)" for event in EVENTS), box=box.SIMPLE)
    for workers in result["decision_s"][EVENTS[0]]:
        cells = (result["decision_s"][event][workers] for event in EVENTS)
        shown.add_row(workers, *(f"{c['p50'] * 1e3:.3f}, {c['p99'] * 1e3:.3f}" for c in cells))
    shown.add_section()
    for streams, of in result["slack_decision_s"]["report"].items():
        whole = result["slack_decision_s"]["tick"][streams]
        cells = (
            f"{event}: {c['p50'] * 1e3:.3f}, {c['p99'] * 1e3:.3f}"
            for event, c in (("report", of), ("tick", whole))
        )
        shown.add_row(f"{streams} streams", *cells, "")
    shown.add_section()
    for pool, of in result["events"].items():
        times = (
            f"{event}: {of[event]['p50'] * 1e3:.3f}, {of[event]['p99'] * 1e3:.3f}"
            for event in ("report", "arrival")
        )
        shown.add_row(f"{pool} sessions", *times, f"{of['reports_per_cpu_s']:.0f} reports per s")
    shown.add_section()
    gaps = {"min-max": result["oracle_gap_percent"]}
    gaps |= {name: of["oracle_gap_percent"] for name, of in result["baselines"].items()}
    for name, of in gaps.items():
        shown.add_row(name, f"above the oracle: mean {of['mean']:.2f} %", f"max {of['max']:.2f} %", "")
    return shown
