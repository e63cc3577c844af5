"""The autoscaler's settings."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from pydantic import Field, SecretStr

from turboserve.autoscaler.policy import Policy
from turboserve.autoscaler.sizing import LARGEST
from turboserve.config import Seconds, Settings


class AutoscalerSettings(Settings):
    """Read from `TURBOSERVE_…`."""

    provider: Literal["local", "external"] = "local"
    """Who runs the workers: this service as local processes, or someone else."""
    pool_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,32}$")] = "local"
    """First part of the slots' names. Two autoscalers on one broker need two names."""
    pool_size: int = Field(default=1, ge=0, le=LARGEST)
    """Workers to keep running."""
    pool_ready_timeout_s: Seconds = 120.0
    """A worker that is not ready this long after its launch is replaced."""
    pool_drain_deadline_s: Seconds = 600.0
    """A drain that takes longer is reported; it is never cut short."""
    pool_release_grace_s: Seconds = 10.0
    """Between asking a worker to end and making it."""
    pool_stop_with_autoscaler: bool = False
    """Whether an orderly stop of this service stops its workers.

    Off: they serve on, and the next autoscaler adopts them, so that this service can be replaced while
    sessions play. A supervisor that stops a whole stack ends them itself, or sets this.
    """
    pool_worker_command: tuple[str, ...] = (sys.executable, "-m", "turboserve.worker")
    """As a JSON list."""
    pool_worker_threads: int = Field(default=1, ge=1)
    """Threads of one worker's matrix library (its OMP_NUM_THREADS)."""
    worker_nats_user: str | None = None
    """The broker user that launched workers connect as."""
    worker_nats_password: SecretStr | None = None
    """The workers' own credentials; none: they get this service's."""

    def policy(self) -> Policy:
        return Policy(ready_timeout_s=self.pool_ready_timeout_s, drain_deadline_s=self.pool_drain_deadline_s)
