"""Migration-aware min-max rebalancing (TurboServe, 5.2.1)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import islice
from math import inf, nextafter

from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.drain import drain_active, drain_suspended
from turboserve.scheduler.placement.links import Links
from turboserve.scheduler.placement.objective import Objective
from turboserve.scheduler.placement.plan import Plan, Planner, Step
from turboserve.scheduler.placement.pool import Pool, PoolEntry
from turboserve.scheduler.placement.proposals import Proposals, costs_of
from turboserve.scheduler.placement.ranking import Item
from turboserve.scheduler.placement.rescue import Rescuer, begun, migration_of
from turboserve.scheduler.placement.stages import Stage, stages
from turboserve.scheduler.placement.types import (
    SESSIONS_TRIED,
    Migration,
    MigrationKind,
    SessionState,
    Weights,
)
from turboserve.wording import counted

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
    expected late chunks, and then the above (see `Objective`): drains get their targets first, then the
    migrations that save late chunks, and then those for balance that make none late. All share the limits and
    the rests, and no session returns to a worker that it left, until something changes from outside.
    """

    def __init__(self, weights: Weights | None = None, links: Links | None = None) -> None:
        self.weights = weights or Weights()
        self.links = links or Links()
        self._last: Proposals | None = None

    def propose(self, cluster: Cluster, now: float) -> list[Migration]:
        """See `Rebalancer.propose`. Without slack, proposals are found again only after a change."""
        found: list[Migration] = []
        until = inf
        slacks = bool(self.weights.rescue_horizon_s and cluster.urgency.slacks)
        if slacks:
            cluster.urgency.refresh(
                cluster.entries, cluster.pool, self.weights.rescue_horizon_s, self.weights.tier_alpha
            )
        elif self._last is not None and self._last.hold(cluster, self.weights, self.links, now):
            return list(self._last.migrations)
        for _, pool in sorted(cluster.pools.items(), key=lambda one: (one[0][0], one[0][1] or "")):
            if slacks and cluster.urgency.reported_in(pool):
                found += self._with_slack(cluster, pool, now)
            else:
                planner = Planner(cluster, pool, self.links, now)
                found += self._in_pool(cluster, planner, None)
                until = min(until, planner.valid_until)
        costs = costs_of(self.links)
        self._last = (
            None
            if slacks
            else Proposals(cluster, cluster.changes, self.weights, costs, now, until, tuple(found))
        )
        return found

    def _with_slack(self, cluster: Cluster, pool: Pool, now: float) -> list[Migration]:
        def planner() -> Planner:
            return Planner(cluster, pool, self.links, now, returns=False)

        objective = Objective(cluster, self.weights, now)
        first = planner()
        allowed = self._allowed(cluster, first)
        if allowed <= 0:
            return self._in_pool(cluster, first, objective)
        before_s = pool.bottleneck_s
        base = self._base(first, before_s)
        with begun(cluster, [(step.session, step.target.id) for step in base.steps]):
            rescues = Rescuer(cluster, first, objective, self.weights, now).find(allowed)
            if rescues:
                with begun(cluster, [(one.step.session, one.step.target.id) for one in rescues]):
                    rest = self._in_pool(cluster, planner(), objective)
        if not rescues:
            return self._in_pool(cluster, first, objective)
        eta = self.weights.eta
        drains = [drain_active(step, before_s, base, len(base.steps), eta) for step in base.steps]
        return [*drains, *(migration_of(one, self.weights) for one in rescues), *rest]

    def _allowed(self, cluster: Cluster, planner: Planner) -> int:
        """Return how many migrations may begin in the pool, without drains."""
        pool = planner.pool
        under_way = sum(cluster.sessions[name].worker not in pool.draining for name in sorted(pool.migrating))
        return self.weights.migrations_at_once - under_way

    def _in_pool(self, cluster: Cluster, planner: Planner, objective: Objective | None) -> list[Migration]:
        pool, eta = planner.pool, self.weights.eta
        before_s = pool.bottleneck_s
        base = self._base(planner, before_s)
        best, gain_s = self._best(cluster, planner, base, objective)
        drains = [step for step in best.steps if step.drain]
        migrations = [drain_active(step, before_s, base, len(drains), eta) for step in drains]
        allowed = self._allowed(cluster, planner)
        if allowed > 0:
            balance = [step for step in best.steps if not step.drain]
            migrations += [_balance(step, base, best, gain_s, eta) for step in balance[:allowed]]
            if self.weights.spreads and len(balance) < allowed:
                migrations += spread(cluster, planner, best, allowed - len(balance), self.weights, objective)
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

    def _best(
        self, cluster: Cluster, planner: Planner, base: Plan, objective: Objective | None
    ) -> tuple[Plan, float]:
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
                if gained_s > gain_s and (objective is None or objective.keeps(plan.steps, base.steps)):
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


