"""Settings of the services in a run under faults: timeouts of about half of the shipped ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from turboserve import failover
from turboserve.autoscaler.pool_file import PoolFile
from turboserve.autoscaler.pool_members import parts_of
from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.broker_accounts import worker_user
from turboserve.config import Settings
from turboserve.gateway.auth.access import DEFAULT_TENANT
from turboserve.gateway.settings import Settings as GatewaySettings
from turboserve.scheduler.settings import SchedulerSettings
from turboserve.simulation.pool_offers import START_S
from turboserve.simulation.roles import ROLES, RoleScale
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.simulation.session_classes import MODEL, SessionClasses
from turboserve.simulation.slow_devices import (
    PARALLEL_SHARE,
    REAL_TIME_MARGIN,
    SLOW_FORWARD_S,
    SLOWER_FORWARD_S,
    UNEVEN_FORWARD_S,
    UNEVEN_SLOWDOWN,
    forward_of,
    ladder_of,
    with_host_sessions,
)
from turboserve.simulation.tenant_keys import key_set
from turboserve.state_store.settings import Settings as StoreSettings
from turboserve.subject_types import identity_of
from turboserve.worker.settings import BEST
from turboserve.worker.settings import Settings as WorkerSettings

S = TypeVar("S", bound=Settings)

POOL = str(AutoscalerSettings.model_fields["pool_name"].default)
"""Name of the pool."""
PLACEMENT = str(SchedulerSettings.model_fields["placement"].default)
"""The placement policy that ships as the default."""
REBALANCER = str(SchedulerSettings.model_fields["rebalancer"].default)
"""The rebalancer that ships as the default."""
RESCUE_HORIZON_S = float(SchedulerSettings.model_fields["rescue_horizon_s"].default)
"""The shipped time within which the rebalancer saves late chunks."""
GATHER = str(WorkerSettings.model_fields["gather_policy"].default)
"""The gather policy that ships as the default."""
EXCHANGE_LIMIT_S = float(WorkerSettings.model_fields["sequence_parallel_timeout_s"].default)
"""The shipped limit of an exchange between two workers in a forward, seconds."""
ABSORBED = 2
"""Factor from K to the sessions for which such a device has memory. The floor carries more than that."""
NO_VARIABLES = "TURBOSERVE_SIMULATED_"
"""Prefix of the environment variables that are read. None exist, so a run depends on its parameters alone."""
SETTINGS_KEPT = 1_000
_made: dict[tuple[type[Settings], str], Settings] = {}
"""Settings by class and values. They are frozen, and take milliseconds to validate."""
PASSWORD = "simulated"
"""Password of workers' identities. The in-memory broker does not check it."""
TIMES = {
    "request_deadline_s": 3.0,
    "canary_timeout_s": 5.0,
    "heartbeat_s": 1.0,
    "lease_s": 4.0,
    "worker_timeout_s": 6.0,
    "migration_timeout_s": 8.0,
}
FAILOVER_TIMES = {**failover.SHORT_TIMES, "migration_timeout_s": TIMES["migration_timeout_s"]}
"""Instead of `TIMES`: the short times of a stack with redundancy."""


CLIENT_SILENCE_S = 1.5
"""Silence after which the broker of a stack with redundancy disconnects a client."""


