"""Migration-aware min-max rebalancing (TurboServe, 5.2.1)."""

from __future__ import annotations

from math import nextafter

from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.descent import Stage, stages
from turboserve.scheduler.placement.links import Links
from turboserve.scheduler.placement.migrations import Migration, MigrationKind
from turboserve.scheduler.placement.plan import Plan, Planner, Step
from turboserve.scheduler.placement.spreading import spread
from turboserve.scheduler.placement.suspended_drain import drain_suspended
from turboserve.scheduler.placement.weights import Weights

TRIES = 8
"""Maximum number of limits tried within one stage. Their plans differ only in how near the migrations are."""


class MinMaxRebalancer:
    """Migrates sessions while the worst chunk latency falls by more than η times the cost of the migrations.

    The paper makes the best single migration until none gains. If several workers share the bottleneck, no
    single migration gains, so this rebalancer weighs sets of migrations:

    1. For each limit that L′ could reach, it plans the cheapest set that brings all workers below the limit.
       `descent` leaves out limits that cannot pay.
    2. It proposes the set with the largest Γ = L − L′ − η Σ κ, if that exceeds `Weights.least_gain` of L. The
       migrations of a set share Γ.
    3. If the set is larger than `Weights.migrations_at_once`, the rest follows in later decisions, where the
      rest
       gains more than before.
    """

    def __init__(self, weights: Weights | None = None, links: Links | None = None) -> None:
        self.weights = weights or Weights()
        self.links = links or Links()

    def propose(self, cluster: Cluster, now: float) -> list[Migration]:
        found: list[Migration] = []
        for _, pool in sorted(cluster.pools.items(), key=lambda one: (one[0][0], one[0][1] or "")):
            found += self._in_pool(cluster, Planner(cluster, pool, self.links, now))
        return found

    def _in_pool(self, cluster: Cluster, planner: Planner) -> list[Migration]:
        pool, eta = planner.pool, self.weights.eta
        before_s = pool.bottleneck_s
        base = self._base(planner, before_s)
        best, gain_s = self._best(cluster, planner, base)
        drains = [step for step in best.steps if step.drain]
        migrations = [_drain(step, before_s, base, len(drains), eta) for step in drains]
        under_way = sum(cluster.sessions[name].worker not in pool.draining for name in sorted(pool.migrating))
        allowed = self.weights.migrations_at_once - under_way
        if allowed > 0:
            balance = [step for step in best.steps if not step.drain]
            migrations += [_balance(step, base, best, gain_s, eta) for step in balance[:allowed]]
            if self.weights.spreads and len(balance) < allowed:
                migrations += spread(cluster, planner, best, allowed - len(balance), self.weights)
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

    def _best(self, cluster: Cluster, planner: Planner, base: Plan) -> tuple[Plan, float]:
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
                if gained_s > gain_s:
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
