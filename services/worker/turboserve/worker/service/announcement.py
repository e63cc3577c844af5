"""Announce a worker while its model loads, so that the pool, operators and usage accounting see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from turboserve.bus import Bus
from turboserve.clock import Clock
from turboserve.contracts.workers import (
    LoadReport,
    MigrationReport,
    MigrationStage,
    SessionRefusal,
    WorkerPhase,
)
from turboserve.tasks import stop
from turboserve.worker.service import events
from turboserve.worker.service.heartbeat import Heartbeat
from turboserve.worker.service.release import RELEASE
from turboserve.worker.settings import Settings

STARTED_AGAIN = "the worker has restarted and is loading"


def starting(worker: str, settings: Settings, device: str, pid: int, now: float) -> LoadReport:
    """Report of a worker that cannot serve yet: no capacity, no profile."""
    return LoadReport(
        worker=worker,
        model=settings.model,
        capacity=0,
        phase=WorkerPhase.STARTING,
        device=device,
        pid=pid,
        pool_member=settings.pool_member,
        started_at=now,
        release=RELEASE,
    )


@asynccontextmanager
async def announced(
    report: LoadReport, settings: Settings, bus: Bus, clock: Clock, gone: Callable[[str], None]
) -> AsyncIterator[None]:
    """Renew with `report` while the body runs; send the final report if it raises. `gone`: see
    `Heartbeat`."""
    announcement = _Announcement(report)
    heartbeat = Heartbeat(
        bus, clock, settings.heartbeat_s, lambda: announcement.report, announcement.handle, gone
    )
    announcement.changed = heartbeat.soon
    beating = asyncio.create_task(heartbeat.run(), name="announcement")
    try:
        yield
    except BaseException:
        await stop(beating)
        await heartbeat.leave()
        raise
    # Let the last heartbeat finish: a renewal applied late would report again that the worker starts.
    heartbeat.end()
    await beating


class _Announcement:
    """The report of a starting worker.

    A starting worker runs no session. Rows that name this worker id belong to the previous process; refuse
    them. A drain order in an answer is ignored: the state store repeats it.
    """

    def __init__(self, report: LoadReport) -> None:
        self.report = report
        self.changed: Callable[[], None] = lambda: None
        """Called when the report changes."""

    def handle(self, message: events.Input) -> None:
        if not isinstance(message, events.Renewed):
            return
        refusals = tuple(
            SessionRefusal(session=row.id, epoch=row.epoch, reason=STARTED_AGAIN)
            for row in message.records
            if row.phase.holds_slot
        )
        migrations = tuple(
            MigrationReport(
                session=one.record.id,
                migration=one.record.migration,
                stage=MigrationStage.FAILED,
                reason=STARTED_AGAIN,
            )
            for one in message.incoming
            if one.record.migration is not None
        )
        if (refusals, migrations) != (self.report.refusals, self.report.migrations):
            self.report = self.report.model_copy(update={"refusals": refusals, "migrations": migrations})
            self.changed()
