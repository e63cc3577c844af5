"""The autoscaler over traces on a virtual clock: cost and lateness against oracles and other autoscalers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group

from turboserve.bench.report import BenchError
from turboserve.contracts.errors import InvalidInputError
from turboserve.experiments.autoscale import absorption, cases, demand, unseen
from turboserve.experiments.autoscale.agreement import agreement
from turboserve.experiments.autoscale.behavior import TRACES, behavior_case
from turboserve.experiments.autoscale.coverage import coverage_case
from turboserve.experiments.autoscale.forecasts import forecast_case, kinds
from turboserve.experiments.autoscale.oscillation import oscillation_case
from turboserve.experiments.autoscale.plant import Plant
from turboserve.experiments.autoscale.production import SCALES, production
from turboserve.experiments.autoscale.requests import read_all
from turboserve.experiments.autoscale.result_tables import TABLES
from turboserve.experiments.autoscale.trace import WorkloadTrace

CASES = (
    "unseen", "windows", "absorption", "coverage", "real", "production", "profiling", "sweep", "agreement",
    "oscillation", "behavior", "forecast",
)  # fmt: skip
"""Cases in the order in which they begin, the longest first."""
WINDOW_DELAYS = (2.0, 10.0)
MEASURED = ("T1", "T2", "T3")
"""Traces of Table 12 that are measured. `bench paper` has the others."""
SWEEP_DELAYS = (2.0, 30.0, 60.0)
"""Start-up times of the sweep; the `production` case covers 10 s."""


@dataclass(frozen=True)
class Unit:
    """One call. Its figures do not depend on where or when it runs."""

    case: str
    key: str
    """Name among the case's units; empty if the case has one unit."""
    function: Callable[..., Any]
    """A function of a module, so that another process can import it."""
    arguments: tuple[Any, ...]


def run_all(units: Sequence[Unit], jobs: int) -> dict[Unit, Any]:
    """Run the units in this order, at most `jobs` at a time. Returns the result of each."""
    if jobs == 1 or len(units) == 1:
        return {unit: unit.function(*unit.arguments) for unit in units}
    # Spawned, not forked: this process may have threads.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {unit: pool.submit(unit.function, *unit.arguments) for unit in units}
        return {unit: future.result() for unit, future in futures.items()}


def run(
    only: Annotated[str, typer.Option(help=f"Cases to run, separated by commas: {', '.join(CASES)}.")] = "",
    segments: Annotated[int, typer.Option(min=1, help="Number of segments of each profiled level.")] = 3,
    training: Annotated[
        int, typer.Option(min=1, help="Number of traces that the windows' table is made from.")
    ] = 10,
    hours: Annotated[float, typer.Option(min=0.05, help="Length of the real arrivals, in hours.")] = 0.5,
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            help="CSV for the case absorption, besides its own traces: time_s,session,event, or requests "
            "with time_s or TIMESTAMP and generated_tokens or GeneratedTokens. May be repeated."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Number of processes; 0 for one per core.")] = 0,
) -> dict[str, Any]:
    """Run the autoscaler's controller with the scheduler's placement, on a virtual clock.

    Compares cost and lateness with oracles, fixed pools and a utilization autoscaler.
    """
    wanted = [name.strip() for name in only.split(",") if name.strip()] or list(CASES)
    unknown = sorted(set(wanted) - set(CASES))
    if unknown:
        raise BenchError(f"--only: unknown case {unknown[0]!r}; known: {', '.join(CASES)}")
    try:
        files = read_all(trace, absorption.traces(hours * 3600)) if trace else []
    except InvalidInputError as error:
        raise BenchError(f"--trace: {error.field}: {error.detail}") from None
    if files and "absorption" not in wanted:
        raise BenchError("--trace: only the case absorption reads it; add it to --only")
    units = [unit for unit in _units(segments, training, hours * 3600, files) if unit.case in wanted]
    began_s = time.monotonic()
    found = run_all(units, jobs or os.cpu_count() or 1)
    result: dict[str, Any] = {"definitions": DEFINITIONS, "seconds": round(time.monotonic() - began_s, 1)}
    for case in CASES:
        parts = {unit.key: found[unit] for unit in units if unit.case == case}
        if parts:
            result[case] = parts.get("", parts)
    if "production" in result:
        result["oracle_gap_percent"] = result["production"]["oracle_gap_percent"]
    return result


