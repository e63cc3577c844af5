"""The word to the workers: at once, and at most once; what is lost comes with the next renewal."""

from __future__ import annotations

import nats

from turboserve import logs
from turboserve.bus import Bus
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import Assignment
from turboserve.state_store.hot.playheads import Playheads
from turboserve.subjects import ASSIGN

log = logs.get("assignments")


class Assignments:
    """Publishes ASSIGN to the worker that a row names, and to the one it named before."""

    def __init__(self, bus: Bus, playheads: Playheads) -> None:
        self._bus, self._playheads = bus, playheads

    async def tell(self, record: SessionRecord, previous: str | None = None) -> None:
        """Never raises: a worker that is not told asks. A row whose fence is not in the log is kept back."""
        if record.own_revision is None:
            return
        message = Assignment(record=self._playheads.heard(record))
        for worker in {record.worker, previous} - {None}:
            try:
                await self._bus.publish(ASSIGN, str(worker), message)
            except (nats.errors.Error, OSError) as error:
                log.debug("assignment not sent", worker=worker, error=repr(error))
