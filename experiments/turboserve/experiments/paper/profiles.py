"""Declared plants of the replays.

The paper does not give L(n), K, the target and the start-up time of its clusters. They are declared here for
all systems.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from turboserve.experiments.autoscale.plant import Plant

SESSIONS = 16
"""K on the clusters. Round-robin puts up to 19 sessions of T2, T3, T5 and T6 on one GPU, and K of Appendix A
(5) does not hold T5's 600 sessions on 64 GPUs."""
USUAL = 12
"""Sessions with which a chunk takes Table 4's mean: three quarters of K."""
MARGIN = 1.05
"""Target relative to L(K), so that a migration to a full worker is in time."""
START_UPS = (2.0, 10.0, 30.0)
"""Start-up times in seconds. The paper does not give its own."""
QUICK_START_UPS = (2.0, 10.0)


SIGNAL_AGES_S = (0.0, 1.0, 5.0, 10.0)
"""Ages of load reports. The paper does not give its own; 0 is as the product reports."""
OLD_SIGNALS_S = 5.0
"""The age in Figures 7 and 8 beside 0: half of the paper's period between rebalancings."""
SIGNALS = (
    "Load reports have one age for all systems: after it, the scheduler and the autoscaler learn that a "
    "session has idled or departed. They know at once what the scheduler decides itself, and which sessions "
    "ask for a slot."
)


@dataclass(frozen=True)
class Model:
    """One column of Table 4, and the declared shape of L(n)."""

    chunk_s: float
    """Mean chunk: L(12)."""
    migration_s: float
    fixed: float
    """Share of L(12) that does not grow with n."""
    most: int
    """GPUs of the cluster."""


MODELS = {
    "H20 1.3B": Model(1.054, 0.023, 0.0, 16),
    "H20 7B": Model(1.201, 0.024, 0.25, 16),
    "B300 1.3B": Model(0.917, 0.024, 0.0, 64),
    "B300 7B": Model(1.181, 0.030, 0.25, 64),
}
"""Chunk and migration are Table 4's. The 1.3B models are declared compute-bound, L(n) ∝ n; of the 7B models'
L(12) a quarter is fixed."""
CLUSTER_OF = {"T1": "H20", "T2": "H20", "T3": "H20", "T4": "B300", "T5": "B300", "T6": "B300", "M": "H20"}


def cluster(model: str, start_up_s: float = 10.0) -> Plant:
    """Return the plant of a model on its cluster."""
    declared = MODELS[model]
    fixed_s = declared.fixed * declared.chunk_s
    more_s = (declared.chunk_s - fixed_s) / USUAL
    latency_s = {n: fixed_s + n * more_s for n in range(1, SESSIONS + 1)}
    return Plant(
        capacity=SESSIONS,
        most=declared.most,
        start_up_s=start_up_s,
        migration_s=declared.migration_s,
        target_s=MARGIN * latency_s[SESSIONS],
        latency_s=latency_s,
    )


def appendix(start_up_s: float) -> Plant:
    """Return the plant of Appendix A: 16 GPUs, K = 5, L(n) = 133.6 ms × n, target 670 ms."""
    return replace(Plant(), start_up_s=start_up_s)


def describe(plant: Plant) -> dict[str, Any]:
    """Return what is declared, for JSON."""
    return {
        "K": plant.capacity,
        "most_workers": plant.most,
        "start_up_s": plant.start_up_s,
        "migration_ms": round(1000 * plant.migration_s, 3),
        "target_ms": round(1000 * plant.target_s, 3),
        "chunk_ms_by_sessions": [round(1000 * plant.latency_s[n], 3) for n in sorted(plant.latency_s)],
    }
