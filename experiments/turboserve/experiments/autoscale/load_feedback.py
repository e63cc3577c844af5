"""The load of the modeled workers as the scheduler reports it."""

from __future__ import annotations

from collections.abc import Mapping

from turboserve.contracts.pool import LoadFeedback
from turboserve.scheduler.placement.pool import PoolEntry
from turboserve.scheduler.placement.types import WorkerState

MODEL = "m"


def load_feedback(
    serving: Mapping[str, WorkerState],
    entries: Mapping[str, PoolEntry],
    waiting: int,
    quality_debt: float,
    floor_slots: int,
    now: float,
) -> LoadFeedback:
    """Return the scheduler's feedback, with its own sums (`scheduler.load_feedback`), in one pass: a replay
    makes one for each event.

    `serving`: ready and draining workers. `floor_slots`: K_floor of each.
    """
    fullest = 0.0
    required, capacity, workers = waiting, 0, 0
    for worker, state in serving.items():
        entry = entries[worker]
        here = len(entry.here)
        required += here
        if not state.draining:
            workers += 1
            slots = entry.slots
            capacity += slots
            load = (here + len(entry.coming)) / slots
            if load > fullest:
                fullest = load
    return LoadFeedback.of_valid_fields(
        {
            "model": MODEL,
            "rho_max": fullest,
            "required": required,
            "waiting": waiting,
            "capacity": capacity,
            "workers": workers,
            "quality_debt": quality_debt,
            "deficit": 0.0,
            "floor_capacity": workers * floor_slots,
            "decoding": None,
            "decisions": 0,
            "at": now,
        }
    )
