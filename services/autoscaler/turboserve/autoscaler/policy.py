"""The parameters of the pool's core."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """All in seconds."""

    ready_timeout_s: float = 120.0
    """A worker that is not ready this long after its launch is ended and replaced."""
    drain_deadline_s: float = 600.0
    """A drain that takes longer is reported and goes on; it never ends a worker that holds sessions."""
    stable_s: float = 30.0
    """A worker that has been ready this long was no failed start: the count of failures begins anew."""
    backoff_s: float = 0.5
    backoff_limit_s: float = 30.0
    list_s: float = 2.0
    """The store and the provider are asked this often."""
    retry_s: float = 1.0
    report_timeout_s: float = 5.0
    """A worker that has spoken within this time lives, whatever the provider's list leaves out."""

    def backoff(self, failures: int) -> float:
        """How long to wait after so many failures in a row: not at all after the first, then doubling."""
        if failures <= 1:
            return 0.0
        return min(self.backoff_s * 2.0 ** min(failures - 2, 16), self.backoff_limit_s)
