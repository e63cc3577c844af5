"""The lease: a worker that nobody has confirmed for too long makes nothing more until someone does."""

from __future__ import annotations


class Lease:
    """Counts from when the renewal was asked for, not answered: whoever waits for us counts from no later."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._until: float | None = None

    def renewed(self, asked_at: float) -> None:
        """Someone confirmed a renewal sent at `asked_at`, or there is nobody who could have missed it."""
        until = asked_at + self._lease_s
        self._until = until if self._until is None else max(until, self._until)

    def valid(self, now: float) -> bool:
        """Whether chunks may be generated. Not before the first renewal."""
        return self._until is not None and now < self._until
