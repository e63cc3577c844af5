"""Runs the core's commands against the state store and the broker, and returns their outcomes as events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import nats.errors
from pydantic import ValidationError

from turboserve import logs, subjects
from turboserve.allocation.linear import SolverError
from turboserve.bus import Bus
from turboserve.bus.client import NoServerError
from turboserve.clock import Clock
from turboserve.contracts import requests
from turboserve.contracts.base import Contract
from turboserve.contracts.errors import (
    ConflictError,
    NoCapacityError,
    NotFoundError,
    SessionNotFoundError,
    StaleStateError,
    StaleTermError,
    TransitionError,
    TurboServeError,
    UnavailableError,
    WorkerGoneError,
)
from turboserve.contracts.leading import TermFenced
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import WorkerRecord
from turboserve.daemon_threads import DaemonThreads
from turboserve.scheduler.messages import (
    AbandonMigration,
    AllListed,
    Answered,
    BeginMigration,
    Command,
    CommitMigration,
    DeclareGone,
    Event,
    ListAll,
    ListWorkers,
    Place,
    ReadSession,
    RecordDecision,
    Refused,
    Release,
    SendFeedback,
    SharesSolved,
    SolveShares,
    SuspendIdle,
    WorkersListed,
)
from turboserve.scheduler.placement import Solve, solve_shares
from turboserve.scheduler.placement.quotas import Quotas, ShareProblem
from turboserve.scheduler.placement.share_keeper import quotas_of_problems
from turboserve.subject_types import Endpoint

Req = TypeVar("Req", bound=Contract)
Resp = TypeVar("Resp", bound=Contract)
log = logs.get("scheduler")
LIVE_PHASES = tuple(phase for phase in Phase if not phase.ended)
PAGE = 100
"""Sessions in one page of a listing: each page takes only some ms of the state store and of the scheduler, so
that other requests and events need not wait longer."""


class Executor:
    """Runs one command and returns one event. Errors of the broker and the store become events."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        term: int = 0,
        on_leadership_lost: Callable[[], None] = lambda: None,
        solve: Solve = solve_shares,
    ) -> None:
        """Requests that only a leader may send carry `term`.

        The executor calls `on_leadership_lost` when the store reports that the term is over. `solve` decides
        the shares of classes.
        """
        self._solve = solve
        self._not_solved: str | None = None
        """Why shares were not solved last time. The core asks again each second; one log line is enough."""
        # Any distribution can install a policy. One that hangs must not keep the process from ending.
        self._solving = DaemonThreads("shares")
        self._bus, self._clock = bus, clock
        self._term, self._on_leadership_lost = term, on_leadership_lost

    async def run(self, command: Command) -> Event | None:
        """Run `command`; returns the event that answers it, or None for a command without an answer."""
        ticket = getattr(command, "ticket", None)
        try:
            return await self._run(command)
        except TurboServeError as error:
            if isinstance(error, StaleTermError):
                self._on_leadership_lost()
            refused = refusal(error, command)
            if refused is Refused.UNKNOWN and not isinstance(error, UnavailableError):
                log.error("command failed", command=command, code=error.code, error=error.detail)
            else:
                say = log.debug if refused is Refused.NOT_SENT else log.info
                say("command refused", command=type(command).__name__, code=error.code, error=error.detail)
        except ValidationError as error:
            log.error("unreadable answer", command=command, error=str(error))
            refused = Refused.UNKNOWN
        except (nats.errors.Error, OSError) as error:
            log.warning("not published", command=type(command).__name__, error=repr(error))
            refused = Refused.NOT_SENT
        return None if ticket is None else Answered(ticket, refused=refused)

    async def _run(self, command: Command) -> Event | None:
        call = self._call
        match command:
            case Place(ticket, version, decision, other_weights):
                request = requests.PlaceSession(
                    session=command.session,
                    expected_version=version,
                    worker=command.worker,
                    decision=decision.model_copy(update={"at": self._clock.wall()}),
                    other_weights=other_weights,
                )
                return Answered(ticket, await call(subjects.PLACE_SESSION, request))
            case BeginMigration(ticket, version, decision):
                begin = requests.BeginMigration(
                    session=command.session,
                    expected_version=version,
                    target=command.worker,
                    decision=decision,
                )
                return Answered(ticket, await call(subjects.BEGIN_MIGRATION, begin))
            case CommitMigration(ticket):
                commit = requests.CommitMigration(
                    session=command.session,
                    migration=command.migration,
                    target=command.worker,
                    next_chunk=command.next_chunk,
                    digest=command.digest,
                    numbers=command.numbers,
                )
                return Answered(ticket, await call(subjects.COMMIT_MIGRATION, commit))
            case AbandonMigration(ticket, session, migration, reason, release):
                abandon = requests.AbandonMigration(
                    session=session, migration=migration, reason=reason, release=release
                )
                return Answered(ticket, await call(subjects.ABANDON_MIGRATION, abandon))
            case Release(ticket, version, decision):
                released = requests.ReleaseSession(
                    session=command.session, expected_version=version, decision=decision
                )
                return Answered(ticket, await call(subjects.RELEASE_SESSION, released))
            case SuspendIdle(ticket, session, version):
                idle = requests.SuspendIdle(session=session, expected_version=version)
                return Answered(ticket, await call(subjects.SUSPEND_IDLE, idle))
            case ReadSession(ticket, session):
                return Answered(
                    ticket, await call(subjects.GET_SESSION, requests.SessionRef(session=session))
                )
            case DeclareGone(ticket, worker, reason, renewed_at):
                gone = requests.WorkerGone(
                    worker=worker, reason=reason, term=self._term, renewed_at=renewed_at
                )
                await call(subjects.WORKER_GONE, gone)
                return Answered(ticket)
            case ListWorkers(ticket):
                return WorkersListed(ticket, await self._workers())
            case ListAll(ticket):
                # List sessions first: an owner that is missing from the later list of workers is gone.
                sessions = await self._sessions()
                return AllListed(ticket, await self._workers(), sessions)
            case SolveShares():
                return await self._shares(command)
            case RecordDecision(decision):
                stamped = decision.model_copy(update={"at": self._clock.wall()})
                await call(subjects.NOTE_DECISION, requests.NoteDecision(decision=stamped))
            case SendFeedback(feedback):
                stamped_feedback = feedback.model_copy(update={"at": self._clock.wall()})
                await self._bus.publish(subjects.FEEDBACK, feedback.model, stamped_feedback)
        return None

    async def _shares(self, command: SolveShares) -> SharesSolved:
        """Solve in a thread: a program takes milliseconds, and more the more kinds of workers there are."""
        solve = partial(_quotas_or_error, self._solve, command.problems)
        try:
            quotas = await asyncio.get_running_loop().run_in_executor(self._solving, solve)
        except Exception as error:
            # Without shares, placement is min-max alone.
            reason = str(error) or repr(error)
            if reason != self._not_solved:
                log.warning("shares not solved", error=repr(error.__cause__ or error))
            self._not_solved = reason
            return SharesSolved(command.ticket, error=reason)
        self._not_solved = None
        return SharesSolved(command.ticket, quotas)

    async def _call(self, endpoint: Endpoint[Req, Resp], request: Req) -> Resp:
        """Send a request to the store, with this scheduler's term if the request needs one."""
        if isinstance(request, TermFenced):
            request = request.model_copy(update={"term": self._term})
        return await self._bus.call(endpoint, request)

    async def _workers(self) -> tuple[WorkerRecord, ...]:
        return (await self._bus.call(subjects.LIST_WORKERS, requests.ListWorkers())).workers

    async def _sessions(self) -> tuple[SessionRecord, ...]:
        found: list[SessionRecord] = []
        after: str | None = None
        while True:
            request = requests.ListSessions(phases=LIVE_PHASES, limit=PAGE, after=after)
            page = await self._bus.call(subjects.LIST_SESSIONS, request)
            found.extend(page.sessions)
            if page.next is None:
                return tuple(found)
            after = page.next


def _quotas_or_error(solve: Solve, problems: tuple[ShareProblem, ...]) -> Quotas:
    """Return the quotas. Raises SolverError, whatever a policy raises.

    In the event loop, its `SystemExit` would end the process. Its `StopIteration` or `CancelledError` would
    leave the command without an answer.
    """
    try:
        return quotas_of_problems(solve, problems)
    except BaseException as error:
        raise SolverError(str(error) or repr(error)) from error


def refusal(error: TurboServeError, command: Command) -> Refused:
    """Classify an error. If the command may have been carried out, the result is `UNKNOWN`."""
    match error:
        case NoServerError():
            return Refused.NOT_SENT
        case StaleStateError():
            return Refused.STALE_STATE
        case ConflictError() | TransitionError():
            return Refused.CONFLICT
        case NoCapacityError():
            return Refused.NO_CAPACITY
        case WorkerGoneError():
            return Refused.WORKER_GONE
        case SessionNotFoundError():
            return Refused.NOT_FOUND
        case NotFoundError():
            return Refused.WORKER_GONE if isinstance(command, Place | BeginMigration) else Refused.NOT_FOUND
        case _:
            return Refused.UNKNOWN