def _units(segments: int, training: int, lasts_s: float, files: Sequence[WorkloadTrace] = ()) -> list[Unit]:
    units = [Unit("unseen", name, unseen_trace, (name, 10.0)) for name in unseen.UNSEEN]
    units += [Unit("windows", f"start_up_{delay:g}_s", windows, (delay, training)) for delay in WINDOW_DELAYS]
    measured = {**absorption.traces(lasts_s), **{one.name: one for one in files}}
    units += [Unit("absorption", name, absorbs, (one,)) for name, one in measured.items()]
    units += [
        Unit("real", "", real, (lasts_s,)),
        Unit("production", "", production_traces, (MEASURED, 10.0)),
        Unit("profiling", "", profiling, (segments,)),
    ]
    units += [Unit("sweep", f"{delay:g}", production_traces, (("T1",), delay)) for delay in SWEEP_DELAYS]
    units += [Unit("coverage", kind, coverage_case, (kind,)) for kind in kinds()]
    units += [Unit("behavior", name, behavior_case, (name, 2 * lasts_s)) for name in TRACES]
    units += [Unit("agreement", str(workers), agrees, (workers,)) for workers in (10, 20)]
    return [*units, Unit("oscillation", "", oscillation, ()), Unit("forecast", "", forecast_case, ((2, 10),))]


def _progress(line: object) -> None:
    Console(stderr=True).print(line)


def windows(delay: float, training: int) -> dict[str, Any]:
    return cases.windows_case(delay, training, _progress)


def real(lasts_s: float) -> dict[str, Any]:
    return demand.real_case(SCALES, lasts_s, _progress)


def unseen_trace(name: str, delay: float) -> dict[str, Any]:
    return unseen.unseen_case(name, delay, _progress)


def production_traces(names: tuple[str, ...], delay: float) -> dict[str, Any]:
    return demand.production_case(names, delay, _progress)


def profiling(segments: int) -> dict[str, Any]:
    return cases.profiling_case(segments, _progress)


def absorbs(trace: WorkloadTrace) -> dict[str, Any]:
    return absorption.absorption_case(trace, _progress)


def agrees(workers: int) -> dict[str, Any]:
    return agreement(production("T1"), workers, Plant(most=64))


def oscillation() -> dict[str, Any]:
    return oscillation_case(_progress)


DEFINITIONS = {
    "cost_worker_s": "Worker-seconds from launch to release. Starting and draining workers count.",
    "latency": "L(n) = 133.6 ms × n, with n sessions on the worker; K = 5. The first chunk after a "
    "migration takes 24 ms more.",
    "late_chunks": "Chunks later than 670 ms: first chunks of activations, including the wait for a slot, "
    "and first chunks after a migration.",
    "worst_served_ms": "Highest L(n) of sessions on a worker, without waits and migrations.",
    "start_up_s": "Time from the decision until the worker serves. The default is 10 s.",
    "windowed oracle": "The same controller, limits, cool-downs, start-up and prices. For each window of "
    "30 s it uses the cheapest ρ̂ without a late chunk. It knows the future.",
    "keeping": "The table of `ours` with ρ̂ lowered until a replay of the profiled traces with the whole "
    "table has no late chunk.",
    "profiled_traces": "Late chunks in a replay, with the whole table, of the traces that it was profiled "
    "on. The profiling of a row assumes that this row is always in force.",
    "profiled, own_table": "Parameters from other draws or time scales of such traces. The forecast is used "
    "only at levels where it lowered the cost on them.",
    "unseen_in_all": "Late chunks and cost over all traces of more_unseen, with both tables and with each "
    "constant ρ̂.",
    "coverage": "Share of instants with no more sessions than were forecast 10 s before. The margin of each "
    "forecast is set so that this share is 0.95 on the measured traces. Surplus and shortfall are means "
    "over all instants.",
    "absorption": "late_activations: first chunks of activations alone. `baselines` without absorption make "
    "the front, a lower convex hull; `against` it: late at the run's cost, cost at the run's late. "
    "quality_debt: share of chunks below the best configuration. A worker lowers the fewest chunks to the "
    "floor, which takes half the time, so K_floor is 10.",
    "behavior": "Mean absolute errors of two forecasts at the same instants, on the Azure arrivals. error_s: "
    "of the time until 1, 5 and 20 slots are free, at refusals of a pool that is too small. active_sessions: "
    "of their number later, in a pool without limit. `steady` counts the departures of 5 min, or is the "
    "autoscaler's forecast without a margin. `behavior` uses what the state store learns. The stays of "
    "`tokens` are in proportion to generated tokens, its prompts to context tokens. The tenants of `tenants` "
    "are declared; those of `alike` differ in nothing. several_classes_percent: of the instants.",
    "unseen": "`learned` is the default controller, `shipped_table` the one of Appendix A. "
    "dearer_than_…_percent: cost above the lower convex hull of the best constants ρ̂, or of utilization "
    "autoscaling, for this trace at the same number of late activations; null where no run has so few.",
    "oracle": "Workers for each minute's peak at the named utilization, in the cheapest schedule (dynamic "
    "program). Each start costs start_up_s.",
    "gaps": "Cost divided by the oracle's cost, minus one. oracle_gap_percent is the mean of absolute "
    "values.",
}


def table(result: Mapping[str, Any]) -> Group:
    """Format the main figures."""
    shown = [TABLES[name](result[name]) for name in CASES if name in result and name in TABLES]
    return Group(*shown, f"seconds: {result['seconds']}")
