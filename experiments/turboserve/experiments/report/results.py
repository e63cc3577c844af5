"""What the page says of each experiment: results with a verdict. All text comes from the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NEAR = 0.02
"""A difference within this share of the published value counts as equal, also without an interval."""


@dataclass(frozen=True)
class Result:
    """One number beside the published one."""

    name: str
    unit: str
    ours: float
    paper: float | None
    """The published value, or the front's; None: there is none."""
    lower_is_better: bool
    width: float | None = None
    """Half of the 95 % interval over draws. None: one draw, or no draws at all."""
    reference: str = "the paper"

    @property
    def verdict(self) -> str:
        """`better`, `equal`, `worse`, or `new` without a published value.

        Equal: the difference is within the interval over draws, or within 2 % of the published value.
        """
        if self.paper is None:
            return "new"
        difference = self.ours - self.paper
        if abs(difference) <= max(self.width or 0.0, NEAR * abs(self.paper)):
            return "equal"
        return "better" if (difference < 0) == self.lower_is_better else "worse"

    @property
    def sentence(self) -> str:
        """Say the result in words."""
        name = self.name[0].upper() + self.name[1:]
        own = f"{self.ours:.4g}"
        if self.width is not None:
            own += f" ± {self.width:.0f}" if self.width >= 10 else f" ± {self.width:.2g}"
        if self.paper is None:
            return f"{name}: {own}{self.unit}; there is no reference."
        text = {"better": "better than", "equal": "equal to", "worse": "worse than"}[self.verdict]
        return f"{name}: {own}{self.unit} is {text} {self.reference}'s {self.paper:.4g}{self.unit}."


def _mean(name: str, unit: str, value: Mapping[str, Any] | None, paper: float | None, lower: bool,
          reference: str = "the paper") -> list[Result]:  # fmt: skip
    """Return a result of a mean over draws; none if no draw has a value."""
    if value is None:
        return []
    return [Result(name, unit, value["mean"], paper, lower, value["ci95"], reference)]


def first(found: Mapping[str, Any]) -> Any:
    return next(iter(found.values()))


def table2(report: Mapping[str, Any]) -> list[Result]:
    paper = report["paper"]["above_oracle_percent"]
    published = [value for name, value in paper.items() if name in first(report["ours"])["by_trace"]]
    mean = sum(published) / len(published)
    return [
        result
        for delay, row in report["ours"].items()
        for result in _mean(f"cost above the oracle by minute, start-up {delay}", " %",
                            row["systems"]["profiled"]["above_minute_oracle_percent"], mean, True)
    ]  # fmt: skip


def table3(report: Mapping[str, Any]) -> list[Result]:
    return [
        Result(f"share of windows with tens of migrations, {name}, start-up {delay}", "", row["tens_share"],
               None, False)
        for delay, rows in report["ours"].items()
        for name, row in rows.items()
    ]  # fmt: skip


def table4(report: Mapping[str, Any]) -> list[Result]:
    """L(12) is declared as the published mean, so a lower mean chunk is no better result."""
    return [
        result
        for model, row in report["ours"].items()
        for result in _mean(
            f"mean chunk, {model} (declared: {report['paper'][model]['chunk_ms']} ms with 12 sessions)",
            " ms", row["chunk_ms"], None, True,
        )
    ]  # fmt: skip


def table5_6(report: Mapping[str, Any]) -> list[Result]:
    levels = first(report["ours"])["levels"]
    return [
        result
        for level, paper in zip(levels, report["paper"]["cost"], strict=True)
        for result in _mean(
            f"cost of level {level['level']}", " worker-s", level["cost_worker_s"], paper, True
        )
    ]


def table7_10(report: Mapping[str, Any]) -> list[Result]:
    found = []
    for delay, row in report["ours"].items():
        systems = first(row)["systems"]
        for name in ("learned", "profiled"):
            ours = systems[name]
            late = f"{ours['late']} of {ours['activations']} late"
            named = f"ten windows, {name}, start-up {delay}, {late}"
            found += [
                Result(f"cost of {named}", " worker-s", ours["cost_worker_s"], 3721.93, True),
                Result(f"cost above the oracle, {named}", " %", ours["above_oracle_percent"], 0.73, True),
                Result(f"mean chunk, {named}", " ms", ours["mean_ms"], 421.57, True),
            ]
    return found


def figure4(report: Mapping[str, Any]) -> list[Result]:
    return [
        result
        for name, row in report["paper"].items()
        for what, paper in row.items()
        for result in _mean(f"{what.removesuffix('_percent').replace('_', ' ')}, {name}", " %",
                            report["interval"].get(f"{name}_{what}"), paper, False)
    ]  # fmt: skip


def figure7(report: Mapping[str, Any]) -> list[Result]:
    ours = report["ours"]
    return [
        result
        for its, signals in ((ours, ""), (ours.get("aged_signals", {}), ", with old signals"))
        for mean, metric in (("mean_over_baselines", ""),
                             ("mean_over_baselines_as_published", ", served chunks"))
        for what, value in its.get(mean, {}).items()
        for result in _mean(
            f"mean {what.removesuffix('_percent').replace('_', ' ')}{metric}{signals}",
            " %", value, report["paper"][what]["mean"], False,
        )
    ]  # fmt: skip


def figure8(report: Mapping[str, Any]) -> list[Result]:
    return [
        result
        for part, rows in report["interval"].items()
        for name, value in rows.items()
        for result in _mean(f"additional cost {part}, {name}", " %", value, report["paper"][part]["mean"],
                            False)
    ]  # fmt: skip


