"""Settings of services whose processes share leadership."""

from __future__ import annotations

from turboserve.config import Seconds, Settings
from turboserve.leadership import Lease


class LeaderSettings(Settings):
    """Times of the lead. Read from `TURBOSERVE_…`."""

    leader_renew_s: Seconds = 0.5
    """Interval at which the leader renews its lead."""
    leader_lease_s: Seconds = 4.0
    """A leader that has not renewed for this long makes no more decisions."""
    leader_timeout_s: Seconds = 5.0
    """Another process takes over after this long without a renewal. It must exceed the lease; the difference
    is the safety margin."""

    def leadership(self) -> Lease:
        """Build the lease of the lead. Raises ValueError unless renewal interval < lease < time-out."""
        return Lease(self.leader_renew_s, self.leader_lease_s, self.leader_timeout_s)
