"""Settings of the state store, read from `TURBOSERVE_…` variables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, model_validator

from turboserve.config import Seconds
from turboserve.config import Settings as Shared
from turboserve.state_store.core.device_errors import PoisonLimits
from turboserve.state_store.core.links import LinkRules
from turboserve.state_store.core.tenants import TenantLimits
from turboserve.state_store.core.webhooks import WebhookRules


class Settings(Shared):
    """Addresses of the two databases, limits, and how much data is kept for how long."""

    postgres_url: SecretStr = SecretStr("postgresql://turboserve@127.0.0.1:5432/turboserve")
    """Address of Postgres 14 or later, which holds the authoritative rows. Locks and time limits belong to a
    session of Postgres: no pooler may divide it among clients, as PgBouncer does in transaction mode."""
    redis_url: SecretStr = SecretStr("redis://127.0.0.1:6379/0")
    """Address of Redis, which holds data that may be lost: playheads and latents."""
    postgres_pool: int = Field(default=12, ge=4)
    """Maximum number of connections; two of them hold the locks for counting chunks and cost."""
    transaction_deadline_s: Seconds = 2.5
    """A transaction that takes longer fails with `unavailable`. Must be below `request_deadline_s`, so that
    the caller gets this answer."""

    max_sessions: int = Field(default=10_000, ge=1)
    """Maximum number of sessions that have not ended, over all models."""
    admission_retry_s: Seconds = 5.0
    """Retry time in the answer to a client for which there is no room, if no forecast tells it, seconds."""
    admission_slot_s: Seconds | None = None
    """A session is refused if its slot, and so its first chunk, is expected later than this. None: an
    admitted session waits as long as it takes."""
    tenant_sessions: int = Field(default=1_000, ge=0)
    """Maximum number of sessions of one tenant that have not ended. 0 in this and the other limits of a
    tenant: no limit."""
    tenant_suspended: int = Field(default=500, ge=0)
    """Maximum number of paused or idle sessions of one tenant. A tenant that has so many creates none."""
    tenant_slots: int = Field(default=0, ge=0)
    """Maximum number of sessions of one tenant that run or wait for a slot, over all models."""
    tenant_slots_factor: float = Field(default=3.0, ge=0)
    """While other tenants are known, a tenant gets another place of a model only if it has fewer places than
    this factor times the places that are left. With 3, one tenant takes at most three quarters."""
    tenant_creations_per_minute: int = Field(default=600, ge=0)
    """Maximum number of sessions that one tenant creates per minute; as many at once after a minute without
    any."""
    tenant_prompts_per_minute: int = Field(default=1_200, ge=0)
    """Maximum number of prompts and pauses of one tenant per minute, over all its sessions; as many at once
    after a minute without any."""
    tenant_stored_bytes: int = Field(default=2**30, ge=0)
    """Maximum stored bytes of one tenant's sessions: 1 KiB each, plus prompts, metadata and controls. An
    ended session counts until its row is deleted, `session_retention_s` after its end."""
    tenant_recorded_bytes: int = Field(default=20 * 2**30, ge=0)
    """Maximum bytes of one tenant's recordings. A tenant that has so many starts no recording, and those that
    run stop."""
    recording_retention_s: float = Field(default=30 * 86_400.0, ge=0)
    """A recording is deleted this long after it is complete, seconds. 0: recordings are kept until clients
    delete them."""
    model_memory_s: Seconds = 600.0
    """A model stays known for this long after its last worker, so that a restart of the worker causes only
    `no_capacity`."""
    idle_guard_s: float = Field(default=2.0, ge=0)
    """A session watched within this time is not suspended as idle, even if the scheduler asks for it."""

    poison_workers: int = Field(default=3, ge=0)
    """A session fails after a device error in its steps on this many workers in a row. 0: never."""
    poison_window_s: Seconds = 600.0
    """Device errors further apart than this are not counted together."""
    poison_chunks: int = Field(default=8, ge=1)
    """A session that has made this many chunks since a device error did not cause the error."""

    abandoned_after_s: float = Field(default=7 * 86_400.0, ge=0)
    """A suspended session that no viewer has watched and no request has changed for this long is ended; 0:
    never."""

    chunks_kept: int = Field(default=400, ge=8)
    """Number of newest chunks that the log keeps of each session."""
    chunk_retention_s: Seconds = 900.0
    """Chunks of an ended session stay readable for this long."""
    session_retention_s: Seconds = 30 * 86_400.0
    """Rows of ended sessions and of workers that are gone are deleted after this."""
    events_retention_s: Seconds = 86_400.0
    """The event log keeps an event this long."""
    duplicate_window_s: Seconds = 120.0
    """Time for which the broker recognizes a repeated message."""
    log_replicas: int = Field(default=1, ge=1, le=5)
    """Number of NATS servers that keep each stream. More than 1 needs a cluster of as many servers."""
    log_max_bytes: int | None = Field(default=None, ge=2**20)
    """Bytes that both streams together may reserve at the broker. None: as much as the broker's account or
    storage allows. Keep the value below half of the broker's disk."""
    log_chunks_share: float = Field(default=0.85, gt=0, lt=1)
    """Share of the bytes of both streams that the chunk log may take."""
    log_events_share: float = Field(default=0.1, gt=0, lt=1)
    """Share of the bytes of both streams that the event log may take."""
    log_low_share: float = Field(default=0.8, gt=0, lt=1)
    """Fill of a stream from which on finished sessions are removed before their retention is over."""
    log_scarce_share: float = Field(default=0.9, gt=0, lt=1)
    """Fill of a stream from which on old chunks of live sessions are removed too, longest histories first."""
    log_full_share: float = Field(default=0.95, gt=0, le=1)
    """Fill of a stream from which on no session is admitted or resumed."""
    log_chunks_floor: int = Field(default=40, ge=8)
    """Number of newest chunks that each live session keeps in any case."""
    log_guard_s: Seconds = 30.0
    """A finished session keeps its chunks for this long in any case, since its viewers still read them."""
    log_directory: Path | None = None
    """The broker's storage folder, if it is on this machine: then the free space of its disk counts as well.
    None: only the limits of the streams count."""
    log_disk_reserve_bytes: int = Field(default=2 * 2**30, ge=2**20)
    """Free bytes of the disk of `log_directory` below which room is low; it is scarce below a half of this,
    and full below a quarter. At most a tenth of the disk applies."""
    latents_kept: int = Field(default=8, ge=1)
    """Number of newest chunks whose latents are kept, besides chunk 0 (the window and its sink)."""
    latents_ttl_s: Seconds = 6 * 3_600.0
    """Latents of a session are dropped this long after its last ones."""

    link_lifetime_s: Seconds = 86_400.0
    """Lifetime of a link to a session whose creator names no expiry, seconds."""
    link_lifetime_max_s: Seconds = 30 * 86_400.0
    """Maximum lifetime of a link, seconds. A signing key verifies for as long after its replacement."""
    signing_key_lifetime_s: Seconds = 30 * 86_400.0
    """The key that signs links and tickets is replaced after this time, seconds."""

    webhook_concurrency: int = Field(default=8, ge=1, le=32)
    """Maximum number of attempts to deliver events to one webhook at the same time."""
    webhook_tenant_concurrency: int = Field(default=24, ge=1)
    """Maximum number of attempts to deliver events to all webhooks of a tenant at the same time."""
    webhook_claim_s: Seconds = 60.0
    """A delivery whose sender has died is attempted again after this. Must be above the senders'
    `webhook_timeout_s`, with a margin."""
    webhook_secret_overlap_s: Seconds = 86_400.0
    """The secret of a webhook signs for this long after its rotation, besides the new one, seconds."""
    webhook_disable_after_s: Seconds = 172_800.0
    """A webhook is disabled when no attempt has succeeded for this long, seconds."""
    webhook_retention_s: Seconds = 3 * 86_400.0
    """Deliveries are deleted this long after they were delivered or have failed, seconds."""
    webhook_backlog: int = Field(default=10_000, ge=1)
    """Maximum number of deliveries that wait for one webhook. Beyond it, the oldest have failed."""

    audit_retention_s: Seconds = 365 * 86_400.0
    """Entries of the audit log are deleted after this, at the next entry, seconds."""

    usage_retention_s: Seconds = 400 * 86_400.0
    """Usage by day is deleted after this, seconds."""

    pool_history_s: Seconds = 7 * 86_400.0
    """Samples, decisions and cost of pools are deleted after this, seconds."""
    chunk_history_s: float = Field(default=86_400.0, ge=0)
    """The chunks that workers made are deleted from the history after this, seconds. 0: none are written."""
    pool_history_rows: int = Field(default=500_000, ge=100)
    """Maximum number of rows in each table of the history; the oldest ones are deleted first. A pool and a
    worker with chunks have a row every 10 s, a tenant with cost one a minute."""

    prices: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Money per GPU and hour by kind of worker, as a JSON object: `{"h100": 3.99, "*": 2.5}`. `*` is for the
    other kinds; without it, they cost nothing. A worker keeps the price that its kind had at its launch."""
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] = "USD"
    """Currency of the prices."""
    cost_sample_s: Seconds = 2.0
    """Interval at which workers' time is divided among the sessions that hold their slots."""

    behavior_s: float = Field(default=15.0, ge=0)
    """Interval at which the behavior of the sessions of full models is learned, for metrics, seconds. 0:
    never."""
    canary_interval_s: Seconds = 2.0
    """Interval between the canaries in each stream. Must be below `canary_timeout_s`, with a margin."""
    progress_interval_s: Seconds = 0.05
    """Time of chunks that one transaction counts. A prompt counts as applied at most this much later."""
    store_lead_timeout_s: Seconds = 5.0
    """Another state store counts chunks and cost after this long without a sign of the one that did."""
    sweep_s: Seconds = 1.0
    """Interval at which the store looks for work that another instance or an earlier process left undone."""
    purge_s: Seconds = 30.0
    """Interval at which the store looks for data whose retention is over."""

    @model_validator(mode="after")
    def _ordered(self) -> Settings:
        if self.log_chunks_share + self.log_events_share > 1:
            raise ValueError("log_chunks_share and log_events_share: together at most 1")
        if not self.log_low_share < self.log_scarce_share < self.log_full_share:
            raise ValueError("log_low_share, log_scarce_share and log_full_share: each above the one before")
        if self.log_chunks_floor > self.chunks_kept:
            raise ValueError(f"log_chunks_floor: at most chunks_kept, {self.chunks_kept}")
        if self.transaction_deadline_s >= self.request_deadline_s:
            raise ValueError(f"transaction_deadline_s: below request_deadline_s, {self.request_deadline_s}")
        if self.link_lifetime_s > self.link_lifetime_max_s:
            raise ValueError(f"link_lifetime_s: at most link_lifetime_max_s, {self.link_lifetime_max_s:g}")
        if self.canary_interval_s >= self.canary_timeout_s:
            raise ValueError(f"canary_interval_s: below canary_timeout_s, {self.canary_timeout_s}")
        return self

    @property
    def poison(self) -> PoisonLimits:
        return PoisonLimits(self.poison_workers, self.poison_window_s, self.poison_chunks)

    @property
    def link_rules(self) -> LinkRules:
        return LinkRules(self.link_lifetime_s, self.link_lifetime_max_s, self.signing_key_lifetime_s)

    @property
    def webhook_rules(self) -> WebhookRules:
        return WebhookRules(
            self.webhook_concurrency,
            self.webhook_tenant_concurrency,
            self.webhook_secret_overlap_s,
            self.webhook_disable_after_s,
        )

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
        """`postgres_url` for the asynchronous driver. `postgres://` is accepted as well."""
        # The driver calls libpq's `sslmode` `ssl`.
        url = self.postgres_url.get_secret_value().replace("sslmode=", "ssl=")
        scheme, _, rest = url.partition("://")
        return f"postgresql+asyncpg://{rest}" if scheme.startswith("postgres") else f"{scheme}://{rest}"
