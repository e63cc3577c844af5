"""Admission: whether a session may be created or run, and what the tenant and the key are charged.

The rules are in `core.workers`, `core.tenants` and `core.key_limits`. They are applied to counts of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from turboserve.clock import Clock
from turboserve.contracts.errors import NoCapacityError, TenantLimitError
from turboserve.contracts.requests import CreateSession
from turboserve.contracts.sessions import RateLeft, SessionRecord
from turboserve.state_store.core import forecast, key_limits, tenants
from turboserve.state_store.core.key_limits import KeyUsage
from turboserve.state_store.core.tenants import Tenant
from turboserve.state_store.core.workers import ModelCapacity
from turboserve.state_store.ports.database import UnitOfWork
from turboserve.state_store.ports.records import AdmissionCounts
from turboserve.state_store.publish.canaries import LogStatus
from turboserve.state_store.settings import Settings
from turboserve.wording import counted


@dataclass(frozen=True)
class Admitted:
    """A creation that is charged, or that found no room."""

    refusal: NoCapacityError | TenantLimitError | None
    """Why there is no room. None: the creation is charged."""
    tenant: Tenant | None = None
    """The tenant's row after the charge, which is written with the session."""
    weight: float = 1.0
    """Weight of the session among those that wait for slots."""
    rates: tuple[RateLeft, ...] = ()


