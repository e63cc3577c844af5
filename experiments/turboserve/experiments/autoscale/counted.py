"""Replays of a trace at the level of counts: a sizer under the trace's demand, without workers or placement.

The pool is the learner's own virtual pool. A run takes a tenth of a simulation's time or less, and its time
hardly depends on the number of sessions. A test holds its cost to the simulation's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from turboserve.autoscaler.control.events import SessionChange
from turboserve.autoscaler.control.virtual_pool import VirtualPool
from turboserve.experiments.autoscale.plant import Plant, policy_for
from turboserve.experiments.autoscale.simulation import TICK_S
from turboserve.experiments.autoscale.sizers import Sizer
from turboserve.experiments.autoscale.trace import WorkloadTrace, changes


@dataclass(frozen=True)
class CountedRun:
    """Totals of one run."""

    cost_s: float
    """Worker-seconds from launch to release."""
    late: int
    """Sessions that waited too long for a slot."""


@dataclass(frozen=True)
class Instant:
    """What happens at one time."""

    at: float
    kinds: tuple[SessionChange, ...]
    active: int
    """Active sessions from then on."""


def instants(trace: WorkloadTrace) -> list[Instant]:
    """Return the changes of a trace by instant, and an instant without one at each whole second."""
    found: dict[float, Instant] = {}
    active = 0
    for at, group in groupby(changes(trace.steps), key=lambda change: change[0].at):
        steps = list(group)
        active += sum(by for _, by in steps)
        found[at] = Instant(at, tuple(step.kind for step, _ in steps), active)
    active = found[0.0].active if 0.0 in found else 0
    for at in sorted({*found, *(TICK_S * tick for tick in range(1, math.ceil(trace.ends_s / TICK_S)))}):
        active = found.setdefault(at, Instant(at, (), active)).active
    return [found[at] for at in sorted(found) if at < trace.ends_s]


def counted(trace: WorkloadTrace, plant: Plant, sizer: Sizer) -> CountedRun:
    """Let a sizer size a pool of counts under the trace's demand."""
    late_after_s = policy_for(plant).late_after_s
    pool = VirtualPool(sizer.target, plant.capacity, plant.start_up_s, late_after_s, 0.0)

    def report(now: float) -> None:
        sizer.on_feedback(pool.feedback(now), pool.starting, now)
        pool.resize(sizer.target, now)

    for instant in instants(trace):
        for ready_at in _ready(pool, instant.at):
            pool.advance(ready_at)
            report(ready_at)
        if instant.at > 0:
            for kind in instant.kinds:
                sizer.on_session_change(kind, instant.at)
        pool.demand(instant.active, instant.at)
        if not instant.kinds:
            sizer.tick(instant.at)
        report(instant.at)
    pool.advance(trace.ends_s)
    return CountedRun(pool.cost_s, pool.late)


def _ready(pool: VirtualPool, until: float) -> Iterator[float]:
    """Yield the times at which workers become ready up to `until`."""
    while (at := pool.next_ready_at) is not None and at <= until:
        yield at
