"""Postgres in memory: statements, commits, crashes and timeouts. It belongs to no process."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any, TypeVar

from turboserve.simulation.runtime.rows.behavior import CommitOutcome, PostgresBehavior
from turboserve.simulation.runtime.rows.locks import LockTable, Waiter
from turboserve.simulation.runtime.rows.session import BlockedError, Session
from turboserve.simulation.runtime.rows.tables import Table, Tables
from turboserve.state_store.ports.database import unavailable

T = TypeVar("T")

DEADLOCK_S = 1.0
"""Time for which a statement waits before Postgres looks for a deadlock (`deadlock_timeout`)."""

_Undo = list[tuple[Table[Any, Any], Any, Any]]


class MemoryPostgres:
    """One server. Its callbacks run in a context of no process, so that frozen clients do not delay it."""

    def __init__(
        self, behavior: PostgresBehavior | None = None, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.behavior = behavior or PostgresBehavior()
        self.loop = loop or asyncio.get_running_loop()
        self.tables = Tables()
        self.locks = LockTable()
        self.down = self.disk_full = False
        self.on_commit: Callable[[Table[Any, Any], Any, Any, Any], None] | None = None
        """Called at each commit for each row, with the table, the key, and the row before and after."""
        self.on_lost: Callable[[Table[Any, Any], Any, Any, Any], None] | None = None
        """As `on_commit`, for each row that a crash reverts."""
        self.transactions = 0
        """Number of committed transactions."""
        self._context = Context()
        self._sessions: dict[Session, None] = {}
        self._frozen_until = self._slow_until = self._slow_s = 0.0
        self._unflushed: deque[tuple[float, _Undo]] = deque()
        self._reaper: asyncio.TimerHandle | None = None

    @property
    def idle_transactions(self) -> int:
        """Number of transactions that wait for their client's next statement."""
        return sum(not session.autocommit and session.idle_since is not None for session in self._sessions)

    # Faults

    def crash(self) -> None:
        """Crash as with `kill -9`. Commits that did not wait for the disk may be lost, the newest first."""
        self.down = True
        for session in list(self._sessions):
            self._end(session)
        self._forget_flushed()
        for _ in range(self.behavior.lost(len(self._unflushed))):
            for table, key, before in reversed(self._unflushed.pop()[1]):
                after = table.rows.get(key)
                table.set(key, before)
                if self.on_lost is not None:
                    self.on_lost(table, key, after, before)
        self._unflushed.clear()

    def stop(self) -> None:
        """Stop in an orderly way: the server is down, and no commit is lost."""
        self._unflushed.clear()
        self.crash()

    def start(self) -> None:
        """Accept connections again."""
        self.down = False

    def freeze(self, seconds: float) -> None:
        """Freeze as with SIGSTOP: answer nothing for `seconds`, then execute what was sent."""
        self._frozen_until = max(self._frozen_until, self.loop.time() + seconds)

    def slow_down(self, seconds: float, statement_s: float) -> None:
        """Make each round trip take `statement_s` longer, for `seconds`."""
        self._slow_until, self._slow_s = self.loop.time() + seconds, statement_s

    # Statements

    def send(self, session: Session, run: Callable[[], T], future: asyncio.Future[T]) -> None:
        """Send a client's statement; `future` receives its answer."""
        delay_s = self.behavior.delay_s()
        if self.behavior.at_commit and (delay_s := session.owe(delay_s)) == 0.0:
            self._arrive(session, run, future)
            return
        if self._slow_until > self.loop.time():
            delay_s += self._slow_s
            self._limit(session, future)
        if delay_s > 0.0:
            self.loop.call_later(delay_s, self._arrive, session, run, future, context=self._context)
        else:
            self.loop.call_soon(self._arrive, session, run, future, context=self._context)

    def _arrive(self, session: Session, run: Callable[[], T], future: asyncio.Future[T]) -> None:
        if self.down or session.ended:
            self._end(session)
            _fail(session, future, unavailable())
            return
        now = self.loop.time()
        if self._frozen_until > now:
            self._limit(session, future)
            self.loop.call_at(self._frozen_until, self._arrive, session, run, future, context=self._context)
            return
        if session.closed and not (session.committing or session.autocommit):
            _fail(session, future, unavailable())
            return
        if not session.opened:
            session.opened = True
            self._sessions[session] = None
            self._watch(session.idle_limit_s)
        self._run(session, run, future)

    def _run(self, session: Session, run: Callable[[], T], future: asyncio.Future[T]) -> None:
        if session.committing and not self._reaches(session, future):
            return
        session.journal.clear()
        try:
            result = run()
        except BlockedError as blocked:
            session.undo_statement()
            self._wait(session, run, future, blocked)
            return
        except Exception as error:
            self._fail_statement(session)
            _fail(session, future, error)
            return
        if session.autocommit:
            if session.writes and not self._reaches(session, future):
                return
            self._commit_statement(session)
        session.idle_since = self.loop.time()
        session.pending = None
        if not future.done():
            future.set_result(result)

    def _reaches(self, session: Session, future: asyncio.Future[Any]) -> bool:
        """Return whether the commit's connection holds. If it breaks, the commit takes effect or not."""
        outcome = self.behavior.commit()
        if outcome is CommitOutcome.DONE:
            return True
        if outcome is CommitOutcome.ANSWER_LOST:
            self.commit(session)
        self._end(session)
        _fail(session, future, unavailable())
        return False

    def _fail_statement(self, session: Session) -> None:
        session.pending = None
        session.idle_since = self.loop.time()
        if session.closed:
            self.roll_back(session)
        elif session.autocommit:
            session.writes.clear()
            self.locks.release(session, session.kept.__contains__)
        else:
            session.failed = True

    def _commit_statement(self, session: Session) -> None:
        self._apply(session)
        self.locks.release(session, session.kept.__contains__)
        if session.closed:
            # Its client is gone, and had sent the statement before.
            self._end(session)

    # Waiting for locks

    def _wait(
        self, session: Session, run: Callable[[], T], future: asyncio.Future[T], blocked: BlockedError
    ) -> None:
        now = self.loop.time()
        until = min(now + session.lock_limit_s, max(session.deadline, now))
        timers: list[asyncio.TimerHandle] = []

        def again() -> None:
            for timer in timers:
                timer.cancel()
            self.loop.call_soon(self._arrive, session, run, future, context=self._context)

        def look() -> None:
            if self.locks.deadlocked(session):
                give_up()

        def give_up() -> None:
            for timer in timers:
                timer.cancel()
            self.locks.stop_waiting(session)
            self._fail_statement(session)
            _fail(session, future, unavailable())

        if now + DEADLOCK_S < until:
            timers.append(self.loop.call_later(DEADLOCK_S, look, context=self._context))
        timers.append(self.loop.call_at(until, give_up, context=self._context))
        self.locks.wait(Waiter(session, blocked.key, blocked.mode, again))

    def _limit(self, session: Session, future: asyncio.Future[Any]) -> None:
        """Set the client's deadline for a statement that may take long."""
        if math.isfinite(session.deadline) and not session.closed:
            self.loop.call_at(session.deadline, self._give_up, session, future, context=self._context)

    def _give_up(self, session: Session, future: asyncio.Future[Any]) -> None:
        """Fail the statement, because the client's deadline passed while the server was frozen or slow."""
        if not future.done():
            _fail(session, future, unavailable())
            session.abandon()

    # Ends of transactions

    def commit(self, session: Session) -> None:
        """Make the session's writes visible, and end its transaction."""
        self._apply(session)
        self.roll_back(session)

    def roll_back(self, session: Session) -> None:
        """Discard the session's writes, and release its locks."""
        session.writes.clear()
        self._sessions.pop(session, None)
        self.locks.stop_waiting(session)
        self.locks.release(session)

    def _end(self, session: Session) -> None:
        """Close the session's connection at the server."""
        session.closed = session.ended = True
        self.roll_back(session)
        if session.pending is not None:
            _fail(session, session.pending, unavailable())
            session.pending = None

    def _apply(self, session: Session) -> None:
        if not session.writes:
            return
        writes = [(table, key, row) for table, rows in session.writes.items() for key, row in rows.items()]
        undo: _Undo = [(table, key, table.set(key, row)) for table, key, row in writes]
        session.writes = {}
        self.transactions += 1
        if session.durable:
            self._unflushed.clear()
        else:
            self._forget_flushed()
            self._unflushed.append((self.loop.time(), undo))
        if self.on_commit is not None:
            for table, key, before in undo:
                self.on_commit(table, key, before, table.rows.get(key))

    def _forget_flushed(self) -> None:
        horizon = self.loop.time() - self.behavior.unflushed_s
        while self._unflushed and self._unflushed[0][0] < horizon:
            self._unflushed.popleft()

    def check_disk(self, *, inserts: bool) -> None:
        """Raise UnavailableError if the disk is full and the write needs room."""
        if self.disk_full and (inserts or self.behavior.refuses_update()):
            raise unavailable(answered=True)

    # Silent sessions

    def _watch(self, limit_s: float) -> None:
        if self._reaper is not None and self._reaper.when() > self.loop.time() + limit_s:
            self._reaper.cancel()
            self._reaper = None
        if self._reaper is None:
            self._reaper = self.loop.call_later(limit_s, self._reap, context=self._context)

    def _reap(self) -> None:
        """End sessions that are silent between two statements for too long, or past their deadline."""
        self._reaper = None
        now = self.loop.time()
        rest = []
        for session in list(self._sessions):
            if session.idle_since is None:
                rest.append(session.idle_limit_s)
                continue
            end = session.idle_since + session.idle_limit_s
            stopped = session.process is not None and session.process.frozen_until > now
            if not stopped:
                end = min(end, session.deadline)
            if end <= now:
                self._end(session)
            else:
                rest.append(end - now)
        if rest:
            self._watch(min(rest))


def _fail(session: Session, future: asyncio.Future[Any], error: BaseException) -> None:
    if future.done():
        return
    if session.abandoned:
        # The client of the session is gone.
        future.cancel()
    else:
        future.set_exception(error)
