"""Checks whether there is room for another session, another running session or another prompt.

The rules are in `core.workers` and `core.tenants`. This module applies them to the counts of the rows.
"""

from __future__ import annotations

from turboserve.clock import Clock
from turboserve.contracts.errors import NoCapacityError, TenantLimitError
from turboserve.contracts.requests import CreateSession
from turboserve.contracts.sessions import SessionRecord
from turboserve.state_store.core import tenants
from turboserve.state_store.ports.database import UnitOfWork
from turboserve.state_store.ports.records import AdmissionCounts
from turboserve.state_store.publish.canaries import LogStatus
from turboserve.state_store.settings import Settings


class Admission:
    """Admission. Each method runs in its caller's transaction, some only with the admission lock held."""

    def __init__(self, log: LogStatus, clock: Clock, settings: Settings) -> None:
        self._log, self._clock, self._settings = log, clock, settings
        self._limits, self._retry_s = settings.tenant_limits, settings.admission_retry_s

    async def census(self, db: UnitOfWork, session: str, model: str, tenant: str) -> AdmissionCounts:
        """Count sessions and capacity. The caller holds the admission lock."""
        now = self._clock.wall()
        return await db.admission.census(
            session,
            model,
            tenant,
            renewed_after=now - self._settings.worker_timeout_s,
            known_after=now - self._settings.model_memory_s,
        )

    async def create(
        self, db: UnitOfWork, request: CreateSession, census: AdmissionCounts
    ) -> NoCapacityError | TenantLimitError | None:
        """Charge the tenant for a new session, or return why there is no room for it.

        The caller holds the admission lock, and raises a returned refusal after the commit: a tenant is known
        from its first request on, refused or not, and other tenants leave places for it. Raises
        LogUnavailableError, UnknownModelError, NoCapacityError and TenantLimitError.
        """
        self._log.require()
        try:
            self._check_room(census)
        except (NoCapacityError, TenantLimitError) as refusal:
            if census.use.known:
                raise
            tenant = await db.tenants.lock(request.tenant)
            await db.tenants.write(tenants.refuse(tenant, self._clock.wall()))
            return refusal
        tenant = await db.tenants.lock(request.tenant)
        now = self._clock.wall()
        await db.tenants.write(tenants.create(tenant, request, self._limits, now))
        return None

    async def resume(self, db: UnitOfWork, record: SessionRecord) -> None:
        """Check whether the session may run again. The caller holds the admission lock.

        Raises LogUnavailableError, UnknownModelError, NoCapacityError and TenantLimitError.
        """
        self._log.require()
        census = await self.census(db, record.id, record.model, record.tenant)
        census.room.admit(self._retry_s)
        tenants.check_slot(census.use, census.room, self._limits, self._retry_s)

    async def prompt(self, db: UnitOfWork, tenant: str, prompt: str) -> None:
        """Charge the tenant for a prompt. Raises TenantLimitError."""
        row = await db.tenants.lock(tenant)
        now = self._clock.wall()
        await db.tenants.write(tenants.submit_prompt(row, prompt, self._limits, now))

    async def pause(self, db: UnitOfWork, tenant: str) -> None:
        """Charge the tenant for a pause. Raises TenantLimitError."""
        row = await db.tenants.lock(tenant)
        await db.tenants.write(tenants.pause(row, self._limits, self._clock.wall()))

    def _check_room(self, census: AdmissionCounts) -> None:
        census.room.admit(self._retry_s)
        if census.live >= self._settings.max_sessions:
            raise NoCapacityError(
                f"{self._settings.max_sessions} sessions are all that this deployment takes",
                field="sessions",
                limit=self._settings.max_sessions,
                retry_after_s=self._retry_s,
            )
        tenants.check_slot(census.use, census.room, self._limits, self._retry_s)
        tenants.check_sessions(census.use, self._limits, self._retry_s)
