"""The parameters of the pool's core."""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.backoff import backoff_s


@dataclass(frozen=True)
class Policy:
    """Times of the pool's core, in seconds."""

    ready_timeout_s: float = 120.0
    """A worker that is not ready this long after its launch is ended and replaced."""
    drain_deadline_s: float = 600.0
    """A drain that takes longer is reported and continues. It never ends a worker that holds sessions."""
    stable_s: float = 30.0
    """If a worker fails after it was ready for this long, the count of failures starts again at one."""
    backoff_s: float = 0.5
    backoff_limit_s: float = 30.0
    list_s: float = 2.0
    """Interval at which the store and the provider are asked for their workers."""
    retry_s: float = 1.0
    report_timeout_s: float = 5.0
    """A worker with a report within this time is alive, even if the provider's list leaves it out."""

    def backoff(self, failures: int) -> float:
        """Return the wait in seconds after `failures` failures in a row: 0 after the first, then doubling."""
        return backoff_s(failures - 1, self.backoff_s, self.backoff_limit_s)
