"""Migration-aware min-max rebalancing (TurboServe, 5.2.1)."""

from __future__ import annotations

import heapq
from math import nextafter

from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.links import Links
from turboserve.scheduler.placement.plan import Plan, Planner, Stage, Step, stages
from turboserve.scheduler.placement.pool import PoolEntry
from turboserve.scheduler.placement.rescue import LateGuard, Rescuer, begun, migration_of
from turboserve.scheduler.placement.spread import spread
from turboserve.scheduler.placement.types import Migration, MigrationKind, SessionState, Weights

TRIES = 8
"""Maximum number of limits tried within one stage. Their plans differ only in how near the migrations are."""


class MinMaxRebalancer:
    """Migrates sessions while the worst chunk latency falls by more than η times the cost of the migrations.

    The paper makes the best single migration until none gains. If several workers share the bottleneck, no
    single migration gains, so this rebalancer weighs sets of migrations:

    1. For each limit that L′ could reach, it plans the cheapest set that brings all workers below the limit.
       `stages` leaves out limits that cannot pay.
    2. It proposes the set with the largest Γ = L − L′ − η Σ κ, if that exceeds `Weights.least_gain` of L. The
       migrations of a set share Γ.
    3. If the set is larger than `Weights.migrations_at_once`, the rest follows in later decisions, where the
       rest gains more than before.

    With `Weights.rescue_horizon_s` and workers that report slack, the objective is first the number of
    expected late chunks, and then the above: drains get their targets first, then the migrations that save
    late chunks, and then those for balance that make none late. All share the limits and the rests.
    """

    def __init__(self, weights: Weights | None = None, links: Links | None = None) -> None:
        self.weights = weights or Weights()
        self.links = links or Links()

    def propose(self, cluster: Cluster, now: float) -> list[Migration]:
        found: list[Migration] = []
        for _, pool in sorted(cluster.pools.items(), key=lambda one: (one[0][0], one[0][1] or "")):
            found += self._with_rescues(cluster, Planner(cluster, pool, self.links, now), now)
        return found

    def _with_rescues(self, cluster: Cluster, planner: Planner, now: float) -> list[Migration]:
        allowed = self._allowed(cluster, planner)
        if allowed <= 0 or not self.weights.rescue_horizon_s or not cluster.urgency.slacks:
            return self._in_pool(cluster, planner, now)
        before_s = planner.pool.bottleneck_s
        base = self._base(planner, before_s)
        with begun(cluster, [(step.session, step.target.id) for step in base.steps]):
            rescues = Rescuer(cluster, planner, self.weights, now).find(allowed)
            if rescues:
                with begun(cluster, [(one.step.session, one.step.target.id) for one in rescues]):
                    rest = self._in_pool(cluster, Planner(cluster, planner.pool, self.links, now), now)
        if not rescues:
            return self._in_pool(cluster, planner, now)
        eta = self.weights.eta
        drains = [_drain(step, before_s, base, len(base.steps), eta) for step in base.steps]
        return [*drains, *(migration_of(one, self.weights) for one in rescues), *rest]

    def _allowed(self, cluster: Cluster, planner: Planner) -> int:
        """Return how many migrations may begin in the pool, without drains."""
        pool = planner.pool
        under_way = sum(cluster.sessions[name].worker not in pool.draining for name in sorted(pool.migrating))
        return self.weights.migrations_at_once - under_way

    def _in_pool(self, cluster: Cluster, planner: Planner, now: float) -> list[Migration]:
        pool, eta = planner.pool, self.weights.eta
        before_s = pool.bottleneck_s
        guard = LateGuard(cluster, self.weights, now)
        base = self._base(planner, before_s)
        best, gain_s = self._best(cluster, planner, base, guard)
        drains = [step for step in best.steps if step.drain]
        migrations = [_drain(step, before_s, base, len(drains), eta) for step in drains]
        allowed = self._allowed(cluster, planner)
        if allowed > 0:
            balance = [step for step in best.steps if not step.drain]
            migrations += [_balance(step, base, best, gain_s, eta) for step in balance[:allowed]]
            if self.weights.spreads and len(balance) < allowed:
                migrations += spread(cluster, planner, best, allowed - len(balance), self.weights, guard)
        if pool.draining:
            migrations += drain_suspended(cluster, planner, eta)
        return migrations

    def _base(self, planner: Planner, before_s: float) -> Plan:
        """Plan only the drains, to where the bottleneck grows least."""
        drains, worst_s = planner.lowest_s(planner.drains())
        plan = planner.plan(max(before_s, worst_s), drains, most=0)
        while plan is None:
            # Exclusions keep some session out of the free slots. Leave the last session for later.
            drains, worst_s = planner.lowest_s(drains[:-1])
            plan = planner.plan(max(before_s, worst_s), drains, most=0)
        return plan

    def _best(self, cluster: Cluster, planner: Planner, base: Plan, guard: LateGuard) -> tuple[Plan, float]:
        """Return the plan that gains most over `base`, or `base` itself, and its gain in seconds."""
        weights = self.weights
        least_s = weights.least_gain * base.latency_s
        start = (base.latency_s, len(base.steps))
        found = stages(cluster, planner, start, weights.eta, least_s, weights.horizon)
        best, gain_s = base, least_s
        for stage in sorted(found, key=lambda stage: -stage.bound_s):
            if stage.bound_s <= gain_s:
                break
            for plan in self._plans(planner, base, stage):
                gained_s = base.latency_s - plan.latency_s - weights.eta * (plan.cost_s - base.cost_s)
                if gained_s > gain_s and not guard.worsens(plan.steps, base.steps):
                    best, gain_s = plan, gained_s
        return best, gain_s

    def _plans(self, planner: Planner, base: Plan, stage: Stage) -> list[Plan]:
        """Return plans of one stage: the cheapest, the lowest, and some between if they differ in cost."""
        drains = [step.session for step in base.steps]
        lowest = planner.plan(stage.floor_s, drains, self.weights.horizon)
        found = [] if lowest is None else [lowest]
        if lowest is not None and lowest.cost_s <= base.cost_s + stage.cost_s:
            return found
        limit_s = stage.ceiling_s
        for _ in range(TRIES):
            plan = planner.plan(limit_s, drains, self.weights.horizon)
            if plan is None:
                break
            found.append(plan)
            if plan.latency_s <= stage.floor_s or (lowest is not None and plan.cost_s >= lowest.cost_s):
                break
            limit_s = nextafter(plan.latency_s, 0.0)
        return found


