"""The lease: a worker whose renewals are not confirmed stops generating until one is."""

from __future__ import annotations

import math


class Lease:
    """The time until which a worker may generate.

    The lease counts from the time a renewal was sent, not answered. A process that waits for the lease to end
    starts counting no earlier.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self.until = -math.inf
        """Time before which chunks may be generated, monotonic seconds. -inf before the first renewal."""

    def renewed(self, asked_at: float) -> None:
        """Extend the lease: the state store confirmed a renewal sent at `asked_at`."""
        self.until = max(self.until, asked_at + self._lease_s)

    def excused(self, asked_at: float) -> None:
        """Extend a valid lease, because no session could be reassigned at `asked_at`: no state store was
        reachable.

        Sessions may have been reassigned after a lease ended. An excuse therefore extends a lease that is
        valid, and never restores one that is over.
        """
        if self.valid(asked_at):
            self.renewed(asked_at)

    def valid(self, now: float) -> bool:
        """Whether chunks may be generated."""
        return now < self.until
