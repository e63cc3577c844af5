"""The simulation's prediction: one run repeated with other seeds, since a run's figures depend on chance.

A session's chunks are due at a fixed pace from its first chunk on. So the moments at which sessions begin
decide for minutes which of them share their forwards. No simulation knows these to the millisecond.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from turboserve.experiments.agreement.outcome import SAME_ACTION_S, matched

REPEATS = 5
SPREAD = ("cost_worker_s", "mean_s", "p50_s", "p95_s", "migrations")
"""Figures whose lowest and highest values are reported."""
_SUMS = ("refused",)


def predicted(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median of every figure, and what is no number from the run with the most common actions."""
    typical = max(runs, key=lambda run: sum(_same(run, other) for other in runs))
    found = dict(typical)
    for name, value in typical.items():
        values = [run[name] for run in runs]
        if name in _SUMS:
            found[name] = sum(values)
        elif isinstance(value, (int, float)) and None not in values:
            found[name] = statistics.median_low(values)
    violations: dict[str, int] = {}
    for run in runs:
        for name, count in run["violations"].items():
            violations[name] = violations.get(name, 0) + count
    spread = {name: [min(run[name] for run in runs), max(run[name] for run in runs)] for name in SPREAD}
    return {**found, "violations": violations, "repeats": len(runs), "spread": spread}


def _same(run: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """Count the actions that both runs make at about the same time, less those that one makes alone."""
    both = sum(abs(by) <= SAME_ACTION_S for by in matched(run["actions"], other["actions"]))
    return 2 * both - len(other["actions"])
