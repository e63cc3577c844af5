"""The endpoint for operators' requests to migrate a session. Each request waits for the core's answer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from turboserve import subjects
from turboserve.bus import Bus
from turboserve.contracts.errors import DeadlineError, UnavailableError
from turboserve.contracts.requests import MigrateSession, MigrationAccepted, SessionRef
from turboserve.scheduler.messages import Event, MigrationRequested, Reply, SessionChanged

ANSWER_TIMEOUT_S = 2.5
"""Below `request_deadline_s`, so that the caller gets an explanation if the core's answer is late."""


class OperatorEndpoint:
    """Serves `scheduler.session.migrate` while this process leads."""

    def __init__(self, bus: Bus, feed: Callable[[Event], None], leads: Callable[[], bool]) -> None:
        self._bus, self._feed, self._leads = bus, feed, leads
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Reply]] = {}

    async def migrate(self, request: MigrateSession) -> MigrationAccepted:
        """Begin a migration; returns the session's row and the decision.

        Raises the store's error for a session that the tenant does not have, and the core's error for a
        session that cannot be migrated.
        """
        ref = SessionRef(session=request.session, tenant=request.tenant)
        record = await self._bus.call(subjects.GET_SESSION, ref)
        if not self._leads():
            raise UnavailableError("the scheduler is changing its leader", retry_after_s=1.0)
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            # The core may not have this row yet, for example of a session that has just been placed.
            self._feed(SessionChanged(record))
            self._feed(MigrationRequested(number, request.session, request.worker))
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                reply = await answer
        except TimeoutError:
            raise DeadlineError("the migration may have begun: read the session", retry_after_s=1.0) from None
        finally:
            del self._waiting[number]
        if reply.error is not None:
            raise reply.error
        assert reply.record is not None
        assert reply.decision is not None
        return MigrationAccepted(record=reply.record, decision=reply.decision)

    def answer(self, reply: Reply) -> None:
        """Pass the core's reply to the request that waits for it. A reply after the time-out is dropped."""
        waiting = self._waiting.get(reply.request)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)
