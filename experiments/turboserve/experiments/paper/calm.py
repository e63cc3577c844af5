"""Quoted cells of Figures 4, 7 and 8 once more, in calm mode beside the level of counts.

The replay of the figures has no chunks. Here each quoted setting runs with the services' own code, real
chunks and viewers (`calm_level`), on the same draw of the trace and the same plant. Playout slack exists at
this level only, so it is a further system.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from turboserve.experiments.autoscale.plant import Plant
from turboserve.experiments.autoscale.production import production
from turboserve.experiments.autoscale.trace import WorkloadTrace
from turboserve.experiments.paper import calm_level, figure4, sweeps
from turboserve.experiments.paper.experiment import QUICK_DRAWS, Scale
from turboserve.experiments.paper.grids import PoolSetting, elastic_settings, fixed_settings
from turboserve.experiments.paper.metrics import above_percent, as_json, curve, mean_interval, measure
from turboserve.experiments.paper.profiles import CLUSTER_OF, USUAL, cluster, describe
from turboserve.experiments.paper.systems import STUDY, SYSTEMS, System, sweep
from turboserve.experiments.result_folder import PaperCell
from turboserve.experiments.weighted import percentile_of

NAME = "calm"
FIGURE4, FIGURES7_8 = "figure 4", "figures 7 and 8"
TRACES = {FIGURE4: "M", FIGURES7_8: "T1"}
SIZE = sweeps.SIZES[0]
START_UP_S = {FIGURE4: 2.0, FIGURES7_8: sweeps.START_UP_S}
RESUME, LATENCY = figure4.HEADLINE
OURS, SLACK = "turboserve", "turboserve with slack"
SYSTEMS_OF: Mapping[str, Mapping[str, System]] = {
    FIGURE4: {**STUDY, SLACK: STUDY[OURS]},
    FIGURES7_8: {
        **{name: SYSTEMS[name] for name in ("base", "LAG", "without migration", "without autoscaling", OURS)},
        SLACK: SYSTEMS[OURS],
    },
}
"""MAG's runs are LAG's."""
COMPARED = ("cost_worker_s", "mean_ms", "p50_ms", "p95_ms", "with_waits_ms", "migrations")
LEVELS = ("count", "calm")
PAPER = {"note": "The paper has no such comparison."}
WANTED = {"cost_difference_percent": 2.0, "late_difference_percent": 0.5}
"""Largest mean difference of a system's cost, and of late chunks in percent of all activations."""


@dataclass(frozen=True)
class Quoted:
    """A figure on one draw of its trace, at the level of counts."""

    figure: str
    trace: WorkloadTrace
    plant: Plant
    _known: dict[System, list[dict[str, Any]]] = field(default_factory=dict)

    def settings(self, system: System) -> list[PoolSetting]:
        if system.elastic:
            return elastic_settings(self.plant, self.trace.peak)
        if self.figure == FIGURE4:
            return [PoolSetting(self.plant.capacity, figure4.GPUS)]
        return fixed_settings(self.trace, self.plant)

    def _runs(self, system: System) -> list[dict[str, Any]]:
        if system not in self._known:
            self._known[system] = sweep(system, self.trace, self.plant, self.settings(system), RESUME)
        return self._known[system]

    def setting(self, name: str) -> PoolSetting | None:
        """Return the quoted setting of a system. None: no setting is fast enough.

        Figure 4: the cheapest that is no slower than the base. Figures 7 and 8: the cheapest at the limit
        L(12), the middle of Figure 8's.
        """
        systems = SYSTEMS_OF[self.figure]
        system = systems[name]
        if self.figure == FIGURE4:
            same = OURS if name == SLACK else name
            found = figure4.quoted({"base": self._runs(systems["base"]), same: self._runs(system)}, same,
                                   LATENCY)  # fmt: skip
        else:
            limit_ms = 1000 * self.plant.latency_s[USUAL] + 1e-3
            found = curve(self._runs(system), LATENCY).at_latency(limit_ms)
        if found is None:
            return None
        return next(one for one in self.settings(system) if one.name == found.name)

    def count_level(self, system: System, setting: PoolSetting) -> dict[str, Any]:
        """Run one setting at the level of counts. Percentiles are of session-seconds."""
        limited = setting.plant(self.plant)
        sizer = setting.sizer(self.trace, limited)
        begin, simulation = sizer.target, system.simulation(self.trace, limited, sizer, RESUME)
        outcome = simulation.run()
        changes = [(at, after) for at, _, after in outcome.actions]
        seconds = dict(enumerate(simulation.fleet.running.seconds))
        latency_s = self.plant.latency_s
        return {
            **as_json(measure(outcome)),
            "wanted_worker_s": calm_level.wanted_worker_s(begin, changes, self.trace.ends_s),
            **{
                f"p{share}_ms": round(1000 * latency_s[percentile_of(seconds, share / 100)], 3)
                for share in (50, 95)
            },
        }


