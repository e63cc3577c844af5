"""Steps inside a transaction (term, lock of the row), and steps after its commit."""

from __future__ import annotations

import asyncio
import math

from turboserve import logs
from turboserve.contracts.errors import SessionNotFoundError, TurboServeError
from turboserve.contracts.leading import PoolFenced, TermFenced, pool_leader
from turboserve.contracts.pool import PoolReport
from turboserve.contracts.requests import SessionRef
from turboserve.contracts.sessions import SessionRecord
from turboserve.state_store.core.change import expect_term
from turboserve.state_store.hot.session_state import Playheads
from turboserve.state_store.ports.database import UnitOfWork
from turboserve.state_store.ports.records import SessionRow
from turboserve.state_store.publish.fence import Assignments, Fence
from turboserve.state_store.publish.outbox import Outbox
from turboserve.tasks import BackgroundTasks

SCHEDULER = "scheduler"
FENCE_TIMEOUT_S = 1.0
"""Maximum seconds that a caller waits for the fence. The row is committed, and the steps continue anyway."""

log = logs.get("post_commit")


async def fenced(db: UnitOfWork, request: TermFenced) -> None:
    """Hold the scheduler's term until this transaction ends. Raises StaleTermError if the sender's is old.

    Call this before any other row is locked: all transactions that hold a term lock it first.
    """
    await in_term(db, request.term)


async def in_term(db: UnitOfWork, term: int) -> None:
    """As `fenced`, for a term without a request."""
    expect_term(await db.leaders.share(SCHEDULER), term)


async def pool_fenced(db: UnitOfWork, request: PoolFenced | PoolReport) -> None:
    """As `fenced`, for the leader of the autoscalers that share a pool. Does nothing without a term."""
    if request.pool is not None and request.pool_term is not None:
        expect_term(await db.leaders.share(pool_leader(request.pool)), request.pool_term)


async def locked(db: UnitOfWork, ref: SessionRef) -> SessionRow:
    """Lock the row until the transaction ends, and return it. Raises SessionNotFoundError."""
    row = await db.sessions.get_row(ref.session, lock=True)
    visible(None if row is None else row.record, ref)
    assert row is not None
    return row


def visible(record: SessionRecord | None, ref: SessionRef) -> SessionRecord:
    """Return the record. Raises SessionNotFoundError if there is none, or it is another tenant's."""
    if record is None or (ref.tenant is not None and record.tenant != ref.tenant):
        raise SessionNotFoundError(f"there is no session {ref.session}", field="session")
    return record


class PostCommit:
    """Steps after a commit: events, fence, assignments. The caller waits for a bounded time.

    They cannot fail a request: a sweep repairs those that were interrupted.
    """

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
        self,
        record: SessionRecord,
        known: SessionRow | None,
        *named: str | None,
        within_s: float = math.inf,
    ) -> SessionRecord:
        task = self._tasks.create(self._settle(record.id, known, *named))
        await asyncio.wait({task}, timeout=min(FENCE_TIMEOUT_S, within_s))
        settled = task.result() if task.done() else None
        same = settled is not None and settled.epoch == record.epoch
        return self._playheads.apply_to(settled if settled is not None and same else record)

    async def settled(self, records: list[SessionRecord], within_s: float) -> list[SessionRecord]:
        """Write missing fences of `records` if possible within `within_s` seconds. Returns the records."""
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        out: list[SessionRecord] = []
        for record in records:
            left_s = until - loop.time()
            if record.own_revision is None and record.epoch > 0 and left_s > 0:
                record = await self._fenced(record, None, within_s=left_s)
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
