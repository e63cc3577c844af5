"""Puts workers to use that have no session yet (TurboServe, 5.2.1, "Integration with autoscaling")."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.moves import Move, MoveKind
from turboserve.scheduler.placement.plan import Plan, Planner
from turboserve.scheduler.placement.pool import Entry
from turboserve.scheduler.placement.states import SessionState
from turboserve.scheduler.placement.weights import Weights


@dataclass(frozen=True)
class _Spread:
    session: SessionState
    source: Entry
    target: Entry
    gain_s: float
    cost_s: float
    before_s: float
    after_s: float


def spread(cluster: Cluster, planner: Planner, plan: Plan, most: int, weights: Weights) -> list[Move]:
    """Sessions that go to workers without any, on top of `plan`, which counts them in; `most` at most.

    With many workers as the bottleneck together, a new one cannot lower L; but it can serve those that move
    to it, and those that stay behind, faster. So Γ is taken over the two workers of the move: source's
    latency now, against the worse of both after. The target never gets slower than the source becomes, so
    the move is never worth undoing. Each idle worker gets one session before any gets a second.
    """
    tops = _Tops(cluster, planner, plan)
    waiting = [cluster.entries[name] for name in planner.pool.idle]
    moves: list[Move] = []
    while waiting and len(moves) < most:
        again = []
        for target in waiting:
            if len(moves) >= most:
                break
            step = _step(tops, planner, plan, target, weights)
            if step is not None:
                plan.filling.add(target.id)
                tops.take(step.source, step.session)
                moves.append(_move(step, plan, weights.eta))
                again.append(target)
        waiting = again
    return moves


class _Tops:
    """The slowest worker that can give a session away, as sessions are taken."""

    def __init__(self, cluster: Cluster, planner: Planner, plan: Plan) -> None:
        self._entries = cluster.entries
        self._planner = planner
        self._plan = plan
        self._gone = {step.session.id for step in plan.steps}
        self._heap: list[tuple[float, str]] = []
        self._position = 0

    def first(self) -> Entry | None:
        items, heap = self._planner.pool.tops.items, self._heap
        while True:
            # What a plan changed ranks by what it is now; nobody without a change ranks further in front.
            if self._position < len(items) and (not heap or -float(items[self._position][0]) >= -heap[0][0]):
                entry = self._entries[str(items[self._position][-1])]
                self._position += 1
                if self.sessions(entry):
                    heapq.heappush(heap, (-self._plan.level_s(entry), entry.id))
                continue
            return self._entries[heap[0][1]] if heap else None

    def sessions(self, entry: Entry) -> list[SessionState]:
        return [session for session in self._planner.movable(entry) if session.id not in self._gone]

    def take(self, entry: Entry, session: SessionState) -> None:
        """`session` leaves `entry`, which is `first`."""
        self._gone.add(session.id)
        self._plan.taken[entry.id] = self._plan.taken.get(entry.id, 0) + 1
        heapq.heappop(self._heap)
        if self.sessions(entry):
            heapq.heappush(self._heap, (-self._plan.level_s(entry), entry.id))


def _step(tops: _Tops, planner: Planner, plan: Plan, target: Entry, weights: Weights) -> _Spread | None:
    source = tops.first()
    if source is None or target.target_item(plan.filling.added.get(target.id, 0)) is None:
        return None
    there = plan.sessions_on(source)
    before_s = source.curve(there)
    left_s, after_s = source.curve(there - 1), target.curve(plan.sessions_on(target) + 1)
    session = next((s for s in tops.sessions(source) if target.id not in s.excluded), None)
    if session is None or after_s > left_s:
        return None
    cost_s = planner.cost_s(session, source, target)
    gain_s = before_s - left_s - weights.eta * cost_s
    if gain_s <= weights.least_gain * before_s:
        return None
    return _Spread(session, source, target, gain_s, cost_s, before_s, left_s)


def _move(step: _Spread, plan: Plan, eta: float) -> Move:
    return Move(
        session=step.session.id,
        source=step.source.id,
        target=step.target.id,
        gain_s=step.gain_s,
        cost_s=step.cost_s,
        reason=(
            f"{step.target.id} has no session yet; chunks on {step.source.id} take {step.after_s:.3g} s "
            f"instead of {step.before_s:.3g} s then"
        ),
        kind=MoveKind.SPREAD,
        numbers={
            "source_latency_s": step.before_s,
            "source_latency_after_s": step.after_s,
            "target_latency_s": plan.level_s(step.target),
            "source_sessions": step.source.staying,
            "target_sessions": plan.sessions_on(step.target),
            "cost_s": step.cost_s,
            "eta": eta,
            "state_bytes": step.session.state_bytes,
        },
    )