@dataclass(frozen=True)
class Scale:
    """Size of a deployment."""

    workers: int = 2
    """Number of workers at the start, and the minimum."""
    most_workers: int = 3
    slots: int = 2
    """Maximum number of sessions on one worker."""
    classes: SessionClasses | None = None
    """Classes of workers that serve several, with their own numbers of sessions in the place of `slots`. Such
    workers take no policy of configurations but `BEST`, and absorb nothing. None: workers serve one class."""
    pool_file: PoolFile | None = None
    """Kinds and offers of the pool: each of its workers serves one of `classes`. None: they are alike."""
    gateways: int = 2
    schedulers: int = 2
    stores: int = 1
    autoscalers: int = 1
    """Number of autoscalers that share the pool. With more than one, they share leadership."""
    placement: str = PLACEMENT
    """The schedulers' placement policy."""
    rebalancer: str = REBALANCER
    rescue_horizon_s: float = RESCUE_HORIZON_S
    gather: str = GATHER
    """The workers' gather policy."""
    fidelity: str = BEST
    """The workers' policy of configurations. `BEST`, unlike the shipped default: without a ladder, both are
    the same. Under any other policy, devices are slow and have a ladder."""
    quality_debt_limit: float = 0.0
    """Price of quality. Above 0, workers absorb bursts: K comes from the profile of a device that has memory
    for more sessions. It needs a policy of configurations that lowers quality."""
    absorb_at_maximum: bool = False
    admission_slot_s: float | None = None
    """A session is refused if its slot is expected later than this. None: it waits."""
    host_sessions: int = 0
    """Number of a worker's sessions beyond its slabs, which `most_sessions` counts. Their states take turns
    in the slabs and wait in host memory."""
    state_copy_s: float = 0.1
    """Time of a copy of a state between slab and host, if `host_sessions` is not 0."""
    roles: RoleScale | None = None
    """Decode workers and text workers. None: the pool's workers compute everything."""
    host_workers: int = 0
    """Number of workers of one host, which lend each other their devices. 0: no worker lends."""
    exchange_limit_s: float = EXCHANGE_LIMIT_S
    """Longest time of the exchanges of a forward that two workers compute together."""
    tenants: int = 1
    """Number of tenants. With more than one, gateways need their keys."""
    tenant_limits: Mapping[str, float] = field(default_factory=dict)
    """Settings of the state store that limit each tenant."""
    client_silence_s: float | None = None
    """Silence after which the broker disconnects a client. None: it never does."""
    report_s: float = 0.5
    """Time between two reports of one viewer's playhead."""
    times: Mapping[str, float] = field(default_factory=lambda: dict(TIMES))
    """Settings that all services share."""

    def with_failover(self) -> Scale:
        """Return the size with two state stores and autoscalers, and the short times of such a stack."""
        return replace(self, times=FAILOVER_TIMES, client_silence_s=CLIENT_SILENCE_S, stores=2, autoscalers=2)

    @property
    def most_sessions(self) -> int:
        """Maximum number of sessions on one worker while it absorbs: K_floor, which memory limits."""
        return ABSORBED * self.slots if self.quality_debt_limit > 0 else self.slots

    @property
    def admitted_sessions(self) -> int:
        """Number of sessions that admission counts for one worker of a pool that cannot grow."""
        return self.most_sessions if self.absorb_at_maximum else self.slots

    @property
    def tenant_names(self) -> tuple[str, ...]:
        """Names of the tenants. Without keys, every user is the first."""
        return DEFAULT_TENANT, *(f"tenant-{number}" for number in range(2, self.tenants + 1))

    def gateway(self) -> GatewaySettings:
        return self._of(GatewaySettings, api_keys=key_set(self.tenant_names))

    def scheduler(self) -> SchedulerSettings:
        return self._of(
            SchedulerSettings,
            placement=self.placement,
            rebalancer=self.rebalancer,
            rescue_horizon_s=self.rescue_horizon_s,
            idle_after_s=10.0,
            resync_s=6.0,
            migration_cooldown_s=4.0,
        )

    def store(self) -> StoreSettings:
        return self._of(
            StoreSettings,
            idle_guard_s=1.0,
            admission_slot_s=self.admission_slot_s,
            # Nothing decides by these.
            chunk_history_s=0.0,
            behavior_s=0.0,
            **self.tenant_limits,
        )

    def autoscaler(self) -> AutoscalerSettings:
        return self._pool(
            pool_ready_timeout_s=12.0,
            pool_drain_deadline_s=20.0,
            pool_release_grace_s=3.0,
            scale_in_cooldown_s=6.0,
            scale_in_window_s=6.0,
            scale_peak_window_s=6.0,
            scale_out_cooldown_s=2.0,
            scale_stale_s=4.0,
            **({} if self.pool_file is None else {"scale_horizon_s": START_S}),
            quality_debt_limit=self.quality_debt_limit,
            absorb_at_maximum=self.absorb_at_maximum,
        )

    @property
    def models(self) -> tuple[str, ...]:
        """Classes that the pool's workers serve."""
        return (MODEL,) if self.classes is None else tuple(self.classes.sessions)

    def sessions_of(self, model: str) -> int:
        """Return n_j: the number of sessions of a class that a worker serves alone."""
        return self.slots if self.classes is None else self.classes.sessions[model]

    def outside(self, name: str, models: tuple[str, ...]) -> WorkerSettings:
        """Return the settings of a worker outside the pool, of these classes."""
        return self.worker(name, "").model_copy(update={"pool_member": None, "model": ",".join(models)})

    def worker(self, name: str, slot: str) -> WorkerSettings:
        most = self.slots if self.classes is None else max(self.classes.sessions.values())
        names = {"worker_id": name, "pool_member": slot, "nats_user": worker_user(identity_of(name))}
        return self._of(
            WorkerSettings,
            model=self._models_of(slot),
            worker_max_sessions=None if self.quality_debt_limit > 0 else most,
            real_time_margin=REAL_TIME_MARGIN,
            gather_policy=self.gather,
            fidelity=self.fidelity,
            host_sessions=self.host_sessions,
            sequence_parallel_directory=self.host_of(slot),
            sequence_parallel_timeout_s=self.exchange_limit_s,
            device="cpu",
            nats_password=PASSWORD,
            **({} if self.roles is None else self.roles.home(self._models_of(slot))),
        ).model_copy(update=names)

    def role_worker(self, name: str, kind: str, model: str) -> WorkerSettings:
        """Return the settings of a decode worker or text worker."""
        assert self.roles is not None
        values = {**self.roles.home(model), "roles": ROLES[kind], "nats_password": PASSWORD}
        made = self._of(
            WorkerSettings, model=model, device="cpu", real_time_margin=REAL_TIME_MARGIN, **values
        )
        return made.model_copy(update={"worker_id": name, "nats_user": worker_user(identity_of(name))})

    def host_of(self, member: str) -> Path | None:
        """Return the directory by which a pool member's worker and others lend each other their devices."""
        if not (self.host_workers and member):
            return None
        return Path(f"/host-{int(member.rpartition('-')[2]) // self.host_workers}")

    def slowdown(self, member: str | None) -> float:
        """Return how many times longer than declared the device of a pool member's worker computes."""
        # What decides by declared times, or lets late sessions wait for ever, has devices that keep them.
        declared = self.fidelity != BEST or self.rescue_horizon_s > 0 or self.gather != GATHER
        uneven = self.host_workers and member and not declared and not int(member.rpartition("-")[2]) % 2
        return UNEVEN_SLOWDOWN if uneven else 1.0

    def _models_of(self, member: str) -> str:
        """Return the classes of a worker in a pool member, with commas between them."""
        parts = parts_of(member, POOL)
        if self.pool_file is not None and parts is not None:
            return self.pool_file.environment_of(parts[0])["TURBOSERVE_MODEL"]
        return ",".join(self.models)

    def profile(self, load_s: float) -> DeviceProfile:
        """Return the profile of each worker's device."""
        slots = self.most_sessions
        profile = DeviceProfile(load_s=load_s, slabs=slots, host_states=2 * slots, chunk_at_once=True)
        profile = with_host_sessions(profile, self.host_sessions, self.state_copy_s)
        if self.host_workers:
            profile = replace(profile, forward_s=UNEVEN_FORWARD_S, parallel_share=PARALLEL_SHARE)
        if self.fidelity == BEST:
            return profile
        slow_s = SLOWER_FORWARD_S if self.rescue_horizon_s > 0 else SLOW_FORWARD_S
        forward_s = slow_s if slots == self.slots else forward_of(profile, self.slots)
        return replace(profile, forward_s=forward_s, ladder=ladder_of(profile))

    def profiles(self, load_s: float, models: tuple[str, ...], checkpoint: int) -> dict[str, DeviceProfile]:
        """Return the profile of a worker's device for each of its classes."""
        profile = self.profile(load_s)
        weights = f"checkpoint {checkpoint}"
        if self.classes is None:
            return {model: replace(profile, weights=weights) for model in models}
        return {
            model: replace(self.classes.profile(model, profile), weights=f"{weights} of {model}")
            for model in models
        }

    def _pool(self, **more: Any) -> AutoscalerSettings:
        return self._of(
            AutoscalerSettings,
            pool_size=self.workers,
            pool_min=self.workers,
            pool_max=self.most_workers,
            pool_model=self.models[0],
            pool_file=self.pool_file,
            pool_shared=self.autoscalers > 1,
            worker_identities={f"wk{number}": PASSWORD for number in range(2 * self.most_workers)},
            **more,
        )

    def _of(self, kind: type[S], **more: Any) -> S:
        values = {**self.times, **more}
        text = repr(values)
        made = _made.get((kind, text))
        if made is None:
            if len(_made) >= SETTINGS_KEPT:
                _made.clear()
            made = _made[kind, text] = kind(_env_prefix=NO_VARIABLES, **values)  # type: ignore[call-arg]
        return cast(S, made)
