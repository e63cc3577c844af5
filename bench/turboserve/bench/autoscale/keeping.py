"""A table as a whole: how late it lets sessions be, and what it takes to let none.

Appendix A finds each level's parameters as if they were in force throughout. A burst raises its level only
when it has begun, so what meets it is the row of the calm before; a worker that is started then comes too
late for who arrived within a start-up.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from turboserve.autoscaler.control.budget import budget
from turboserve.autoscaler.control.detector import WorkloadDetector
from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.bench.autoscale.outcome import ScalingOutcome
from turboserve.bench.autoscale.plant import Plant
from turboserve.bench.autoscale.profiling import RHO_GRID
from turboserve.bench.autoscale.simulation import Simulation
from turboserve.bench.autoscale.sizers import Controlled
from turboserve.bench.autoscale.trace import WorkloadTrace
from turboserve.contracts.autoscale import ProfileTable


def replay(trace: WorkloadTrace, plant: Plant, policy: ControlPolicy, table: ProfileTable) -> ScalingOutcome:
    """The controller over a trace; the pool begins as the table wants it for who is there at 0."""
    size = budget(trace.active()[0], plant.capacity, table.levels[0], most=plant.most)
    return Simulation(trace, plant, Controlled(policy, table, min(max(size, 1), plant.most))).run()


def as_a_whole(
    table: ProfileTable, traces: Iterable[WorkloadTrace], plant: Plant, policy: ControlPolicy
) -> ProfileTable:
    """The table, with what a replay of the traces with all of it had in its provenance."""
    runs = [replay(trace, plant, policy, table) for trace in traces]
    found = {"late": sum(run.late for run in runs), "activations": sum(run.placed for run in runs)}
    return table.model_copy(update={"provenance": table.provenance.model_copy(update=found)})


def keep_target(
    table: ProfileTable,
    traces: Sequence[WorkloadTrace],
    plant: Plant,
    policy: ControlPolicy,
    grid: Sequence[float] = RHO_GRID,
    say: Callable[[str], None] = lambda line: None,
) -> ProfileTable:
    """Lower rows' ρ̂ until nobody is late in a replay of `traces` with the whole table.

    The row to lower is the one that was in force a start-up before most of the late became active: only
    workers that were there then could have had them. Ends as well when none of the rows to blame can go any
    lower; the provenance says how many are late then. λ and the forecast of each row stay. Rows are not
    raised again where nobody would be late with it: that fits these traces, and no others (tried).
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
            say(f"{blamed.total()} are late: level {level} gets ρ̂ {lower[_rho(table, level)]:g}")
            table, playing = _with_rho(table, level, lower[_rho(table, level)]), late_in
        elif late_in or len(playing) == len(traces):
            return as_a_whole(table, traces, plant, policy)
        else:
            # More room for one can make another late: a pool that was larger shrinks at another time.
            playing = list(traces)


def levels_at(
    trace: WorkloadTrace, table: ProfileTable, policy: ControlPolicy, times: Iterable[float]
) -> list[int]:
    """Which level is in force at each of the times; before the trace's beginning the first is."""
    detector = WorkloadDetector(policy.epoch_s, policy.window)
    # Who is there at 0 came before: no burst.
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
    # What was measured of the row was measured with another ρ̂.
    changed = {"target_utilization": rho, "pass_rate": None, "cost_s": None}
    rows = [row.model_copy(update=changed) if row.level == level else row for row in table.levels]
    return table.model_copy(update={"levels": tuple(rows)})
