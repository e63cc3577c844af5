"""Table 2: the autoscaler's cost against offline oracles that know the whole trace (7.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from turboserve.autoscaler.control.policy import default_table
from turboserve.contracts.autoscale import ProfileTable
from turboserve.experiments.autoscale.demand import SLOT_S, TARGET, profiled
from turboserve.experiments.autoscale.oracles import cheapest_cost, cheapest_plan, lower_bound, slot_needs
from turboserve.experiments.autoscale.plant import policy_for
from turboserve.experiments.autoscale.production import production
from turboserve.experiments.autoscale.profiling import Grid
from turboserve.experiments.autoscale.simulation import Simulation
from turboserve.experiments.autoscale.sizers import Controlled, Planned, flat_table
from turboserve.experiments.paper.experiment import Scale
from turboserve.experiments.paper.metrics import above_percent, as_json, mean_interval, measure, ratio
from turboserve.experiments.paper.profiles import cluster, describe
from turboserve.experiments.result_folder import PaperCell

NAME = "table2"
TRACES = ("T4", "T5", "T6")
"""The paper's "Trace 1 to 3 on Cluster 2". Cluster 2 ran T4 to T6 (Appendix B)."""
MODEL = "B300 1.3B"
SEEN_SEED = 1000
"""Seed of the draws that the profiled table is made from."""
HEADLINE = "predictive"
"""What `met` judges. With a start-up of 10 s no chunk is late with it on T4's draw `SEEN_SEED`, on which the
profiled table is made."""
DEFAULT = "learned"
"""The controller as it ships."""
PAPER = {
    "above_oracle_percent": {"T4": 4.7, "T5": 8.3, "T6": 5.5, "mean": 6.1, "max": 8.3},
    "cost_dollars": {
        "oracle": {"T4": 188.03, "T5": 158.55, "T6": 152.36},
        "turboserve": {"T4": 196.87, "T5": 171.71, "T6": 160.74},
    },
    "note": "The printed column of the third trace has its two costs exchanged: 160.74 / 152.36 is 5.5 %.",
}
WANTED = {"above_minute_oracle_percent": 0.0, "above_second_oracle_percent": 6.0, "late_percent": 0.1}


def cells(scale: Scale) -> list[PaperCell]:
    names = TRACES[:1] if scale.quick else TRACES
    return [
        PaperCell(NAME, f"{name}, draw {seed}, start-up {delay:g} s", run, (name, seed, delay, names))
        for delay in scale.start_ups
        for name in names
        for seed in scale.seeds
    ]


def run(name: str, seed: int, start_up_s: float, names: tuple[str, ...]) -> dict[str, Any]:
    """Replay one draw. All runs begin with the oracle's workers and hold the same target utilization."""
    plant = cluster(MODEL, start_up_s)
    trace = production(name, seed)
    plan, minute_s = cheapest_plan(
        slot_needs(trace, plant.capacity, TARGET, SLOT_S, plant.most), SLOT_S, start_up_s
    )
    seconds = slot_needs(trace, plant.capacity, TARGET, 1.0, plant.most)
    second_s = cheapest_cost(((float(at), need) for at, need in enumerate(seconds)), trace.ends_s, start_up_s)
    tables = {
        "reactive": flat_table(TARGET),
        "predictive": flat_table(TARGET, predictive=True),
        "profiled": _profiled(tuple(names), start_up_s),
        "shipped table": default_table(),
        DEFAULT: default_table(),
    }
    policies = {DEFAULT: policy_for(plant, learns=True)}
    runs = {
        system: measure(
            Simulation(
                trace, plant, Controlled(policies.get(system, policy_for(plant)), table, plan[0])
            ).run()
        )
        for system, table in tables.items()
    }
    oracle = measure(Simulation(trace, plant, Planned(plan, SLOT_S, start_up_s)).run(), minute_s)
    return {
        "trace": trace.digest,
        "oracle_minute": as_json(oracle),
        "oracle_second_worker_s": round(second_s, 3),
        "lower_bound_worker_s": round(lower_bound(trace, plant), 3),
        "systems": {
            system: {
                **as_json(found),
                "above_minute_oracle_percent": round(above_percent(found.cost_worker_s, minute_s), 3),
                "above_second_oracle_percent": round(above_percent(found.cost_worker_s, second_s), 3),
            }
            for system, found in runs.items()
        },
    }