class Admission:
    """Admission. Each method runs in its caller's transaction, some only with the admission lock held."""

    def __init__(
        self,
        log: LogStatus,
        clock: Clock,
        settings: Settings,
        found_full: Callable[[str], None] | None = None,
    ) -> None:
        """`found_full` is called with a model whose slots had to be forecast."""
        self._log, self._clock, self._settings = log, clock, settings
        self._found_full = found_full
        self._limits, self._retry_s = settings.tenant_limits, settings.admission_retry_s

    async def census(
        self, db: UnitOfWork, session: str, model: str, tenant: str, *, locks_tenant: bool = False
    ) -> AdmissionCounts:
        """Count sessions and capacity. The caller holds the admission lock."""
        now = self._clock.wall()
        return await db.admission.census(
            session,
            model,
            tenant,
            renewed_after=now - self._settings.worker_timeout_s,
            known_after=now - self._settings.model_memory_s,
            locks_tenant=locks_tenant,
        )

    async def create(self, db: UnitOfWork, request: CreateSession, census: AdmissionCounts) -> Admitted:
        """Charge the tenant and the key for a new session. The caller writes the tenant's row.

        The caller holds the admission lock, and raises a returned refusal after the commit: a tenant is known
        from its first request on, refused or not, and other tenants leave places for it. Raises
        LogUnavailableError, UnknownModelError, NoCapacityError, TenantLimitError and KeyQuotaError.
        """
        self._log.require()
        try:
            await self._check_room(db, census)
        except (NoCapacityError, TenantLimitError) as refusal:
            if census.use.known:
                raise
            tenant = await db.tenants.lock(request.tenant)
            await db.tenants.write(tenants.refuse(tenant, self._clock.wall()))
            return Admitted(refusal=refusal)
        use = await self._key_usage(db, request.key)
        now = self._clock.wall()
        if request.key is not None:
            key_limits.check_slot(use, self._retry_s, now)
            key_limits.check_sessions(use, self._retry_s)
        tenant = census.tenant or await db.tenants.lock(request.tenant)
        tenant = tenants.create(tenant, request, self._limits, now)
        per_minute = self._limits.creations_per_minute
        left = tenants.left(tenant.creations_full_at, per_minute, now, tenants.CREATIONS)
        if request.key is not None:
            left += await self._key_created(db, request.key, use, now)
        return Admitted(None, tenant, use.limits.weight or 1.0, left)

    async def _key_created(self, db: UnitOfWork, key: str, use: KeyUsage, now: float) -> tuple[RateLeft, ...]:
        """Charge the key for a new session, and return what its limits per time have left."""
        if use.limits.creations_per_minute is None:
            return key_limits.budget_left(use, now)
        rates = key_limits.create(await db.keys.lock_rates(key), use.limits, now)
        await db.keys.write_rates(rates)
        return key_limits.creations_left(rates, use.limits, now) + key_limits.budget_left(use, now)

    async def _key_usage(self, db: UnitOfWork, key: str | None) -> KeyUsage:
        if key is None:
            return KeyUsage()
        return await db.keys.usage(key, tenants.day_of(self._clock.wall()))

    async def resume(self, db: UnitOfWork, record: SessionRecord) -> float:
        """Check whether the session may run again, and return its weight. The caller holds the admission
        lock.

        Raises LogUnavailableError, UnknownModelError, NoCapacityError, TenantLimitError and KeyQuotaError.
        """
        self._log.require()
        census = await self.census(db, record.id, record.model, record.tenant)
        await self._admit(db, census.room)
        tenants.check_slot(census.use, census.room, self._limits, self._retry_s)
        use = await self._key_usage(db, record.key)
        if record.key is not None:
            key_limits.check_slot(use, self._retry_s, self._clock.wall())
        return use.limits.weight or 1.0

    async def prompt(
        self, db: UnitOfWork, record: SessionRecord, prompt: str
    ) -> tuple[Tenant, tuple[RateLeft, ...]]:
        """Charge the session's tenant and key for a prompt. The caller writes the tenant's row.

        Returns this row, and what the rates have left. Raises TenantLimitError and KeyQuotaError.
        """
        now = self._clock.wall()
        row = tenants.submit_prompt(await db.tenants.lock(record.tenant), prompt, self._limits, now)
        return row, await self._charge_key(db, record.key, row, now)

    async def pause(self, db: UnitOfWork, record: SessionRecord) -> Tenant:
        """As `prompt`, for a pause."""
        now = self._clock.wall()
        row = tenants.pause(await db.tenants.lock(record.tenant), self._limits, now)
        await self._charge_key(db, record.key, row, now)
        return row

    async def _charge_key(
        self, db: UnitOfWork, key: str | None, row: Tenant, now: float
    ) -> tuple[RateLeft, ...]:
        per_minute = self._limits.prompts_per_minute
        left = tenants.left(row.prompts_full_at, per_minute, now, tenants.PROMPTS)
        found = None if key is None else await db.keys.get(key)
        if found is None or found.limits.prompts_per_minute is None:
            return left
        rates = key_limits.submit_prompt(await db.keys.lock_rates(found.id), found.limits, now)
        await db.keys.write_rates(rates)
        return left + key_limits.prompts_left(rates, found.limits, now)

    async def _admit(self, db: UnitOfWork, room: ModelCapacity) -> None:
        """Check whether another session of the model fits, and gets its slot in time.

        The retry time of a refusal is forecast from departures and starting workers.
        """
        limit_s = self._settings.admission_slot_s
        if room.known and room.demand < room.capacity and limit_s is None:
            return
        if room.known and self._found_full is not None:
            self._found_full(room.model)
        now = self._clock.wall()
        outlook = await db.admission.outlook(
            room.model,
            since=now - forecast.WINDOW_S,
            renewed_after=now - self._settings.worker_timeout_s,
        )
        excess = room.demand - room.capacity + 1
        room.admit(forecast.retry_after_s(excess, outlook, now, self._retry_s))
        free_s = forecast.slot_in(room.demand, outlook, now)
        if limit_s is not None and free_s is not None and free_s > limit_s:
            raise NoCapacityError(
                f"the next slot for {room.model} is expected in {free_s:.0f} s, the limit is {limit_s:g} s",
                field="admission_slot_s",
                limit=limit_s,
                retry_after_s=min(max(free_s - limit_s, forecast.SHORTEST_S), forecast.LONGEST_S),
            )

    async def _check_room(self, db: UnitOfWork, census: AdmissionCounts) -> None:
        await self._admit(db, census.room)
        if census.live >= self._settings.max_sessions:
            raise NoCapacityError(
                f"this deployment takes no more than {counted(self._settings.max_sessions, 'session')}",
                field="sessions",
                limit=self._settings.max_sessions,
                retry_after_s=self._retry_s,
            )
        tenants.check_slot(census.use, census.room, self._limits, self._retry_s)
        tenants.check_sessions(census.use, self._limits, self._retry_s)
