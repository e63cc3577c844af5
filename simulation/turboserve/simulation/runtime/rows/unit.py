"""All repositories over one session."""

from __future__ import annotations

from functools import cached_property

from turboserve.simulation.runtime.rows.admission import MemoryAdmission
from turboserve.simulation.runtime.rows.audit import MemoryAudit
from turboserve.simulation.runtime.rows.changes import MemoryChanges, MemoryFence
from turboserve.simulation.runtime.rows.controls import MemoryControls
from turboserve.simulation.runtime.rows.cost import MemoryCorrections, MemoryRentals
from turboserve.simulation.runtime.rows.deployment import (
    MemoryClocks,
    MemoryLeaders,
    MemoryOutbox,
    MemoryPools,
)
from turboserve.simulation.runtime.rows.keys import MemoryKeys
from turboserve.simulation.runtime.rows.links import MemorySessionLinks
from turboserve.simulation.runtime.rows.placements import MemoryPlacements
from turboserve.simulation.runtime.rows.pool_history import MemoryPoolHistory
from turboserve.simulation.runtime.rows.progress import MemoryProgress
from turboserve.simulation.runtime.rows.recordings import MemoryRecordings
from turboserve.simulation.runtime.rows.session import Session
from turboserve.simulation.runtime.rows.sessions import MemorySessions
from turboserve.simulation.runtime.rows.tenants import MemoryTenants
from turboserve.simulation.runtime.rows.webhooks import MemoryWebhooks
from turboserve.simulation.runtime.rows.workers import MemoryWorkers


class MemoryUnitOfWork:
    """`UnitOfWork` in memory. Each repository is created at its first use."""

    def __init__(self, session: Session) -> None:
        self.session = session

    async def make_durable(self) -> None:
        await self.session.execute(self._make_durable)

    def _make_durable(self) -> None:
        self.session.durable = True

    @cached_property
    def admission(self) -> MemoryAdmission:
        return MemoryAdmission(self.session)

    @cached_property
    def audit(self) -> MemoryAudit:
        return MemoryAudit(self.session)

    @cached_property
    def changes(self) -> MemoryChanges:
        return MemoryChanges(self.session)

    @cached_property
    def clocks(self) -> MemoryClocks:
        return MemoryClocks(self.session)

    @cached_property
    def controls(self) -> MemoryControls:
        return MemoryControls(self.session)

    @cached_property
    def corrections(self) -> MemoryCorrections:
        return MemoryCorrections(self.session)

    @cached_property
    def fence(self) -> MemoryFence:
        return MemoryFence(self.session)

    @cached_property
    def keys(self) -> MemoryKeys:
        return MemoryKeys(self.session)

    @cached_property
    def leaders(self) -> MemoryLeaders:
        return MemoryLeaders(self.session)

    @cached_property
    def links(self) -> MemorySessionLinks:
        return MemorySessionLinks(self.session)

    @cached_property
    def outbox(self) -> MemoryOutbox:
        return MemoryOutbox(self.session)

    @cached_property
    def placements(self) -> MemoryPlacements:
        return MemoryPlacements(self.session)

    @cached_property
    def pool_history(self) -> MemoryPoolHistory:
        return MemoryPoolHistory(self.session)

    @cached_property
    def pools(self) -> MemoryPools:
        return MemoryPools(self.session)

    @cached_property
    def progress(self) -> MemoryProgress:
        return MemoryProgress(self.session)

    @cached_property
    def recordings(self) -> MemoryRecordings:
        return MemoryRecordings(self.session)

    @cached_property
    def rentals(self) -> MemoryRentals:
        return MemoryRentals(self.session)

    @cached_property
    def sessions(self) -> MemorySessions:
        return MemorySessions(self.session)

    @cached_property
    def tenants(self) -> MemoryTenants:
        return MemoryTenants(self.session)

    @cached_property
    def webhooks(self) -> MemoryWebhooks:
        return MemoryWebhooks(self.session)

    @cached_property
    def workers(self) -> MemoryWorkers:
        return MemoryWorkers(self.session)