@cache
def quoted(figure: str, seed: int) -> Quoted:
    """Return a figure on one draw. Its runs are made when they are needed, once in this process."""
    return Quoted(figure, production(TRACES[figure], seed), plant_of(figure))


def cells(scale: Scale) -> list[PaperCell]:
    """Return the cells by draw, so that the first draws are whole if the run is cut off."""
    figures = (FIGURE4,) if scale.quick else (FIGURE4, FIGURES7_8)
    seeds = scale.seeds if scale.draws or not scale.quick else scale.seeds[: QUICK_DRAWS // 2]
    return [
        PaperCell(NAME, f"{figure}, {name}, draw {seed}", run, (figure, name, seed))
        for seed in seeds
        for figure in figures
        for name in SYSTEMS_OF[figure]
    ]


def run(figure: str, name: str, seed: int) -> dict[str, Any]:
    """Run a system's quoted setting at both levels."""
    found, system = quoted(figure, seed), SYSTEMS_OF[figure][name]
    setting = found.setting(name)
    if setting is None:
        return {"setting": None}
    return both_levels(found, system, setting, seed, name == SLACK)


def both_levels(
    found: Quoted, system: System, setting: PoolSetting, seed: int, slack: bool
) -> dict[str, Any]:
    """Run one setting at both levels. With `slack`, there is no level of counts."""
    in_calm = calm_level.simulate(system, setting, found.trace, found.plant, seed, RESUME, slack)
    if slack:
        return {"setting": setting.name, "calm": in_calm}
    return {"setting": setting.name, "count": found.count_level(system, setting), "calm": in_calm}


def report(scale: Scale, results: Mapping[PaperCell, Any]) -> dict[str, Any]:
    draws: dict[str, dict[str, list[Any]]] = {}
    for cell, result in results.items():
        figure, name, _ = cell.arguments
        draws.setdefault(figure, {}).setdefault(name, []).append(result)
    ours = {
        figure: {name: _summary(each) for name, each in systems.items()} for figure, systems in draws.items()
    }
    rows_ = [row for systems in ours.values() for row in systems.values() if "difference_percent" in row]
    cost = _largest([row["difference_percent"]["cost_worker_s"] for row in rows_])
    late = _largest([row["late_difference_percent"] for row in rows_])
    return {
        "paper": PAPER,
        "ours": ours,
        "interval": {"largest_cost_difference_percent": cost, "largest_late_difference_percent": late},
        "ratio": None,
        "draws": len({cell.arguments[2] for cell in results}),
        "wanted": WANTED,
        "met": {
            "cost_difference_percent": _within(cost, WANTED["cost_difference_percent"]),
            "late_difference_percent": _within(late, WANTED["late_difference_percent"]),
        },
        "declared": {
            "plants": {figure: describe(plant_of(figure)) for figure in ours},
            "traces": {figure: TRACES[figure] for figure in ours},
            "settings": "Figure 4: a system's cheapest setting that is no slower than the base. Figures 7 "
            f"and 8: its cheapest setting within L({USUAL}). Both with waits, by the level of counts. The "
            "system with slack has the setting of `turboserve`.",
            "count": "The replay of the figures. Chunks come back to back. Percentiles are of "
            "session-seconds.",
            "calm": "The services' own code in virtual time: chunks, viewers, transactions, reports. A chunk "
            f"plays for {calm_level.CHUNK_S:g} s, and a session generates at most 3 s ahead of its viewer, "
            "as shipped. So sessions of one worker seldom all compute at once.",
            "latency": "Level of counts: L(n), the time between two chunks of a session. Calm: from when a "
            "session may generate a chunk until its packaging. `with_waits_ms`: the worst, or the longest "
            "wait for a new session's first chunk.",
            "late": "Level of counts: first chunks of activations, and next chunks after migrations, above "
            "the target. Calm: new sessions' first chunks above the target, and chunks that stop a viewer.",
            "resume": f"{RESUME}: a resumed session returns to its worker if there is room.",
            "slack": "Fidelity `in-time`, rescues within 5 s and the queue `step`, as `ours` of `bench "
            "slack`; qualities of fewer steps are declared. The lead is the shipped one.",
            "left out": "T2 to T6 and the larger model: too much processor time. MAG chooses as LAG does.",
        },
    }


def plant_of(figure: str) -> Plant:
    """Return the plant of a figure."""
    if figure == FIGURE4:
        return figure4.plant_of(START_UP_S[figure])
    return cluster(f"{CLUSTER_OF[TRACES[figure]]} {SIZE}", START_UP_S[figure])


def _summary(draws: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means of one system over the draws that quote a setting."""
    known = [draw for draw in draws if draw["setting"] is not None]
    found: dict[str, Any] = {
        "settings": [draw["setting"] for draw in known],
        "draws_without_a_setting": len(draws) - len(known),
    }
    for level in LEVELS:
        runs = [draw[level] for draw in known if level in draw]
        names = (*COMPARED, "late", *(("quality", "stall_s") if level == "calm" else ()))
        if all("wanted_worker_s" in each for each in runs):
            # Cells that were stored before have no such figure.
            names = (*names, "wanted_worker_s")
        if runs:
            found[level] = {name: mean_interval([float(each[name]) for each in runs]) for name in names}
    pairs = [(draw["count"], draw["calm"]) for draw in known if "count" in draw]
    if pairs:
        found["difference_percent"] = {
            name: mean_interval([above_percent(calm[name], count[name]) for count, calm in pairs])
            if all(count[name] for count, _ in pairs)
            else None
            for name in COMPARED
        }
        found["late_difference_percent"] = mean_interval(
            [100 * (calm["late"] - count["late"]) / max(count["activations"], 1) for count, calm in pairs]
        )
    found["violations"] = sum(draw["calm"]["violations"] for draw in known)
    return found


def _largest(values: Sequence[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """Return the mean difference that is farthest from zero."""
    known = [value for value in values if value is not None]
    return max(known, key=lambda value: abs(value["mean"]), default=None)


def _within(value: Mapping[str, Any] | None, limit: float) -> bool:
    return value is not None and abs(value["mean"]) <= limit


def rows(report_: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (what, paper, ours) for the terminal."""
    shown = []
    for figure, systems in report_["ours"].items():
        for name, row in systems.items():
            texts = [_text(level, row[level]) for level in LEVELS if level in row]
            differences = [
                f"{what.removesuffix('_worker_s').removesuffix('_ms')} {value['mean']:+.1f} %"
                for what, value in row.get("difference_percent", {}).items()
                if value is not None
            ]
            texts += [f"difference: {', '.join(differences)}"] if differences else []
            shown.append((f"{name}; {figure}", "", "; ".join(texts) or "no setting is fast enough"))
    return shown


def _text(level: str, found: Mapping[str, Any]) -> str:
    text = (
        f"{level}: {found['cost_worker_s']['mean']:.0f} worker-s, {found['mean_ms']['mean']:.0f} ms, "
        f"{found['late']['mean']:g} late, {found['migrations']['mean']:.0f} migrations"
    )
    quality = found.get("quality")
    return text if quality is None or quality["mean"] == 1.0 else f"{text}, quality {quality['mean']:.3f}"
