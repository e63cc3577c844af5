"""Min-max assignment: each session goes where the bottleneck latency grows least (TurboServe, 5.2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.interface import Placement, Rebalancer, serving_by_kind, why_not
from turboserve.scheduler.placement.links import LinkKind, kind_between
from turboserve.scheduler.placement.pool import LatencyCurve, PoolEntry, with_loan_s
from turboserve.scheduler.placement.quota_preference import best_within
from turboserve.scheduler.placement.ranking import Item
from turboserve.scheduler.placement.tentative import TentativeAssignment
from turboserve.scheduler.placement.types import Candidate, Choice, Demand, Migration, SessionState

HELD = "it holds the session's state"
LEAST = "the bottleneck latency grows least"
WITHIN_QUOTA = "its quota has room, and the bottleneck latency grows least"
LOWERED = "no slot is free, so chunks get lower fidelity; the bottleneck latency grows least"


class MinMax(Placement):
    """Chooses the worker where the worst chunk latency of the model grows least.

    Ties go to the worker with the lowest own chunk latency with the session, then to the lower load, then to
    the lower id. A resumed session returns to the worker that holds its state if there is room. If no slot is
    free, a worker that absorbs takes more than K sessions, up to K_floor; suspect workers come after those.
    If the cluster has quotas of the session's class, workers whose quota is not used up come first.

    Since max(L, a) ≤ max(L, b) whenever a ≤ b, this is the order of the own latency alone. So one ranking
    serves every L, and `assign` finds the worker in logarithmic time. `place` computes every maximum, without
    quotas; a test checks that both make the same choices then.
    """

    def __init__(self, rebalancer: Rebalancer | None = None) -> None:
        """`rebalancer`: `assign` leaves near slots to its migrations (see `swap_for_locality`). None: no
        exchange."""
        self._rebalancer = rebalancer

    def assign(self, cluster: Cluster, demands: Sequence[Demand]) -> list[Choice]:
        tentative = TentativeAssignment(cluster)
        bottlenecks: dict[int, float] = {}
        choices = [self._assign(cluster, tentative, bottlenecks, demand) for demand in demands]
        if self._rebalancer is None or not demands or len(cluster.entries) < 2:
            # Without a second worker, no migration is expected.
            return choices
        return swap_for_locality(cluster, demands, choices, self._rebalancer)

    def _assign(
        self, cluster: Cluster, tentative: TentativeAssignment, bottlenecks: dict[int, float], demand: Demand
    ) -> Choice:
        pools = cluster.pools_for(demand.model, demand.weights_digest)
        bottleneck_s = max((bottlenecks.setdefault(id(p), p.bottleneck_s) for p in pools), default=0.0)
        ready = sum(pool.ready for pool in pools)
        entry = self._held(cluster, tentative, demand)
        reason = HELD if entry is not None else LEAST
        if entry is None and (entry := best_within(cluster, tentative, demand)) is not None:
            reason = WITHIN_QUOTA
        if entry is None:
            entry = self._best(cluster, tentative, demand)
        if entry is None:
            known = (cluster.entries.get(name) for name in demand.excluded)
            refused = any(
                e is not None and e.candidate and e.fits(demand.model, demand.weights_digest) for e in known
            )
            return Choice(demand.session, None, why_not(ready, refused, demand), {"candidates": ready})
        counted = entry.id == demand.counted_on
        others = entry.held + tentative.added.get(entry.id, 0) - counted
        reason = reason if others < entry.slots else LOWERED
        staying = others - len(entry.going)
        if not counted:
            tentative.add(entry.id)
        level_s = 0.0 if entry.state.suspect else entry.curve(staying + 1)
        after_s = max(bottleneck_s, level_s)
        own = id(cluster.pool(demand.model, entry.state.weights_digest))
        bottlenecks[own] = max(bottlenecks[own], level_s)
        latency_s = entry.with_more_s(others + 1)
        load = (others, entry.slots, entry.limit)
        choice = _choice(demand, entry.id, reason, latency_s, (bottleneck_s, after_s), load, ready)
        return _with_quota(cluster, demand.model, choice)

    @staticmethod
    def _held(cluster: Cluster, tentative: TentativeAssignment, demand: Demand) -> PoolEntry | None:
        entry = cluster.entries.get(demand.holder or "")
        if entry is None or not entry.candidate or entry.state.suspect:
            return None
        if not entry.fits(demand.model, demand.weights_digest):
            return None
        others = entry.held + tentative.added.get(entry.id, 0) - (entry.id == demand.counted_on)
        return entry if others < entry.slots and entry.id not in demand.excluded else None

    @staticmethod
    def _best(cluster: Cluster, tentative: TentativeAssignment, demand: Demand) -> PoolEntry | None:
        own = cluster.entries.get(demand.counted_on or "")
        if own is not None and (
            own.id in demand.excluded or not own.fits(demand.model, demand.weights_digest)
        ):
            own = None
        # The session's own slot does not count on its present worker, so compute that worker's key here.
        excluded = demand.excluded if own is None else {*demand.excluded, own.id}
        found: list[tuple[Item, PoolEntry]] = []
        for pool in cluster.pools_for(demand.model, demand.weights_digest):
            best = tentative.best(pool.targets, excluded=excluded, last_resort=True)
            if best is not None and (item := best.target_item(tentative.added.get(best.id, 0))) is not None:
                found.append((item, best))
        if own is not None and (item := own.target_item(tentative.added.get(own.id, 0) - 1)) is not None:
            found.append((item, own))
        return min(found, key=lambda one: one[0])[1] if found else None

    def place(self, candidates: Sequence[Candidate], demands: Sequence[Demand]) -> list[Choice]:
        curves = {c.worker: LatencyCurve(c.chunk_latency_s, c.capacity) for c in candidates}
        serving = serving_by_kind(candidates, demands)
        added = {candidate.worker: 0 for candidate in candidates}
        return [self._place(serving[d.kind_of_worker], curves, added, d) for d in demands]

    def _place(
        self,
        candidates: list[Candidate],
        curves: dict[str, LatencyCurve],
        added: dict[str, int],
        demand: Demand,
    ) -> Choice:
        loads = {c.worker: c.load + added[c.worker] for c in candidates}
        levels = (curves[c.worker](loads[c.worker] - c.leaving) for c in candidates if not c.suspect)
        bottleneck_s = max(levels, default=0.0)
        others = {name: load - (name == demand.counted_on) for name, load in loads.items()}
        rooms = [c for c in candidates if others[c.worker] < c.capacity and c.worker not in demand.excluded]
        if all(c.suspect for c in rooms):
            rooms += [
                c
                for c in candidates
                if c.capacity <= others[c.worker] < c.floor_capacity
                and not c.suspect
                and c.worker not in demand.excluded
            ]
        if not rooms:
            refused = any(c.worker in demand.excluded for c in candidates)
            reason = why_not(len(candidates), refused, demand)
            return Choice(demand.session, None, reason, {"candidates": len(candidates)})

        def cost(candidate: Candidate) -> tuple[bool, float, float, float, str]:
            on_it = others[candidate.worker]
            latency_s = with_loan_s(curves[candidate.worker], on_it + 1, lends=candidate.lends)
            after_s = max(bottleneck_s, latency_s)
            return candidate.suspect, after_s, latency_s, on_it / candidate.capacity, candidate.worker

        slotted = (c for c in rooms if others[c.worker] < c.capacity and not c.suspect)
        held = next((c for c in slotted if c.worker == demand.holder), None)
        best = held or min(rooms, key=cost)
        on_it = others[best.worker]
        if best.worker != demand.counted_on:
            added[best.worker] += 1
        curve = curves[best.worker]
        after_s = bottleneck_s if best.suspect else max(bottleneck_s, curve(on_it - best.leaving + 1))
        reason = HELD if held is not None else LEAST if on_it < best.capacity else LOWERED
        load = (on_it, best.capacity, best.floor_capacity)
        latency_s = with_loan_s(curve, on_it + 1, lends=best.lends)
        return _choice(demand, best.worker, reason, latency_s, (bottleneck_s, after_s), load, len(candidates))


def _choice(
    demand: Demand,
    worker: str,
    reason: str,
    latency_s: float,
    bottleneck_s: tuple[float, float],
    load: tuple[int, int, int],
    candidates: int,
) -> Choice:
    others, slots, floor_slots = load
    before_s, after_s = bottleneck_s
    numbers = {
        "latency_s": latency_s,
        "bottleneck_before_s": before_s,
        "bottleneck_after_s": after_s,
        "sessions": others + 1,
        "capacity": slots,
        "candidates": candidates,
    }
    if others >= slots:
        numbers["floor_capacity"] = floor_slots
    return Choice(demand.session, worker, reason, numbers)


def _with_quota(cluster: Cluster, model: str, choice: Choice) -> Choice:
    """Return the choice with the worker's quota of the class, if the class has quotas."""
    quotas = cluster.quotas.get(model)
    if quotas is None:
        return choice
    return replace(choice, numbers={**choice.numbers, "quota": quotas.get(str(choice.worker), 0)})


