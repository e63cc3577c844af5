"""Plans migrations: the cheapest set under a latency limit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from operator import attrgetter

from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.links import LinkKind, Links, kind_between
from turboserve.scheduler.placement.pool import Pool, PoolEntry
from turboserve.scheduler.placement.quota_preference import used_up
from turboserve.scheduler.placement.tentative import TentativeAssignment
from turboserve.scheduler.placement.types import SESSIONS_TRIED, SessionState
from turboserve.static_frozen import statically_frozen

KINDS = tuple(LinkKind)
_BY_SIZE = attrgetter("state_bytes", "id")


@statically_frozen()
class Step:
    """Migration of one session from `source` to `target`."""

    session: SessionState
    source: PoolEntry
    target: PoolEntry
    cost_s: float
    """κ, seconds."""
    drain: bool


@dataclass
class Plan:
    """Steps that take effect together."""

    tentative: TentativeAssignment
    steps: list[Step] = field(default_factory=list)
    taken: dict[str, int] = field(default_factory=dict)
    """Serving worker → number of sessions that leave it by these steps."""
    tried: set[str] = field(default_factory=set)
    """Sessions tried instead of others. See `Planner.plan`."""
    latency_s: float = 0.0
    """L′: the bottleneck in seconds, once all steps and all migrations under way are done."""
    cost_s: float = 0.0
    """Sum of κ over all steps, seconds."""

    def sessions_on(self, entry: PoolEntry) -> int:
        """Return the number of sessions on a worker after all steps."""
        return entry.staying + self.tentative.added.get(entry.id, 0) - self.taken.get(entry.id, 0)

    def level_s(self, entry: PoolEntry) -> float:
        """Return a worker's chunk latency after all steps, in seconds."""
        return entry.curve(self.sessions_on(entry))

    def numbers(self, step: Step, before_s: float, eta: float) -> dict[str, float]:
        """Return the numbers of one step for the decision log. `before_s`: bottleneck before, seconds."""
        return {
            "bottleneck_before_s": before_s,
            "bottleneck_after_s": self.latency_s,
            "source_latency_s": step.source.curve(step.source.staying),
            "target_latency_s": self.level_s(step.target),
            "source_sessions": step.source.staying,
            "target_sessions": self.sessions_on(step.target),
            "cost_s": step.cost_s,
            "eta": eta,
            "state_bytes": step.session.state_bytes,
        }


