"""Operators' requests to migrate a session. Each is checked before the migration begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from turboserve.contracts.errors import (
    ConflictError,
    DeadlineError,
    InvalidInputError,
    NoCapacityError,
    NotFoundError,
    SessionNotFoundError,
    TransitionError,
    TurboServeError,
    UnavailableError,
)
from turboserve.contracts.sessions import Decision, Phase
from turboserve.scheduler.class_views import choice_of_worker, demand_with_entries, free_of
from turboserve.scheduler.messages import (
    Answered,
    BeginMigration,
    MigrationRequested,
    RecordDecision,
    Refused,
    Reply,
)
from turboserve.scheduler.migrations import Migrations, Take
from turboserve.scheduler.placement import Candidate, Choice, Demand, Placement
from turboserve.scheduler.projections import is_movable
from turboserve.scheduler.session_view import SessionView
from turboserve.scheduler.view import View
from turboserve.scheduler.worker_classes import worker_of
from turboserve.scheduler.worker_view import WorkerView
from turboserve.wording import counted

RETRY_S = 0.5


def not_ready() -> UnavailableError:
    """Return the error for a request that arrives before the view is filled.

    Each call makes a new error, because an error that is raised repeatedly keeps every traceback.
    """
    return UnavailableError("the scheduler has just started", retry_after_s=1.0)


class OperatorRequests:
    """Operators' requests that wait for the outcome of `BeginMigration`."""

    def __init__(self) -> None:
        self._waiting: dict[int, int] = {}
        """Ticket of a `BeginMigration` → number of the request that it answers."""

    def ask(
        self,
        asked: MigrationRequested,
        view: View,
        placement: Placement,
        candidates: Sequence[Candidate],
        now: float,
        take: Take,
    ) -> list[BeginMigration | Reply | RecordDecision]:
        """Begin the migration, or reply with an error. A lack of room is also recorded as a decision."""
        try:
            session, choice = choose(view, asked, placement, candidates, now)
        except TurboServeError as error:
            return [Reply(asked.request, error=error), *_notes(view, asked.session, error)]
        assert choice.worker is not None
        begin = Migrations.begin(view, session, choice.worker, choice.reason, choice.numbers, take)
        self._waiting[begin.ticket] = asked.request
        return [begin]

    def answered(self, view: View, begin: BeginMigration, answer: Answered) -> list[Reply | RecordDecision]:
        """Return the reply to the request that began this migration; nothing if no operator requested it."""
        request = self._waiting.pop(begin.ticket, None)
        if request is None:
            return []
        if answer.refused is None:
            return [Reply(request, answer.record, begin.decision)]
        error = error_of(answer.refused, begin.worker)
        return [Reply(request, error=error), *_notes(view, begin.session, error)]


def _notes(view: View, name: str, error: TurboServeError) -> list[RecordDecision]:
    """Build the decision record of a request that found no room. Other errors are not recorded."""
    session = view.sessions.get(name)
    if session is None or not isinstance(error, NoCapacityError):
        return []
    record, reason = session.record, f"an operator requested its migration: {error.detail}"
    return [
        RecordDecision(
            Decision(session=name, epoch=record.epoch, worker=record.worker, kind="stay", reason=reason)
        )
    ]


def choose(
    view: View, asked: MigrationRequested, placement: Placement, candidates: Sequence[Candidate], now: float
) -> tuple[SessionView, Choice]:
    """Return the session and its target. Raises a TurboServeError that says why it cannot be migrated."""
    session = session_of(view, asked, now)
    if asked.worker is not None:
        return session, named(view, session, asked.worker)
    return session, best(view, session, placement, candidates, now)


