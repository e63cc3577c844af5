"""Renewals: at every heartbeat and after every change, report what is held and receive the assigned rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import nats

from turboserve import logs
from turboserve.bus import Bus
from turboserve.bus.client import NoServerError
from turboserve.clock import Clock
from turboserve.contracts.errors import (
    IncompatibleVersionError,
    TurboServeError,
    UnavailableError,
    WorkerGoneError,
)
from turboserve.contracts.requests import Renew
from turboserve.contracts.worker_offers import ServedClass
from turboserve.contracts.workers import (
    LoadReport,
    MigrationReport,
    MigrationStage,
    SessionRefusal,
    WorkerPhase,
)
from turboserve.subjects import LOAD, RENEW
from turboserve.tasks import stop
from turboserve.worker.service import events
from turboserve.worker.settings import Settings

PAUSE_S = 0.05
"""Smallest time between two reports, seconds."""
FINAL_REPORT_TIMEOUT_S = 0.3
"""Time to wait for the answer to the final report, seconds. The state store applies the report also when its
answer comes too late."""
STARTED_AGAIN = "the worker has restarted and is loading"

log = logs.get("heartbeat")


def _release() -> str | None:
    try:
        return version("turboserve-worker")
    except PackageNotFoundError:
        return None


RELEASE = _release()
"""Version of the installed distribution. None: the worker runs from files that are not installed."""


class Heartbeat:
    """Sends LOAD and RENEW. Answers go to `deliver_event`; the refusal of a worker that was declared gone
    goes to `gone`."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        settings: Settings,
        report: Callable[[], LoadReport],
        deliver_event: Callable[[events.Input], None],
        gone: Callable[[str], None],
    ) -> None:
        self._bus, self._clock, self._heartbeat_s = bus, clock, settings.heartbeat_s
        # A state store that is frozen answers nothing. Other ones get the next renewals within the lease.
        self._answer_s = min(settings.request_deadline_s, settings.lease_s / 3)
        self._report, self._deliver, self._gone = report, deliver_event, gone
        self._wanted = asyncio.Event()
        self.answered = False
        """Whether the state store has ever answered."""
        self._leaving = False

    def soon(self) -> None:
        """Report at once rather than at the next heartbeat."""
        self._wanted.set()

    async def publish(self) -> None:
        """Send a load report without a renewal, for services that follow the load. The next heartbeat repeats
        a lost one."""
        if self._leaving:
            return
        with suppress(nats.errors.Error, OSError):
            await self._send(self._report())

    async def run(self) -> None:
        """Send heartbeats until `end` or `leave`."""
        while not self._leaving:
            self._wanted.clear()
            await self._beat()
            await asyncio.sleep(PAUSE_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.001, self._heartbeat_s - PAUSE_S)):
                    await self._wanted.wait()

    def end(self) -> None:
        """Send no further heartbeat. `run` returns after the heartbeat under way."""
        self._leaving = True
        self._wanted.set()

    async def leave(self) -> None:
        """Send the final report, so that its sessions get new workers at once rather than after a timeout.

        Call this after the last chunk: the fence refuses later ones. Raises no TurboServeError; waits at most
        `FINAL_REPORT_TIMEOUT_S` for the answer.
        """
        self._leaving = True
        load = self._report().model_copy(update={"phase": WorkerPhase.GONE})
        try:
            await self._bus.call(RENEW, Renew(load=load), deadline_s=FINAL_REPORT_TIMEOUT_S)
        except TurboServeError as error:
            log.info("final report not acknowledged", error=error.detail)

    async def _send(self, load: LoadReport) -> None:
        # What a model declares does not change. Renewals write it into the worker's row.
        declared: dict[str, Any] = {"controls": (), "frame": None}
        if load.classes is not None:
            classes = tuple(one.model_copy(update=declared) for one in load.classes)
            declared = {**declared, "classes": classes}
        await self._bus.publish(LOAD, load.worker, load.model_copy(update=declared))

    async def _beat(self) -> None:
        load = self._report()
        asked_at = self._clock.monotonic()
        try:
            await self._send(load)
            answer = await self._bus.call(RENEW, Renew(load=load), deadline_s=self._answer_s)
        except NoServerError:
            self._deliver(events.RenewalUnavailable(asked_at))
        except WorkerGoneError as error:
            # A renewal under way gets this answer too when the final report overtakes it.
            if not self._leaving:
                self._gone(error.detail)
        except IncompatibleVersionError as error:
            # This worker does not count for this state store. Its sessions go to other workers.
            log.error("renewal refused", error=error.detail, code=error.code)
        except UnavailableError as error:
            log.warning("not renewed", error=error.detail)
            if error.answered:
                # The state store answers and its database does not: the state store cannot reassign sessions
                # either.
                self._deliver(events.RenewalUnavailable(asked_at))
        except TurboServeError as error:
            log.error("renewal refused", error=error.detail, code=error.code)
        except (nats.errors.Error, OSError) as error:
            log.warning("not renewed", error=repr(error))
        else:
            self.answered = True
            self._deliver(
                events.Renewed(asked_at, answer.assigned, answer.drain, answer.incoming, answer.keys)
            )


def starting(worker: str, settings: Settings, device: str, pid: int, now: float) -> LoadReport:
    """Report of a worker that cannot serve yet: no capacity, no profile.

    It names the classes of a worker of several, so that these are known before they are loaded.
    """
    models = settings.models
    return LoadReport(
        worker=worker,
        model=models[0],
        capacity=0,
        classes=tuple(ServedClass(model=one, capacity=0) for one in models) if len(models) > 1 else None,
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
    heartbeat = Heartbeat(bus, clock, settings, lambda: announcement.report, announcement.handle, gone)
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
