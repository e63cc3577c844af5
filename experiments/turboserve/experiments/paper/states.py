"""States of small pools on Trace 1, as a rebalancer finds them (Figure 9, right)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from turboserve.experiments.autoscale.plant import Plant, Resume
from turboserve.experiments.autoscale.production import production
from turboserve.experiments.autoscale.sizers import Fixed
from turboserve.experiments.autoscale.trace import WorkloadTrace, checked
from turboserve.experiments.paper.profiles import SESSIONS, appendix, cluster
from turboserve.experiments.paper.systems import System
from turboserve.experiments.paper.table4 import STATE_BYTES
from turboserve.experiments.placement.gap import MODEL, Instance
from turboserve.scheduler.placement import SessionState, WorkerState

TRACE = "T1"
POOLS = ((5, 3), (5, 4), (5, 5), (5, 6), (SESSIONS, 3), (SESSIONS, 4))
"""(K, GPUs). Of larger pools an exhaustive search takes minutes for each state."""
STATES = 20
"""States of one pool and draw, at the middles of equal parts of the trace. Empty pools do not count."""
HOSTS = 2
DECLARED = (
    f"Every n-th session of {TRACE}, so many that the pool holds the peak, on a fixed pool with the shipped "
    f"placement; resumed sessions return. Nothing migrates, so that departures leave loads unequal. "
    f"{STATES} states of each pool and draw (K, GPUs): {', '.join(str(pool) for pool in POOLS)}. Equal "
    f"workers, in turn on {HOSTS} nodes; a state has {STATE_BYTES / 1e9:.2f} GB."
)


def states(sessions: int, gpus: int, seed: int) -> Iterator[Instance]:
    """Yield the states of one pool. `sessions`: K."""
    plant = plant_of(sessions, gpus)
    trace = thinned(production(TRACE, seed), sessions * gpus)
    simulation = System("min-max").simulation(trace, plant, Fixed(gpus), Resume.RETURNS)
    for number in range(STATES):
        simulation.advance((number + 0.5) * trace.ends_s / STATES)
        entries = simulation.fleet.cluster.entries
        names = sorted(entries)
        there = [(session, name) for name in names for session in sorted(entries[name].here)]
        if there:
            workers = (
                WorkerState(name, MODEL, sessions, chunk_latency_s=plant.latency_s, host=_host(turn))
                for turn, name in enumerate(names)
            )
            held = (SessionState(session, MODEL, name, state_bytes=STATE_BYTES) for session, name in there)
            yield Instance(tuple(workers), tuple(held), ())


def plant_of(sessions: int, gpus: int) -> Plant:
    return replace(cluster("H20 1.3B") if sessions == SESSIONS else appendix(2.0), most=gpus)


def thinned(trace: WorkloadTrace, slots: int) -> WorkloadTrace:
    """Return the trace with every n-th session, for the least n with which `slots` hold the peak."""
    every = math.ceil(trace.peak / slots)
    while True:
        kept = set(trace.sessions[::every])
        steps = [step for step in trace.steps if step.session in kept]
        found = checked(f"{trace.name}, every {every}th session", steps, trace.ends_s)
        if found.peak <= slots:
            return found
        every += 1


def _host(turn: int) -> str:
    return f"node-{turn % HOSTS}/host-{turn % HOSTS}"
