"""What both sides of all runs say together."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from turboserve.experiments.agreement import toyworld as toys
from turboserve.experiments.agreement.declared import Declared
from turboserve.experiments.agreement.outcome import compared

ERRORS = ("cost_error_percent", "p50_error_percent", "p95_error_percent", "late_points")
WANTED = {
    "cost_error_percent": 2.0,
    "p50_error_percent": 5.0,
    "p95_error_percent": 10.0,
    "late_points": 0.5,
    "migrations_error_percent": 10.0,
}
TOYWORLD_WANTED = 10.0
DEFINITIONS = {
    "real": "Trace M in real time on `turboserve up` with paced workers: declared forwards, which "
    "the worker sleeps. NATS, Redis, Postgres, all services and all viewers are real.",
    "simulated": "The same trace, settings and device in calm mode, with the fitted constants: the median of "
    "each figure over repeats with other seeds. `spread` has the lowest and the highest.",
    "slowdown": "Median time of a real chunk of toyworld, relative to its simulation from stages that were "
    "measured alone: the mean of the fitted numbers of sessions (`fitted_on`).",
    "p95": "95th percentile of its time relative to the median, relative to the same ratio in that "
    "simulation.",
    "decisions_identical": "Whether new cores of the scheduler, the pool and the controller, fed the events "
    "of every real run (void ones, too), return what they returned there.",
    "error_percent": "The simulation's difference from the real run, relative to that. Summaries have the "
    "largest one, with its sign, of the runs that count; null: there is none.",
    "mean_s, p50_s, p95_s": "Time of a chunk from its first forward to its packaging. Declared forwards make "
    "these times a lattice, so that the median jumps by a step of it; the mean does not.",
    "late_points": "Difference of the chunks that stop their viewer's playing, in percent of all chunks.",
    "actions_within": "Changes of the pool's size that both sides make in one order, at most 1.5 s apart.",
    "ranking_equal": "Whether both sides order the policies alike by the mean p95 of their runs.",
    "cpu_busy": "Share of the machine's processor time that was busy, by all processes.",
    "cpu_own": "Share that the stack and its viewers used, without workers that ended meanwhile.",
    "void": "Why a run does not count; null: it counts.",
}


def pair(run: Declared, real: Mapping[str, Any], simulated: Mapping[str, Any]) -> dict[str, Any]:
    """Return both sides of one run with their differences."""
    return {
        "policy": run.policy,
        "draw": run.draw,
        **compared(real, simulated),
        "void": real["void"],
        "real": real,
        "simulated": simulated,
    }


def summed(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], fits: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Sum up the predicted runs by policy, and all. `fits`: runs of which only the decisions count."""
    predicted = [each for policy in runs.values() for each in policy]
    counted = [each for each in predicted if each["void"] is None]
    real, simulated = (
        {name: _mean_p95(policy, side) for name, policy in runs.items()} for side in ("real", "simulated")
    )
    whole = {name: largest(each[name] for each in counted) for name in WANTED}
    return {
        "decisions_identical": identical([*predicted, *fits]),
        **whole,
        "met": {name: met(whole[name], limit) for name, limit in WANTED.items()},
        "wanted": WANTED,
        "actions_real": sum(each["actions_real"] for each in counted),
        "actions_within": sum(each["actions_within"] for each in counted),
        "ranking_equal": None if None in real.values() else ranked(real) == ranked(simulated),
        "ranking": {"real": ranked(real), "simulated": ranked(simulated)},
        "void_runs": sum(each["void"] is not None for each in [*predicted, *fits]),
        "policies": {name: _policy(policy) for name, policy in runs.items()},
    }


def _policy(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counted = [each for each in runs if each["void"] is None]
    return {
        "decisions_identical": identical(runs),
        **{name: largest(each[name] for each in counted) for name in WANTED},
        "draws": list(runs),
    }


def identical(runs: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether every core of the real runs decided alike again, and each had something to decide."""
    cores = [core for each in runs for core in each["real"]["decisions"].values()]
    return bool(cores) and all(core["events"] > 0 and core["different"] == 0 for core in cores)


def largest(errors: Iterable[float | None]) -> float | None:
    """Return the error that is farthest from 0, with its sign. None: there is none, or one has no value."""
    found = list(errors)
    if not found or None in found:
        return None
    return max((error for error in found if error is not None), key=abs)


def met(error: float | None, limit: float) -> bool | None:
    """Return whether the error is within the limit. None: there is no error to judge."""
    return None if error is None else abs(error) <= limit


def _mean_p95(runs: Sequence[Mapping[str, Any]], side: str) -> float | None:
    found = [each[side]["p95_s"] for each in runs if each["void"] is None]
    return statistics.fmean(found) if found and None not in found else None


def ranked(values: Mapping[str, float | None]) -> list[str]:
    """Return the names from the lowest value on; those without a value are left out."""
    known = {name: value for name, value in values.items() if value is not None}
    return sorted(known, key=lambda name: (known[name], name))


def toyworld(
    stages: Mapping[str, Any], sharing: toys.Sharing, real: Mapping[str, Any], simulated: Mapping[str, Any]
) -> dict[str, Any]:
    """Return both sides of the toyworld run, with the errors by number of sessions and the largest.

    The numbers of sessions that fitted the constants do not count for the largest.
    """
    errors = toys.compared(real, simulated)
    whole = compared(real, simulated)
    counts = real["void"] is None
    found = {
        name: largest(each[name] for number, each in errors.items() if number not in toys.FITTED)
        if counts
        else None
        for name in ("p50_error_percent", "p95_error_percent")
    }
    return {
        "decisions_identical": identical([{"real": real}]),
        "cost_error_percent": whole["cost_error_percent"] if counts else None,
        **found,
        "late_points": whole["late_points"] if counts else None,
        "wanted": TOYWORLD_WANTED,
        "met": {name: met(by, TOYWORLD_WANTED) for name, by in found.items()},
        "void": real["void"],
        "by_sessions": errors,
        "profile_s": stages,
        "constants": sharing.to_json(),
        "real": real,
        "simulated": simulated,
    }
