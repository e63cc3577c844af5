"""The default controller on many draws of unseen kinds of traces, by start-up time (no table of the paper).

Every run is a replay at the level of counts (`counted`). The fronts are those of `bench autoscale --only
unseen`: the best constant ρ̂, and the best utilization autoscaler, with the future known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from turboserve.autoscaler.control.policy import default_table
from turboserve.experiments.autoscale.absorption import Front, Point
from turboserve.experiments.autoscale.appendix import other_windows
from turboserve.experiments.autoscale.bursts import GENERATORS
from turboserve.experiments.autoscale.counted import CountedRun, counted
from turboserve.experiments.autoscale.oracles import cheapest_plan, slot_needs
from turboserve.experiments.autoscale.plant import Plant, policy_for
from turboserve.experiments.autoscale.production import azure, production
from turboserve.experiments.autoscale.sizers import Controlled, Sizer, Utilization, flat_table
from turboserve.experiments.autoscale.trace import WorkloadTrace, changes
from turboserve.experiments.autoscale.unseen import CONSTANTS, LASTS_S, SLOT_S, UTILIZATIONS
from turboserve.experiments.paper.experiment import Scale
from turboserve.experiments.paper.metrics import mean_interval
from turboserve.experiments.result_folder import PaperCell

NAME = "headroom"
MOST = 256
WITHIN_PERCENT = 3.0
"""Wanted: no dearer than the best constant by more than this, at equal lateness."""
FIRST_SEED = 100
"""Seeds from here on. Traces of the same generators with lower seeds were tuned on."""
KINDS: Mapping[str, Callable[[int], WorkloadTrace]] = {
    **{name: partial(production, name) for name in ("M", "T4", "T5", "T6")},
    **{f"azure x{stretch}": partial(azure, stretch, LASTS_S) for stretch in (4, 16)},
    "other windows": other_windows,
    **GENERATORS,
}
"""Draws by seed. Nothing was tuned on M, T4 to T6, self-exciting, flash crowds, or Azure slowed 4 times."""
ALL = "all"
SYSTEMS = ("learned", "shipped_table")
LARGE = ("T4", "T5", "T6")
"""Kinds that `--quick` leaves out."""


PAPER = {"note": "The paper has no such comparison."}
WANTED = {"dearer_than_constant_percent": WITHIN_PERCENT, "dearer_than_utilization_percent": 0.0}


def cells(scale: Scale) -> list[PaperCell]:
    """Return the grid: draws × start-up times × kinds of traces."""
    kinds = [kind for kind in KINDS if not scale.quick or kind not in LARGE]
    return [
        PaperCell(NAME, f"{kind}, draw {draw}, start-up {start_up_s:g} s", run, (kind, draw, start_up_s))
        for draw in scale.seeds
        for start_up_s in scale.start_ups
        for kind in kinds
    ]


def run(kind: str, draw: int, start_up_s: float) -> dict[str, Any]:
    """Compare the controllers on one draw. All runs begin with the oracle's workers."""
    trace = KINDS[kind](FIRST_SEED + draw)
    plant = Plant(most=MOST, start_up_s=start_up_s)
    policy = policy_for(plant)
    needs = slot_needs(trace, plant.capacity, 1.0, SLOT_S, plant.most)
    _, oracle_s = cheapest_plan(needs, SLOT_S, start_up_s)
    begin = max(needs[0], 1)

    def replayed(sizer: Sizer) -> CountedRun:
        return counted(trace, plant, sizer)

    fronts = {
        "constant": {rho: replayed(Controlled(policy, flat_table(rho), begin)) for rho in CONSTANTS},
        "utilization": {rho: replayed(Utilization(begin, rho, 1, plant.most)) for rho in UTILIZATIONS},
    }
    ours = {
        "learned": replayed(Controlled(policy_for(plant, learns=True), default_table(), begin)),
        "shipped_table": replayed(Controlled(policy, default_table(), begin)),
    }
    return {
        "trace": trace.digest,
        "activations": sum(by > 0 for _, by in changes(trace.steps)),
        "oracle_cost_worker_s": round(oracle_s, 1),
        **{system: compared(found, fronts, oracle_s, policy.lateness_price_s)
           for system, found in ours.items()},
        "fronts": {
            name: {f"{rho:g}": [round(found.cost_s, 1), found.late] for rho, found in runs.items()}
            for name, runs in fronts.items()
        },
    }  # fmt: skip


