"""Tables 5 and 6: offline profiling, ten levels of volatility (Appendix A)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turboserve.contracts.autoscale import Provenance
from turboserve.experiments.autoscale.appendix import BURSTS, segment
from turboserve.experiments.autoscale.cases import PAPER_WEIGHT, profile_level
from turboserve.experiments.autoscale.keeping import as_a_whole
from turboserve.experiments.autoscale.plant import policy_for
from turboserve.experiments.autoscale.profiling import RHO_GRID, Grid, build_table, whole
from turboserve.experiments.paper.experiment import Scale
from turboserve.experiments.paper.metrics import mean_interval, ratio
from turboserve.experiments.paper.profiles import appendix, describe
from turboserve.experiments.result_folder import PaperCell

NAME = "table5_6"
SEGMENTS = 3
"""Segments of each level in one draw."""
PAPER_COSTS = (338.66, 369.35, 498.73, 526.14, 547.34, 700.77, 702.44, 705.05, 770.44, 769.46)
PAPER_RHOS = (0.80, 0.80, 0.65, 0.65, 0.65, 0.50, 0.50, 0.50, 0.25, 0.25)
PAPER_VOLATILITIES = (0.86, 1.32, 1.92, 2.66, 3.15, 3.77, 4.39, 5.14, 5.51, 6.38)
WANTED = {"cost_ratio_at_any_level": 1.0, "whole_table_late_percent": 1.0}
WHOLE = "whole table"


def cells(scale: Scale) -> list[PaperCell]:
    found = []
    for delay in scale.start_ups:
        for seed in scale.seeds:
            name = f"draw {seed}, start-up {delay:g} s"
            found += [
                PaperCell(NAME, f"level {level}, {name}", run_level, (level, burst, seed, delay))
                for level, burst in enumerate(BURSTS, 1)
            ]
            found.append(PaperCell(NAME, f"{WHOLE}, {name}", run_table, (seed, delay)))
    return found


def run_level(level: int, burst: int, seed: int, start_up_s: float) -> dict[str, Any]:
    """Search the grid for one level."""
    return profile_level(level, burst, SEGMENTS, appendix(start_up_s), seed * SEGMENTS)


def run_table(seed: int, start_up_s: float) -> dict[str, Any]:
    """Profile all levels as one table, and replay all segments with the table as a whole."""
    plant = appendix(start_up_s)
    policy = policy_for(plant)
    seeds = range(seed * SEGMENTS, (seed + 1) * SEGMENTS)
    traces = [segment(burst, each) for burst in BURSTS for each in seeds]
    table = build_table(
        [whole(trace, policy) for trace in traces],
        len(BURSTS),
        plant,
        policy,
        Provenance(source="the bursts of Table 5"),
        Grid(weights=PAPER_WEIGHT),
    )
    found = as_a_whole(table, traces, plant, policy).provenance
    assert found.late is not None
    assert found.activations is not None
    return {
        "late": found.late,
        "activations": found.activations,
        "late_percent": round(100.0 * found.late / found.activations, 4),
        "target_utilizations": [row.target_utilization for row in table.levels],
    }


def report(scale: Scale, results: Mapping[PaperCell, Any]) -> dict[str, Any]:
    by_start_up = {f"{delay:g} s": _summary(delay, results) for delay in scale.start_ups}
    first = by_start_up[f"{scale.start_ups[0]:g} s"]
    costs = [level["cost_worker_s"]["mean"] for level in first["levels"]]
    ratios = [ratio(ours, paper) for ours, paper in zip(costs, PAPER_COSTS, strict=True)]
    return {
        "paper": {
            "cost": list(PAPER_COSTS),
            "target_utilization": list(PAPER_RHOS),
            "volatility": list(PAPER_VOLATILITIES),
            "pass_rate": 1.0,
        },
        "ours": by_start_up,
        "interval": [level["cost_worker_s"] for level in first["levels"]],
        "ratio": {"cost": ratios, "mean_cost": round(sum(ratios) / len(ratios), 4)},
        "wanted": WANTED,
        "met": {
            "cost_ratio_at_any_level": max(ratios) <= WANTED["cost_ratio_at_any_level"],
            "whole_table_late_percent": all(
                found[WHOLE]["late_percent"]["mean"] <= WANTED["whole_table_late_percent"]
                for found in by_start_up.values()
            ),
        },
        "declared": {
            "plant": describe(appendix(scale.start_ups[0])),
            "grid": list(RHO_GRID),
            "segments": f"{SEGMENTS} of 60 s a level and draw; bursts spread over 2 s at a random instant",
            "pass_rate": "Share of segments with no late chunk: waits for a slot and migrations included.",
            "headline": f"start-up {scale.start_ups[0]:g} s",
        },
    }


def _summary(delay: float, results: Mapping[PaperCell, Any]) -> dict[str, Any]:
    found = {cell: result for cell, result in results.items() if cell.arguments[-1] == delay}
    levels = []
    for level in range(1, len(BURSTS) + 1):
        rows = [
            result
            for cell, result in found.items()
            if cell.function is run_level and cell.arguments[0] == level
        ]
        levels.append(
            {
                "level": level,
                "cost_worker_s": mean_interval([row["cost_worker_s"] for row in rows]),
                "target_utilization": mean_interval([row["target_utilization"] for row in rows]),
                "volatility": mean_interval([row["volatility"] for row in rows]),
                "pass_rate": mean_interval([row["pass_rate"] for row in rows]),
            }
        )
    tables = [result for cell, result in found.items() if cell.function is run_table]
    return {"levels": levels, WHOLE: {"late_percent": mean_interval([t["late_percent"] for t in tables])}}


def rows(report_: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (what, paper, ours) for the terminal."""
    shown = []
    for delay, found in report_["ours"].items():
        for level, cost, rho in zip(found["levels"], PAPER_COSTS, PAPER_RHOS, strict=True):
            mine = level["cost_worker_s"]["mean"]
            shown.append(
                (
                    f"level {level['level']}, start-up {delay}: cost, ρ̂, pass rate",
                    f"{cost:.0f}, {rho:.2f}, 100 %",
                    f"{mine:.0f} (× {mine / cost:.2f}), {level['target_utilization']['mean']:.2f}, "
                    f"{level['pass_rate']['mean']:.0%}",
                )
            )
        late = found[WHOLE]["late_percent"]["mean"]
        shown.append((f"{WHOLE}, start-up {delay}: late", "not given", f"{late:.1f} %"))
    return shown
