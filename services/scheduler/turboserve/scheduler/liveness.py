"""Listening time, and the rules by which a silent worker is suspect, is looked up or is declared gone."""

from __future__ import annotations

from collections.abc import Iterable

from turboserve.scheduler.view_models import WorkerView

LONGEST_GAP_S = 1.0
"""Longest gap between two events that counts in full. In a longer one the scheduler itself was delayed."""
SUSPECT_AFTER = 1 / 3
"""Part of the time-out after which a silent worker is suspect: it gets sessions only as a last resort."""
LOOK_AFTER = 1 / 6
"""Part of the time-out after which a silent worker's row is read."""
LOOK_EVERY = 1 / 4
"""Part of the time-out between two reads of a silent worker's row."""


class ListeningTime:
    """Seconds during which this process was able to receive workers' reports.

    Listening time does not advance while the broker is disconnected, and a gap between two events counts for
    at most `LONGEST_GAP_S`. So no pause of the scheduler makes a worker time out. Listening time is never
    faster than real time, so a worker's lease always ends before the worker is declared gone.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._last: float | None = None
        self._connected = False

    def advance(self, now: float, connected: bool | None = None) -> None:
        """Advance to monotonic time `now`. `connected`: new connection state; None: unchanged."""
        if self._last is not None and self._connected:
            self.now += min(max(now - self._last, 0.0), LONGEST_GAP_S)
        self._last = now if self._last is None else max(now, self._last)
        if connected is not None:
            self._connected = connected


def note_look(worker: WorkerView, renewed_at: float, asked_at: float, listened: float) -> None:
    """Note a read of the worker's row, requested at `asked_at` and answered at `listened` (listening times).

    A changed `renewed_at` shows that the worker has renewed since the last read, even if no report arrived.
    Values of `renewed_at` (the store's wall clock) are compared only with each other.
    """
    worker.looked_at = max(worker.looked_at, asked_at)
    if renewed_at > worker.renewed_at:
        worker.renewed_at, worker.renewal_seen_at = renewed_at, listened


def is_suspect(worker: WorkerView, listened: float, timeout_s: float) -> bool:
    return listened - worker.heard_at > timeout_s * SUSPECT_AFTER


def is_dead(worker: WorkerView, listened: float, timeout_s: float, lease_s: float) -> bool:
    """Whether the worker is silent for the time-out, and its row, read later, shows no renewal for a lease.

    So a worker that renews is not declared gone because its load reports are lost. A worker that does not
    renew has stopped its sessions, because its lease is over, before other workers get them.
    """
    return (
        listened - worker.heard_at >= timeout_s
        and worker.looked_at >= worker.heard_at + timeout_s
        and worker.looked_at - worker.renewal_seen_at >= lease_s
    )


def wants_look(workers: Iterable[WorkerView], listened: float, timeout_s: float) -> bool:
    """Whether to read the workers' rows because of a silent worker."""
    for worker in workers:
        silent_s = listened - worker.heard_at
        if silent_s < timeout_s * LOOK_AFTER:
            continue
        if silent_s >= timeout_s and worker.looked_at < worker.heard_at + timeout_s:
            return True
        if listened - worker.looked_at >= timeout_s * LOOK_EVERY:
            return True
    return False
