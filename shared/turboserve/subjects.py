"""Every NATS subject in one table: who sends, who reads, what travels. Broker permissions come from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from turboserve.contracts import chunks, cost, leading, pool, requests, sessions, workers
from turboserve.contracts.base import Contract

SERVICES = ("gateway", "scheduler", "autoscaler", "worker", "state-store")

CHUNKS = "CHUNKS"
"""Stream of `own.<session>` and `chunk.<session>`: the fence and the chunk log share one order."""
EVENTS = "EVENTS"
"""Stream of session and worker events."""

Req = TypeVar("Req", bound=Contract)
Resp = TypeVar("Resp", bound=Contract)
Msg = TypeVar("Msg", bound=Contract)


@dataclass(frozen=True)
class Endpoint(Generic[Req, Resp]):
    """Request and reply with a deadline. One of the server's instances answers (queue group)."""

    subject: str
    request: type[Req]
    response: type[Resp]
    server: str
    callers: tuple[str, ...]


@dataclass(frozen=True)
class Topic(Generic[Msg]):
    """Plain publish and subscribe, at most once: only for what is repeated or repaired by other means.

    `pattern` has one `{id}`: the session or worker it is about.
    """

    pattern: str
    message: type[Msg]
    senders: tuple[str, ...]
    readers: tuple[str, ...]

    def of(self, token: str) -> str:
        return self.pattern.format(id=token)

    @property
    def every(self) -> str:
        return self.pattern.format(id="*")


@dataclass(frozen=True)
class Log:
    """One subject per session or worker in a stream; accepted messages are republished on `live`.

    A canary's pattern has no `{id}`: it is one subject.
    """

    stream: str
    pattern: str
    live_pattern: str | None
    writers: tuple[str, ...]
    readers: tuple[str, ...]

    def of(self, token: str) -> str:
        return self.pattern.format(id=token)

    def token(self, subject: str) -> str:
        """Of a subject of this log: the session or worker that it is about."""
        return subject.removeprefix(self.of(""))

    def live(self, token: str) -> str:
        assert self.live_pattern is not None
        return self.live_pattern.format(id=token)

    @property
    def every(self) -> str:
        return self.pattern.format(id="*")


OWN = Log(CHUNKS, "own.{id}", None, ("state-store",), ())
CHUNK = Log(CHUNKS, "chunk.{id}", "live.chunk.{id}", ("worker",), ("gateway", "worker", "state-store"))
EVENT = Log(EVENTS, "event.{id}", "live.event.{id}", ("state-store",), ("gateway", "scheduler", "autoscaler"))
WORKER_EVENT = Log(
    EVENTS, "worker-event.{id}", "live.worker-event.{id}", ("state-store",), ("scheduler", "autoscaler")
)
CANARY_CHUNKS = Log(
    CHUNKS, "canary.CHUNKS", "live.canary.CHUNKS", ("state-store",), ("gateway", "worker", "state-store")
)
"""Appended again and again: whoever hears it knows that the stream takes what is appended."""
CANARY_EVENTS = Log(
    EVENTS,
    "canary.EVENTS",
    "live.canary.EVENTS",
    ("state-store",),
    ("gateway", "scheduler", "autoscaler", "state-store"),
)
"""As `CANARY_CHUNKS`, for the other stream."""
CANARIES = (CANARY_CHUNKS, CANARY_EVENTS)
LOGS = (OWN, CHUNK, EVENT, WORKER_EVENT, *CANARIES)

LOAD = Topic("load.{id}", workers.LoadReport, ("worker",), ("scheduler", "autoscaler"))
ASSIGN = Topic("assign.{id}", workers.Assignment, ("state-store",), ("worker",))
PLAYHEAD = Topic("playhead.{id}", workers.Playhead, ("gateway",), ("worker", "state-store", "scheduler"))
LATENTS = Topic("latents.{id}", chunks.LatentsHeader, ("worker",), ("state-store",))
FEEDBACK = Topic("feedback.{id}", pool.LoadFeedback, ("scheduler",), ("autoscaler",))
"""`id` is the model."""
POOL = Topic("pool.{id}", pool.PoolStatus, ("autoscaler",), ("gateway", "scheduler"))
"""`id` is always `status`."""
TOPICS: tuple[Topic[Contract], ...] = (LOAD, ASSIGN, PLAYHEAD, LATENTS, FEEDBACK, POOL)  # type: ignore[assignment]

