"""The scheduler's settings."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from turboserve.config import Seconds, Settings
from turboserve.scheduler.leadership import Lease
from turboserve.scheduler.placement import PLACEMENTS
from turboserve.scheduler.policy import Policy


class SchedulerSettings(Settings):
    """Read from `TURBOSERVE_…`."""

    idle_after_s: Seconds = 60.0
    """A session that nobody has watched for this long is suspended."""
    resync_s: Seconds = 15.0
    """The view is compared with the state store this often."""
    tick_s: Seconds = 0.25
    """Silent workers, idle sessions and repeats are looked for this often."""

    leader_renew_s: Seconds = 0.5
    """The scheduler that leads renews this often."""
    leader_lease_s: Seconds = 4.0
    """A leader that has not renewed for this long decides nothing any more."""
    leader_timeout_s: Seconds = 5.0
    """After this long without a renewal another scheduler takes over; more than the lease, by a margin."""

    placement: Annotated[str, AfterValidator(PLACEMENTS.check)] = "min-max"
    """Policy that chooses a session's worker: `min-max`, or an installed one. `turboserve-baselines` installs
    `least-loaded`, `round-robin`, `load-aware` and `memory-aware`. Only `min-max` migrates sessions for
    balance."""
    target_chunk_s: Seconds | None = None
    """A worker is given no more sessions than keep its chunk latency within this; none: as many as the worker
    itself says it can serve in real time."""
    weights_wait_s: Seconds = 10.0
    """A session waits this long for a slot on a worker with the weights that made its video so far, if there
    is one. Then it goes on from its latents on a worker with other weights."""
    move_weight: float = Field(default=0.1, ge=0)
    """η: seconds of the worst chunk latency that a second of transfer must save."""
    rebalance: bool = True
    """Live sessions move to where they run better. Without it only drains and operators move them."""
    moves_at_once: int = Field(default=8, ge=1)
    """Sessions that may be moving at the same time."""
    moves_per_worker: int = Field(default=2, ge=1)
    """Of these, from and to one worker."""
    move_rest_s: Seconds = 30.0
    """A session that has moved, or failed to, is not moved again for balance before this time."""

    def leadership(self) -> Lease:
        """Raises ValueError if renewals, lease and time-out are not in order."""
        return Lease(self.leader_renew_s, self.leader_lease_s, self.leader_timeout_s)

    def policy(self) -> Policy:
        return Policy(
            worker_timeout_s=self.worker_timeout_s,
            lease_s=self.lease_s,
            idle_after_s=self.idle_after_s,
            resync_s=self.resync_s,
            target_chunk_s=self.target_chunk_s,
            weights_wait_s=self.weights_wait_s,
            rebalance=self.rebalance and self.placement == "min-max",
            moves_at_once=self.moves_at_once,
            moves_per_worker=self.moves_per_worker,
            move_limit_s=self.move_limit_s,
            move_limit_most_s=self.move_limit_most_s,
            move_rest_s=self.move_rest_s,
        )