_NEARNESS = list(LinkKind)


def swap_for_locality(
    cluster: Cluster, demands: Sequence[Demand], choices: Sequence[Choice], rebalancer: Rebalancer
) -> list[Choice]:
    """Return `choices`, some of them exchanged with the target of an expected migration.

    A new session costs the same on any host, but a migration costs less on a near one. If a new session's
    worker is nearer to a migration's source than the migration's target is, the new session goes to that
    target instead. The number of sessions on each worker does not change, so L′ does not either, and the
    migration becomes cheaper when it is decided.
    """
    if len({entry.state.host for entry in cluster.entries.values()}) < 2:
        # No worker is nearer than another. Planning migrations would take longer than the placement.
        return list(choices)
    before = {d.session: cluster.sessions.get(d.session) for d in demands}
    _try_out(cluster, demands, choices, before)
    migrations = rebalancer.propose(cluster, inf)
    after = _exchanged(cluster, demands, choices, migrations) if migrations else list(choices)
    for name, state in before.items():
        if state is None:
            cluster.drop_session(name)
        else:
            cluster.put_session(state)
    return after


def _try_out(
    cluster: Cluster,
    demands: Sequence[Demand],
    choices: Sequence[Choice],
    before: dict[str, SessionState | None],
) -> None:
    for demand, choice in zip(demands, choices, strict=True):
        if choice.worker is not None:
            state = before[demand.session] or SessionState(demand.session, demand.model)
            cluster.put_session(replace(state, reserved=choice.worker, movable=False))


