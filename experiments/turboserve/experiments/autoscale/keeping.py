"""A profile table as a whole: how late sessions are with it, and what prevents lateness.

Appendix A finds each level's parameters as if they were in force throughout. A burst raises its level only
after it has begun, so the row of the calm before is in force when the burst arrives. A worker that is started
then is too late for the sessions that arrived within a start-up.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from turboserve.autoscaler.control.budget import budget
from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.autoscaler.control.workload import WorkloadDetector
from turboserve.contracts.autoscale import ProfileTable
from turboserve.experiments.autoscale.outcome import ScalingOutcome
from turboserve.experiments.autoscale.plant import Plant
from turboserve.experiments.autoscale.profiling import RHO_GRID
from turboserve.experiments.autoscale.simulation import Simulation
from turboserve.experiments.autoscale.sizers import Controlled
from turboserve.experiments.autoscale.trace import WorkloadTrace


def replay(trace: WorkloadTrace, plant: Plant, policy: ControlPolicy, table: ProfileTable) -> ScalingOutcome:
    """Replay a trace with the controller.

    The pool starts at the table's size for the sessions active at time 0.
    """
    size = budget(trace.active()[0], plant.capacity, table.levels[0], most=plant.most)
    return Simulation(trace, plant, Controlled(policy, table, min(max(size, 1), plant.most))).run()


def as_a_whole(
    table: ProfileTable, traces: Iterable[WorkloadTrace], plant: Plant, policy: ControlPolicy
) -> ProfileTable:
    """Return the table with the lateness of a replay of the traces in its provenance."""
    runs = [replay(trace, plant, policy, table) for trace in traces]
    found = {"late": sum(run.late for run in runs), "activations": sum(run.placed for run in runs)}
    return table.model_copy(update={"provenance": table.provenance.model_copy(update=found)})


def keep_target(
    table: ProfileTable,
    traces: Sequence[WorkloadTrace],
    plant: Plant,
    policy: ControlPolicy,
    grid: Sequence[float] = RHO_GRID,
    progress: Callable[[str], None] = lambda line: None,
) -> ProfileTable:
    """Lower the ρ̂ of rows until no session is late in a replay of `traces` with the whole table.

    The row to lower is the row in force one start-up before most of the late sessions became active: only
    workers present then could have served them. The search also ends when no row to blame can be lowered
    further; the provenance then records how many sessions are late. λ and the forecast of each row stay. Rows
    are not raised again where no session would be late: that fits these traces and no others (tried).
    """
    lower = dict(pairwise(sorted(grid, reverse=True)))
    playing = list(traces)
    while True:
        blamed: Counter[int] = Counter()
        late_in: list[WorkloadTrace] = []
        for trace in playing:
            late = replay(trace, plant, policy, table).late_since
            if late:
                late_in.append(trace)
                blamed.update(levels_at(trace, table, policy, [at - plant.start_up_s for at in late]))
        level = next((level for level, _ in blamed.most_common() if _rho(table, level) in lower), None)
        if level is not None:
            progress(f"{blamed.total()} late chunks: ρ̂ of level {level} is now {lower[_rho(table, level)]:g}")
            table, playing = _with_rho(table, level, lower[_rho(table, level)]), late_in
        elif late_in or len(playing) == len(traces):
            return as_a_whole(table, traces, plant, policy)
        else:
            # More room for one session can make another late: a larger pool shrinks at another time.
            playing = list(traces)


def levels_at(
    trace: WorkloadTrace, table: ProfileTable, policy: ControlPolicy, times: Iterable[float]
) -> list[int]:
    """Return the level in force at each of the times; before the trace's beginning, the first level."""
    detector = WorkloadDetector(policy.epoch_s, policy.window)
    # Sessions present at t = 0 do not count as arrivals.
    steps = deque(step for step in trace.steps if step.at > 0)
    levels: list[int] = []
    for time in sorted(times):
        while steps and steps[0].at <= time:
            step = steps.popleft()
            detector.add(step.kind, 1, step.at)
        if time > 0:
            detector.advance(time)
        levels.append(table.row(detector.volatility).level)
    return levels


def _rho(table: ProfileTable, level: int) -> float:
    return table.levels[level - 1].target_utilization


def _with_rho(table: ProfileTable, level: int, rho: float) -> ProfileTable:
    # The row's measurements were made with another ρ̂.
    changed = {"target_utilization": rho, "pass_rate": None, "cost_s": None}
    rows = [row.model_copy(update=changed) if row.level == level else row for row in table.levels]
    return table.model_copy(update={"levels": tuple(rows)})
