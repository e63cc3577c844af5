"""All repositories on one connection: in one transaction, or with statements that commit themselves."""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.state_store.repository.admission import SqlAdmission
from turboserve.state_store.repository.changes import SqlChanges
from turboserve.state_store.repository.clocks import SqlClocks
from turboserve.state_store.repository.controls import SqlControls
from turboserve.state_store.repository.corrections import SqlCorrections
from turboserve.state_store.repository.fence import SqlFence
from turboserve.state_store.repository.leaders import SqlLeaders
from turboserve.state_store.repository.outbox import SqlOutbox
from turboserve.state_store.repository.pools import SqlPools
from turboserve.state_store.repository.progress import SqlProgress
from turboserve.state_store.repository.rentals import SqlRentals
from turboserve.state_store.repository.sessions import SqlSessions
from turboserve.state_store.repository.tenants import SqlTenants
from turboserve.state_store.repository.workers import SqlWorkers


class SqlUnitOfWork:
    """`UnitOfWork` in SQL."""

    def __init__(self, connection: AsyncConnection) -> None:
        self.connection = connection
        self.admission = SqlAdmission(connection)
        self.changes = SqlChanges(connection)
        self.clocks = SqlClocks(connection)
        self.controls = SqlControls(connection)
        self.corrections = SqlCorrections(connection)
        self.fence = SqlFence(connection)
        self.leaders = SqlLeaders(connection)
        self.outbox = SqlOutbox(connection)
        self.pools = SqlPools(connection)
        self.progress = SqlProgress(connection)
        self.rentals = SqlRentals(connection)
        self.sessions = SqlSessions(connection)
        self.tenants = SqlTenants(connection)
        self.workers = SqlWorkers(connection)

    async def make_durable(self) -> None:
        await self.connection.execute(text("set local synchronous_commit = on"))
