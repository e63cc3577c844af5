"""Quotas: shares rounded to whole sessions, kind by kind and worker by worker."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor

from turboserve.allocation.classes import ROUNDING, Capability, SessionClass
from turboserve.scheduler.placement.shares import Demand, Kind, Shares

Counts = Mapping[SessionClass, int]
WHOLE = 1e-6
"""A share that is this near to a whole number is that number."""


@dataclass(frozen=True)
class Worker:
    """One worker and the sessions on it."""

    name: str
    capability: Capability
    counts: Counts


Quotas = dict[str, dict[SessionClass, int]]
"""Sessions that each worker should have, by class."""


@dataclass(frozen=True)
class ShareProblem:
    """Workers and sessions for which shares are wanted."""

    workers: tuple[Worker, ...]
    """Workers that may get sessions, with those that they have."""
    waiting: Mapping[SessionClass, int]
    """Further sessions by class."""


def round_shares(
    kinds: Sequence[Kind], shares: Shares, demand: Demand
) -> dict[tuple[str, SessionClass], int]:
    """Round x_kj to whole sessions.

    No kind exceeds its time or memory. Each class j gets more than Σ_k x_kj - f_j sessions, where f_j is the
    number of kinds whose x_kj is no whole number: rounding down loses less than one session of each, and
    what then fits is added, the largest remainder first. The optimum is a vertex, so Σ_j f_j is at most the
    number of the program's rows.
    """
    whole = {cell: floor(value + WHOLE) for cell, value in shares.sessions.items()}
    of_kind: dict[str, Counter[SessionClass]] = defaultdict(Counter)
    total: Counter[SessionClass] = Counter()
    exact: dict[SessionClass, float] = defaultdict(float)
    for (name, one), count in whole.items():
        of_kind[name][one] += count
        total[one] += count
        exact[one] += shares.sessions[name, one]
    capabilities = {kind.name: kind for kind in kinds}
    remainders = sorted(shares.sessions, key=lambda cell: (whole[cell] - shares.sessions[cell], cell))
    for cell in remainders:
        name, one = cell
        if total[one] + 1 <= min(demand.get(one, 0), exact[one] + 1 - WHOLE):
            of_kind[name][one] += 1
            if _kind_fits(capabilities[name], of_kind[name]):
                whole[cell] += 1
                total[one] += 1
            else:
                of_kind[name][one] -= 1
    return {cell: count for cell, count in whole.items() if count}


def _kind_fits(kind: Kind, counts: Counts) -> bool:
    capability = kind.capability
    used = sum(count / capability.sessions[one] for one, count in counts.items() if count)
    if used > kind.workers * (1 + ROUNDING):
        return False
    size = sum(count * capability.state_bytes.get(one, 0) for one, count in counts.items())
    return not capability.memory_bytes or size <= kind.workers * capability.memory_bytes


def quotas_of(
    workers: Mapping[str, Sequence[Worker]], kinds: Sequence[Kind], shares: Shares, demand: Demand
) -> Quotas:
    """Return the quota of each worker: whole sessions that fit into its polytope.

    Args: `workers` has the workers of each kind by the kind's name.

    1. Sessions stay where they are, as far as the quota of their kind allows.
    2. The others fill workers of their kind: first those that have sessions of the class, since rows of
       unlike shape never share a forward, then empty ones, then the fullest ones. No worker is filled above
       the program's utilization as long as another one has room below it.
    3. What then fits on no worker of its kind goes to the kind where it takes the least part.
    """
    cells = round_shares(kinds, shares, demand)
    counts: Quotas = {worker.name: {} for of_kind in workers.values() for worker in of_kind}
    rest: Counter[SessionClass] = Counter()
    for kind in kinds:
        wanted = Counter({one: count for (name, one), count in cells.items() if name == kind.name})
        _keep(workers[kind.name], wanted, counts)
        _fill(workers[kind.name], wanted, counts, shares.utilization)
        rest.update(wanted)
    for one in demand:
        # Shares that rounding has cut.
        quota = sum(of.get(one, 0) for of in counts.values())
        served = floor(shares.served.get(one, 0.0) * demand[one] + WHOLE)
        rest[one] = max(rest[one], served - quota)
    everyone = [worker for of_kind in workers.values() for worker in of_kind]
    for one in sorted(rest, key=lambda one: (-rest[one], one)):
        for _ in range(rest[one]):
            if not _add_anywhere(everyone, one, counts):
                break
    return counts


def _keep(workers: Sequence[Worker], wanted: Counter[SessionClass], counts: Quotas) -> None:
    """Keep present sessions within the quota of the kind. Workers with the most sessions of a class first, so
    that few workers have sessions of several classes."""
    for one in sorted(wanted):
        for worker in sorted(workers, key=lambda w: (-w.counts.get(one, 0), w.name)):
            kept = min(worker.counts.get(one, 0), wanted[one])
            kept = min(kept, worker.capability.most(one, counts[worker.name]))
            if kept:
                counts[worker.name][one] = kept
                wanted[one] -= kept


def _fill(workers: Sequence[Worker], wanted: Counter[SessionClass], counts: Quotas, level: float) -> None:
    if not workers:
        return
    rates = workers[0].capability.sessions
    used = {worker.name: worker.capability.utilization(counts[worker.name]) for worker in workers}
    # The largest sessions first: small ones fill what those leave.
    for one in sorted(wanted, key=lambda one: (rates.get(one, 0), one)):
        part = 1 / max(rates.get(one, 0), 1)
        rooms = {w.name: w.capability.most(one, counts[w.name]) for w in workers} if wanted[one] else {}
        while wanted[one]:
            best = min(
                (w for w in workers if rooms[w.name] > 0),
                key=lambda w: _order(one, part, used[w.name], counts[w.name], level, w.name),
                default=None,
            )
            if best is None:
                break
            of = counts[best.name]
            # As many at once as the level allows.
            below = int((level + part / 2 + ROUNDING - used[best.name]) / part)
            added = max(1, min(wanted[one], below, rooms[best.name]))
            of[one] = of.get(one, 0) + added
            used[best.name] = best.capability.utilization(of)
            # Of the others, the room is as before.
            rooms[best.name] = best.capability.most(one, of)
            wanted[one] -= added


def _order(
    one: SessionClass, part: float, used: float, counts: Counts, level: float, name: str
) -> tuple[bool, int, float, str]:
    """Order the workers of one kind for one session more."""
    above = used + part > level + part / 2 + ROUNDING
    affinity = 0 if counts.get(one) else 1 if not counts else 2
    # Below the level the fullest worker is filled first; above it, the emptiest.
    return above, affinity if not above else 0, used if above else -used, name


def _add_anywhere(workers: Sequence[Worker], one: SessionClass, counts: Quotas) -> bool:
    best = min(
        (w for w in workers if w.capability.most(one, counts[w.name]) > 0),
        key=lambda w: (1 / w.capability.sessions[one], w.name),
        default=None,
    )
    if best is None:
        return False
    counts[best.name][one] = counts[best.name].get(one, 0) + 1
    return True
