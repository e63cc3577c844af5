"""Tables of the results of `turboserve bench autoscale` for the terminal, by case."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich import box
from rich.table import Table

COLUMNS = ("policy", "cost, s", "mean, ms", "worst, ms", "late chunks")


def _profiling(found: Mapping[str, Any]) -> Table:
    columns = ("level", "volatility", "arrivals", "peak_active", "target_utilization", "pass_rate",
               "cost_worker_s")  # fmt: skip
    shown = Table(*columns, title="profiling (Tables 5 and 6)", box=box.SIMPLE)
    for row in found["levels"]:
        shown.add_row(*(f"{row[column]:g}" for column in columns))
    return shown


def _windows(found: Mapping[str, Any]) -> Table:
    shown = Table("start-up", *COLUMNS, "gap, %", title="ten windows",
                  box=box.SIMPLE)  # fmt: skip
    for case in found.values():
        delay = f"{case['start_up_s']:g} s"
        for who in ("ours", "keeping", "oracle"):
            row = case[who]
            if row is not None:
                gap = {"ours": case["gap_percent"], "oracle": ""}.get(who, row.get("gap_percent"))
                shown.add_row(delay, who, *_row(row), str(gap))
        more = case["more_unseen"]
        for who, prefix in (("ours", ""), ("keeping", "keeping_")):
            late = sum(row[f"{prefix}late_chunks"] for row in more)
            gaps = ", ".join(str(row[f"{prefix}gap_percent"]) for row in more)
            shown.add_row(delay, f"{who}, {len(more)} unseen", "", "", "", str(late), gaps)
    return shown


def _production(found: Mapping[str, Any]) -> Table:
    shown = Table("trace", *COLUMNS, "gap, %", title="T1 to T3",
                  box=box.SIMPLE)  # fmt: skip
    for name, rows in found["traces"].items():
        for who, row in rows.items():
            shown.add_row(name, who, *_row(row), str(row.get("gap_percent", "")))
    return shown


def _sweep(found: Mapping[str, Any]) -> Table:
    shown = Table("start-up", *COLUMNS, "gap, %", title="T1 by start-up",
                  box=box.SIMPLE)  # fmt: skip
    for delay, case in found.items():
        for who, row in case["traces"]["T1"].items():
            shown.add_row(f"{delay} s", who, *_row(row), str(row.get("gap_percent", "")))
    return shown


def _real(found: Mapping[str, Any]) -> Table:
    shown = Table("scale", *COLUMNS, "cost / oracle",
                  title="real arrivals", box=box.SIMPLE)  # fmt: skip
    for name, rows in found.items():
        for who, row in rows.items():
            shown.add_row(name, who, *_row(row), str(row["cost_of_oracle"]))
    return shown


def _absorption(found: Mapping[str, Any]) -> Table:
    shown = Table("trace", "cost / oracle", "late", "front's late", "cheaper, %", "quality debt, %",
                  title="absorption", box=box.SIMPLE)  # fmt: skip
    for name, case in found.items():
        row = case["headline"]
        shown.add_row(
            name, f"{row['cost_of_oracle']:g}", f"{row['late_activations']} of {row['activations']}",
            str(row["front_late_at_cost"]), str(row["cheaper_percent"]), f"{100 * row['quality_debt']:.2f}",
        )  # fmt: skip
    return shown


def _forecast(found: Mapping[str, Any]) -> Table:
    shown = Table("traces", "horizon", "none", "product", "learned", title="forecasts: RMS (p95) error",
                  box=box.SIMPLE)  # fmt: skip
    for kind, horizons in found.items():
        for horizon, errors in horizons.items():
            cells = (f"{error['rms']:g} ({error['p95']:g})" for error in errors.values())
            shown.add_row(kind, horizon.replace("_", " "), *cells)
    return shown


def _coverage(found: Mapping[str, Any]) -> Table:
    shown = Table("traces", "forecast", "coverage", "surplus", "shortfall", "cost, s", "late chunks",
                  box=box.SIMPLE, title="forecasts at equal coverage, start-up 10 s")  # fmt: skip
    for kind, rows in found.items():
        for name, row in rows.items():
            names = ("coverage", "surplus_sessions", "shortfall_sessions", "cost_worker_s", "late_chunks")
            shown.add_row(kind, name, *(f"{row[one]:g}" if one in row else "" for one in names))
    return shown


def _oscillation(found: Mapping[str, Any]) -> Table:
    periods = list(found["square"])
    shown = Table("settings", *(f"{period} s" for period in periods), box=box.SIMPLE,
                  title="square waves: actions, cost in s, late chunks")  # fmt: skip
    for name, waves in {"shipped": found["square"], **found["square_slower"]}.items():
        cells = (f"{w['actions']}, {w['cost_worker_s']:.0f}, {w['late_chunks']}" for w in waves.values())
        shown.add_row(name, *cells)
    shown.add_row("reversed within a cool-down", str(found["undone_within_cooldown"]))
    shown.add_row("actions at constant load", str(found["constant_actions_max"]))
    return shown


def _plain(title: str) -> Callable[[Mapping[str, Any]], Table]:
    def shown(found: Mapping[str, Any]) -> Table:
        whole = Table(title=title, show_header=False, box=box.SIMPLE)
        for name, value in found.items():
            whole.add_row(name, str(value))
        return whole

    return shown


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    names = ("cost_worker_s", "mean_latency_ms", "worst_chunk_ms", "late_chunks")
    return tuple(f"{row[name]:g}" for name in names)


def _unseen(found: Mapping[str, Any]) -> Table:
    shown = Table("unseen trace", "controller", "cost/oracle", "late", "to constants", "to utilization",
                  box=box.SIMPLE)  # fmt: skip
    for trace, row in found.items():
        for system in ("learned", "shipped_table"):
            its = row[system]
            fronts = (its["dearer_than_constant_percent"], its["dearer_than_utilization_percent"])
            texts = ["no run" if value is None else f"{value:+.1f} %" for value in fronts]
            late = f"{its['late_activations']} of {its['activations']}"
            shown.add_row(trace, system, f"{its['cost_of_oracle']:.2f}", late, *texts)
    return shown


TABLES: dict[str, Callable[[Mapping[str, Any]], Table]] = {
    "unseen": _unseen,
    "profiling": _profiling,
    "windows": _windows,
    "production": _production,
    "real": _real,
    "absorption": _absorption,
    "oscillation": _oscillation,
    "sweep": _sweep,
    "forecast": _forecast,
    "coverage": _coverage,
    "agreement": _plain("the whole scheduler core against the simulator"),
}
