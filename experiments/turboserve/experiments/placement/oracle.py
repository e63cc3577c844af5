"""The best placement, by exhaustive search, for small clusters (TurboServe, 7.4, Figure 9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from turboserve.scheduler.placement import Links, SessionState, WorkerState
from turboserve.scheduler.placement.links import kind_between
from turboserve.scheduler.placement.pool import LatencyCurve, slots


@dataclass(frozen=True)
class Optimum:
    """The least L + η Σ κ, and a placement that attains it."""

    objective_s: float
    worker: dict[str, str]


def optimum(
    workers: Sequence[WorkerState],
    sessions: Sequence[SessionState],
    links: Links,
    eta: float,
    target_chunk_s: float | None = None,
) -> Optimum:
    """Search every assignment of `sessions` of one model to `workers` that respects their slots.

    L is the worst chunk latency over the workers. A session that has a worker pays η κ on any other; a new
    session pays nothing. Workers that are to be emptied take none. The search shares no code with the
    rebalancer but L(n) and κ.

    A branch is cut if it cannot get below the best assignment so far: L is no less than the already placed
    sessions need, nor than the same number of sessions needs if migrations are free. Sessions that are alike
    in everything are placed in one order only.
    """
    taking = [w for w in workers if w.ready and not w.draining]
    curves = [LatencyCurve(w.chunk_latency_s, w.capacity) for w in taking]
    limits = [slots(c, w.capacity, target_chunk_s) for c, w in zip(curves, taking, strict=True)]
    host_of = {w.id: w.host for w in workers}
    ordered = sorted(sessions, key=lambda s: (s.worker or "", s.state_bytes, s.id))

    def cost_s(session: SessionState, worker: WorkerState) -> float:
        if session.worker is None or session.worker == worker.id:
            return 0.0
        kind = kind_between(host_of[session.worker], worker.host)
        return eta * links.seconds(kind, session.state_bytes)

    costs = [[cost_s(session, worker) for worker in taking] for session in ordered]
    alike = [
        i > 0 and (s.worker, s.state_bytes) == (ordered[i - 1].worker, ordered[i - 1].state_bytes)
        for i, s in enumerate(ordered)
    ]
    least_s = _least_s(curves, limits, len(ordered))
    counts = [0] * len(taking)
    chosen = [0] * len(ordered)
    best_s, best = inf, list(chosen)

    def go(i: int, latency_s: float, migration_s: float) -> None:
        nonlocal best_s, best
        if latency_s + migration_s >= best_s:
            return
        if i == len(ordered):
            best_s, best = latency_s + migration_s, list(chosen)
            return
        # Sessions that are alike must try the workers in the same order, or skipping permutations is not
        # valid.
        ranks = sorted(range(len(taking)), key=lambda j: (costs[i][j], j))
        if alike[i]:
            ranks = ranks[ranks.index(chosen[i - 1]) :]
        for j in ranks:
            if counts[j] < limits[j]:
                counts[j] += 1
                chosen[i] = j
                go(i + 1, max(latency_s, curves[j](counts[j])), migration_s + costs[i][j])
                counts[j] -= 1

    go(0, least_s, 0.0)
    return Optimum(best_s, {s.id: taking[j].id for s, j in zip(ordered, best, strict=True)})


def _least_s(curves: Sequence[LatencyCurve], limits: Sequence[int], sessions: int) -> float:
    """Return the least L of so many sessions if migrations are free: the fastest of all slots are used."""
    levels = sorted(
        curve(n) for curve, limit in zip(curves, limits, strict=True) for n in range(1, limit + 1)
    )
    return levels[sessions - 1] if sessions else 0.0
