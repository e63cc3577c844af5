"""The autoscaler's settings."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.autoscaler.policy import Policy
from turboserve.autoscaler.sizing import LARGEST
from turboserve.broker_accounts import IDENTITY_PATTERN
from turboserve.config import Seconds, Settings
from turboserve.contracts.autoscale import ProfileTable
from turboserve.contracts.base import Id
from turboserve.environment import listed


class AutoscalerSettings(Settings):
    """Read from `TURBOSERVE_…`."""

    provider: Literal["local", "ray", "external"] = "local"
    """Who runs the workers: this service as local processes, a Ray cluster as actors, or someone else."""
    ray_address: str = "auto"
    """The Ray cluster; `auto`: the one whose node this is."""
    ray_cpus: float = Field(default=1.0, ge=0)
    """CPUs of a node that one worker takes; its GPUs are `pool_worker_gpus`."""
    ray_resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    """What else of a node it takes, as a JSON object of Ray's custom resources."""
    pool_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,32}$")] = "local"
    """First part of the members' names. Two autoscalers on one broker need two names."""
    pool_size: int = Field(default=1, ge=0, le=LARGEST)
    """Workers to begin with, where none are found running."""
    pool_min: int | None = Field(default=None, ge=0, le=LARGEST)
    """Workers at least; none: `pool_size`. 0: the pool goes to zero when nobody has needed it for
    `scale_zero_after_s`, and the first session wakes it."""
    pool_max: int | None = Field(default=None, ge=0, le=LARGEST)
    """Workers at most; none: `pool_size`. The same as `pool_min`: a pool of fixed size."""
    pool_override: int | None = Field(default=None, ge=0, le=LARGEST)
    """Keep this many workers, whatever the load; an order over the API comes before it. None: the
    controller decides."""
    pool_model: Id | None = None
    """What the pool's workers serve; none: what TURBOSERVE_MODEL tells them, or `toyworld`."""
    pool_worker_kind: str | None = Field(default=None, min_length=1, max_length=64)
    """What a worker runs on, as `prices` names it; none: the device that each worker names itself."""
    pool_worker_gpus: float = Field(default=1.0, ge=0, le=1_024)
    """GPUs that one worker takes up and is paid for."""
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
    pool_worker_variables: Annotated[tuple[str, ...], NoDecode] = ()
    """Further variables of this service's environment that workers get, separated by commas; `*` at the end
    of a name stands for any rest of it. Settings of other services cannot be passed on."""
    pool_worker_threads: int = Field(default=1, ge=1)
    """Threads of one worker's matrix library (its OMP_NUM_THREADS)."""
    worker_nats_user: str | None = None
    """The broker user that launched workers connect as."""
    worker_nats_password: SecretStr | None = None
    """The workers' own credentials; none: they get this service's."""

    worker_identities: dict[Annotated[str, Field(pattern=f"^{IDENTITY_PATTERN}$")], SecretStr] = {}
    """Identities of workers at the broker and their passwords, as a JSON object: `{"wk0": "…"}`. A launched
    worker gets one that no other worker of the pool has, as far as there are enough; a worker that drains
    keeps its own beside the one that replaces it. None: all workers share one user."""

    scale_dry_run: bool = False
    """The controller only says what it would do; an order over the API comes before it."""
    scale_hysteresis: float = Field(default=0.1, ge=0, lt=1)
    """Half the width of the band around the target utilisation in which the pool stays as it is (δ)."""
    scale_out_cooldown_s: float = Field(default=1.0, ge=0)
    """Between any change of the pool's size and the next scale-out."""
    scale_in_cooldown_s: float = Field(default=10.0, ge=0)
    """Between any change of the pool's size and the next scale-in."""
    scale_in_window_s: float = Field(default=10.0, ge=0)
    """A scale-in goes no lower than what was needed at any time in this window: about what a worker takes to
    start, since keeping one that long costs what starting it again would."""
    scale_peak_window_s: float = Field(default=120.0, ge=0)
    """A scale-in leaves room, all workers full, for the most sessions that were active in this window."""
    scale_stale_s: Seconds = 10.0
    """Load feedback that is older says nothing: the pool does not shrink."""
    scale_zero_after_s: float = Field(default=300.0, ge=0)
    """With `pool_min` 0: all workers go after this long without a session."""
    scale_predictive: Literal["profiled", "on", "off"] = "profiled"
    """Whether a forecast of the demand is a lower bound of the pool's size; `profiled`: at the levels of
    volatility for which profiling found that it pays, which the table says."""
    scale_horizon_s: Seconds = 10.0
    """How far ahead the forecast looks: about what a worker takes from its launch to being ready."""

    @field_validator("pool_worker_variables", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return listed(value) if isinstance(value, str) else value

    @property
    def limits(self) -> tuple[int, int]:
        """Workers at least and at most."""
        least = self.pool_size if self.pool_min is None else self.pool_min
        most = max(self.pool_size, least) if self.pool_max is None else self.pool_max
        return least, most

    @property
    def model(self) -> str:
        """What the pool's workers serve."""
        return self.pool_model or os.environ.get("TURBOSERVE_MODEL") or "toyworld"

    @model_validator(mode="after")
    def _limits_go_up(self) -> Self:
        least, most = self.limits
        if least > most:
            raise ValueError(f"pool_min: {least} is more than pool_max ({most})")
        return self

    def control_policy(self, table: ProfileTable) -> ControlPolicy:
        """The controller's parameters; those of its detector are the table's."""
        least, most = self.limits
        return ControlPolicy(
            least=least,
            most=most,
            hysteresis=self.scale_hysteresis,
            out_cooldown_s=self.scale_out_cooldown_s,
            in_cooldown_s=self.scale_in_cooldown_s,
            in_window_s=self.scale_in_window_s,
            peak_window_s=self.scale_peak_window_s,
            stale_s=self.scale_stale_s,
            scale_to_zero=least == 0,
            zero_after_s=self.scale_zero_after_s,
            epoch_s=table.provenance.epoch_s,
            window=table.provenance.window,
            predictive=None if self.scale_predictive == "profiled" else self.scale_predictive == "on",
            horizon_s=self.scale_horizon_s,
            dry_run=self.scale_dry_run,
        )

    def policy(self) -> Policy:
        return Policy(
            ready_timeout_s=self.pool_ready_timeout_s,
            drain_deadline_s=self.pool_drain_deadline_s,
            # Workers speak once a heartbeat, and one word may be lost.
            report_timeout_s=max(Policy.report_timeout_s, 3 * self.heartbeat_s),
        )
