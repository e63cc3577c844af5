"""The parameters of the scheduler's core."""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.contracts.workers import WorkerPhase


@dataclass(frozen=True)
class Policy:
    """Times are in seconds."""

    worker_timeout_s: float = 12.0
    """A worker not heard of for this long is taken for dead, unless the store says that it renews."""
    starting_timeout_s: float = 60.0
    """The same for one that loads its model: it holds no session, and loading may keep it from speaking."""
    lease_s: float = 8.0
    """A worker that has not renewed for this long has stopped by itself."""
    idle_after_s: float = 60.0
    """A session that nobody has watched for this long is suspended."""
    resync_s: float = 15.0
    """Between two listings of everything: whatever was missed heals by then."""
    resync_least_s: float = 1.0
    """Between two listings that were asked for by surprises."""
    retry_s: float = 0.5
    """After a command that failed; twice as long each time, up to `retry_limit_s`."""
    retry_limit_s: float = 10.0
    full_s: float = 1.0
    """A worker that the store called full is not tried again for this long."""
    refused_s: float = 5.0
    """A worker that refused a session is not asked again for this long; twice as long each time."""
    refused_limit_s: float = 60.0
    weights_wait_s: float = 10.0
    """A session waits this long for a slot on a worker with the weights that made its chunks."""
    target_chunk_s: float | None = None
    """A worker is given no more sessions than keep its chunk latency within this; None: up to its own K."""
    rebalance: bool = True
    """Whether live sessions move to where they run better; drains and operators move them in any case."""
    rebalance_s: float = 1.0
    """Better places are looked for at least this often, and at once when something has changed."""
    rebalance_least_s: float = 0.1
    """Between two looks."""
    moves_at_once: int = 8
    """Sessions that may be on their way at the same time."""
    moves_per_worker: int = 2
    """Of these, from and to one worker."""
    move_limit_s: float = 20.0
    """A move whose target has not said by then that it copies is given up."""
    move_limit_most_s: float = 3_600.0
    """From then on it has as long as the target says that it tries, this at most, and..."""
    move_margin_s: float = 5.0
    """...so much longer: whoever waits for another waits longer than that does."""
    move_rest_s: float = 30.0
    """A session that has moved, or failed to, is not moved again for balance before this time."""
    feedback_s: float = 1.0
    """The load is reported at least this often."""

    def silence_limit(self, phase: WorkerPhase) -> float:
        """How long a worker in `phase` may be silent before it is taken for dead."""
        if phase is WorkerPhase.STARTING:
            return max(self.worker_timeout_s, self.starting_timeout_s)
        return self.worker_timeout_s

    def retry_after(self, failures: int) -> float:
        """How long to wait after so many failures in a row."""
        return min(self.retry_s * 2.0 ** min(failures - 1, 16), self.retry_limit_s)

    def rest_after(self, refusals: int) -> float:
        """How long a worker that has refused a session so often is not asked again."""
        return min(self.refused_s * 2.0 ** min(refusals - 1, 16), self.refused_limit_s)
