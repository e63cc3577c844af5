"""The load of the modeled workers as the scheduler reports it: by its own sums."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache

from turboserve.contracts.pool import LoadFeedback
from turboserve.scheduler.load_feedback import ClassRoom, feedback_of
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
    """Return the scheduler's feedback (`scheduler.load_feedback`).

    `serving`: ready and draining workers. `quality_debt`: of all together. `floor_slots`: K_floor of each.
    """
    rooms = []
    for worker, state in serving.items():
        entry = entries[worker]
        slots = 0 if state.draining else entry.slots
        rooms.append(_room(len(entry.here), len(entry.coming), slots, floor_slots))
    found = feedback_of(MODEL, rooms, waiting, Fraction(waiting), waiting, 0)
    return found.model_copy(update={"quality_debt": quality_debt, "at": now})


@lru_cache(maxsize=65_536)
def _room(here: int, coming: int, slots: int, floor_slots: int) -> ClassRoom:
    """Return the room of a worker with `here` sessions. `slots`: K, or 0 if it gets no sessions."""
    return ClassRoom(
        model=MODEL,
        rho=(here + coming) / slots if slots else 0.0,
        used=here,
        required=here,
        whole=1,
        own=here,
        slots=slots,
        floor_slots=floor_slots if slots else 0,
        lowers=True,
        denoised=slots,
        decoding=None,
        debt=0.0,
        deficit=0.0,
        borrows=False,
    )
