"""The table of all NATS subjects: their senders, readers and messages.

`turboserve.broker_accounts` derives the broker's accounts and permissions from this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from turboserve.contracts import chunks, cost, leading, pool, requests, sessions, workers
from turboserve.contracts.base import Contract

SERVICES = ("gateway", "scheduler", "autoscaler", "worker", "state-store")
ADMIN = "admin"
"""The broker user of tests and tools. It may do everything that services may do."""

CHUNKS = "CHUNKS"
"""Stream of `own.<session>` and `chunk.<session>.<identity>`. The fence needs both in one order."""
EVENTS = "EVENTS"
"""Stream of session events and worker events."""

Req = TypeVar("Req", bound=Contract)
Resp = TypeVar("Resp", bound=Contract)
Msg = TypeVar("Msg", bound=Contract)


def identity_of(worker: str) -> str:
    """Return the broker identity of a worker's id: the part before the first `_`."""
    return worker.partition("_")[0]


@dataclass(frozen=True)
class Caller:
    """The sender of a request. The broker lets each user name only itself in the request's subject."""

    role: str
    """A service's name, or `ADMIN`."""
    id: str | None = None
    """Identity of a worker with its own broker user. None: the role has one user."""

    @property
    def token(self) -> str:
        """The caller's part of a subject: `gateway`, or `worker.wk1`."""
        return self.role if self.id is None else f"{self.role}.{self.id}"

    @classmethod
    def from_token(cls, token: str) -> Caller:
        """Parse a caller's token. Raises ValueError for anything that `token` never returns."""
        role, *rest = token.split(".")
        if not role or len(rest) > 1 or "" in rest:
            raise ValueError(f"caller: {token!r} is not ROLE or ROLE.ID")
        return cls(role, *rest)


@dataclass(frozen=True)
class Endpoint(Generic[Req, Resp]):
    """Request and reply with a deadline. One of the server's instances answers (queue group).

    The subject of a request is `SUBJECT.from.CALLER`.
    """

    subject: str
    request: type[Req]
    response: type[Resp]
    server: str
    callers: tuple[str, ...]
    periodic: bool = False
    """Whether services send the request at intervals. Such requests are not traced by default."""

    def request_subject(self, caller: str) -> str:
        """Return the subject to which the caller with this token sends requests."""
        return f"{self.subject}.from.{caller}"

    @property
    def every(self) -> str:
        """Pattern of the requests of all callers."""
        return f"{self.subject}.from.>"

    def caller_of(self, subject: str) -> Caller:
        """Return the sender of a request that arrived on `subject`. Raises ValueError if there is none."""
        prefix, _, token = subject.partition(".from.")
        if prefix != self.subject:
            raise ValueError(f"subject: {subject!r} is no request to {self.subject}")
        return Caller.from_token(token)


@dataclass(frozen=True)
class Topic(Generic[Msg]):
    """Publish and subscribe with at-most-once delivery, only for messages whose loss is repaired otherwise.

    `pattern` has one `{id}`: the session, worker, model or pool that a message is about.
    """

    pattern: str
    message: type[Msg]
    senders: tuple[str, ...]
    readers: tuple[str, ...]
    by_worker: bool = False
    """Whether `{id}` is a worker, as `IDENTITY.WORKER`. The identity lets permissions tell workers apart."""
    author: str | None = None
    """Field of the message that names the sending worker or pool. It must be the one in the subject."""

    def of(self, token: str) -> str:
        return self.pattern.format(id=f"{identity_of(token)}.{token}" if self.by_worker else token)

    def of_identity(self, identity: str | None) -> str:
        """Pattern of what the workers of this identity send or read. None: all subjects of the topic."""
        return self.pattern.format(id=f"{identity or '*'}.*" if self.by_worker else "*")

    @property
    def every(self) -> str:
        return self.of_identity(None)


@dataclass(frozen=True)
class Log:
    """Subjects in a stream, one per session or worker. The broker republishes accepted messages.

    `live_pattern` has the subjects of republished messages. A canary's pattern has no `{id}`: it is one
    subject.
    """

    stream: str
    pattern: str
    live_pattern: str | None
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    """Services that receive republished messages."""
    history_readers: tuple[str, ...] = ()
    """Services that read stored messages."""
    by_identity: bool = False
    """Whether the writer's identity follows `{id}`. The identity lets permissions tell workers apart."""

    def of(self, token: str) -> str:
        """Return the subject of entries about `token`, or the pattern that covers all identities."""
        return self._with_identity(self.pattern, token, "*")

    def by(self, token: str, worker: str) -> str:
        """Return the subject to which `worker` appends entries about `token`."""
        return self._with_identity(self.pattern, token, identity_of(worker))

    def of_identity(self, identity: str | None) -> str:
        """Return the pattern of what the workers of this identity append. None: of all entries."""
        return self._with_identity(self.pattern, "*", identity or "*")

    def token(self, subject: str) -> str:
        """Return the session or worker that a subject of this log is about."""
        return subject.removeprefix(self.pattern.format(id="")).partition(".")[0]

    def identity(self, subject: str) -> str | None:
        """Return the identity in a subject of this log, or None if the subject names no identity."""
        return subject.removeprefix(self.pattern.format(id="")).partition(".")[2] or None

    def live(self, token: str) -> str:
        assert self.live_pattern is not None
        return self._with_identity(self.live_pattern, token, "*")

    @property
    def every(self) -> str:
        return self.of_identity(None)

    def takes(self, subject: str) -> bool:
        """Whether messages on `subject` belong to this log. Subjects of earlier versions do, too."""
        kind, *rest = subject.split(".")
        return kind == self.pattern.partition(".")[0] and 1 <= len(rest) <= 1 + self.by_identity

    def _with_identity(self, pattern: str, token: str, identity: str) -> str:
        return pattern.format(id=f"{token}.{identity}" if self.by_identity else token)


