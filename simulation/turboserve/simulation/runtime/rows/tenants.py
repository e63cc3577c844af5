"""Rows of tenants."""

from __future__ import annotations

from turboserve.simulation.runtime.rows.locks import LockMode
from turboserve.simulation.runtime.rows.session import Session
from turboserve.state_store.core.tenants import Tenant


def write_tenant(db: Session, tenant: Tenant) -> None:
    """Replace the row, if there is one. Called by statements."""
    rows = db.tables.tenants
    if db.lock(rows, tenant.id, LockMode.NO_KEY_UPDATE) is not None:
        db.update(rows, tenant.id, tenant)


class MemoryTenants:
    """`TenantRepository` in one session of the server."""

    def __init__(self, session: Session) -> None:
        self._db, self._rows = session, session.tables.tenants

    async def lock(self, tenant: str) -> Tenant:
        return await self._db.lock_or_insert(self._rows, tenant, Tenant(tenant))

    async def write(self, tenant: Tenant) -> None:
        await self._db.execute(lambda: write_tenant(self._db, tenant))

    async def delete_unused(self, before: float) -> int:
        def unused(tenant: Tenant | None) -> bool:
            if tenant is None or tenant.stored_bytes:
                return False
            return tenant.creations_full_at < before and tenant.prompts_full_at < before

        def run() -> int:
            deleted = 0
            for name in sorted(name for name, tenant in self._db.all(self._rows) if unused(tenant)):
                if unused(self._db.lock(self._rows, name)):
                    deleted += self._db.delete(self._rows, name)
            return deleted

        return await self._db.execute(run)