def _exchanged(
    cluster: Cluster, demands: Sequence[Demand], choices: Sequence[Choice], migrations: Sequence[Migration]
) -> list[Choice]:
    found = list(choices)
    open_ = [
        i
        for i, (demand, choice) in enumerate(zip(demands, choices, strict=True))
        if choice.worker is not None
        and demand.counted_on is None
        and demand.holder != choice.worker
        # A migration to a worker without a free slot will not be decided.
        and choice.numbers["sessions"] <= choice.numbers["capacity"]
    ]
    for migration in sorted(migrations, key=lambda migration: (-migration.cost_s, migration.session)):
        session = cluster.sessions[migration.session]
        if session.suspended:
            continue
        far = _nearness(cluster, migration.source, migration.target)
        nearer = [
            (_nearness(cluster, migration.source, str(found[i].worker)), i)
            for i in open_
            if _same_pool(cluster, str(found[i].worker), migration.target)
            and found[i].worker not in session.excluded
            and cluster.entries[str(found[i].worker)].serves
            and migration.target not in demands[i].excluded
        ]
        best, i = min(nearer, default=(far, -1))
        if best < far:
            found[i] = _at(cluster, found[i], migration)
            open_.remove(i)
    return found


def _same_pool(cluster: Cluster, one: str, other: str) -> bool:
    """Whether sessions can migrate between two workers, because both have the same model and weights."""
    first, second = (cluster.entries[name].state for name in (one, other))
    return (first.model, first.weights_digest) == (second.model, second.weights_digest)


def _nearness(cluster: Cluster, source: str, worker: str) -> int:
    hosts = (cluster.entries[name].state.host for name in (source, worker))
    return _NEARNESS.index(kind_between(*hosts))


def _at(cluster: Cluster, choice: Choice, migration: Migration) -> Choice:
    entry = cluster.entries[migration.target]
    latency_s = entry.with_more_s(entry.held + 1)
    numbers = {
        **choice.numbers,
        "latency_s": latency_s,
        "bottleneck_after_s": max(choice.numbers["bottleneck_before_s"], latency_s),
        "sessions": entry.held + 1,
        "capacity": entry.slots,
    }
    reason = f"{choice.reason}, with {choice.worker} left to a session of {migration.source}, which is nearer"
    return _with_quota(cluster, entry.state.model, Choice(choice.session, entry.id, reason, numbers))
