"""The table of all NATS subjects: their senders, readers and messages.

`turboserve.broker_accounts` derives the broker's accounts and permissions from this table.
"""

from __future__ import annotations

from turboserve import history_subjects, recording_subjects, webhook_subjects
from turboserve.contracts import (
    audit,
    chunks,
    cost,
    keys,
    leading,
    links,
    pool,
    requests,
    sessions,
    usage,
    viewers,
    weights,
    workers,
)
from turboserve.contracts.base import Contract
from turboserve.subject_types import Endpoint, Log, Topic

SERVICES = ("gateway", "scheduler", "autoscaler", "worker", "state-store", "recorder", "webhooks")
ADMIN = "admin"
"""The broker user of tests and tools. It may do everything that services may do."""

CHUNKS = "CHUNKS"
"""Stream of `own.<session>` and `chunk.<session>.<identity>`. The fence needs both in one order."""
EVENTS = "EVENTS"
"""Stream of session events and worker events."""

OWN = Log(CHUNKS, "own.{id}", "live.own.{id}", ("state-store",), ("gateway", "recorder"), ("state-store",))
CHUNK = Log(
    CHUNKS,
    "chunk.{id}",
    "live.chunk.{id}",
    ("worker",),
    ("gateway", "recorder"),
    ("gateway", "worker", "state-store", "recorder"),
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
    CHUNKS,
    "canary.CHUNKS",
    "live.canary.CHUNKS",
    ("state-store",),
    ("gateway", "worker", "state-store", "recorder"),
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
POOL = Topic("pool.{id}", pool.PoolStatus, ("autoscaler",), ("gateway", "scheduler"), author="pool")
"""`id` is the pool."""
KEY = Topic("key.{id}", keys.KeyChange, ("state-store",), ("gateway",), author="key")
"""`id` is the API key's id."""
LINK = Topic("link.{id}", links.LinkChange, ("state-store",), ("gateway",), author="link")
"""`id` is the link's id."""
WEIGHTS = Topic("weights.{id}", weights.WeightKey, ("state-store",), ("worker",), by_worker=True)
"""`id` is the worker with the weights."""
LEAVE = Topic("leave.{id}", viewers.LeaveViewer, ("gateway",), ("gateway",))
"""`id` is the gateway that serves the viewer."""
_OF_WORKERS = (LOAD, ASSIGN, PLAYHEAD, LATENTS)
_OF_GATEWAYS = (KEY, LINK, LEAVE)
TOPICS: tuple[Topic[Contract], ...] = (*_OF_WORKERS, FEEDBACK, POOL, *_OF_GATEWAYS, WEIGHTS)  # type: ignore[assignment]

_STORE = "state-store"
CREATE_SESSION = Endpoint(
    "state.session.create", requests.CreateSession, sessions.SessionRecord, _STORE, ("gateway",)
)
GET_SESSION = Endpoint(
    "state.session.get",
    requests.SessionRef,
    sessions.SessionRecord,
    _STORE,
    ("gateway", "scheduler", "recorder"),
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
SET_CONTROL = Endpoint(
    "state.session.control", requests.SetControl, sessions.ControlReceipt, _STORE, ("gateway",)
)
PAUSE_SESSION = Endpoint(
    "state.session.pause", requests.SessionRef, sessions.SessionRecord, _STORE, ("gateway",)
)
RESUME_SESSION = Endpoint(
    "state.session.resume", requests.SessionRef, sessions.SessionRecord, _STORE, ("gateway",)
)
CHANGE_SESSION = Endpoint(
    "state.session.change", requests.ChangeSession, sessions.SessionRecord, _STORE, ("gateway",)
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
FIND_WEIGHTS = Endpoint(
    "state.worker.weights", weights.FindWeights, weights.WeightHolders, _STORE, ("worker",)
)
REPORT_POOL = Endpoint(
    "state.pool.report", pool.PoolReport, pool.PoolOrders, _STORE, ("autoscaler",), periodic=True
)
ORDER_POOL = Endpoint("state.pool.order", pool.OrderPool, pool.PoolOrders, _STORE, ("gateway",))
LIST_USAGE = Endpoint("state.usage.list", usage.ListUsage, usage.UsagePage, _STORE, ("gateway",))
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
LED = "scheduler", "autoscaler"
"""Services whose processes share leadership."""
GET_LEADER = Endpoint("state.leader.get", leading.GetLeader, leading.LeaderRecord, _STORE, LED, periodic=True)
CAMPAIGN = Endpoint(
    "state.leader.campaign", leading.Campaign, leading.CampaignResult, _STORE, LED, periodic=True
)
KEEP_LEAD = Endpoint("state.leader.renew", leading.KeepLead, leading.LeaderRecord, _STORE, LED, periodic=True)
STEP_DOWN = Endpoint("state.leader.resign", leading.StepDown, leading.LeaderRecord, _STORE, LED)
CREATE_KEY = Endpoint("state.key.create", keys.CreateKey, keys.CreatedKey, _STORE, ("gateway",))
GET_KEY = Endpoint("state.key.get", keys.KeyRef, keys.KeyRecord, _STORE, ("gateway",))
LIST_KEYS = Endpoint("state.key.list", keys.ListKeys, keys.KeyPage, _STORE, ("gateway",))
CHANGE_KEY = Endpoint("state.key.change", keys.ChangeKey, keys.KeyRecord, _STORE, ("gateway",))
REVOKE_KEY = Endpoint("state.key.revoke", keys.KeyRef, keys.KeyRecord, _STORE, ("gateway",))
GET_VALID_KEYS = Endpoint(
    "state.key.valid", keys.GetValidKeys, keys.ValidKeys, _STORE, ("gateway",), periodic=True
)
NOTE_KEY_USES = Endpoint(
    "state.key.used", keys.NoteKeyUses, requests.Done, _STORE, ("gateway",), periodic=True
)
CREATE_LINK = Endpoint("state.link.create", links.CreateLink, links.LinkRecord, _STORE, ("gateway",))
LIST_LINKS = Endpoint("state.link.list", links.ListLinks, links.LinkList, _STORE, ("gateway",))
REVOKE_LINK = Endpoint("state.link.revoke", links.LinkRef, links.LinkRecord, _STORE, ("gateway",))
GET_SIGNING = Endpoint(
    "state.link.signing", links.GetSigning, links.Signing, _STORE, ("gateway",), periodic=True
)
NOTE_AUDIT = Endpoint("state.audit.note", audit.NoteAudit, requests.Done, _STORE, ("gateway",))
LIST_AUDIT = Endpoint("state.audit.list", audit.ListAudit, audit.AuditPage, _STORE, ("gateway",))

_ENDPOINTS: tuple[Endpoint[Contract, Contract], ...] = (  # type: ignore[assignment]
    CREATE_SESSION,
    GET_SESSION,
    LIST_SESSIONS,
    SUBMIT_PROMPT,
    SET_CONTROL,
    PAUSE_SESSION,
    RESUME_SESSION,
    CHANGE_SESSION,
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
    FIND_WEIGHTS,
    REPORT_POOL,
    ORDER_POOL,
    GET_COST,
    LIST_USAGE,
    CORRECT_COST,
    GET_LATENTS,
    MIGRATE_SESSION,
    GET_LEADER,
    CAMPAIGN,
    KEEP_LEAD,
    STEP_DOWN,
    CREATE_KEY,
    GET_KEY,
    LIST_KEYS,
    CHANGE_KEY,
    REVOKE_KEY,
    GET_VALID_KEYS,
    NOTE_KEY_USES,
    CREATE_LINK,
    LIST_LINKS,
    REVOKE_LINK,
    GET_SIGNING,
    NOTE_AUDIT,
    LIST_AUDIT,
)
ENDPOINTS = (
    *_ENDPOINTS,
    *recording_subjects.ENDPOINTS,
    *history_subjects.ENDPOINTS,
    *webhook_subjects.ENDPOINTS,
)


def inbox_prefix(user: str) -> str:
    """Return the prefix of reply subjects of this broker user. No other user may subscribe to them."""
    return f"_INBOX_{user.replace('-', '_').replace('.', '_')}"
