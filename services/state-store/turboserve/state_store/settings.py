"""Settings of the state store, read from `TURBOSERVE_…` variables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, model_validator

from turboserve.config import Seconds
from turboserve.config import Settings as Shared
from turboserve.state_store.core.device_errors import PoisonLimits
from turboserve.state_store.core.tenants import TenantLimits


class Settings(Shared):
    """Where the two databases are, and how much is kept for how long."""

    postgres_url: SecretStr = SecretStr("postgresql://turboserve@127.0.0.1:5432/turboserve")
    """The truth, in Postgres 14 or later."""
    redis_url: SecretStr = SecretStr("redis://127.0.0.1:6379/0")
    """What is hot and may be lost: playheads, heartbeats, latents."""
    postgres_pool: int = Field(default=12, ge=4)
    """Connections at most; two of them are kept for locks of those who count chunks and cost."""
    transaction_deadline_s: Seconds = 2.5
    """A transaction that takes longer is given up with `unavailable`: below `request_deadline_s`."""

    max_sessions: int = Field(default=10_000, ge=1)
    """Sessions that have not ended, over all models."""
    admission_retry_s: Seconds = 5.0
    """What a client without room is told to wait."""
    tenant_sessions: int = Field(default=1_000, ge=0)
    """Sessions of one tenant that have not ended; 0: no limit, as with the other limits of a tenant."""
    tenant_suspended: int = Field(default=500, ge=0)
    """Of these, paused or idle ones; a tenant that has so many creates none."""
    tenant_slots: int = Field(default=0, ge=0)
    """Sessions of one tenant that run or wait for a slot, over all models."""
    tenant_slots_factor: float = Field(default=3.0, ge=0)
    """While the deployment knows other tenants, a tenant gets another place of a model only if it has fewer
    there than this times the places that are left: with 3, one tenant alone takes at most three quarters."""
    tenant_creations_per_minute: int = Field(default=600, ge=0)
    """Sessions that one tenant creates per minute; as many at once after a minute without any."""
    tenant_prompts_per_minute: int = Field(default=1_200, ge=0)
    """Prompts and pauses of one tenant per minute, over all its sessions; as many at once after a minute
    without any."""
    tenant_stored_bytes: int = Field(default=2**30, ge=0)
    """Bytes that one tenant's sessions may take: 1 KiB each, prompts and metadata. An ended session counts
    until its row is deleted, `session_retention_s` after its end."""
    model_memory_s: Seconds = 600.0
    """A model stays known for this long after its last worker, so that a restart is only `no_capacity`."""
    idle_guard_s: float = Field(default=2.0, ge=0)
    """A session watched this recently is not suspended as idle, whatever the scheduler saw."""

    poison_workers: int = Field(default=3, ge=0)
    """A session is failed once so many workers in a row have died of a device error in a step for it; 0:
    never."""
    poison_window_s: Seconds = 600.0
    """Deaths further apart than this are not counted together."""
    poison_chunks: int = Field(default=8, ge=1)
    """A session that has made so many chunks since such a death did not cause it."""

    abandoned_after_s: float = Field(default=7 * 86_400.0, ge=0)
    """A suspended session that nobody has watched or changed for this long is ended; 0: never."""

    chunks_kept: int = Field(default=400, ge=8)
    """Newest chunks that the log keeps of each session."""
    chunk_retention_s: Seconds = 900.0
    """Chunks of an ended session stay readable for this long."""
    session_retention_s: Seconds = 30 * 86_400.0
    """Rows of ended sessions and of workers that are gone are deleted after this."""
    events_retention_s: Seconds = 86_400.0
    """The event log keeps an event this long."""
    duplicate_window_s: Seconds = 120.0
    """For this long the broker itself recognises a repeated message."""
    log_max_bytes: int | None = Field(default=None, ge=2**20)
    """Bytes that both streams together may reserve at the broker; none: as much as its account, or its
    storage, lets them reserve. Keep it below half of the broker's disk."""
    log_chunks_share: float = Field(default=0.85, gt=0, lt=1)
    """Share of these bytes that the chunk log may take."""
    log_events_share: float = Field(default=0.1, gt=0, lt=1)
    """Share of these bytes that the event log may take."""
    log_low_share: float = Field(default=0.8, gt=0, lt=1)
    """Fill of a stream at which finished sessions are removed from it before their retention is over."""
    log_scarce_share: float = Field(default=0.9, gt=0, lt=1)
    """Fill at which the old chunks of live sessions are removed too, longest histories first."""
    log_full_share: float = Field(default=0.95, gt=0, le=1)
    """Fill at which no session is admitted or resumed."""
    log_chunks_floor: int = Field(default=40, ge=8)
    """Newest chunks that each live session keeps in any case."""
    log_guard_s: Seconds = 30.0
    """A finished session keeps its chunks for this long in any case: its viewers are still there."""
    log_directory: Path | None = None
    """The broker's storage, if it is on this machine: the free space of its disk counts too. None: only the
    limits of the streams do."""
    log_disk_reserve_bytes: int = Field(default=2 * 2**30, ge=2**20)
    """Free bytes of that disk below which room is low, scarce below a half of it, full below a quarter; a
    tenth of the disk if that is less."""
    latents_kept: int = Field(default=8, ge=1)
    """Newest chunks whose latents are kept, beside the first one's (the window and its sink)."""
    latents_ttl_s: Seconds = 6 * 3_600.0
    """Latents of a session that makes none any more are dropped after this."""

    prices: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Money per GPU and hour by kind of worker, as a JSON object: `{"h100": 3.99, "*": 2.5}`; `*` is for
    kinds that are not named, and without it they cost nothing. A worker costs what its kind did when it was
    launched."""
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] = "USD"
    """What prices are in."""
    cost_sample_s: Seconds = 2.0
    """How often workers' time is divided among the sessions that hold their slots."""

    canary_interval_s: Seconds = 2.0
    """A canary is appended to each stream this often; below `canary_timeout_s`, by a margin."""
    sweep_s: Seconds = 1.0
    """How often to look for what another instance, or an earlier life of this one, left undone."""
    purge_s: Seconds = 30.0
    """How often to look for what is past its retention."""

    @model_validator(mode="after")
    def _ordered(self) -> Settings:
        if self.log_chunks_share + self.log_events_share > 1:
            raise ValueError("log_chunks_share and log_events_share: together at most 1")
        if not self.log_low_share < self.log_scarce_share < self.log_full_share:
            raise ValueError("log_low_share, log_scarce_share and log_full_share: each above the one before")
        if self.log_chunks_floor > self.chunks_kept:
            raise ValueError(f"log_chunks_floor: at most chunks_kept, {self.chunks_kept}")
        if self.canary_interval_s >= self.canary_timeout_s:
            raise ValueError(f"canary_interval_s: below canary_timeout_s, {self.canary_timeout_s}")
        return self

    @property
    def poison(self) -> PoisonLimits:
        return PoisonLimits(self.poison_workers, self.poison_window_s, self.poison_chunks)

    @property
    def tenant_limits(self) -> TenantLimits:
        return TenantLimits(
            sessions=self.tenant_sessions,
            suspended=self.tenant_suspended,
            slots=self.tenant_slots,
            slots_factor=self.tenant_slots_factor,
            creations_per_minute=self.tenant_creations_per_minute,
            prompts_per_minute=self.tenant_prompts_per_minute,
            stored_bytes=self.tenant_stored_bytes,
        )

    @property
    def sqlalchemy_url(self) -> str:
        """The same address for the asynchronous driver; `postgres://` is accepted as well."""
        # The driver has its own name for what libpq calls `sslmode`.
        url = self.postgres_url.get_secret_value().replace("sslmode=", "ssl=")
        scheme, _, rest = url.partition("://")
        return f"postgresql+asyncpg://{rest}" if scheme.startswith("postgres") else f"{scheme}://{rest}"