OWN = Log(CHUNKS, "own.{id}", "live.own.{id}", ("state-store",), ("gateway",), ("state-store",))
CHUNK = Log(
    CHUNKS,
    "chunk.{id}",
    "live.chunk.{id}",
    ("worker",),
    ("gateway",),
    ("gateway", "worker", "state-store"),
    by_identity=True,
)
CHUNK_UNNAMED = Log(CHUNKS, "chunk.{id}", None, (), ())
"""Subject of chunks from earlier versions, whose workers all appended to one subject. The stream keeps such
entries until they expire, and takes no new ones."""
ANY_CHUNK = "chunk.>"
"""Pattern of the entries of `CHUNK` and `CHUNK_UNNAMED`."""
EVENT = Log(
    EVENTS,
    "event.{id}",
    "live.event.{id}",
    ("state-store",),
    ("gateway", "scheduler", "autoscaler"),
    ("gateway", "scheduler", "state-store"),
)
WORKER_EVENT = Log(
    EVENTS,
    "worker-event.{id}",
    "live.worker-event.{id}",
    ("state-store",),
    ("scheduler",),
    ("scheduler", "state-store"),
)
CANARY_CHUNKS = Log(
    CHUNKS, "canary.CHUNKS", "live.canary.CHUNKS", ("state-store",), ("gateway", "worker", "state-store")
)
"""Appended repeatedly. A service that receives it knows that the stream takes appends."""
CANARY_EVENTS = Log(
    EVENTS,
    "canary.EVENTS",
    "live.canary.EVENTS",
    ("state-store",),
    ("gateway", "scheduler", "autoscaler", "state-store"),
)
"""As `CANARY_CHUNKS`, for the stream EVENTS."""
CANARIES = (CANARY_CHUNKS, CANARY_EVENTS)
LOGS = (OWN, CHUNK, EVENT, WORKER_EVENT, *CANARIES)

LOAD = Topic(
    "load.{id}",
    workers.LoadReport,
    ("worker",),
    ("scheduler", "autoscaler"),
    by_worker=True,
    author="worker",
)
ASSIGN = Topic("assign.{id}", workers.Assignment, ("state-store",), ("worker",), by_worker=True)
PLAYHEAD = Topic("playhead.{id}", workers.Playhead, ("gateway",), ("worker", "state-store", "scheduler"))
LATENTS = Topic(
    "latents.{id}", chunks.LatentsHeader, ("worker",), ("state-store",), by_worker=True, author="worker"
)
FEEDBACK = Topic("feedback.{id}", pool.LoadFeedback, ("scheduler",), ("autoscaler",))
"""`id` is the model."""
POOL = Topic("pool.{id}", pool.PoolStatus, ("autoscaler",), ("gateway",), author="pool")
"""`id` is the pool."""
TOPICS: tuple[Topic[Contract], ...] = (LOAD, ASSIGN, PLAYHEAD, LATENTS, FEEDBACK, POOL)  # type: ignore[assignment]

