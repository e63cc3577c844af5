"""Constant load and square waves of several periods: how often the pool changes, and how often in vain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from turboserve.autoscaler.control.policy import ControlPolicy, default_table
from turboserve.experiments.autoscale.keeping import replay
from turboserve.experiments.autoscale.outcome import ScalingOutcome
from turboserve.experiments.autoscale.plant import Plant, policy_for
from turboserve.experiments.autoscale.shapes import constant, square

SESSIONS = (3, 20, 57)
PERIODS_S = (20, 60, 120, 300, 600)
LOW, HIGH, LASTS_S = 10, 40, 1800
SLOWER: Mapping[str, Mapping[str, float]] = {
    "out_cooldown_5_s": {"out_cooldown_s": 5.0},
    "in_cooldown_30_s": {"in_cooldown_s": 30.0},
    "in_window_30_s": {"in_window_s": 30.0},
    "peak_window_300_s": {"peak_window_s": 300.0},
}
"""Settings that might take fewer actions at the same cost."""


def oscillation_case(progress: Callable[[str], None]) -> dict[str, Any]:
    """Count the actions in an hour of constant load and half an hour of waves, also with slower settings."""
    plant = Plant(most=64)
    policy, table = policy_for(plant), default_table()
    steady = {
        str(sessions): len(replay(constant(sessions, 3600), plant, policy, table).actions)
        for sessions in SESSIONS
    }
    waves = _waves(plant, policy)
    slower = {name: _waves(plant, policy_for(plant, **changed)) for name, changed in SLOWER.items()}
    progress(f"constant: {steady} actions; square waves: {waves}")
    every = [wave for one in (waves, *slower.values()) for wave in one.values()]
    return {
        "constant_actions": steady,
        "constant_actions_max": max(steady.values()),
        "square": waves,
        "square_slower": slower,
        "undone_within_cooldown": sum(wave["undone"] for wave in every),
    }


def _waves(plant: Plant, policy: ControlPolicy) -> dict[str, dict[str, Any]]:
    found = {}
    for period_s in PERIODS_S:
        run = replay(square(LOW, HIGH, period_s, LASTS_S), plant, policy, default_table())
        found[str(period_s)] = {
            "actions": len(run.actions),
            "undone": undone(run, policy),
            "cost_worker_s": round(run.cost_s, 1),
            "late_chunks": run.late,
        }
    return found


def undone(run: ScalingOutcome, policy: ControlPolicy) -> int:
    """Count scale-outs undone within the scale-in cool-down, and scale-ins within the scale-out cool-down."""
    count = 0
    for (t0, a0, b0), (t1, a1, b1) in pairwise(run.actions):
        back = (b0 - a0) * (b1 - a1) < 0
        cooldown_s = policy.in_cooldown_s if b0 > a0 else policy.out_cooldown_s
        count += back and t1 - t0 < cooldown_s
    return count