def _balance(step: Step, base: Plan, best: Plan, gain_s: float, eta: float) -> Migration:
    together = len(best.steps) - len(base.steps)
    others = "" if together == 1 else f", with {counted(together - 1, 'other migration')}"
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
        numbers={**best.numbers(step, base.latency_s, eta), "migrations_together": together},
    )


def spread(
    cluster: Cluster, planner: Planner, plan: Plan, most: int, weights: Weights, objective: Objective | None
) -> list[Migration]:
    """Relieve workers one by one where too many share the bottleneck for it to fall.

    Proposes up to `most` migrations on top of `plan`, and counts them in `plan`.

    If many workers share the bottleneck, L falls only after as many migrations, which may cost more than they
    gain. But each of them makes chunks faster for all sessions that remain on its source. So Γ is taken over
    the two workers of a migration: the source's latency now, minus the worse of both latencies afterwards.

    The source is the worker that stays slowest after losing a session. The target must stay at least as fast
    as the source becomes. So no such migration is worth undoing, and profile noise causes none. `objective`
    refuses migrations that make further chunks late; None: slack is not used.
    """
    sources = _Sources(cluster, planner, plan)
    migrations: list[Migration] = []
    steps = list(plan.steps)
    for _ in range(weights.horizon):
        source = sources.first() if len(migrations) < most else None
        if source is None:
            break
        there = plan.sessions_on(source)
        before_s, after_s = source.curve(there), source.curve(there - 1)
        found: Step | None = None
        # Others are tried only where the cheapest is barred, and only if slack is used.
        sessions = list(islice(sources.sessions(source), 1 if objective is None else SESSIONS_TRIED))
        full = not sessions and plan.tentative.best(planner.pool.targets, after_s) is None
        for session in sessions:
            excluded = planner.barred(session)
            target = plan.tentative.best(planner.pool.targets, after_s, excluded)
            full = target is None and not excluded
            if full:
                break
            if target is not None:
                step = Step(session, source, target, planner.cost_s(session, source, target), drain=False)
                gain_s = before_s - after_s - weights.eta * step.cost_s
                keeps = objective is None or objective.keeps([step], given=steps)
                found = step if keeps and gain_s > weights.least_gain * before_s else None
                break
        if full:
            break
        if found is None:
            sources.skip()
            continue
        session, target, cost_s = found.session, found.target, found.cost_s
        steps.append(found)
        plan.tentative.add(target.id)
        sources.take(source, session)
        numbers = {
            "source_latency_s": before_s,
            "source_latency_after_s": after_s,
            "target_latency_s": plan.level_s(target),
            "source_sessions": there,
            "target_sessions": plan.sessions_on(target),
            "cost_s": cost_s,
            "eta": weights.eta,
            "state_bytes": session.state_bytes,
        }
        reason = (
            f"chunks on {source.id} take {after_s:.3g} s instead of {before_s:.3g} s then, and "
            f"{numbers['target_latency_s']:.3g} s on {target.id}, which has more slack"
        )
        migrations.append(
            Migration(session.id, source.id, target.id, gain_s, cost_s, reason, MigrationKind.SPREAD, numbers)
        )
    return migrations


class _Sources:
    """Source workers in the order of `Pool.spare`, updated as sessions are taken from them."""

    def __init__(self, cluster: Cluster, planner: Planner, plan: Plan) -> None:
        self._entries = cluster.entries
        self._planner = planner
        self._plan = plan
        self._gone = {step.session.id for step in plan.steps}
        self._heap: list[Item] = []
        self._position = 0

    def first(self) -> PoolEntry | None:
        items, heap = self._planner.pool.spare.items, self._heap
        # Sessions that the plan takes from a worker only move that worker further back.
        while self._position < len(items) and (not heap or items[self._position] < heap[0]):
            entry = self._entries[str(items[self._position][-1])]
            self._position += 1
            self._push(entry)
        return self._entries[str(heap[0][-1])] if heap else None

    def sessions(self, entry: PoolEntry) -> Iterator[SessionState]:
        """Yield the worker's sessions that may leave, the cheapest to migrate first."""
        return (s for s in self._planner.movable(entry) if s.id not in self._gone)

    def skip(self) -> None:
        """Drop the first worker as a source."""
        heapq.heappop(self._heap)

    def take(self, entry: PoolEntry, session: SessionState) -> None:
        """Take `session` from `entry`, which must be the first worker."""
        self._gone.add(session.id)
        self._plan.taken[entry.id] = self._plan.taken.get(entry.id, 0) + 1
        heapq.heappop(self._heap)
        self._push(entry)

    def _push(self, entry: PoolEntry) -> None:
        left = self._plan.sessions_on(entry) - 1
        if left > 0:
            heapq.heappush(self._heap, (-entry.curve(left), entry.id))
