"""Time as far as the scheduler was listening, and what it means for workers that were not heard of."""

from __future__ import annotations

from collections.abc import Iterable

from turboserve.scheduler.view_models import WorkerView

LONGEST_GAP_S = 1.0
"""Two events further apart than this: the scheduler itself was held up, and may have missed as much."""
SUSPECT_AFTER = 1 / 3
"""Part of the time-out after which a silent worker is only given sessions if there is no other."""
LOOK_AFTER = 1 / 6
"""Part of the time-out after which a silent worker's row is read."""
LOOK_EVERY = 1 / 4


class ListeningTime:
    """Seconds during which this process was able to hear its workers.

    It stands still while the broker is not connected, and a gap between two events counts for at most
    `LONGEST_GAP_S`. So a pause of the scheduler, however long, lets nobody time out: lost metrics are not
    dead workers. It never runs faster than real time, so a worker's lease has always ended before.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._last: float | None = None
        self._connected = False

    def advance(self, now: float, connected: bool | None = None) -> None:
        """`connected` None: as before."""
        if self._last is not None and self._connected:
            self.now += min(max(now - self._last, 0.0), LONGEST_GAP_S)
        self._last = now if self._last is None else max(now, self._last)
        if connected is not None:
            self._connected = connected


def note_look(worker: WorkerView, renewed_at: float, asked_at: float, listened: float) -> None:
    """Its row was read, asked for at `asked_at` and answered at `listened`.

    If it has renewed since the read before, it was alive at some time before now, though we may not have
    heard it. The store's wall clock is compared with itself only.
    """
    worker.looked_at = max(worker.looked_at, asked_at)
    if renewed_at > worker.renewed_at:
        worker.renewed_at, worker.renewal_seen_at = renewed_at, listened


def is_suspect(worker: WorkerView, listened: float, timeout_s: float) -> bool:
    return listened - worker.heard_at > timeout_s * SUSPECT_AFTER


def is_dead(worker: WorkerView, listened: float, timeout_s: float, lease_s: float) -> bool:
    """Not heard of for the time-out, and its row, read after that, shows no renewal for the lease.

    So a worker whose load reports are lost, but which renews, lives; and one that does not renew has let go
    of its sessions (its lease is over) before they are taken from it.
    """
    return (
        listened - worker.heard_at >= timeout_s
        and worker.looked_at >= worker.heard_at + timeout_s
        and worker.looked_at - worker.renewal_seen_at >= lease_s
    )


def wants_look(workers: Iterable[WorkerView], listened: float, timeout_s: float) -> bool:
    """Whether the rows should be read because of a silent worker."""
    for worker in workers:
        silent_s = listened - worker.heard_at
        if silent_s < timeout_s * LOOK_AFTER:
            continue
        if silent_s >= timeout_s and worker.looked_at < worker.heard_at + timeout_s:
            return True
        if listened - worker.looked_at >= timeout_s * LOOK_EVERY:
            return True
    return False
