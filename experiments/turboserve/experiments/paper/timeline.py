"""Timelines of one draw of M: workers over demand, every session's worker, and migrations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from turboserve.autoscaler.control.policy import default_table
from turboserve.experiments.autoscale.plant import Plant, policy_for
from turboserve.experiments.autoscale.production import production
from turboserve.experiments.autoscale.simulation import Simulation
from turboserve.experiments.autoscale.sizers import Controlled, Fixed, Sizer
from turboserve.experiments.paper.experiment import Scale
from turboserve.experiments.paper.metrics import as_json, mean_interval, measure
from turboserve.experiments.paper.profiles import appendix, describe
from turboserve.experiments.result_folder import PaperCell

NAME = "timeline"
TRACE, START_UP_S, BEGIN = "M", 10.0, 3
SYSTEMS = ("default", "shipped table", "fixed for the peak")
PAPER = {"note": "The paper's figures of this kind have no numbers."}
WANTED: Mapping[str, float] = {"default_late_percent": 2.0}


def cells(scale: Scale) -> list[PaperCell]:
    return [
        PaperCell(NAME, f"{system}, draw {seed}", run, (system, seed, seed == scale.first_seed))
        for system in SYSTEMS
        for seed in scale.seeds
    ]


def run(system: str, seed: int, detailed: bool, trace_name: str = TRACE) -> dict[str, Any]:
    """Replay one draw. `detailed`: with the timeline of the run, sampled every second."""
    plant = appendix(START_UP_S)
    trace = production(trace_name, seed)
    simulation = Simulation(trace, plant, _sizer(system, plant, trace.peak))
    spans = _Spans()
    for second in range(1, math.ceil(trace.ends_s)):
        simulation.advance(float(second))
        entries = simulation.fleet.cluster.entries
        if detailed:
            spans.sample(second, {s: worker for worker, entry in entries.items() for s in sorted(entry.here)})
    simulation.advance(trace.ends_s)
    simulation.fleet.finish(trace.ends_s)
    outcome = simulation.outcome
    found: dict[str, Any] = as_json(measure(outcome))
    if detailed:
        found["timeline"] = {
            "ends_s": trace.ends_s,
            "capacity": plant.capacity,
            "active": trace.active(),
            "workers": [[round(at, 1), size] for at, size in outcome.sizes],
            "spans": spans.finished(math.ceil(trace.ends_s)),
            "migrated": spans.migrated,
        }
    return found


def _sizer(system: str, plant: Plant, peak: int) -> Sizer:
    if system == SYSTEMS[2]:
        return Fixed(math.ceil(peak / plant.capacity))
    return Controlled(policy_for(plant, learns=system == SYSTEMS[0]), default_table(), BEGIN)


class _Spans:
    """Which worker has each session over time, by samples."""

    def __init__(self) -> None:
        self.migrated: list[list[int]] = []
        """[second, session]: the session was on another worker one second before."""
        self._found: list[list[int]] = []
        self._open: dict[str, tuple[int, str]] = {}
        self._sessions: dict[str, int] = {}
        self._workers: dict[str, int] = {}

    def sample(self, second: int, here: Mapping[str, str]) -> None:
        for session in [*self._open]:
            worker = self._open[session][1]
            if here.get(session) != worker:
                self._close(session, second)
                if session in here:
                    self.migrated.append([second, self._sessions[session]])
        for session, worker in here.items():
            self._sessions.setdefault(session, len(self._sessions))
            self._workers.setdefault(worker, len(self._workers))
            self._open.setdefault(session, (second, worker))

    def finished(self, second: int) -> list[list[int]]:
        """Return [session, worker, first second, last second]."""
        for session in [*self._open]:
            self._close(session, second)
        return sorted(self._found)

    def _close(self, session: str, second: int) -> None:
        begins, worker = self._open.pop(session)
        self._found.append([self._sessions[session], self._workers[worker], begins, second])


def report(scale: Scale, results: Mapping[PaperCell, Any]) -> dict[str, Any]:
    draws: dict[str, list[Any]] = {}
    for cell, found in results.items():
        draws.setdefault(cell.arguments[0], []).append(found)
    names = ("cost_worker_s", "late_percent", "migrations", "mean_ms")
    ours: dict[str, Any] = {
        system: {name: mean_interval([draw[name] for draw in each]) for name in names}
        for system, each in draws.items()
    }
    late = ours[SYSTEMS[0]]["late_percent"]
    return {
        "paper": PAPER,
        "ours": ours,
        "interval": late,
        "ratio": None,
        "wanted": WANTED,
        "met": {"default_late_percent": late["mean"] <= WANTED["default_late_percent"]},
        "declared": {
            "plant": describe(appendix(START_UP_S)),
            "trace": f"{TRACE}; the pool begins with {BEGIN} workers",
            "samples": "Sessions' workers are sampled every second.",
        },
        "timelines": {
            system: draw["timeline"] for system, each in draws.items() for draw in each if "timeline" in draw
        },
    }


def rows(report_: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (what, paper, ours) for the terminal."""
    return [
        (
            system,
            "",
            f"{row['cost_worker_s']['mean']:.0f} worker-s, {row['late_percent']['mean']:.2f} % late, "
            f"{row['migrations']['mean']:.0f} migrations",
        )
        for system, row in report_["ours"].items()
    ]