def figure9(report: Mapping[str, Any]) -> list[Result]:
    found = [
        result
        for key, events in report["ours"]["decision"].items()
        for result in _mean(f"decisions to the last migration, p99, {key}", " ms", _last(events),
                            report["paper"]["milliseconds_at_most"].get(key.split()[0]), True)
    ]  # fmt: skip
    gap = report["ours"]["above_oracle_percent"]
    found += _mean("distance from brute force, mean", " %", gap["mean"], 3.6, True)
    return [*found, Result("distance from brute force, largest", " %", gap["max"], 6.5, True)]


def _last(events: Mapping[str, Any]) -> Mapping[str, Any]:
    value: Mapping[str, Any] = list(events.values())[-1]["p99_ms"]
    return value


def sensitivity(report: Mapping[str, Any]) -> list[Result]:
    return [
        Result(f"change of cost between {name} one step below and above the shipped value", " %", value, None,
               True)
        for name, value in report["declared"]["cost_change_percent"].items()
        if value is not None
    ]  # fmt: skip


def batching(report: Mapping[str, Any]) -> list[Result]:
    found = []
    for profile, sweeps in report["ours"].items():
        bursty = sweeps["cv"][-1]
        found += _mean(f"goodput to chunk-level batches at CV {bursty['cv']:g}, {profile}", " times",
                       bursty["ratio"], report["paper"]["cv 4"][0], False)  # fmt: skip
    return found


def slackserve(report: Mapping[str, Any]) -> list[Result]:
    return [
        result
        for load, rows in report["ours"].items()
        if "ours" in rows
        for result in _mean(f"chunks in time, {load}", "", rows["ours"]["cpr"],
                            report["paper"]["cpr"].get(load), False)
    ]  # fmt: skip


def timeline(report: Mapping[str, Any]) -> list[Result]:
    return [
        result
        for system, row in report["ours"].items()
        for result in _mean(f"cost of M, {system}", " worker-s", row["cost_worker_s"], None, True)
    ]


def headroom(report: Mapping[str, Any]) -> list[Result]:
    return [
        Result(f"cost above the best constant with late sessions priced, start-up {delay}", " %",
               rows["all"]["learned"]["constant"]["priced_above_percent"]["mean"], None, True)
        for delay, rows in report["ours"].items()
    ]  # fmt: skip


def calm(report: Mapping[str, Any]) -> list[Result]:
    """Return the figures in calm mode beside those of the replay at the level of counts.

    Times of chunks have no verdict: viewers pace them in calm mode only.
    """
    found = []
    for figure, systems in report["ours"].items():
        for name, row in systems.items():
            served, count = row.get("calm", {}), row.get("count", {})
            for what, label, unit in (("cost_worker_s", "cost", " worker-s"), ("late", "late chunks", "")):
                reference = count[what]["mean"] if count else None
                found += _mean(f"{label} in calm mode, {name}, {figure}", unit, served.get(what), reference,
                               True, "the count-level replay")  # fmt: skip
            replayed = f" (replay: {count['mean_ms']['mean']:.0f} ms)" if count else ""
            found += _mean(f"mean chunk in calm mode, {name}, {figure}{replayed}", " ms",
                           served.get("mean_ms"), None, True)  # fmt: skip
            if served and not count:
                found += _mean(f"quality, {name}, {figure}", "", served["quality"], None, False)
    return found


def unseen(rows: Mapping[str, Any]) -> list[Result]:
    """Return the default controller's results of `turboserve bench autoscale --only unseen`."""
    found = []
    for trace, row in rows.items():
        ours = row["learned"]
        dearer = ours["dearer_than_constant_percent"]
        if dearer is None:
            continue
        front = ours["cost_of_oracle"] / (1 + dearer / 100)
        name = f"cost of {trace} at {ours['late_activations']} late"
        best = round(front, 4)
        found.append(Result(name, " × oracle", ours["cost_of_oracle"], best, True, None, "the best constant"))
    return found


RESULTS: Mapping[str, Callable[[Mapping[str, Any]], Sequence[Result]]] = {
    "table2": table2, "table3": table3, "table4": table4, "table5_6": table5_6, "table7_10": table7_10,
    "figure4": figure4, "figure7": figure7, "figure8": figure8, "figure9": figure9,
    "sensitivity": sensitivity, "batching": batching, "slackserve": slackserve, "timeline": timeline,
    "headroom": headroom, "calm": calm,
}  # fmt: skip
TITLES: Mapping[str, str] = {
    "figure4": "Figure 4: migration and autoscaling, alone and together",
    "figure7": "Figure 7: against the baselines",
    "figure8": "Figure 8: without a part",
    "figure9": "Figure 9: time and distance of a rebalancing",
    "table2": "Table 2: cost against offline oracles",
    "table3": "Table 3: twelve minutes of T1",
    "table4": "Table 4: chunk and migration",
    "table5_6": "Tables 5 and 6: profiling",
    "table7_10": "Tables 7 to 10: ten unseen windows",
    "sensitivity": "What the paper leaves open",
    "batching": "NeuStream: goodput within a deadline",
    "slackserve": "SlackServe's workloads",
    "timeline": "Timelines of M",
    "headroom": "The default headroom on many draws of unseen traces",
    "calm": "Figures 4, 7 and 8 in calm mode: the services' own code",
    "unseen": "The default autoscaler on unseen traces",
}
