"""The lease: a worker that nobody has confirmed for too long makes nothing more until someone does."""

from __future__ import annotations

import math


class Lease:
    """Counts from when the renewal was asked for, not answered: whoever waits for us counts from no later."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self.until = -math.inf
        """Chunks may be generated before this time, monotonic seconds. None before the first renewal."""

    def renewed(self, asked_at: float) -> None:
        """The state store confirmed a renewal sent at `asked_at`."""
        self.until = max(self.until, asked_at + self._lease_s)

    def excused(self, asked_at: float) -> None:
        """Nobody was there to renew with at `asked_at`, so nobody could take our sessions away then either.

        They may have been taken before, once the lease was over: an excuse goes on from a lease that holds,
        and never brings one back.
        """
        if self.valid(asked_at):
            self.renewed(asked_at)

    def valid(self, now: float) -> bool:
        """Whether chunks may be generated."""
        return now < self.until
