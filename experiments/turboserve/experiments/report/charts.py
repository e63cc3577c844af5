"""The charts of each experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from turboserve.experiments.report.results import Result, first
from turboserve.experiments.report.svg import Bars, Series, Span, bars, lanes, lines

ROWS_AT_MOST = 14


def pairs(title: str, results: Sequence[Result]) -> list[str]:
    """Draw bars of all results with a published value, one chart for each unit."""
    charts = []
    reference = results[0].reference.removeprefix("the ") if results else ""
    for unit in dict.fromkeys(result.unit for result in results):
        rows = [
            Bars(result.name, result.paper, result.ours, result.width)
            for result in results
            if result.unit == unit and result.paper is not None
        ]
        if rows:
            charts.append(bars(title, unit.strip() or "share", rows[:ROWS_AT_MOST], reference))
    return charts


def profiling(report: Mapping[str, Any]) -> list[str]:
    levels = first(report["ours"])["levels"]
    paper = report["paper"]
    charts = []
    for title, name, published in (
        ("Cost by level", "cost_worker_s", paper["cost"]),
        ("Target utilization found", "target_utilization", paper["target_utilization"]),
    ):
        points = [(float(level["level"]), level[name]["mean"]) for level in levels]
        widths = [level[name]["ci95"] for level in levels]
        numbered = [(number + 1.0, value) for number, value in enumerate(published)]
        series = [
            Series("paper", numbered, color="var(--paper)"),
            Series("ours, 95 % interval", points, widths),
        ]
        unit = "worker-seconds" if name == "cost_worker_s" else "share"
        charts.append(lines(title, "level of volatility", unit, series))
    return charts


def windows(report: Mapping[str, Any]) -> list[str]:
    """Draw migrations and workers by window, with intervals over draws."""
    charts = []
    for title, name in (("Migrations by window", "migrations_by_window"), ("Workers", "gpus_by_window")):
        series = []
        for system, row in first(report["ours"]).items():
            points = [(number + 1.0, each["mean"]) for number, each in enumerate(row[name])]
            series.append(Series(system, points, [each["ci95"] for each in row[name]]))
        charts.append(lines(title, "window of two minutes", title.split()[0].lower(), series))
    return charts


def decisions(report: Mapping[str, Any]) -> list[str]:
    series: dict[str, list[tuple[float, float]]] = {}
    for key, events in report["ours"]["decision"].items():
        gpus, slots = key.split(" GPUs, ")
        point = (float(gpus), list(events.values())[-1]["p99_ms"]["mean"])
        series.setdefault(slots, []).append(point)
    paper = [(float(gpus), value) for gpus, value in report["paper"]["milliseconds_at_most"].items()]
    drawn = [Series(name, points) for name, points in series.items()]
    return [
        lines("Decisions to the last migration, p99", "GPUs", "milliseconds",
              [Series("paper, at most", paper, color="var(--paper)"), *drawn])
    ]  # fmt: skip


def signal_ages(report: Mapping[str, Any]) -> list[str]:
    """Draw what migration saves by the age of the signals, for each resume rule, waits included."""
    rules: dict[str, dict[str, list[tuple[float, Mapping[str, Any]]]]] = {}
    start_up = next(iter(report["ours"])).split("; ")[2]
    for key, row in report["ours"].items():
        rule, latency, delay, *signals = key.split("; ")
        if latency != "with_waits_ms" or delay != start_up:
            continue
        age_s = float(signals[0].split()[1]) if signals else 0.0
        for system in ("migration", "turboserve, fixed pool"):
            if (value := row[system]["latency_reduction_percent"]) is not None:
                rules.setdefault(rule, {}).setdefault(system, []).append((age_s, value))
    return [
        lines(f"Latency that migration saves, by age of signals, {rule}", "seconds", "%", [
            Series(system, [(age_s, value["mean"]) for age_s, value in found],
                   [value["ci95"] for _, value in found])
            for system, found in by_system.items()
        ])
        for rule, by_system in rules.items()
    ]  # fmt: skip


def sensitivities(report: Mapping[str, Any]) -> list[str]:
    charts = []
    for name, rows in report["ours"].items():
        if len(rows) < 2:
            continue
        points = [(row["value"], row["cost_worker_s"]["mean"]) for row in rows]
        late = [(row["value"], row["late_percent"]["mean"]) for row in rows]
        costs = Series("cost", points, [row["cost_worker_s"]["ci95"] for row in rows])
        lates = Series("late", late, [row["late_percent"]["ci95"] for row in rows], color="var(--c1)")
        charts.append(lines(f"Cost over {name}", name, "worker-seconds", [costs]))
        charts.append(lines(f"Late chunks over {name}", name, "per 100 activations", [lates]))
    return charts


def goodput(report: Mapping[str, Any]) -> list[str]:
    charts = []
    for profile, sweeps in report["ours"].items():
        for sweep, name in (("load", "load"), ("cv", "cv"), ("deadline", "deadline_scale")):
            series = [
                Series(
                    policy,
                    [(point[name], point[policy]["mean"]) for point in sweeps[sweep]],
                    [point[policy]["ci95"] for point in sweeps[sweep]],
                )
                for policy in ("step", "chunk", "fcfs")
            ]
            charts.append(lines(f"{profile}: chunks within the deadline", name, "share", series))
    return charts


def timelines(report: Mapping[str, Any]) -> list[str]:
    charts = []
    for system, found in report["timelines"].items():
        ends_s, capacity = found["ends_s"], found["capacity"]
        active = [(float(second), count / capacity) for second, count in enumerate(found["active"])]
        sizes = [(float(at), float(size)) for at, size in found["workers"]]
        sizes.append((ends_s, sizes[-1][1]))
        charts.append(
            lines(f"{system}: workers over demand", "seconds", "workers", [
                Series("paid for", sizes, color="var(--c0)", steps=True),
                Series(f"demand / {capacity}", active, color="var(--c1)", steps=True),
            ])
        )  # fmt: skip
        spans = [Span(row, worker, begins, ends) for row, worker, begins, ends in found["spans"]]
        rows = 1 + max((span.row for span in spans), default=0)
        marks = [(float(at), row) for at, row in found["migrated"]]
        title = f"{system}: sessions while they make chunks, by worker (color), and {len(marks)} migrations"
        charts.append(lanes(title, rows, spans, ends_s, "session, by first chunk", marks))
    return charts


CHARTS: Mapping[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "table5_6": profiling,
    "table3": windows,
    "figure4": signal_ages,
    "figure9": decisions,
    "sensitivity": sensitivities,
    "batching": goodput,
    "timeline": timelines,
}
"""Charts beside those of `pairs`."""
