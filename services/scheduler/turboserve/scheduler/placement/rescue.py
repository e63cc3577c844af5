"""Migrations that save late chunks (SlackServe, 4.3: re-homing)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice

from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.objective import LateChunks, Objective
from turboserve.scheduler.placement.plan import Planner, Step
from turboserve.scheduler.placement.pool import PoolEntry
from turboserve.scheduler.placement.ranking import Item
from turboserve.scheduler.placement.types import Migration, MigrationKind, SessionState, Weights
from turboserve.scheduler.placement.urgency import slack_at
from turboserve.static_frozen import statically_frozen, with_fields

SOURCES = 4
"""Number of sources without a useful migration after which the search ends, per pool and decision."""
ROOMS = 8
"""Number of targets that are compared by latency and cost, per source."""
TARGETS = 3
SESSIONS = 2
"""Numbers of targets and of sessions whose late chunks are counted together, per source."""


@contextmanager
def begun(cluster: Cluster, migrations: Iterable[tuple[SessionState, str]]) -> Iterator[None]:
    """Show migrations of sessions to targets as begun in `cluster`, and take them back at the end."""
    before = []
    try:
        for session, target in migrations:
            before.append(session)
            cluster.put_session(with_fields(session, target=target))
        yield
    finally:
        for session in before:
            cluster.put_session(session)


@statically_frozen()
class Rescue:
    """A migration, with the expected late chunks of source and target without and with it."""

    step: Step
    late: LateChunks
    late_after: LateChunks
    slack_s: float
    latency_s: float
    """Worse chunk latency of source and target without the migration, seconds."""
    latency_after_s: float

    @property
    def saved(self) -> int:
        return self.late.soon - self.late_after.soon


class Rescuer:
    """Finds migrations of one pool that save late chunks, one after the other.

    The source is the worker that expects most late chunks. Of its sessions and of the targets, the pair that
    saves most is taken, if the objective agrees; of equal ones that with the least L′ + η κ. L′ is taken over
    source and target.

    Slacks also change by the migrations themselves. So a worker with a session that rests gives none away,
    unless that lowers the late chunks with all slack used up: these fall by each such rescue, and nothing but
    a change from outside raises them.
    """

    def __init__(
        self, cluster: Cluster, planner: Planner, objective: Objective, weights: Weights, now: float
    ) -> None:
        self._cluster = cluster
        self._planner = planner
        self._objective = objective
        self._weights = weights
        self._now = now

    def find(self, most: int) -> list[Rescue]:
        """Return up to `most` migrations, in the order in which to begin them. Leaves the cluster as is."""
        cluster, pool, weights = self._cluster, self._planner.pool, self._weights
        found: list[Rescue] = []
        useless: set[str] = set()
        tried = 0
        with ExitStack() as stack:
            while len(found) < most and tried < SOURCES:
                cluster.urgency.refresh(
                    cluster.entries, cluster.pool, weights.rescue_horizon_s, weights.tier_alpha
                )
                worst = self._worst(useless)
                best_room = next(iter(pool.relaxed.items), None)
                if worst is None or best_room is None:
                    break
                if -float(worst[0]) - float(best_room[0]) < weights.least_saved:
                    # The other sources expect fewer late chunks.
                    break
                source = cluster.entries[str(worst[-1])]
                rescue = self._best(source)
                if rescue is None:
                    useless.add(source.id)
                    tried += 1
                    continue
                found.append(rescue)
                step = rescue.step
                stack.enter_context(begun(cluster, [(step.session, step.target.id)]))
        return found

    def _worst(self, useless: set[str]) -> Item | None:
        """Return the rank of the worker with most late chunks."""
        for item in self._planner.pool.late.items:
            name = str(item[-1])
            if name not in useless:
                return item
        return None

    def _best(self, source: PoolEntry) -> Rescue | None:
        objective, rests = self._objective, self._rests(source)
        late = objective.late_on(source)
        leaving = []
        for session in self._planner.movable(source):
            known = self._cluster.urgency.slacks.get(session.id)
            if session.id not in source.going and known is not None and known.playing:
                left = objective.late_on(source, without=(session.id,))
                leaving.append((left, slack_at(known, self._now), session))
        leaving.sort(key=lambda one: (one[0].soon, one[1], one[2].state_bytes, one[2].id))
        found: list[tuple[float, float, str, str, Rescue]] = []
        now_late: dict[str, LateChunks] = {}
        tried = 0
        for left, slack_s, session in leaving:
            targets = self._targets(source, session) if tried < SESSIONS else []
            tried += bool(targets)
            for target in targets:
                step = Step(session, source, target, self._planner.cost_s(session, source, target), False)
                there = now_late.get(target.id)
                if there is None:
                    there = now_late[target.id] = objective.late_on(target)
                with_it = objective.late_on(target, coming={session.id: step.cost_s})
                rescue = Rescue(
                    step, late + there, left + with_it, slack_s, _latency_s(step, 0), _latency_s(step, 1)
                )
                lasts = rescue.late_after.lasting < rescue.late.lasting
                if (lasts or not rests) and objective.saves(rescue.late, rescue.late_after, step.cost_s):
                    cost = rescue.latency_after_s + self._weights.eta * step.cost_s
                    found.append((-rescue.saved, cost, session.id, target.id, rescue))
        return min(found, key=lambda one: one[:4])[-1] if found else None

    def _rests(self, worker: PoolEntry) -> bool:
        """Whether a session that has lately migrated is on the worker."""
        sessions = self._cluster.sessions
        return any(sessions[name].rests_until > self._now for name in worker.here)

    def _targets(self, source: PoolEntry, session: SessionState) -> list[PoolEntry]:
        """Return the targets on which an urgent session causes fewest late chunks, then by L′ + η κ."""
        ranked = self._planner.pool.relaxed.items
        barred = self._planner.barred(session)
        fit = (item for item in ranked if item[-1] not in barred and item[-1] != source.id)
        rooms: list[tuple[float, float, str]] = []
        for item in islice(fit, ROOMS):
            target = self._cluster.entries[str(item[-1])]
            cost_s = self._planner.cost_s(session, source, target)
            rooms.append((float(item[0]), float(item[1]) + self._weights.eta * cost_s, target.id))
        return [self._cluster.entries[name] for _, _, name in sorted(rooms)[:TARGETS]]


def _latency_s(step: Step, migrated: int) -> float:
    """Return the worse latency of source and target with `migrated` sessions gone, in seconds."""
    source, target = step.source, step.target
    return max(source.curve(source.staying - migrated), target.curve(target.staying + migrated))


def migration_of(rescue: Rescue, weights: Weights) -> Migration:
    """Return the proposal, with its numbers for the decision log."""
    step, horizon_s = rescue.step, weights.rescue_horizon_s
    source, target = step.source.id, step.target.id
    return Migration(
        session=step.session.id,
        source=source,
        target=target,
        gain_s=rescue.latency_s - rescue.latency_after_s - weights.eta * step.cost_s,
        cost_s=step.cost_s,
        reason=(
            f"late chunks expected on {source} and {target} within {horizon_s:g} s: "
            f"{rescue.late_after.soon} instead of {rescue.late.soon}"
        ),
        kind=MigrationKind.RESCUE,
        numbers={
            "late_chunks": rescue.late.soon,
            "late_chunks_after": rescue.late_after.soon,
            "horizon_s": horizon_s,
            "slack_s": rescue.slack_s,
            "latency_s": rescue.latency_s,
            "latency_after_s": rescue.latency_after_s,
            "cost_s": step.cost_s,
            "eta": weights.eta,
            "state_bytes": step.session.state_bytes,
        },
    )