@cache
def _profiled(names: tuple[str, ...], start_up_s: float) -> ProfileTable:
    """Return a table of other draws: the forecast is on at the levels of volatility at which it pays."""
    traces = [production(name, SEEN_SEED) for name in names]
    return profiled(traces, cluster(MODEL, start_up_s), Grid((TARGET,), (0.2,)))


def report(scale: Scale, results: Mapping[PaperCell, Any]) -> dict[str, Any]:
    by_start_up = {
        f"{delay:g} s": _summary([(cell.arguments[0], found) for cell, found in results.items()
                                  if cell.arguments[2] == delay])
        for delay in scale.start_ups
    }  # fmt: skip
    worst = [found["systems"][HEADLINE] for found in by_start_up.values()]
    ours = by_start_up[f"{scale.start_ups[0]:g} s"]["systems"][HEADLINE]
    names = list(dict.fromkeys(cell.arguments[0] for cell in results))
    published = [PAPER["above_oracle_percent"][name] for name in names]  # type: ignore[index]
    return {
        "paper": PAPER,
        "ours": by_start_up,
        "interval": ours["above_minute_oracle_percent"],
        "ratio": {
            "cost_over_minute_oracle": ratio(
                1 + ours["above_minute_oracle_percent"]["mean"] / 100,
                1 + sum(published) / len(published) / 100,
            )
        },
        "wanted": WANTED,
        "met": {name: all(row[name]["mean"] <= limit for row in worst) for name, limit in WANTED.items()},
        "declared": {
            "plant": describe(cluster(MODEL, scale.start_ups[0])),
            "target_utilization": TARGET,
            "headline": f"{HEADLINE}, start-up {scale.start_ups[0]:g} s; `met` holds at every start-up",
            "oracle_minute": "Workers for each minute's peak at the target utilization, in the cheapest "
            "schedule. A start costs the start-up time; a drain costs nothing.",
            "oracle_second": "The same in slots of one second.",
            "lower_bound": "No policy costs less if no first chunk is late, at any utilization.",
        },
    }


def _summary(found: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    first = found[0][1]["systems"]
    columns = ("above_minute_oracle_percent", "above_second_oracle_percent", "late_percent")
    by_trace: dict[str, list[float]] = {}
    for name, each in found:
        by_trace.setdefault(name, []).append(each["systems"][HEADLINE][columns[0]])
    return {
        "systems": {
            system: {
                column: mean_interval([each["systems"][system][column] for _, each in found])
                for column in columns
            }
            for system in first
        },
        "by_trace": {name: mean_interval(values) for name, values in by_trace.items()},
        "oracle_late_percent": mean_interval([each["oracle_minute"]["late_percent"] for _, each in found]),
        "lower_bound_of_second_oracle": mean_interval(
            [each["lower_bound_worker_s"] / each["oracle_second_worker_s"] for _, each in found]
        ),
    }


def rows(report_: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (what, paper, ours) for the terminal."""
    shown = []
    for delay, found in report_["ours"].items():
        for system, row in found["systems"].items():
            minute, second = row["above_minute_oracle_percent"], row["above_second_oracle_percent"]
            shown.append(
                (
                    f"{system}, start-up {delay}: cost above the oracle by minute; by second; late",
                    "+6.1 % (max +8.3)",
                    f"{minute['mean']:+.1f} % (max {minute['max']:+.1f}); {second['mean']:+.1f} %; "
                    f"{row['late_percent']['mean']:.2f} %",
                )
            )
    return shown
