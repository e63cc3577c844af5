"""Declares ended workers gone at the store, until the store acknowledges."""

from __future__ import annotations

from dataclasses import dataclass

from cachetools import FIFOCache

REMEMBERED = 10_000


@dataclass
class _GoneReport:
    reason: str
    due_at: float = 0.0
    under_way: bool = False


class GoneNotifier:
    """Repeats each declaration until it is acknowledged, and remembers gone workers."""

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._open: dict[str, _GoneReport] = {}
        self._gone_at: FIFOCache[str, int] = FIFOCache(REMEMBERED)

    def add(self, worker: str, reason: str, stamp: int) -> None:
        """Declare `worker` gone. Another call after the acknowledgment declares it again."""
        self._gone_at[worker] = stamp
        self._open.setdefault(worker, _GoneReport(reason))

    def gone_after(self, worker: str, stamp: int) -> bool:
        """Whether `add` noted the worker's end after `stamp`."""
        return self._gone_at.get(worker, -1) > stamp

    def due(self, now: float) -> list[tuple[str, str]]:
        """Return workers and reasons to declare now. Each is under way until `answered`."""
        found = []
        for worker, notice in self._open.items():
            if not notice.under_way and notice.due_at <= now:
                notice.under_way = True
                found.append((worker, notice.reason))
        return found

    def answered(self, worker: str, done: bool, now: float) -> None:
        notice = self._open.get(worker)
        if notice is None:
            return
        if done:
            del self._open[worker]
        else:
            notice.under_way, notice.due_at = False, now + self._retry_s