def session_of(view: View, asked: MigrationRequested, now: float) -> SessionView:
    """Return the session if it can be migrated now. Raises a TurboServeError that says why not."""
    session = view.sessions.get(asked.session)
    if session is None:
        raise SessionNotFoundError(f"there is no session {asked.session}", field="session")
    record = session.record
    quiesced = record.phase in (Phase.ACTIVE, Phase.SUSPENDED) and record.migration is None
    if not quiesced or record.worker is None:
        doing = "already migrating" if record.migration is not None else record.phase.value
        raise TransitionError(
            f"session {record.id} is {doing} and cannot be migrated", field="phase", limit=record.phase.value
        )
    source = view.workers.get(record.worker)
    if source is not None and not source.provides_state:
        raise TransitionError(
            f"its worker {record.worker} does not transfer sessions to other workers", field="session"
        )
    if not is_movable(view, session, now):
        raise ConflictError(
            f"session {record.id} is being placed or read",
            field="session",
            retry_after_s=RETRY_S,
        )
    return session


def named(view: View, session: SessionView, name: str) -> Choice:
    """Choose the worker that the operator names. Raises a TurboServeError if it cannot take the session."""
    record, worker = session.record, view.workers.get(name)
    if worker is None:
        raise NotFoundError(f"there is no worker {name}", field="worker")
    if name == record.worker:
        raise InvalidInputError(f"session {record.id} is at {name} already", field="worker")
    if not worker.serves(record.model):
        raise InvalidInputError(
            f"worker {name} serves {worker.model}, not {record.model}", field="worker", limit=worker.model
        )
    digest = worker.digest_of(record.model)
    if None not in (digest, record.weights_digest) and digest != record.weights_digest:
        raise InvalidInputError(
            f"worker {name} has the weights {digest}, and the session's state was made with "
            f"{record.weights_digest}",
            field="worker",
            limit=digest,
        )
    if not worker.ready:
        phase = "draining" if worker.draining else worker.process.phase.value
        raise NoCapacityError(f"worker {name} is {phase}", field="worker", limit=phase, retry_after_s=1.0)
    if record.phase.holds_slot and free_of(view, worker, record.model) < 1:
        raise NoCapacityError(
            f"worker {name} is full: it holds {counted(worker.load, 'session')}",
            field="worker",
            limit=worker.capacity,
            retry_after_s=1.0,
        )
    return Choice(record.id, name, f"an operator requested {name}", _numbers(worker))


def best(
    view: View, session: SessionView, placement: Placement, candidates: Sequence[Candidate], now: float
) -> Choice:
    """Let the placement choose another worker. Raises NoCapacityError if none has room."""
    record = session.record
    failed = {worker for worker, until in session.migration_failures.items() if until > now}
    demand = demand_with_entries(
        view,
        Demand(
            session=record.id,
            model=record.model,
            kind="migrate",
            excluded=frozenset({*failed, record.worker or ""}),
            weights_digest=record.weights_digest,
        ),
    )
    # A migration never puts a worker above K: the store would refuse it.
    others = [replace(c, floor_capacity=0) for c in candidates if worker_of(c.worker) != record.worker]
    choice = choice_of_worker(placement.place(others, [demand])[0])
    if choice.worker is None:
        raise NoCapacityError(f"no other worker: {choice.reason}", field="worker", retry_after_s=1.0)
    reason = f"an operator requested another worker: {choice.reason}"
    return Choice(record.id, choice.worker, reason, choice.numbers)


def _numbers(worker: WorkerView) -> dict[str, float]:
    return {"sessions": worker.load + 1, "capacity": worker.capacity}


def error_of(refused: Refused, worker: str) -> TurboServeError:
    """Return the operator's error for a `BeginMigration` that failed."""
    match refused:
        case Refused.NO_CAPACITY:
            return NoCapacityError(f"worker {worker} has no free slot", field="worker", retry_after_s=1.0)
        case Refused.WORKER_GONE:
            return NotFoundError(f"worker {worker} is gone", field="worker")
        case Refused.NOT_FOUND:
            return SessionNotFoundError("the session no longer exists", field="session")
        case Refused.NOT_SENT:
            return UnavailableError("the state store is unavailable", retry_after_s=RETRY_S)
        case Refused.UNKNOWN:
            return DeadlineError("the migration may have begun: read the session")
        case _:
            return ConflictError(
                "another request changed the session at the same time", field="session", retry_after_s=RETRY_S
            )
