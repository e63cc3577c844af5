"""Renewals: at every heartbeat and after every change, report what is held and receive the assigned rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

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
from turboserve.contracts.workers import LoadReport, WorkerPhase
from turboserve.subjects import LOAD, RENEW
from turboserve.worker.service import events

PAUSE_S = 0.05
"""Smallest time between two reports, seconds."""
FINAL_REPORT_TIMEOUT_S = 0.3
"""Time to wait for the answer to the final report, seconds. The state store applies the report also when its
answer comes too late."""

log = logs.get("heartbeat")


class Heartbeat:
    """Sends LOAD and RENEW. Answers go to `deliver_event`; the refusal of a worker that was declared gone
    goes to `gone`."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        heartbeat_s: float,
        report: Callable[[], LoadReport],
        deliver_event: Callable[[events.Input], None],
        gone: Callable[[str], None],
    ) -> None:
        self._bus, self._clock, self._heartbeat_s = bus, clock, heartbeat_s
        self._report, self._deliver, self._gone = report, deliver_event, gone
        self._wanted = asyncio.Event()
        self.answered = False
        """Whether the state store has ever answered."""
        self._leaving = False

    def soon(self) -> None:
        """Report at once rather than at the next heartbeat."""
        self._wanted.set()

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

    async def _beat(self) -> None:
        load = self._report()
        asked_at = self._clock.monotonic()
        try:
            await self._bus.publish(LOAD, load.worker, load)
            answer = await self._bus.call(RENEW, Renew(load=load))
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