_STORE = "state-store"
CREATE_SESSION = Endpoint(
    "state.session.create", requests.CreateSession, sessions.SessionRecord, _STORE, ("gateway",)
)
GET_SESSION = Endpoint(
    "state.session.get",
    requests.SessionRef,
    sessions.SessionRecord,
    _STORE,
    ("gateway", "scheduler", "worker"),
)
LIST_SESSIONS = Endpoint(
    "state.session.list", requests.ListSessions, requests.SessionPage, _STORE, ("gateway", "scheduler")
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
    "state.session.fail", requests.FailSession, sessions.SessionRecord, _STORE, ("worker", "scheduler")
)
PLACE_SESSION = Endpoint(
    "state.session.place", requests.PlaceSession, sessions.SessionRecord, _STORE, ("scheduler",)
)
BEGIN_MOVE = Endpoint(
    "state.session.move.begin", requests.BeginMove, sessions.SessionRecord, _STORE, ("scheduler",)
)
COMMIT_MOVE = Endpoint(
    "state.session.move.commit", requests.CommitMove, sessions.SessionRecord, _STORE, ("scheduler",)
)
ABANDON_MOVE = Endpoint(
    "state.session.move.abandon", requests.AbandonMove, sessions.SessionRecord, _STORE, ("scheduler",)
)
NOTE_DECISION = Endpoint("state.session.note", requests.NoteDecision, requests.Done, _STORE, ("scheduler",))
SUSPEND_IDLE = Endpoint(
    "state.session.suspend-idle", requests.SuspendIdle, sessions.SessionRecord, _STORE, ("scheduler",)
)
LIST_DECISIONS = Endpoint(
    "state.session.decisions", requests.SessionRef, requests.DecisionPage, _STORE, ("gateway",)
)
RENEW = Endpoint("state.worker.renew", requests.Renew, workers.Renewal, _STORE, ("worker",))
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
)
REPORT_POOL = Endpoint("state.pool.report", pool.PoolReport, pool.PoolOrders, _STORE, ("autoscaler",))
ORDER_POOL = Endpoint("state.pool.order", pool.OrderPool, pool.PoolOrders, _STORE, ("gateway",))
GET_COST = Endpoint("state.cost.get", cost.GetCost, cost.CostReport, _STORE, ("gateway",))
CORRECT_COST = Endpoint("state.cost.correct", cost.CorrectCost, cost.Correction, _STORE, ("gateway",))
GET_LATENTS = Endpoint("state.latents.get", requests.GetLatents, chunks.LatentsHeader, _STORE, ("worker",))
"""The answer's body is the raw latents: see `Bus.call_raw`."""
MOVE_SESSION = Endpoint(
    "scheduler.session.move", requests.MoveSession, requests.MoveAccepted, "scheduler", ("gateway",)
)
GET_LEADER = Endpoint(
    "state.leader.get", leading.GetLeader, leading.LeaderRecord, _STORE, ("gateway", "scheduler")
)
CAMPAIGN = Endpoint("state.leader.campaign", leading.Campaign, leading.CampaignResult, _STORE, ("scheduler",))
KEEP_LEAD = Endpoint("state.leader.renew", leading.KeepLead, leading.LeaderRecord, _STORE, ("scheduler",))
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
    BEGIN_MOVE,
    COMMIT_MOVE,
    ABANDON_MOVE,
    NOTE_DECISION,
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
    MOVE_SESSION,
    GET_LEADER,
    CAMPAIGN,
    KEEP_LEAD,
    STEP_DOWN,
)


def inbox_prefix(service: str) -> str:
    """Where replies to this service arrive; no other service may listen there."""
    return f"_INBOX_{service.replace('-', '_')}"


def permissions(service: str) -> dict[str, list[str]]:
    """What the broker lets `service` publish and subscribe to, from the table above.

    Replies are allowed by the broker's `allow_responses`, so nobody may publish to a foreign inbox at will.
    """
    if service not in SERVICES:
        raise ValueError(f"service: {service!r} is not one of {', '.join(SERVICES)}")
    publish: list[str] = []
    subscribe = [f"{inbox_prefix(service)}.>"]
    publish += [e.subject for e in ENDPOINTS if service in e.callers]
    subscribe += [e.subject for e in ENDPOINTS if service == e.server]
    publish += [t.every for t in TOPICS if service in t.senders]
    subscribe += [t.every for t in TOPICS if service in t.readers]
    publish += [log.every for log in LOGS if service in log.writers]
    subscribe += [f"live.{log.every}" for log in LOGS if service in log.readers and log.live_pattern]
    if service == _STORE:
        publish += ["$JS.API.>", "$JS.ACK.>"]
    else:
        for stream in sorted({log.stream for log in LOGS if service in (*log.readers, *log.writers)}):
            publish += [
                f"$JS.API.STREAM.INFO.{stream}",
                f"$JS.API.DIRECT.GET.{stream}",
                f"$JS.API.DIRECT.GET.{stream}.>",
                f"$JS.API.CONSUMER.CREATE.{stream}.>",
                f"$JS.API.CONSUMER.INFO.{stream}.>",
                f"$JS.API.CONSUMER.MSG.NEXT.{stream}.>",
                f"$JS.ACK.{stream}.>",
            ]
    return {"publish": sorted(set(publish)), "subscribe": sorted(set(subscribe))}
