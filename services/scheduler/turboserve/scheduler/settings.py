"""The scheduler's settings."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from turboserve.config import Seconds
from turboserve.contracts.fidelity import TIER_ALPHA, TierAlpha
from turboserve.leader_settings import LeaderSettings
from turboserve.scheduler.placement import PLACEMENTS, REBALANCERS, SHARES, Solve
from turboserve.scheduler.policy import Policy

NO_SHARES = "off"


def _check_shares(name: str) -> str:
    return name if name == NO_SHARES else SHARES.check(name)


class SchedulerSettings(LeaderSettings):
    """Read from `TURBOSERVE_…`."""

    idle_after_s: Seconds = 60.0
    """A session without a viewer for this long is suspended."""
    resync_s: Seconds = 15.0
    """Interval at which the scheduler compares its view with the state store."""
    tick_s: Seconds = 0.25
    """Interval of the checks for silent workers, idle sessions and commands to repeat."""

    placement: Annotated[str, AfterValidator(PLACEMENTS.check)] = "min-max"
    """Policy that chooses a session's worker: `min-max`, or an installed one. `turboserve-baselines` installs
    `least-loaded`, `round-robin`, `load-aware`, `memory-aware`, `fewest-streams`, `class-blind` and
    `static-split`. The rebalancer `min-max` migrates sessions for balance only with the placement
    `min-max`."""
    rebalancer: Annotated[str, AfterValidator(REBALANCERS.check)] = "min-max"
    """Policy that proposes migrations: `min-max`, or an installed one. `turboserve-baselines` installs
    `algorithm-1`, the re-homing of SlackServe."""
    shares: Annotated[str, AfterValidator(_check_shares)] = "exact"
    """Policy that decides how many sessions of each class each worker should have, if workers serve several
    classes: `exact`, an installed one, or `off`. The placement `min-max` prefers workers that have fewer.
    `turboserve-baselines` installs `oserve` and `most-sessions`."""
    rescue_horizon_s: float = Field(default=0.0, ge=0, le=60)
    """The rebalancer `min-max` also migrates sessions to save chunks that are expected to be late within this
    time, seconds, and makes no migration that causes such chunks. It needs workers that report slack. 0: the
    rebalancer ignores slack."""
    tier_alpha: TierAlpha = TIER_ALPHA
    """Width of a tier of playout slack, as a multiple of a chunk's time T: a session is urgent below a credit
    of this many T, and relaxed above twice as many. A worker has room for a rescued session if one with a
    slack of this many T would make no chunk late there. Set it on workers and schedulers alike."""
    target_chunk_s: Seconds | None = None
    """A worker gets only as many sessions as keep its chunk latency within this limit. None: as many as the
    worker itself reports that it can serve in real time."""
    weights_wait_s: Seconds = 10.0
    """A session waits this long for a slot on a worker with the weights that made its video, if there is such
    a worker. After that, the session continues from its latents on a worker with other weights."""
    migration_cost_weight: float = Field(default=0.1, ge=0)
    """η: seconds of the worst chunk latency that one second of transfer must save."""
    rebalance: bool = True
    """Whether live sessions migrate to lower the chunk latency. If off, only drains and operators migrate."""
    migrations_at_once: int = Field(default=8, ge=1)
    """Maximum number of sessions that migrate at the same time."""
    migrations_per_worker: int = Field(default=2, ge=1)
    """Maximum number of simultaneous migrations from and to one worker."""
    migration_cooldown_s: Seconds = 30.0
    """A session is not migrated for balance or to save chunks for this long after a migration that succeeded
    or failed. Each further failure in a row doubles the time, at most three times."""

    def solve(self) -> Solve:
        """Return the policy that decides shares. Raises what making it raises."""
        return SHARES.make("exact" if self.shares == NO_SHARES else self.shares)

    def policy(self) -> Policy:
        return Policy(
            worker_timeout_s=self.worker_timeout_s,
            lease_s=self.lease_s,
            idle_after_s=self.idle_after_s,
            resync_s=self.resync_s,
            target_chunk_s=self.target_chunk_s,
            weights_wait_s=self.weights_wait_s,
            shares=self.shares != NO_SHARES and self.placement == "min-max",
            rebalance=self.rebalance and (self.placement == "min-max" or self.rebalancer != "min-max"),
            migrations_at_once=self.migrations_at_once,
            migrations_per_worker=self.migrations_per_worker,
            migration_timeout_s=self.migration_timeout_s,
            migration_timeout_max_s=self.migration_timeout_max_s,
            migration_cooldown_s=self.migration_cooldown_s,
        )