_STORE = "state-store"
CREATE_SESSION = Endpoint(
    "state.session.create", requests.CreateSession, sessions.SessionRecord, _STORE, ("gateway",)
)
GET_SESSION = Endpoint(
    "state.session.get", requests.SessionRef, sessions.SessionRecord, _STORE, ("gateway", "scheduler")
)
LIST_SESSIONS = Endpoint(
    "state.session.list",
    requests.ListSessions,
    requests.SessionPage,
    _STORE,
    ("gateway", "scheduler"),
    periodic=True,
)
SUBMIT_PROMPT = Endpoint(
    "state.session.prompt", requests.SubmitPrompt, sessions.PromptReceipt, _STORE, ("gateway",)
)
PAUSE_SESSION = Endpoint(
    "state.session.pause", requests.SessionRef, sessions.SessionRecord, _STORE, ("gateway",)
)
RESUME_SESSION = Endpoint(
    "state.session.resume", requests.SessionRef, sessions.SessionRecord, _STORE, ("gateway",)
)
END_SESSION = Endpoint("state.session.end", requests.EndSession, sessions.SessionRecord, _STORE, ("gateway",))
FAIL_SESSION = Endpoint(
    "state.session.fail", requests.FailSession, sessions.SessionRecord, _STORE, ("worker",)
)
PLACE_SESSION = Endpoint(
    "state.session.place", requests.PlaceSession, sessions.SessionRecord, _STORE, ("scheduler",)
)
BEGIN_MIGRATION = Endpoint(
    "state.session.migration.begin", requests.BeginMigration, sessions.SessionRecord, _STORE, ("scheduler",)
)
COMMIT_MIGRATION = Endpoint(
    "state.session.migration.commit", requests.CommitMigration, sessions.SessionRecord, _STORE, ("scheduler",)
)
ABANDON_MIGRATION = Endpoint(
    "state.session.migration.abandon",
    requests.AbandonMigration,
    sessions.SessionRecord,
    _STORE,
    ("scheduler",),
)
NOTE_DECISION = Endpoint("state.session.note", requests.NoteDecision, requests.Done, _STORE, ("scheduler",))
RELEASE_SESSION = Endpoint(
    "state.session.release", requests.ReleaseSession, sessions.SessionRecord, _STORE, ("scheduler",)
)
SUSPEND_IDLE = Endpoint(
    "state.session.suspend-idle", requests.SuspendIdle, sessions.SessionRecord, _STORE, ("scheduler",)
)
LIST_DECISIONS = Endpoint(
    "state.session.decisions", requests.SessionRef, requests.DecisionPage, _STORE, ("gateway",)
)
RENEW = Endpoint("state.worker.renew", requests.Renew, workers.Renewal, _STORE, ("worker",), periodic=True)
WORKER_GONE = Endpoint(
    "state.worker.gone", requests.WorkerGone, requests.Done, _STORE, ("scheduler", "autoscaler")
)
DRAIN_WORKER = Endpoint("state.worker.drain", requests.DrainWorker, requests.Done, _STORE, ("autoscaler",))
LIST_WORKERS = Endpoint(
    "state.worker.list",
    requests.ListWorkers,
    requests.WorkerPage,
    _STORE,
    ("gateway", "scheduler", "autoscaler"),
    periodic=True,
)
REPORT_POOL = Endpoint(
    "state.pool.report", pool.PoolReport, pool.PoolOrders, _STORE, ("autoscaler",), periodic=True
)
ORDER_POOL = Endpoint("state.pool.order", pool.OrderPool, pool.PoolOrders, _STORE, ("gateway",))
GET_COST = Endpoint("state.cost.get", cost.GetCost, cost.CostReport, _STORE, ("gateway",))
CORRECT_COST = Endpoint("state.cost.correct", cost.CorrectCost, cost.Correction, _STORE, ("gateway",))
GET_LATENTS = Endpoint("state.latents.get", requests.GetLatents, chunks.LatentsHeader, _STORE, ("worker",))
"""The answer's body is the raw latents: see `Bus.call_raw`."""
MIGRATE_SESSION = Endpoint(
    "scheduler.session.migrate",
    requests.MigrateSession,
    requests.MigrationAccepted,
    "scheduler",
    ("gateway",),
)
GET_LEADER = Endpoint(
    "state.leader.get", leading.GetLeader, leading.LeaderRecord, _STORE, ("scheduler",), periodic=True
)
CAMPAIGN = Endpoint(
    "state.leader.campaign", leading.Campaign, leading.CampaignResult, _STORE, ("scheduler",), periodic=True
)
KEEP_LEAD = Endpoint(
    "state.leader.renew", leading.KeepLead, leading.LeaderRecord, _STORE, ("scheduler",), periodic=True
)
STEP_DOWN = Endpoint("state.leader.resign", leading.StepDown, leading.LeaderRecord, _STORE, ("scheduler",))

ENDPOINTS: tuple[Endpoint[Contract, Contract], ...] = (  # type: ignore[assignment]
    CREATE_SESSION,
    GET_SESSION,
    LIST_SESSIONS,
    SUBMIT_PROMPT,
    PAUSE_SESSION,
    RESUME_SESSION,
    END_SESSION,
    FAIL_SESSION,
    PLACE_SESSION,
    BEGIN_MIGRATION,
    COMMIT_MIGRATION,
    ABANDON_MIGRATION,
    NOTE_DECISION,
    RELEASE_SESSION,
    SUSPEND_IDLE,
    LIST_DECISIONS,
    RENEW,
    WORKER_GONE,
    DRAIN_WORKER,
    LIST_WORKERS,
    REPORT_POOL,
    ORDER_POOL,
    GET_COST,
    CORRECT_COST,
    GET_LATENTS,
    MIGRATE_SESSION,
    GET_LEADER,
    CAMPAIGN,
    KEEP_LEAD,
    STEP_DOWN,
)


def inbox_prefix(user: str) -> str:
    """Return the prefix of reply subjects of this broker user. No other user may subscribe to them."""
    return f"_INBOX_{user.replace('-', '_').replace('.', '_')}"
