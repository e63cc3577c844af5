"""Cells of the comparison: one run of one policy on one workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from turboserve.experiments.slack.metrics import StreamMetrics, cpr_bounds, measure
from turboserve.experiments.slack.policies import COUNTED, HOST_WORKERS, POLICIES
from turboserve.experiments.slack.profiles import PROFILES
from turboserve.experiments.slack.workloads import WORKLOADS
from turboserve.simulation.streams import WARM_UP_S, StreamRecord, StreamScale, run_streams

SLOTS = 64
"""Sessions in a worker's memory where K does not limit them: SlackServe refuses no stream."""
LONGEST_TAIL_S = 600.0
"""Virtual time after the last arrival at which a run ends, whatever is incomplete."""


@dataclass(frozen=True)
class Cell:
    """Parameters of one run."""

    profile: str
    workload: str
    policy: str
    workers: int
    streams: int
    rate: float
    """Arrivals per second for each 16 workers."""
    seed: int


@dataclass(frozen=True)
class CellResult:
    """Result of one run."""

    metrics: StreamMetrics
    migrations: int
    loans: int
    violations: int
    virtual_s: float
    messages: tuple[str, ...] = ()


@dataclass(frozen=True)
class CprBounds:
    """The least and the largest CPR that a run can have. Both are equal if it has ended."""

    least: float
    most: float


def simulate(cell: Cell) -> CellResult:
    """Run one cell."""
    records, run = _run(cell, lambda records: False)
    return CellResult(
        measure(records, run["virtual_s"] - WARM_UP_S),
        run["counts"]["moves"],
        run["counts"]["loans"],
        sum(run["violations"].values()),
        run["virtual_s"],
        tuple(run["messages"][:3]),
    )


def simulate_bounds(cell: Cell, too_low: float, enough: float) -> CprBounds:
    """Run one cell until its CPR is certainly below `too_low` or at least `enough`, or to its end."""

    def decided(records: Sequence[StreamRecord]) -> bool:
        least, most = cpr_bounds(records)
        return most < too_low or least >= enough

    records, _ = _run(cell, decided)
    least, most = cpr_bounds(records)
    return CprBounds(least, most if decided(records) else least)


def _run(
    cell: Cell, decided: Callable[[Sequence[StreamRecord]], bool]
) -> tuple[list[StreamRecord], dict[str, Any]]:
    policy, profile = POLICIES[cell.policy], PROFILES[cell.profile]()
    counted = {"worker_max_sessions": None} if cell.policy in COUNTED else {}
    scale = StreamScale(
        workers=cell.workers,
        most_workers=cell.workers,
        slots=SLOTS,
        gather=policy.gather,
        placement=policy.placement,
        device=profile.device,
        host_workers=HOST_WORKERS if policy.lends else 0,
        worker_settings={**policy.worker, **counted},
        scheduler_settings=policy.scheduler,
    )
    plans = WORKLOADS[cell.workload](cell.seed, cell.streams, cell.rate, cell.workers)
    longest_s = plans[-1].arrives_s + LONGEST_TAIL_S
    return run_streams(cell.seed, scale, plans, profile.start_buffer_s, longest_s, decided)