class Planner:
    """Makes plans for one pool. The cluster must not change meanwhile."""

    def __init__(self, cluster: Cluster, pool: Pool, links: Links, now: float, returns: bool = True) -> None:
        """`returns`: sessions may return to workers that they left (see `barred`)."""
        self.pool = pool
        self._returns = returns
        self._cluster = cluster
        self._links = links
        self._now = now
        self._movable: dict[str, list[SessionState]] = {}
        self._full: dict[str, frozenset[str]] = {}
        """Source → workers whose quota is used up, for its sessions."""
        self.valid_until = inf
        """Time at which the first session that was passed over has rested. Until then, plans are the same."""

    def movable(self, entry: PoolEntry) -> list[SessionState]:
        """Return the sessions that may leave a worker for balance, cheapest first."""
        known = self._movable.get(entry.id)
        if known is None:
            known = []
            sessions, going, now = self._cluster.sessions, entry.going, self._now
            for name in entry.here:
                session = sessions[name]
                if not session.movable or name in going:
                    continue
                rested_at = session.rests_until
                if session.retries_at > rested_at:
                    rested_at = session.retries_at
                if rested_at <= now:
                    known.append(session)
                elif rested_at < self.valid_until:
                    self.valid_until = rested_at
            if self._returns and not self._cluster.quotas:
                # No session is barred from more workers than it is excluded from.
                known.sort(key=_BY_SIZE)
            else:
                # Of equal states, those that may go to most workers.
                known.sort(key=lambda s: (s.state_bytes, len(self.barred(s)) - len(s.excluded), s.id))
            self._movable[entry.id] = known
        return known

    def barred(self, session: SessionState) -> Collection[str]:
        """Return the workers to which the session may not migrate for balance or to save late chunks.

        Beside those that it is excluded from, these are the workers that it left by such a migration, until
        they or its present worker change from outside. Slacks rise and fall by themselves, so without this
        rule the same session would be worth a migration in both directions, again and again.

        A session within its worker's quota does not leave for a worker whose quota is used up.
        """
        excluded = session.excluded
        if self._cluster.quotas and session.worker is not None:
            excluded |= self._used_up(session.model, session.worker)
        if self._returns or not session.left:
            return excluded
        here = self._changed_outside(session.worker or "")
        left = session.left.items()
        return excluded.union(name for name, at in left if at > max(here, self._changed_outside(name)))

    def _used_up(self, model: str, source: str) -> frozenset[str]:
        """See `used_up`."""
        known = self._full.get(source)
        if known is None:
            known = self._full[source] = used_up(self._cluster, self.pool, model, source)
        return known

    def _changed_outside(self, worker: str) -> int:
        entry = self._cluster.entries.get(worker)
        return 0 if entry is None else entry.state.changed_outside

    def cost_s(self, session: SessionState, source: PoolEntry, target: PoolEntry) -> float:
        """Return κ of a session's migration, in seconds."""
        kind = kind_between(source.state.host, target.state.host)
        return self._links.seconds(kind, session.state_bytes)

    def least_cost_s(self, session: SessionState, source: PoolEntry) -> float:
        """Return κ to the nearest kind of target that exists, in seconds, without regard to room."""
        host, size = source.state.host, session.state_bytes
        if not host:
            return self._links.seconds(LinkKind.ACROSS, size)
        near = (kind for kind in KINDS if kind is LinkKind.ACROSS or self._has(kind, host, source.id))
        return min(self._links.seconds(kind, size) for kind in near)

    def _has(self, kind: LinkKind, host: str, besides: str) -> bool:
        ranking = self.pool.neighbours(kind, host)
        return ranking is not None and any(str(item[-1]) != besides for item in ranking.items[:2])

    def drains(self) -> list[SessionState]:
        """Return the active sessions that must leave draining workers."""
        found = []
        for name in sorted(self.pool.draining):
            entry = self._cluster.entries[name]
            if not entry.state.suspect:
                there = (self._cluster.sessions[session] for session in sorted(entry.here - entry.going))
                found += [session for session in there if session.movable]
        return found

    def lowest_s(self, sessions: Sequence[SessionState]) -> tuple[list[SessionState], float]:
        """Put each session where the latency is least.

        Returns the sessions for which there is room, and the worst latency of their targets in seconds.
        """
        tentative = TentativeAssignment(self._cluster)
        placed, worst_s = [], 0.0
        for session in sessions:
            entry = tentative.best(self.pool.targets, excluded=session.excluded)
            if entry is not None:
                tentative.add(entry.id)
                worst_s = max(worst_s, entry.with_more_s(entry.held + tentative.added[entry.id]))
                placed.append(session)
        return placed, worst_s

    def plan(self, limit_s: float, drains: Sequence[SessionState], most: int) -> Plan | None:
        """Plan so that no serving worker exceeds `limit_s` and all of `drains` leave their workers.

        Returns None if there is no such plan, or none with at most `most` migrations besides the drains.

        A worker above the limit gives away the sessions that are cheapest to migrate. All sessions with room
        on their own host go there, then all with room on their own node, then the others anywhere. Since
        hosts nest in nodes, no other choice has more near migrations, so the cost is least for sessions of
        one size. Among unequal sessions, larger ones choose first. While slack is used, another session of
        the same worker goes instead of one that is barred from the targets with room.
        """
        leaving = [(session, True) for session in drains]
        plan = Plan(TentativeAssignment(self._cluster))
        for item in self.pool.tops.items:
            if -float(item[0]) <= limit_s:
                break
            entry = self._cluster.entries[str(item[-1])]
            excess = entry.staying - entry.curve.most(limit_s, entry.staying)
            movable = self.movable(entry)
            if len(movable) < excess or len(leaving) - len(drains) + excess > most:
                return None
            plan.taken[entry.id] = excess
            leaving += [(session, False) for session in movable[:excess]]
        leaving.sort(key=lambda one: (-one[0].state_bytes, one[0].id))
        for kind in KINDS if leaving else ():
            leaving = [one for one in leaving if not self._place(plan, *one, kind, limit_s)]
        if not all(not drain and self._replace(plan, session, limit_s) for session, drain in leaving):
            return None
        plan.latency_s = self._worst_s(plan)
        return plan

    def _replace(self, plan: Plan, barred: SessionState, limit_s: float) -> bool:
        """Place another session of the same worker where one is barred from targets with room."""
        entry = self._cluster.entries[str(barred.worker)]
        if self._returns or not self.barred(barred):
            return False
        others = (s for s in self.movable(entry)[plan.taken[entry.id] :] if s.id not in plan.tried)
        for other in islice(others, SESSIONS_TRIED):
            plan.tried.add(other.id)
            if any(self._place(plan, other, False, kind, limit_s) for kind in KINDS):
                return True
            if not self.barred(other):
                break  # There is no room.
        return False

    def _place(self, plan: Plan, session: SessionState, drain: bool, kind: LinkKind, limit_s: float) -> bool:
        source = self._cluster.entries[str(session.worker)]
        ranking = self.pool.neighbours(kind, source.state.host)
        if ranking is None:
            return False
        excluded = session.excluded if drain else self.barred(session)
        target = plan.tentative.best(ranking, limit_s, excluded)
        if target is None:
            return False
        plan.tentative.add(target.id)
        cost_s = self.cost_s(session, source, target)
        plan.steps.append(Step(session, source, target, cost_s, drain))
        plan.cost_s += cost_s
        return True

    def _worst_s(self, plan: Plan) -> float:
        changed = plan.taken.keys() | plan.tentative.added.keys()
        worst_s = max((plan.level_s(self._cluster.entries[name]) for name in changed), default=0.0)
        for item in self.pool.tops.items:
            if str(item[-1]) not in changed:
                return max(worst_s, -float(item[0]))
        return worst_s