def compared(
    found: CountedRun, fronts: Mapping[str, Mapping[float, CountedRun]], oracle_s: float, price_s: float
) -> dict[str, Any]:
    """Return one run's figures, and how much dearer it is than each front at equal lateness.

    None: no run of that front lets so few be late. `priced_…`: late sessions cost what an operator pays.
    """
    row: dict[str, Any] = {
        "cost_worker_s": round(found.cost_s, 1),
        "cost_of_oracle": round(found.cost_s / oracle_s, 4),
        "late": found.late,
    }
    for name, runs in fronts.items():
        front = Front([Point(each.cost_s, each.late) for each in runs.values()])
        cost_s = front.cost_at(found.late)
        best_s = min(each.cost_s + price_s * each.late for each in runs.values())
        total_s = found.cost_s + price_s * found.late
        row[f"dearer_than_{name}_percent"] = (
            None if cost_s is None else round(100 * (found.cost_s / cost_s - 1), 3)
        )
        row[f"priced_above_{name}_percent"] = round(100 * (total_s / best_s - 1), 3)
    return row


def report(scale: Scale, results: Mapping[PaperCell, Any]) -> dict[str, Any]:
    """Return means and intervals over the draws, by start-up time, kind of trace and system."""
    by: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for cell, result in results.items():
        kind, _, start_up_s = cell.arguments
        by.setdefault(f"{start_up_s:g} s", {}).setdefault(kind, []).append(result)
    ours = {
        start_up: {
            kind: {system: _summed([each[system] for each in found]) for system in SYSTEMS}
            for kind, found in {**kinds, ALL: [each for found in kinds.values() for each in found]}.items()
        }
        for start_up, kinds in by.items()
    }
    rows = [row["learned"] for kinds in ours.values() for row in kinds.values()]
    return {
        "paper": PAPER,
        "ours": ours,
        "interval": next(iter(ours.values()))[ALL]["learned"]["constant"]["dearer_percent"],
        "ratio": {},
        "wanted": WANTED,
        "met": {
            f"dearer_than_{front}_percent": all(
                row[front]["dearer_percent"] is None or row[front]["dearer_percent"]["mean"] <= limit
                for row in rows
            )
            for front, limit in (("constant", WITHIN_PERCENT), ("utilization", 0.0))
        },
        "declared": {
            "kinds": list(KINDS),
            "first_seed": FIRST_SEED,
            "level": "Counts: no workers, placement or migrations.",
            "within": "Draws at most 3 % dearer at equal lateness, or with fewer late than the whole front.",
        },
    }


def rows(report_: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (what, paper, ours) for the terminal."""
    shown = []
    for start_up, kinds in report_["ours"].items():
        for kind, systems in kinds.items():
            texts = []
            for front in ("constant", "utilization"):
                found = systems["learned"][front]
                dearer = found["dearer_percent"]
                mean = "fewer late than any" if dearer is None else f"{dearer['mean']:+.1f} %"
                texts.append(f"{mean} ({found['within']} of {found['draws']} within 3 %)")
            shown.append((f"{kind}, start-up {start_up}: to constants; to utilization", "", "; ".join(texts)))
    return shown


def _summed(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of one system over some draws."""
    found: dict[str, Any] = {
        "cost_of_oracle": mean_interval([row["cost_of_oracle"] for row in rows]),
        "late": mean_interval([float(row["late"]) for row in rows]),
    }
    for name in ("constant", "utilization"):
        dearer = [row[f"dearer_than_{name}_percent"] for row in rows]
        known = [value for value in dearer if value is not None]
        found[name] = {
            "dearer_percent": mean_interval(known) if known else None,
            "fewer_late_than_any": len(dearer) - len(known),
            "within": sum(value <= WITHIN_PERCENT for value in known) + len(dearer) - len(known),
            "no_dearer": sum(value <= 0 for value in known) + len(dearer) - len(known),
            "draws": len(rows),
            "priced_above_percent": mean_interval([row[f"priced_above_{name}_percent"] for row in rows]),
        }
    return found
