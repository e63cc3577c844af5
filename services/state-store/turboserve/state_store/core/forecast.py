"""Forecasts when slots become free: by sessions that leave, and by workers that start. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

WINDOW_S = 300.0
"""Time over which departures are counted, seconds."""
SHORTEST_S, LONGEST_S = 1.0, 300.0
"""Limits of a retry time, seconds. No forecast from five minutes reaches further than they do."""


@dataclass(frozen=True)
class Outlook:
    """What will free slots of one model, counted from rows at one moment."""

    left: int
    """Sessions that have ended or have been suspended within `WINDOW_S`."""
    ready_slots: int
    """Sessions that the ready workers hold now: K, or K_floor of each while they absorb."""
    starting: tuple[float, ...]
    """Since when each starting worker has existed, Unix seconds, longest first."""
    coming: int
    """Workers that pools may still start or that are starting, all of which admission counts already."""
    slots: int
    """Slots that a new worker brings: the largest K of the model's workers."""
    start_up_s: float | None
    """Mean time from launch to ready of the workers that run. None: not known."""

    def limited(self, decode_sessions: int | None) -> Outlook:
        """Return the outlook without workers for whose sessions decode workers have no time.

        `decode_sessions`: sessions that the decode workers carry. None: no decode workers limit the pool.
        """
        if decode_sessions is None:
            return self
        useful = min(self.coming, -(-max(decode_sessions - self.ready_slots, 0) // self.slots))
        return replace(self, coming=useful, starting=self.starting[:useful])


def slots_free_in(needed: int, outlook: Outlook, arrivals_s: Sequence[float]) -> float | None:
    """Return in how many seconds `needed` more slots will have become free; 0.0 if `needed` is not above 0.

    Sessions leave at the rate of the last minutes. `arrivals_s`: in how many seconds each worker will be
    ready. None: not at all, as far as rows tell.
    """
    if needed <= 0:
        return 0.0
    rate, added = outlook.left / WINDOW_S, 0
    for ready_s in sorted(arrivals_s):
        if rate * ready_s + added >= needed:
            break
        added += outlook.slots
        if rate * ready_s + added >= needed:
            # Without this worker, too few slots are free at this time; with it, enough.
            return ready_s
    return (needed - added) / rate if rate > 0 else None


def ready_in(outlook: Outlook, now: float) -> list[float]:
    """Return in how many seconds each starting worker will be ready. Empty if no start-up time is known."""
    start_up_s = outlook.start_up_s
    if start_up_s is None:
        return []
    return [max(since + start_up_s - now, 0.0) for since in outlook.starting]


def retry_after_s(excess: int, outlook: Outlook, now: float, unknown_s: float) -> float:
    """Return when a refused client should come back, seconds.

    `excess`: slots that are missing, above those that admission counts. It counts `coming` workers, so only
    starting workers beyond these help. `unknown_s`: the answer if rows tell of no slot.
    """
    beyond = ready_in(outlook, now)[outlook.coming :]
    free_s = slots_free_in(excess, outlook, beyond)
    return unknown_s if free_s is None else min(max(free_s, SHORTEST_S), LONGEST_S)


def slot_in(demand: int, outlook: Outlook, now: float) -> float | None:
    """Return in how many seconds another session would get its slot. None: rows do not tell.

    `demand`: sessions that hold or wait for a slot. They are served first.
    """
    arrivals = ready_in(outlook, now)
    if outlook.start_up_s is not None:
        arrivals += [outlook.start_up_s] * max(outlook.coming - len(outlook.starting), 0)
    return slots_free_in(demand - outlook.ready_slots + 1, outlook, arrivals)
