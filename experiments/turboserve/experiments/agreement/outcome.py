"""The figures of one run, from what its cores were given and what its viewers received."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turboserve.autoscaler.messages import Done, Exited, Launch, Release, SizeWanted
from turboserve.bench.report import percentile
from turboserve.bench.streaming.player import Player
from turboserve.contracts.workers import WorkerPhase
from turboserve.experiments.agreement.recording import POOL, SCHEDULER, Handled, Recording, decisions, handled
from turboserve.scheduler.messages import CommitMigration, LoadReported

SAME_ACTION_S = 1.5


@dataclass(frozen=True)
class SeenChunk:
    """A chunk that a viewer received."""

    session: str
    index: int
    worker: str
    compute_s: float
    at_s: float
    """Since the beginning of the trace."""
    quality: float = 1.0
    """Relative to the best configuration's."""
    waited_s: float = 0.0
    """From when the session was allowed to generate it until its first forward."""


def figures(
    recordings: Sequence[Recording],
    chunks: Sequence[SeenChunk],
    players: Sequence[Player],
    begins_s: float,
    lasts_s: float,
    again: bool = True,
) -> dict[str, Any]:
    """Return the figures of a run, for JSON. `begins_s`: beginning of the trace on the cores' clock.

    `again`: whether new cores get the recorded events, and their decisions are compared.
    """
    ends_s = begins_s + lasts_s
    pool, scheduler = handled(recordings, POOL), handled(recordings, SCHEDULER)
    latencies = [chunk.compute_s for chunk in chunks]
    times = _times(pool)
    cost = sum(
        max(0.0, min(time.ended_s, ends_s) - max(time.launched_s, begins_s)) for time in times.values()
    )
    stalls = sum(player.stalls for player in players)
    ready = _ready(scheduler)
    starts = [ready[name] - time.launched_s for name, time in times.items() if name in ready]
    releases = [
        time.ended_s - time.released_s for time in times.values() if time.released_s < time.ended_s < math.inf
    ]
    migrations = sum(
        begins_s <= each.now < ends_s and isinstance(command, CommitMigration)
        for each in scheduler
        for command in each.returned
    )
    return {
        "chunks": len(chunks),
        "cost_worker_s": round(cost, 3),
        "mean_s": round(statistics.fmean(latencies), 6) if latencies else None,
        "p10_s": percentile(latencies, 0.1),
        "p50_s": percentile(latencies, 0.5),
        "p95_s": percentile(latencies, 0.95),
        "late": stalls,
        "late_percent": round(100.0 * stalls / max(len(chunks), 1), 4),
        "stall_s": round(sum(player.stall_s for player in players), 3),
        "migrations": migrations,
        "actions": [
            [round(each.now - begins_s, 3), each.event.size]
            for each in pool
            if isinstance(each.event, SizeWanted) and begins_s <= each.now < ends_s
        ],
        "start_s": round(statistics.median(starts), 3) if starts else None,
        "release_s": round(statistics.median(releases), 3) if releases else None,
        "workers_launched": len(times),
        "decisions": decisions(recordings) if again else {},
    }


@dataclass
class _WorkerTime:
    launched_s: float
    released_s: float = math.inf
    ended_s: float = math.inf


def _times(pool: Sequence[Handled]) -> dict[str, _WorkerTime]:
    """Return, by worker, when the pool launched it, requested its end, and learned of it."""
    times: dict[str, _WorkerTime] = {}
    tickets: dict[int, str] = {}
    for each in pool:
        ended = None
        if isinstance(each.event, Exited):
            ended = each.event.worker
        elif isinstance(each.event, Done):
            ended = tickets.pop(each.event.ticket, None)
        if ended in times:
            times[ended].ended_s = min(times[ended].ended_s, each.now)
        for command in each.returned:
            if isinstance(command, Launch):
                times[command.worker] = _WorkerTime(each.now)
            elif isinstance(command, Release) and command.worker is not None:
                tickets[command.ticket] = command.worker
                if command.worker in times:
                    times[command.worker].released_s = each.now
    return times


def _ready(scheduler: Sequence[Handled]) -> dict[str, float]:
    """Return, by worker, when the scheduler heard from it that it serves."""
    found: dict[str, float] = {}
    for each in scheduler:
        event = each.event
        if isinstance(event, LoadReported) and event.report.phase is WorkerPhase.READY:
            found.setdefault(event.report.worker, each.now)
    return found


def compared(real: Mapping[str, Any], simulated: Mapping[str, Any]) -> dict[str, Any]:
    """Return by how much the simulation differs from the real run, for JSON."""
    actions = matched(real["actions"], simulated["actions"])
    return {
        "cost_error_percent": error_percent(simulated["cost_worker_s"], real["cost_worker_s"]),
        "mean_error_percent": error_percent(simulated["mean_s"], real["mean_s"]),
        "p50_error_percent": error_percent(simulated["p50_s"], real["p50_s"]),
        "p95_error_percent": error_percent(simulated["p95_s"], real["p95_s"]),
        "late_points": round(simulated["late_percent"] - real["late_percent"], 4),
        "migrations_error_percent": error_percent(simulated["migrations"], real["migrations"]),
        "actions_real": len(real["actions"]),
        "actions_simulated": len(simulated["actions"]),
        "actions_within": sum(abs(by) <= SAME_ACTION_S for by in actions),
        "actions_matched": len(actions),
    }


def error_percent(simulated: float | None, real: float | None) -> float | None:
    """Return the difference relative to the real number. None: there is no such ratio."""
    if simulated is None or real is None or (real == 0 and simulated != 0):
        return None
    return 0.0 if simulated == real else round(100.0 * (simulated / real - 1.0), 3)


def matched(real: Sequence[Sequence[float]], simulated: Sequence[Sequence[float]]) -> list[float]:
    """Return the differences in time of the actions that both sides made in the same order, most of them."""
    best: list[list[list[float]]] = [[[] for _ in range(len(simulated) + 1)] for _ in range(len(real) + 1)]
    for row, (at_s, size) in enumerate(real, 1):
        for column, (other_s, other) in enumerate(simulated, 1):
            options = [best[row - 1][column], best[row][column - 1]]
            if size == other:
                options.append([*best[row - 1][column - 1], other_s - at_s])
            best[row][column] = max(options, key=lambda each: (len(each), -sum(map(abs, each))))
    return best[-1][-1]
