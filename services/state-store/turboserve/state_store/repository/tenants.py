"""Rows of tenants."""

from __future__ import annotations

from dataclasses import asdict

from sqlalchemy import delete, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.state_store.core.tenants import Tenant
from turboserve.state_store.tables import tenants


class SqlTenants:
    """`TenantRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def lock(self, tenant: str) -> Tenant:
        query = select(tenants).where(tenants.c.id == tenant).with_for_update()
        row = (await self._db.execute(query)).mappings().first()
        if row is None:
            # This waits if another transaction inserts the row at the same time.
            await self._db.execute(insert(tenants).values(id=tenant).on_conflict_do_nothing())
            row = (await self._db.execute(query)).mappings().one()
        return Tenant(**row)

    async def write(self, tenant: Tenant) -> None:
        values = asdict(tenant)
        await self._db.execute(update(tenants).where(tenants.c.id == values.pop("id")).values(values))

    async def delete_unused(self, before: float) -> int:
        full = (tenants.c.creations_full_at < before, tenants.c.prompts_full_at < before)
        return (await self._db.execute(delete(tenants).where(tenants.c.stored_bytes == 0, *full))).rowcount
