"""Steps after a commit, while the caller waits for a bounded time: events, fence, assignments."""

from __future__ import annotations

import asyncio

from turboserve import logs
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.sessions import SessionRecord
from turboserve.state_store.hot.playheads import Playheads
from turboserve.state_store.ports.records import SessionRow
from turboserve.state_store.publish.assignments import Assignments
from turboserve.state_store.publish.fence import Fence
from turboserve.state_store.publish.outbox import Outbox
from turboserve.tasks import BackgroundTasks

FENCE_TIMEOUT_S = 1.0
"""Maximum seconds that a caller waits for the fence. The row is committed, and the steps continue anyway."""

log = logs.get("post_commit")


class PostCommit:
    """Steps after a commit. They cannot fail a request: a sweep repairs those that were interrupted."""

    def __init__(self, outbox: Outbox, fence: Fence, assignments: Assignments, playheads: Playheads) -> None:
        self._outbox, self._fence = outbox, fence
        self._assignments, self._playheads = assignments, playheads
        self._tasks = BackgroundTasks()

    def events(self) -> None:
        self._outbox.wake()

    async def changed(self, record: SessionRecord, *named: str | None) -> SessionRecord:
        """Publish a change that keeps the owner. Returns the record to answer with.

        `named`: workers that the row named before, which are informed as well.
        """
        self._outbox.wake()
        await self._assignments.notify(record, *named)
        return self._playheads.apply_to(record)

    async def owner_changed(
        self, record: SessionRecord, fence_revision: int, *named: str | None
    ) -> SessionRecord:
        """Publish a change of owner. Returns the record to answer with, fenced if that was done in time."""
        self._outbox.wake()
        return await self._fenced(record, SessionRow(record, fence_revision), *named)

    async def _fenced(
        self, record: SessionRecord, known: SessionRow | None, *named: str | None
    ) -> SessionRecord:
        task = self._tasks.create(self._settle(record.id, known, *named))
        await asyncio.wait({task}, timeout=FENCE_TIMEOUT_S)
        settled = task.result() if task.done() else None
        same = settled is not None and settled.epoch == record.epoch
        return self._playheads.apply_to(settled if settled is not None and same else record)

    async def settled(self, records: list[SessionRecord]) -> list[SessionRecord]:
        """Write missing fences of `records` if possible now. Returns the records."""
        out: list[SessionRecord] = []
        for record in records:
            if record.own_revision is None and record.epoch > 0:
                out.append(await self._fenced(record, None))
            else:
                out.append(record)
        return out

    async def fresh(self, record: SessionRecord) -> SessionRecord:
        [answer] = await self._playheads.onto([record])
        return answer

    async def _settle(
        self, session: str, known: SessionRow | None, *named: str | None
    ) -> SessionRecord | None:
        try:
            return await self._fence.settle(session, *named, known=known)
        except TurboServeError as error:
            log.warning("fence left to the sweep", session=session, error=error.detail)
        except Exception:
            log.exception("fence left to the sweep", session=session)
        return None
