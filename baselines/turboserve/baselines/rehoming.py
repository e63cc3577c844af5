"""The re-homing of SlackServe (Algorithm 1) and its assignment, as baselines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from turboserve.baselines.greedy import OneByOne
from turboserve.contracts.fidelity import Tier
from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.links import LinkKind, kind_between
from turboserve.scheduler.placement.pool import Pool, PoolEntry
from turboserve.scheduler.placement.rebalance import MinMaxRebalancer
from turboserve.scheduler.placement.types import (
    Candidate,
    Demand,
    Migration,
    MigrationKind,
    SessionState,
    Weights,
)

TICK_S = 3.0
"""Time between two decisions (Table 3)."""
COOLDOWN_S = 60.0
"""A session is not migrated again for this long after a migration was proposed."""
SENT = 2
RECEIVED = 1
"""Maximum number of sessions that a worker sends and receives in one tick."""
URGENT_HEAVY = 2
"""Number of urgent sessions from which a worker is urgent-heavy. The paper does not define it. A lone urgent
session is the first in its queue already, so it gains nothing."""


class FewestStreams(OneByOne):
    """Chooses the worker with the fewest sessions (SlackServe, 3.2)."""

    reason = "it has the fewest sessions"

    def _best(self, rooms: list[Candidate], loads: dict[str, int], demand: Demand) -> Candidate:
        return min(rooms, key=lambda c: (loads[c.worker], c.worker))


@dataclass
class _Queue:
    """One worker in one tick."""

    entry: PoolEntry
    urgent: list[SessionState] = field(default_factory=list)
    """Urgent sessions that may leave, the one with the least credit first."""
    count: int = 0
    """Number of urgent sessions, also of those that may not leave."""
    receives: bool = True
    """Whether no session is urgent or normal."""
    sent: int = 0
    received: int = 0


class AlgorithmOne:
    """Each tick, migrates the least-credit urgent sessions of urgent-heavy workers to relaxed workers.

    1. Every sender with every receiver of its node: if the sender has sent fewer than 2 sessions and the
       receiver has received none in this tick, the sender's urgent session with the least credit migrates.
    2. The same between nodes, for senders whose node has no receiver left and that are still urgent-heavy.

    Tiers are as last reported. Drains are those of `MinMaxRebalancer`. Unlike other rebalancers, this one
    remembers its last tick and the sessions that it has migrated. The paper's receivers always have room;
    here a receiver needs a free slot, and gets no session while a drain is proposed to it.
    """

    def __init__(self) -> None:
        # Only drains: no migration for balance is allowed.
        self._drains = MinMaxRebalancer(Weights(migrations_at_once=0))
        self._ticked_at: float | None = None
        self._migrated: dict[str, float] = {}

    def propose(self, cluster: Cluster, now: float) -> list[Migration]:
        found = self._drains.propose(cluster, now)
        if self._ticked_at is not None and now < self._ticked_at + TICK_S:
            return found
        taken = {migration.target for migration in found}
        self._ticked_at = now
        self._migrated = {name: at for name, at in self._migrated.items() if now < at + COOLDOWN_S}
        for _, pool in sorted(cluster.pools.items(), key=lambda one: (one[0][0], one[0][1] or "")):
            found += self._in_pool(cluster, pool, taken, now)
        return found

    def _in_pool(self, cluster: Cluster, pool: Pool, taken: set[str], now: float) -> list[Migration]:
        # This ranking has all workers that serve.
        queues = [self._queue(cluster, cluster.entries[name], now) for name in sorted(pool.suspended_ranking)]
        senders = [queue for queue in queues if queue.count >= URGENT_HEAVY]
        receivers = [queue for queue in queues if queue.receives and queue.entry.id not in taken]
        found: list[Migration] = []

        def near(source: _Queue, target: _Queue) -> bool:
            return kind_between(source.entry.state.host, target.entry.state.host) is not LinkKind.ACROSS

        def far(source: _Queue, target: _Queue) -> bool:
            left = any(near(source, other) and other.received < RECEIVED for other in receivers)
            return not left and source.count - source.sent >= URGENT_HEAVY

        fits: tuple[Callable[[_Queue, _Queue], bool], ...] = (near, far)
        for fit in fits:
            for source in senders:
                for target in receivers:
                    if source.sent < SENT and target.received < RECEIVED and fit(source, target):
                        found += self._migrate(source, target, now)
        return found

    def _queue(self, cluster: Cluster, entry: PoolEntry, now: float) -> _Queue:
        queue = _Queue(entry, receives=entry.held < entry.slots)
        slacks = cluster.urgency.slacks
        for name in (entry.here - entry.going) | entry.coming:
            known = slacks.get(name)
            if known is None or known.tier is not Tier.RELAXED:
                queue.receives = False
            if known is None or known.tier is not Tier.URGENT:
                continue
            queue.count += 1
            session = cluster.sessions[name]
            rested = session.rests_until <= now and name not in self._migrated
            if name in entry.here and session.movable and rested:
                queue.urgent.append(session)
        queue.urgent.sort(key=lambda session: (slacks[session.id].credit_s, session.id))
        return queue

    def _migrate(self, source: _Queue, target: _Queue, now: float) -> list[Migration]:
        session = next((s for s in source.urgent if target.entry.id not in s.excluded), None)
        if session is None:
            return []
        source.urgent.remove(session)
        source.sent += 1
        target.received += 1
        self._migrated[session.id] = now
        hosts = source.entry.state.host, target.entry.state.host
        cost_s = self._drains.links.seconds(kind_between(*hosts), session.state_bytes)
        return [
            Migration(
                session=session.id,
                source=source.entry.id,
                target=target.entry.id,
                gain_s=0.0,
                cost_s=cost_s,
                reason=f"{source.count} sessions on {source.entry.id} are urgent, none on {target.entry.id}",
                kind=MigrationKind.RESCUE,
                numbers={"urgent": source.count, "state_bytes": session.state_bytes},
            )
        ]