def _numbers(step: Step, plan: Plan, before_s: float, eta: float) -> dict[str, float]:
    return {
        "bottleneck_before_s": before_s,
        "bottleneck_after_s": plan.latency_s,
        "source_latency_s": step.source.curve(step.source.staying),
        "target_latency_s": plan.level_s(step.target),
        "source_sessions": step.source.staying,
        "target_sessions": plan.sessions_on(step.target),
        "cost_s": step.cost_s,
        "eta": eta,
        "state_bytes": step.session.state_bytes,
    }


def _drain(step: Step, before_s: float, base: Plan, drains: int, eta: float) -> Migration:
    return Migration(
        session=step.session.id,
        source=step.source.id,
        target=step.target.id,
        gain_s=(before_s - base.latency_s) / drains - eta * step.cost_s,
        cost_s=step.cost_s,
        reason=f"{step.source.id} is draining; the bottleneck latency grows least on {step.target.id}",
        kind=MigrationKind.DRAIN,
        numbers=_numbers(step, base, before_s, eta),
    )


def _balance(step: Step, base: Plan, best: Plan, gain_s: float, eta: float) -> Migration:
    together = len(best.steps) - len(base.steps)
    others = "" if together == 1 else f", with {together - 1} other migrations"
    return Migration(
        session=step.session.id,
        source=step.source.id,
        target=step.target.id,
        gain_s=gain_s / together,
        cost_s=step.cost_s,
        reason=(
            f"the worst chunk latency falls from {base.latency_s:.3g} s to {best.latency_s:.3g} s{others}, "
            f"which gains more than the migrations cost"
        ),
        kind=MigrationKind.BALANCE,
        numbers={**_numbers(step, best, base.latency_s, eta), "migrations_together": together},
    )


def drain_suspended(cluster: Cluster, planner: Planner, eta: float) -> list[Migration]:
    """Propose one migration per suspended session, to the worker with the fewest sessions per slot.

    Suspended sessions count in that number, because each is resumed on its worker if there is room then. They
    need no slot, only host memory.
    """
    workers_by_load = [(float(item[0]), str(item[-1])) for item in planner.pool.suspended_ranking.items]
    migrations: list[Migration] = []
    for name in sorted(planner.pool.draining):
        source = cluster.entries[name]
        if source.state.suspect:
            continue
        for session in (cluster.sessions[suspended] for suspended in sorted(source.suspended)):
            # A session that is still migrating to this worker must arrive first.
            if not session.movable or session.target is not None or session.worker != name:
                continue
            target = _take(cluster, workers_by_load, session)
            if target is not None:
                migrations.append(_migration(planner, session, source, target, eta))
    return migrations


def _take(
    cluster: Cluster, workers_by_load: list[tuple[float, str]], session: SessionState
) -> PoolEntry | None:
    aside = []
    found: PoolEntry | None = None
    while workers_by_load and found is None:
        load, name = heapq.heappop(workers_by_load)
        entry = cluster.entries[name]
        if name not in session.excluded:
            found = entry
            load += 1 / entry.slots
        aside.append((load, name))
    for item in aside:
        heapq.heappush(workers_by_load, item)
    return found


def _migration(
    planner: Planner, session: SessionState, source: PoolEntry, target: PoolEntry, eta: float
) -> Migration:
    cost_s = planner.cost_s(session, source, target)
    return Migration(
        session=session.id,
        source=source.id,
        target=target.id,
        gain_s=-eta * cost_s,
        cost_s=cost_s,
        reason=f"{source.id} is draining; {target.id} has the fewest sessions for its size",
        kind=MigrationKind.DRAIN,
        numbers={"cost_s": cost_s, "eta": eta, "state_bytes": session.state_bytes},
    )
