"""Expected late chunks of one worker: its L(b), its sessions' slacks, and the order of its own gather policy.

The count uses L(b) at the fastest configuration that the worker may choose. So a chunk that its worker saves
by lowering its quality is not late.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from math import ceil

from turboserve.scheduler.placement.pool import CHUNK_S, LatencyCurve

LEAD_S = 3.0
"""A session with more slack than this begins no chunk, seconds: the shipped `max_lead_s` of a worker."""
LARGEST_SESSIONS = 64
"""Number of sessions whose batches are played out: those with the least slack. It bounds the time of a count.
If a worker is too slow for all its sessions, the further ones get no chunk."""


def late_chunks(curve: LatencyCurve, slacks_s: Sequence[float], horizon_s: float) -> int:
    """Return how many of the chunks that viewers need within `horizon_s` do not come in time.

    Args: `slacks_s` has the slack of each session whose viewer plays, seconds, in any order. A session's next
    chunk is due when its slack is used up, and each further chunk `CHUNK_S` after the one before. A late
    chunk stalls its viewer, so the deadlines of the session's later chunks shift by the delay. The chunks
    that the viewer then does not get within the horizon count as late, too.

    The worker generates in batches as `LeastCreditFirst` of the worker's engine does. Cost: O(n log n) for
    each batch of n sessions, at most n · (`horizon_s` + `LEAD_S`) / `CHUNK_S` batches.
    """
    dues = sorted(slacks_s)
    if not dues:
        return 0
    all_s = curve(len(dues))
    if all_s <= CHUNK_S and dues[0] >= all_s:
        return 0
    counted = dues if all_s > CHUNK_S else dues[:LARGEST_SESSIONS]
    needed = sum(ceil((horizon_s - max(0.0, due)) / CHUNK_S) for due in counted if due < horizon_s)
    del dues[LARGEST_SESSIONS:]
    now, in_time = 0.0, 0
    while True:
        if all_s <= CHUNK_S and dues[0] - now >= all_s:
            # Even if all sessions share each further batch, every chunk is in time.
            in_time += sum(ceil((horizon_s - due) / CHUNK_S) for due in dues if due < horizon_s)
            return max(0, needed - in_time)
        start = dues[0] - LEAD_S
        if start > now:
            now = start
        if now >= horizon_s:
            return max(0, needed - in_time)
        size = _batch(curve, dues, bisect_right(dues, now + LEAD_S), now)
        now += curve(size)
        batch, dues = dues[:size], dues[size:]
        for due in batch:
            if due >= now:
                in_time += due < horizon_s
                insort(dues, due + CHUNK_S)
            else:
                insort(dues, now + CHUNK_S)


def lasting_late_chunks(curve: LatencyCurve, sessions: int, horizon_s: float) -> int:
    """Return the late chunks in `horizon_s` of a worker whose `sessions` viewers have used up their slack.

    0 if the worker keeps up with all of them. A buffer is used only once, but these chunks are late in each
    further horizon.
    """
    if curve(sessions) <= CHUNK_S:
        return 0
    return late_chunks(curve, [0.0] * sessions, horizon_s)


def _batch(curve: LatencyCurve, dues: list[float], ready: int, now: float) -> int:
    """Return the size of the next batch, as `LeastCreditFirst.gather` of the worker chooses it."""
    size = curve.best_batch(ready)
    if size == 1 or dues[0] >= now + curve(size):
        return size
    alone = now + curve(1)
    if sum(due >= now + curve(size) for due in dues[:size]) == sum(due >= alone for due in dues[:size]):
        return size
    savable = sum(due >= alone for due in dues[:ready])
    for smaller in range(size - 1, 0, -1):
        turn_s = curve(smaller)
        in_time = sum(now + turn_s * (1 + place // smaller) <= dues[place] for place in range(ready))
        if in_time >= savable:
            return smaller
    return size
