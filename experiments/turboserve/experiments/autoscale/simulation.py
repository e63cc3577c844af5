"""One run on a virtual clock: a trace, a plant, and a sizer that decides the pool's size.

Placement and rebalancing are the scheduler's own (`Cluster`, `MinMax`, `MinMaxRebalancer`), called as its
core calls them: after every event. `agreement` shows that a whole scheduler core decides the same.
"""

from __future__ import annotations

import copy
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from turboserve.autoscaler.control.events import SessionChange
from turboserve.experiments.autoscale.fleet import Fleet
from turboserve.experiments.autoscale.outcome import ScalingOutcome
from turboserve.experiments.autoscale.plant import Plant, Resume
from turboserve.experiments.autoscale.sizers import Fixed, Sizer
from turboserve.experiments.autoscale.trace import Step, WorkloadTrace
from turboserve.scheduler.placement.interface import Assigner, Rebalancer
from turboserve.scheduler.placement.types import Migration

TICK_S = 1.0
LEAVING = (SessionChange.DEPARTURE, SessionChange.IDLING)


class Simulation:
    """State of one run."""

    def __init__(
        self,
        trace: WorkloadTrace,
        plant: Plant,
        sizer: Sizer,
        rebalancer: Rebalancer | None = None,
        assigner: Assigner | None = None,
        resume: Resume = Resume.BY_POLICY,
    ) -> None:
        """The scheduler's shipped policies place and rebalance, unless others are given."""
        self.trace, self.plant, self.sizer = trace, plant, sizer
        self.fleet = Fleet(plant, rebalancer, assigner, resume)
        self.now = 0.0
        self._instants = tuple(_instants(trace.steps))
        self._next = 0
        self._order = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._unseen: dict[str, deque[tuple[int, SessionChange]]] = {}
        """Session → (number, change): changes of which the scheduler does not know yet, in order."""
        self._reports = type(sizer) is not Fixed
        """A pool that never changes reads no feedback."""
        self.fleet.resize(sizer.target, 0.0, ready=True)
        self.fleet.absorb(sizer.absorbs)
        self._at(TICK_S, self._tick)

    @property
    def outcome(self) -> ScalingOutcome:
        return self.fleet.outcome

    def run(self) -> ScalingOutcome:
        """Play the trace to its end."""
        self.advance(self.trace.ends_s)
        self.fleet.finish(self.trace.ends_s)
        return self.outcome

    def advance(self, until: float) -> None:
        """Play the events before `until`."""
        while True:
            queued = self._queue[0][0]
            stepped = self._instants[self._next][0] if self._next < len(self._instants) else until
            now = min(queued, stepped)
            if now >= until:
                return
            self.now = now
            self.fleet.advance(now)
            if queued == now:
                heapq.heappop(self._queue)[2]()
            else:
                self._apply_steps(self._instants[self._next][1])
                self._next += 1
                self._decide()

    def fork(self) -> Simulation:
        """Return an independent copy of the run at its current time."""
        shared = (self.trace, self.plant, self._instants)
        return copy.deepcopy(self, {id(one): one for one in shared})

    def _apply_steps(self, steps: Iterable[Step]) -> None:
        for step in steps:
            if step.kind not in LEAVING:
                # The session asks for a slot, so the scheduler knows that it was idle.
                self._learn_all(step.session)
            elif self.plant.signal_age_s > 0 and not self.fleet.waits(step.session):
                self.fleet.running.stop(step.session)
                self._order += 1
                self._unseen.setdefault(step.session, deque()).append((self._order, step.kind))
                at = self.now + self.plant.signal_age_s
                self._at(at, partial(self._report_arrives, step.session, self._order))
                continue
            self._learn(step.session, step.kind)

    def _learn(self, session: str, kind: SessionChange) -> None:
        if self.now > 0:
            # Sessions present at t = 0 do not count as arrivals.
            self.sizer.on_session_change(kind, self.now)
        self.fleet.on_session_change(session, kind, self.now)

    def _learn_all(self, session: str) -> None:
        """Apply the session's changes whose reports are under way."""
        for _, kind in self._unseen.pop(session, ()):
            self._learn(session, kind)

    def _report_arrives(self, session: str, number: int) -> None:
        changes = self._unseen.get(session)
        if not changes or changes[0][0] != number:
            return
        self._learn(session, changes.popleft()[1])
        self._decide()

    def _tick(self) -> None:
        # No event has occurred since the last decision, so only the report is repeated.
        self.sizer.tick(self.now)
        self._report()
        self._at(self.now + TICK_S, self._tick)

    def _ready(self, worker: str) -> None:
        self.fleet.ready(worker)
        self._decide()

    def _migrated(self, migration: Migration) -> None:
        # The source answers that the session has left.
        self._learn_all(migration.session)
        self.fleet.commit(migration, self.now)
        self._decide()

    def _decide(self) -> None:
        """Act as the scheduler after every event: place, rebalance, report. Then apply the sizer's target."""
        self._schedule()
        self._report()

    def _report(self) -> None:
        if not self._reports:
            return
        fleet = self.fleet
        self.sizer.on_feedback(fleet.feedback(self.now), fleet.starting, self.now)
        admits = fleet.absorb(self.sizer.absorbs)
        if self.sizer.target == fleet.target:
            if admits:
                self._schedule()
            return
        self.outcome.actions.append((self.now, fleet.target, self.sizer.target))
        for ready_at, worker in fleet.resize(self.sizer.target, self.now):
            self._at(ready_at, partial(self._ready, worker))
        self._schedule()

    def _schedule(self) -> None:
        self.fleet.place(self.now)
        for migration in self.fleet.rebalance(self.now):
            self._at(self.now + self.plant.migration_s, partial(self._migrated, migration))

    def _at(self, time: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (time, self._order, act))


def _instants(steps: Iterable[Step]) -> Iterator[tuple[float, tuple[Step, ...]]]:
    """Group the steps of each instant; departures come first, because they make room."""
    for at, group in itertools.groupby(steps, key=lambda step: step.at):
        yield at, tuple(sorted(group, key=lambda step: step.kind not in LEAVING))
