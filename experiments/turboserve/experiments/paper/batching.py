"""NeuStream's evaluation of batching (6): goodput within a deadline, over rate, CV and deadline scale.

The engine's own gather policies run on declared L(b). A request is one chunk. *Goodput* is the number of
chunks a second that end within the deadline: `scale` times the latency of a chunk alone. Arrivals have
Gamma-distributed intervals by rate and coefficient of variation (CV).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from turboserve.experiments.batching.simulation import BatchingScenario, capacity, simulate
from turboserve.experiments.paper.experiment import Scale
from turboserve.experiments.paper.metrics import mean_interval, ratio
from turboserve.experiments.result_folder import PaperCell
from turboserve.worker.engine.gather import GATHER_POLICIES, LatencyProfile

NAME = "batching"
FORWARDS, SLOTS = 5, 16
PROFILES = {
    "batch-friendly": {size: 0.0185 + 0.0015 * size for size in range(1, SLOTS + 1)},
    "compute-bound": {size: 0.0002 + 0.0378 * size for size in range(1, SLOTS + 1)},
}
"""Seconds of a forward by batch size, as in `turboserve bench batching`."""
OURS, BASE = "step", "chunk"
POLICIES = (OURS, BASE, "fcfs")
LOADS, CVS, SCALES = (0.3, 0.5, 0.7, 0.9, 1.1, 1.4), (0.5, 1.0, 2.0, 4.0), (1.2, 1.5, 2.0, 3.0, 5.0)
LOAD, CV, SCALE = 0.8, 1.0, 2.0
"""Values of what a sweep does not vary."""
KEPT = 0.9
"""Share of the chunks within the deadline at which `rate_kept` is read."""
SWEEPS = {
    "load": [(load, CV, SCALE) for load in LOADS],
    "cv": [(LOAD, cv, SCALE) for cv in CVS],
    "deadline": [(LOAD, CV, scale) for scale in SCALES],
}
PAPER = {
    "most": "5.26 times (DiT-S/2, RTX 4090, 4 requests/s, unequal steps)",
    "cv 4": [1.37, 4.04],
    "deadline 1.2, at most": 3.13,
    "equal steps, mean batch": 1.67,
    "baseline": "Clockwork (their own on PyTorch)",
}
WANTED = {"least_ratio": 1.0, "batch-friendly, cv 4": 1.37}


def cells(scale: Scale) -> list[PaperCell]:
    chunks = 400 if scale.quick else 2000
    return [
        PaperCell(NAME, f"{profile}, {sweep}, draw {seed}", run, (profile, sweep, seed, chunks))
        for profile in PROFILES
        for sweep in SWEEPS
        for seed in scale.seeds
    ]


def run(profile_name: str, sweep: str, seed: int, chunks: int) -> list[dict[str, Any]]:
    """Return, for each point of a sweep, the goodput and the share within the deadline of each policy."""
    profile = LatencyProfile(PROFILES[profile_name])
    alone_s = FORWARDS * profile(1)
    found = []
    for load, cv, scale in SWEEPS[sweep]:
        rate = load * capacity(profile, FORWARDS, SLOTS)
        scene = BatchingScenario(gamma(chunks, rate, cv, seed), FORWARDS, scale * alone_s, SLOTS)
        point: dict[str, Any] = {"load": load, "cv": cv, "deadline_scale": scale, "rate": round(rate, 4)}
        for policy in POLICIES:
            latencies_s = simulate(scene, GATHER_POLICIES.make(policy), profile)
            share = sum(latency <= scene.slack_s for latency in latencies_s) / chunks
            point[policy] = {"within": round(share, 5), "goodput": round(share * rate, 4)}
        found.append(point)
    return found


def gamma(chunks: int, rate: float, cv: float, seed: int) -> tuple[float, ...]:
    """Draw the times of `chunks` arrivals at `rate` per second with intervals of this CV."""
    source = random.Random(f"batching {seed}")
    shape = 1 / cv**2
    now, times = 0.0, []
    for _ in range(chunks):
        now += source.gammavariate(shape, 1 / (rate * shape))
        times.append(now)
    return tuple(times)


def report(scale: Scale, results: Mapping[PaperCell, Any]) -> dict[str, Any]:
    draws: dict[str, dict[str, list[Any]]] = {}
    for cell, found in results.items():
        profile, sweep = cell.arguments[:2]
        draws.setdefault(profile, {}).setdefault(sweep, []).append(found)
    ours: dict[str, Any] = {
        profile: {sweep: _points(each) for sweep, each in sweeps.items()} for profile, sweeps in draws.items()
    }
    for sweeps in ours.values():
        sweeps["load_kept"] = {policy: _kept(sweeps["load"], policy) for policy in POLICIES}
    points = [
        point
        for sweeps in ours.values()
        for sweep in SWEEPS
        for point in sweeps[sweep]
        if point["ratio"] is not None
    ]
    ratios = [point["ratio"]["mean"] for point in points]
    friendly = next(iter(PROFILES))
    bursty = next(point for point in ours[friendly]["cv"] if point["cv"] == CVS[-1])["ratio"]
    return {
        "paper": PAPER,
        "ours": ours,
        "interval": bursty,
        "ratio": None if bursty is None else {"cv 4 to the paper's least": ratio(bursty["mean"], 1.37)},
        "wanted": WANTED,
        "met": {
            "least_ratio": min(ratios) >= WANTED["least_ratio"],
            f"{friendly}, cv 4": bursty is not None and bursty["mean"] >= WANTED[f"{friendly}, cv 4"],
        },
        "declared": {
            "ratio": f"Goodput of `{OURS}` (join at the next forward) to `{BASE}` (join at the next chunk). "
            "The paper's ratios are to its baseline, with unequal numbers of steps.",
            "latency_s": PROFILES,
            "forwards": FORWARDS,
            "slots": SLOTS,
            "drops": "No chunk is dropped: a late chunk of a session still has to be made. NeuStream drops "
            "requests that are late.",
            "load": "Rate relative to the largest b / (forwards L(b)).",
            "others": {"load": LOAD, "cv": CV, "deadline_scale": SCALE},
        },
    }  # fmt: skip


def _points(draws: list[Any]) -> list[dict[str, Any]]:
    points = []
    for number, first in enumerate(draws[0]):
        each = [draw[number] for draw in draws]
        pairs = [(one[OURS]["goodput"], one[BASE]["goodput"]) for one in each]
        known = [ours / base for ours, base in pairs if base > 0]
        points.append(
            {name: first[name] for name in ("load", "cv", "deadline_scale")}
            | {policy: mean_interval([one[policy]["within"] for one in each]) for policy in POLICIES}
            | {"ratio": mean_interval(known) if known else None}
        )
    return points


def _kept(points: list[dict[str, Any]], policy: str) -> float | None:
    """Return the highest load of the sweep up to which 90 % of the chunks are in time."""
    kept = None
    for point in points:
        if point[policy]["mean"] < KEPT:
            return kept
        kept = point["load"]
    return kept


def rows(report_: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (what, paper, ours) for the terminal."""
    shown = []
    for profile, sweeps in report_["ours"].items():
        for sweep in SWEEPS:
            ratios = [point["ratio"]["mean"] for point in sweeps[sweep] if point["ratio"] is not None]
            shown.append(
                (f"{profile}: ratio over {sweep}", "1.37 to 5.26", f"{min(ratios):.2f} to {max(ratios):.2f}")
            )
        kept = ", ".join(f"{policy} {load}" for policy, load in sweeps["load_kept"].items())
        shown.append((f"{profile}: load with 90 % in time", "", kept))
    return shown
