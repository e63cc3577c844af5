"""The autoscaler's settings."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.autoscaler.lifecycle import Policy
from turboserve.autoscaler.pool_file import PoolFile
from turboserve.autoscaler.pool_members import LARGEST
from turboserve.broker_accounts import IDENTITY_PATTERN
from turboserve.config import Seconds
from turboserve.contracts.autoscale import ProfileTable
from turboserve.contracts.base import Id
from turboserve.environment import listed
from turboserve.leader_settings import LeaderSettings


class AutoscalerSettings(LeaderSettings):
    """Read from `TURBOSERVE_…`."""

    provider: Literal["local", "ray", "kubernetes", "external"] = "local"
    """What runs the workers: this service as local processes (`local`), a Ray cluster as actors (`ray`), a
    Kubernetes namespace as pods (`kubernetes`), or another system (`external`)."""
    ray_address: str = "auto"
    """Address of the Ray cluster. `auto`: the cluster of the node that this service runs on."""
    ray_cpus: float = Field(default=1.0, ge=0)
    """CPUs of a Ray node that one worker takes. `pool_worker_gpus` sets its GPUs."""
    ray_resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Custom Ray resources that one worker takes, as a JSON object."""
    kubernetes_namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")] = (
        "turboserve"
    )
    """Namespace of the workers' pods."""
    kubernetes_pod_template: Path | None = None
    """YAML file with the template of a worker's pod, in the form of a Deployment's `spec.template`.

    Its container `worker` gets the pool member, the worker's id and its broker identity. Everything else, the
    worker's settings included, comes from the template. Read when the service starts."""
    kubernetes_config: Path | None = None
    """A kubeconfig file. None: the service account of this service's pod, or the user's own kubeconfig."""
    kubernetes_identity_secret: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,252}$")] | None = None
    """Secret that has the password of each identity in `worker_identities` under the identity's name."""
    pool_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,32}$")] = "local"
    """Id of the pool in the API, and first part of its members' names. Two autoscalers on one broker, or with
    pods in one namespace, need two names, or `pool_shared`."""
    pool_shared: bool = False
    """Whether several autoscalers run this pool. One leads; another takes over when the leader is silent for
    `leader_timeout_s`. All need the same settings."""
    pool_scope: str | None = Field(default=None, min_length=1)
    """What tells this pool's workers from those of other pools with its name, on one machine or Ray cluster:
    an autoscaler adopts the workers of its name and scope alone. None: the value of TURBOSERVE_NATS_URL, so
    autoscalers that share a pool and reach the broker at different addresses need it."""
    pool_size: int = Field(default=1, ge=0, le=LARGEST)
    """Initial number of workers if none are running."""
    pool_min: int | None = Field(default=None, ge=0, le=LARGEST)
    """Minimum number of workers. None: `pool_size`. With 0, the pool shrinks to zero after
    `scale_zero_after_s` without sessions, and the first session starts a worker."""
    pool_max: int | None = Field(default=None, ge=0, le=LARGEST)
    """Maximum number of workers. None: `pool_size`. If equal to `pool_min`, the pool has a fixed size."""
    pool_override: int | None = Field(default=None, ge=0, le=LARGEST)
    """Fixed number of workers, whatever the load. An override over the API takes precedence. None: the
    controller decides."""
    pool_model: Id | None = None
    """Model that the pool's workers serve. None: the value of TURBOSERVE_MODEL, or `toyworld`."""
    pool_file: Annotated[PoolFile | None, NoDecode] = None
    """TOML file with the kinds of workers that the pool may have, with which models, and at which price. Its
    limits replace `pool_size`, `pool_min` and `pool_max`. None: the workers are alike. Read when the service
    starts."""
    pool_worker_kind: str | None = Field(default=None, min_length=1, max_length=64)
    """Hardware of a worker, by its name in `prices`. None: the device that each worker reports."""
    pool_worker_gpus: float = Field(default=1.0, ge=0, le=1_024)
    """Number of GPUs that one worker occupies and that are paid for."""
    pool_ready_timeout_s: Seconds = 120.0
    """A worker that is not ready this long after its launch is replaced."""
    pool_drain_deadline_s: Seconds = 600.0
    """A drain that takes longer is reported. It is never cut short."""
    pool_release_grace_s: Seconds = 10.0
    """Time between the request to a worker to end and its forced end."""
    pool_stop_with_autoscaler: bool = False
    """Whether an orderly stop of this service stops its workers.

    If off, the workers continue and the next autoscaler adopts them, so that this service can be replaced
    while sessions play. A supervisor that stops a whole stack ends the workers itself or sets this.
    """
    pool_worker_command: tuple[str, ...] = (sys.executable, "-m", "turboserve.worker")
    """Command that starts a worker, as a JSON list."""
    pool_worker_variables: Annotated[tuple[str, ...], NoDecode] = ()
    """Further variables of this service's environment that workers get, separated by commas. A `*` at the end
    of a name matches any rest. Settings of other services cannot be passed on."""
    pool_worker_threads: int = Field(default=1, ge=1)
    """Threads of one worker's matrix library (its OMP_NUM_THREADS)."""
    worker_nats_user: str | None = None
    """The broker user that launched workers connect as."""
    worker_nats_password: SecretStr | None = None
    """Password of `worker_nats_user`. None: workers get this service's credentials."""

    worker_identities: dict[Annotated[str, Field(pattern=f"^{IDENTITY_PATTERN}$")], SecretStr] = {}
    """Broker identities of workers and their passwords, as a JSON object: `{"wk0": "…"}`. A launched worker
    gets an identity that no other worker of the pool has, as long as there are enough; a draining worker
    keeps its own. Empty: all workers share one user."""

    scale_dry_run: bool = False
    """Whether the controller only reports what it would do. An order over the API takes precedence."""
    scale_hysteresis: float = Field(default=0.1, ge=0, lt=1)
    """δ: half the width of the band around the target utilization in which the size does not change."""
    scale_out_cooldown_s: float = Field(default=1.0, ge=0)
    """Minimum time between any change of the pool's size and the next scale-out."""
    scale_in_cooldown_s: float = Field(default=10.0, ge=0)
    """Minimum time between any change of the pool's size and the next scale-in."""
    scale_in_window_s: float = Field(default=10.0, ge=0)
    """A scale-in keeps at least as many workers as were needed at any time in this window. Set it to about
    the start-up time of a worker, since keeping a worker that long costs as much as starting it again."""
    scale_peak_window_s: float = Field(default=120.0, ge=0)
    """A scale-in keeps enough slots for the largest number of active sessions in this window."""
    scale_stale_s: Seconds = 10.0
    """The pool does not shrink if the last load feedback is older than this."""
    scale_zero_after_s: float = Field(default=300.0, ge=0)
    """With `pool_min` 0, all workers end after this long without a session."""
    scale_headroom: Literal["learned", "profiled"] = "learned"
    """Where the target utilization, the forecast and the peak's window come from: learned from this pool's
    own demand, or from a table of profiled parameters by volatility. A table that is set over the API, and a
    `quality_debt_limit`, take precedence over what is learned."""
    scale_lateness_price_s: float = Field(default=60.0, ge=0)
    """Price of lateness: worker-seconds that the pool pays to spare one session a late first chunk. The
    learned headroom has the least sum of cost and priced lateness."""
    scale_late_after_s: Seconds = 0.5
    """A session that waits longer than this for a slot counts as late in what is learned."""
    scale_predictive: Literal["profiled", "on", "off"] = "profiled"
    """Whether a forecast of the demand is a lower bound of the pool's size. `profiled`: as learned, or at the
    volatility levels at which the table of profiled parameters says that it pays."""
    quality_debt_limit: float = Field(default=0.0, ge=0, le=1)
    """Price of quality: mean share of chunks lowered by load that the pool accepts to save
    idle workers. While workers start or the pool may grow, workers then hold more than K sessions, up to
    what the floor of quality carries, and the pool keeps less headroom. 0: off."""
    absorb_at_maximum: bool = False
    """Whether workers also hold more than K sessions while the pool is at its maximum. Otherwise sessions
    wait then."""
    scale_horizon_s: Seconds = 10.0
    """How far ahead the forecast looks: about the time from a worker's launch until it is ready."""

    @field_validator("pool_file", mode="before")
    @classmethod
    def _read(cls, value: object) -> object:
        return PoolFile.read(Path(value)) if isinstance(value, str | Path) else value

    @field_validator("pool_worker_variables", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return listed(value) if isinstance(value, str) else value

    @property
    def limits(self) -> tuple[int, int]:
        """Minimum and maximum number of workers."""
        if self.pool_file is not None:
            return self.pool_file.limits
        least = self.pool_size if self.pool_min is None else self.pool_min
        most = max(self.pool_size, least) if self.pool_max is None else self.pool_max
        return least, most

    @property
    def models(self) -> tuple[str, ...]:
        """Models that each of the pool's workers serves. The load of the first counts the sessions of all.

        With `pool_file`: the models of its offers, of which each worker serves those of its own.
        """
        if self.pool_file is not None:
            return self.pool_file.models
        named = self.pool_model or os.environ.get("TURBOSERVE_MODEL") or "toyworld"
        return tuple(one.strip() for one in named.split(","))

    def models_of(self, offer: str) -> tuple[str, ...]:
        """Return the models that each worker of an offer serves. Empty for an offer that the file lacks."""
        return self.models if self.pool_file is None else self.pool_file.models_of(offer)

    @model_validator(mode="after")
    def _limits_go_up(self) -> Self:
        least, most = self.limits
        if least > most:
            raise ValueError(f"pool_min: {least} is more than pool_max ({most})")
        return self

    @model_validator(mode="after")
    def _offers_can_be_started(self) -> Self:
        if self.pool_file is None:
            return self
        if self.provider == "external":
            raise ValueError("pool_file: another system starts the workers of the provider external")
        if self.pool_file.composed and self.quality_debt_limit > 0:
            raise ValueError(
                "pool_file: workers of several offers absorb nothing; set quality_debt_limit to 0"
            )
        return self

    @model_validator(mode="after")
    def _shared_workers_stay(self) -> Self:
        if self.pool_shared and self.pool_stop_with_autoscaler:
            raise ValueError("pool_stop_with_autoscaler: the next leader needs the workers of a shared pool")
        return self

    @model_validator(mode="after")
    def _kubernetes_is_complete(self) -> Self:
        if self.provider == "kubernetes":
            if self.kubernetes_pod_template is None:
                raise ValueError("kubernetes_pod_template: the provider `kubernetes` needs a pod template")
            if self.worker_identities and self.kubernetes_identity_secret is None:
                raise ValueError(
                    "kubernetes_identity_secret: worker_identities need the Secret of their passwords"
                )
        return self

    def control_policy(self, table: ProfileTable) -> ControlPolicy:
        """Return the controller's parameters; those of its detector come from `table`."""
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
            # A pool of fixed size has nothing to learn.
            learns=self.scale_headroom == "learned" and least != most,
            lateness_price_s=self.scale_lateness_price_s,
            late_after_s=self.scale_late_after_s,
            quality_debt_limit=self.quality_debt_limit,
            absorb_at_maximum=self.absorb_at_maximum,
            dry_run=self.scale_dry_run,
        )

    def policy(self) -> Policy:
        return Policy(
            ready_timeout_s=self.pool_ready_timeout_s,
            drain_deadline_s=self.pool_drain_deadline_s,
            list_s=min(Policy.list_s, 2 * self.heartbeat_s),
            # Workers report once per heartbeat interval, and single reports may be lost.
            report_timeout_s=max(Policy.report_timeout_s, 3 * self.heartbeat_s),
        )
