"""Leadership of a service: campaign, renewal and step-down, each one transaction on one row."""

from __future__ import annotations

from turboserve import logs
from turboserve.contracts.leading import (
    Campaign,
    CampaignResult,
    GetLeader,
    KeepLead,
    LeaderRecord,
    StepDown,
)
from turboserve.state_store.core import leading as rules
from turboserve.state_store.ports.database import Database

log = logs.get("leaders")


class Leaders:
    """The endpoints of leaders, without their transport. All may raise UnavailableError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, request: GetLeader) -> LeaderRecord:
        async with self._database.statement() as db:
            return await db.leaders.get(request.name)

    async def campaign(self, request: Campaign) -> CampaignResult:
        async with self._database.transaction() as db:
            before = await db.leaders.lock(request.name, new_term=True)
            after = rules.campaign(before, request)
            if after is None:
                return CampaignResult(record=before, granted=False)
            await db.leaders.write(after)
        log.info("new leader", service=after.name, holder=after.holder, term=after.term)
        return CampaignResult(record=after, granted=True)

    async def keep(self, request: KeepLead) -> LeaderRecord:
        # Durable: if a crash undid the renewal, the lease on which its holder relies would end.
        async with self._database.transaction() as db:
            after = rules.keep(await db.leaders.lock(request.name, new_term=False), request)
            await db.leaders.write(after)
        return after

    async def step_down(self, request: StepDown) -> LeaderRecord:
        async with self._database.transaction() as db:
            after = rules.step_down(await db.leaders.lock(request.name, new_term=True), request)
            await db.leaders.write(after)
        log.info("leader stepped down", service=after.name, holder=request.holder, term=after.term)
        return after
