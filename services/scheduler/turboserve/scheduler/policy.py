"""The parameters of the scheduler's core."""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.backoff import backoff_s
from turboserve.contracts.workers import WorkerPhase

REST_DOUBLINGS = 3
"""How often the rest after failed migrations doubles: a session is tried again while its load may change."""


@dataclass(frozen=True)
class Policy:
    """Parameters of the scheduler's core. Times are in seconds."""

    worker_timeout_s: float = 12.0
    """A worker that has sent no report for this long is declared gone, unless the store shows that it renews
    its lease."""
    starting_timeout_s: float = 60.0
    """`worker_timeout_s` for a worker that loads its model: it holds no session, and loading may delay its
    reports."""
    lease_s: float = 8.0
    """A worker that has not renewed its lease for this long has stopped generating."""
    idle_after_s: float = 60.0
    """A session without a viewer for this long is suspended."""
    resync_s: float = 15.0
    """Interval of full listings of the store. A listing repairs what the view has missed."""
    resync_least_s: float = 1.0
    """Minimum time between two full listings, also if events show that the view is wrong."""
    retry_s: float = 0.5
    """Wait after a failed command. Each further failure doubles the wait, up to `retry_limit_s`."""
    retry_limit_s: float = 10.0
    full_s: float = 1.0
    """A worker that the store reported full gets no session for this long."""
    refused_s: float = 5.0
    """A worker that refused a session does not get it again for this long. Each further refusal doubles the
    time, up to `refused_limit_s`."""
    refused_limit_s: float = 60.0
    weights_wait_s: float = 10.0
    """A session waits this long for a slot on a worker with the weights that made its chunks."""
    target_chunk_s: float | None = None
    """A worker gets only as many sessions as keep its chunk latency within this limit. None: as many as its
    own capacity."""
    shares: bool = True
    """Whether placement follows quotas of classes where workers serve several."""
    rebalance: bool = True
    """Whether live sessions migrate to lower the chunk latency. Drains and operators migrate in any case."""
    rebalance_s: float = 1.0
    """Interval of calls to the rebalancer while nothing changes."""
    rebalance_least_s: float = 0.1
    """Minimum time between two calls to the rebalancer."""
    migrations_at_once: int = 8
    """Maximum number of sessions that migrate at the same time."""
    migrations_per_worker: int = 2
    """Maximum number of simultaneous migrations from and to one worker."""
    migration_timeout_s: float = 20.0
    """A migration is abandoned if its target does not report within this time that it copies."""
    migration_timeout_max_s: float = 3_600.0
    """Upper bound of the copy time that the target reports. From that report on, the migration has that time
    plus `migration_margin_s`."""
    migration_margin_s: float = 5.0
    """Added to the target's copy time, so that the target gives up before the scheduler does."""
    migration_cooldown_s: float = 30.0
    """A session is not migrated for balance or to save chunks for this long after a migration that succeeded
    or failed. Each further failure in a row doubles the time, at most three times."""
    feedback_s: float = 1.0
    """Maximum time between two load feedback messages to the autoscaler."""

    def silence_limit(self, phase: WorkerPhase) -> float:
        """How long a worker in `phase` may be silent before it is declared gone, in seconds."""
        if phase is WorkerPhase.STARTING:
            return max(self.worker_timeout_s, self.starting_timeout_s)
        return self.worker_timeout_s

    def retry_after(self, failures: int) -> float:
        """How long to wait after `failures` failures in a row, in seconds."""
        return backoff_s(failures, self.retry_s, self.retry_limit_s)

    def rest_after_failed(self, failures: int) -> float:
        """How long a session rests after `failures` failed migrations in a row, in seconds."""
        limit_s = self.migration_cooldown_s * 2.0**REST_DOUBLINGS
        return backoff_s(failures, self.migration_cooldown_s, limit_s)

    def rest_after(self, refusals: int) -> float:
        """How long a worker that has refused a session `refusals` times does not get it again, in seconds."""
        return backoff_s(refusals, self.refused_s, self.refused_limit_s)
