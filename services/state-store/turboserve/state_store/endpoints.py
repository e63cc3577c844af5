"""The endpoints and subscriptions on the bus. `turboserve.subjects` lists the callers and senders of each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from turboserve import history_subjects, recording_subjects, subjects, webhook_subjects
from turboserve.bus import Bus, Owners
from turboserve.clock import Clock
from turboserve.contracts.base import Contract
from turboserve.contracts.errors import ConflictError, ForbiddenError, TurboServeError
from turboserve.contracts.leading import POOL_LEADER, Campaign, KeepLead
from turboserve.contracts.requests import FailSession, GetLatents, Renew, WorkerGone
from turboserve.contracts.weights import FindWeights
from turboserve.contracts.workers import Playhead
from turboserve.state_store import metrics
from turboserve.state_store.hot.session_state import Latents, Playheads
from turboserve.state_store.periodic_writes import ViewerUsage
from turboserve.state_store.service.audit import Audit
from turboserve.state_store.service.controls import Controls
from turboserve.state_store.service.keys import Keys
from turboserve.state_store.service.leaders import Leaders
from turboserve.state_store.service.links import Links
from turboserve.state_store.service.pool_history import PoolHistories
from turboserve.state_store.service.pools import Pools
from turboserve.state_store.service.recordings import Recordings
from turboserve.state_store.service.session_migrations import SessionMigrations
from turboserve.state_store.service.sessions import Sessions
from turboserve.state_store.service.webhooks import Webhooks
from turboserve.state_store.service.weights import Weights
from turboserve.state_store.service.workers import Workers
from turboserve.subject_types import Caller, Endpoint, identity_of
from turboserve.telemetry_names import DESTINATION, ERROR_TYPE

QUEUE = "state-store"
"""Group of the instances that share the reports of gateways and workers."""

Req = TypeVar("Req", bound=Contract)
Resp = TypeVar("Resp", bound=Contract)
Answer = TypeVar("Answer")


async def serve(
    bus: Bus,
    clock: Clock,
    sessions: Sessions,
    controls: Controls,
    session_migrations: SessionMigrations,
    workers: Workers,
    leaders: Leaders,
) -> None:
    """Answer all endpoints of the state store."""
    await _serve(bus, clock, subjects.CREATE_SESSION, sessions.create)
    await _serve(bus, clock, subjects.GET_SESSION, sessions.get)
    await _serve(bus, clock, subjects.LIST_SESSIONS, sessions.list)
    await _serve(bus, clock, subjects.SUBMIT_PROMPT, controls.submit_prompt)
    await _serve(bus, clock, subjects.SET_CONTROL, controls.set_control)
    await _serve(bus, clock, subjects.PAUSE_SESSION, sessions.pause)
    await _serve(bus, clock, subjects.RESUME_SESSION, sessions.resume)
    await _serve(bus, clock, subjects.CHANGE_SESSION, sessions.change)
    await _serve(bus, clock, subjects.END_SESSION, sessions.end)
    await _serve(bus, clock, subjects.FAIL_SESSION, sessions.fail)
    await _serve(bus, clock, subjects.PLACE_SESSION, sessions.place)
    await _serve(bus, clock, subjects.BEGIN_MIGRATION, session_migrations.begin)
    await _serve(bus, clock, subjects.COMMIT_MIGRATION, session_migrations.commit)
    await _serve(bus, clock, subjects.ABANDON_MIGRATION, session_migrations.abandon)
    await _serve(bus, clock, subjects.NOTE_DECISION, sessions.note)
    await _serve(bus, clock, subjects.RELEASE_SESSION, sessions.release)
    await _serve(bus, clock, subjects.SUSPEND_IDLE, sessions.suspend_idle)
    await _serve(bus, clock, subjects.LIST_DECISIONS, sessions.decisions)
    await _serve(bus, clock, subjects.RENEW, workers.renew)
    await _serve(bus, clock, subjects.WORKER_GONE, workers.gone)
    await _serve(bus, clock, subjects.DRAIN_WORKER, workers.drain)
    await _serve(bus, clock, subjects.LIST_WORKERS, workers.list)
    await _serve(bus, clock, subjects.GET_LEADER, leaders.get)
    await _serve(bus, clock, subjects.CAMPAIGN, leaders.campaign)
    await _serve(bus, clock, subjects.KEEP_LEAD, leaders.keep)
    await _serve(bus, clock, subjects.STEP_DOWN, leaders.step_down)
    await bus.serve_raw(subjects.GET_LATENTS, answering(clock, subjects.GET_LATENTS, sessions.latents))


async def _serve(
    bus: Bus, clock: Clock, endpoint: Endpoint[Req, Resp], handler: Callable[[Req], Awaitable[Resp]]
) -> None:
    await bus.serve(endpoint, answering(clock, endpoint, handler))


def answering(
    clock: Clock, endpoint: Endpoint[Req, Resp], handler: Callable[[Req], Awaitable[Answer]]
) -> Callable[[Req, Caller], Awaitable[Answer]]:
    """Wrap `handler`: check the caller's rights, and count and time the requests."""
    name = endpoint.subject

    async def run(request: Req, caller: Caller) -> Answer:
        started = clock.monotonic()
        attributes = {DESTINATION: name}
        try:
            check(caller, request)
            return await handler(request)
        except TurboServeError as error:
            attributes[ERROR_TYPE] = error.code
            if isinstance(error, ConflictError):
                metrics.conflicts.add(1, {DESTINATION: name})
            raise
        except Exception:
            attributes[ERROR_TYPE] = "internal"
            raise
        finally:
            metrics.requests.add(1, attributes)
            metrics.request_duration.record(clock.monotonic() - started, {DESTINATION: name})

    return run


def check(caller: Caller, request: Contract) -> None:
    """Raise ForbiddenError for a request that this caller may not make.

    A scheduler that declares a worker gone has to name its term and the renewal that it read, so that the
    state store can refuse a scheduler that does not lead or is mistaken. An autoscaler may lead a pool, and
    no schedulers. A worker with its own broker user may only make requests for workers of its identity.
    """
    if isinstance(request, WorkerGone) and caller.role == "scheduler":
        for field in ("term", "renewed_at"):
            if getattr(request, field) is None:
                raise ForbiddenError(f"{field}: required from a scheduler", field=field)
    if isinstance(request, Campaign | KeepLead) and caller.role in subjects.LED:
        of_pool = request.name.startswith(POOL_LEADER)
        if of_pool != (caller.role == "autoscaler"):
            raise ForbiddenError(f"name: {caller.role} does not lead {request.name}", field="name")
    if caller.role == "worker" and caller.id is not None:
        worker = _worker_of(request)
        if worker is not None and identity_of(worker) != caller.id:
            raise ForbiddenError(
                f"worker: {worker} does not begin with {caller.id}_", field="worker", limit=caller.id
            )


def _worker_of(request: Contract) -> str | None:
    """Return the worker that the request is made for."""
    if isinstance(request, Renew):
        return request.load.worker
    return request.worker if isinstance(request, FailSession | GetLatents | FindWeights) else None


async def serve_weights(bus: Bus, clock: Clock, weights: Weights) -> None:
    """Answer the endpoint of starting workers that look for weights."""
    await _serve(bus, clock, subjects.FIND_WEIGHTS, weights.find)


async def serve_pools(bus: Bus, clock: Clock, pools: Pools) -> None:
    """Answer all endpoints of pools."""
    await _serve(bus, clock, subjects.REPORT_POOL, pools.report)
    await _serve(bus, clock, subjects.ORDER_POOL, pools.order)
    await _serve(bus, clock, subjects.CORRECT_COST, pools.correct)
    await _serve(bus, clock, subjects.GET_COST, pools.cost)
    await _serve(bus, clock, subjects.LIST_USAGE, pools.usage)


async def serve_pool_history(bus: Bus, clock: Clock, histories: PoolHistories) -> None:
    """Answer all endpoints of the history of pools."""
    await _serve(bus, clock, history_subjects.GET_POOL_HISTORY, histories.get)
    await _serve(bus, clock, history_subjects.LIST_POOL_DECISIONS, histories.decisions)
    await _serve(bus, clock, history_subjects.LIST_MIGRATIONS, histories.migrations)
    await _serve(bus, clock, history_subjects.LIST_LANES, histories.lanes)
    await _serve(bus, clock, history_subjects.GET_POOL_COST, histories.cost)
    await _serve(bus, clock, history_subjects.LIST_WAITING, histories.waiting)


async def serve_keys(bus: Bus, clock: Clock, keys: Keys) -> None:
    """Answer all endpoints of API keys."""
    await _serve(bus, clock, subjects.CREATE_KEY, keys.create)
    await _serve(bus, clock, subjects.GET_KEY, keys.get)
    await _serve(bus, clock, subjects.LIST_KEYS, keys.list)
    await _serve(bus, clock, subjects.CHANGE_KEY, keys.change)
    await _serve(bus, clock, subjects.REVOKE_KEY, keys.revoke)
    await _serve(bus, clock, subjects.GET_VALID_KEYS, keys.valid)
    await _serve(bus, clock, subjects.NOTE_KEY_USES, keys.note_uses)


async def serve_audit(bus: Bus, clock: Clock, audit: Audit) -> None:
    """Answer all endpoints of the audit log."""
    await _serve(bus, clock, subjects.NOTE_AUDIT, audit.note)
    await _serve(bus, clock, subjects.LIST_AUDIT, audit.list)


async def serve_links(bus: Bus, clock: Clock, links: Links) -> None:
    """Answer all endpoints of links."""
    await _serve(bus, clock, subjects.CREATE_LINK, links.create)
    await _serve(bus, clock, subjects.LIST_LINKS, links.list)
    await _serve(bus, clock, subjects.REVOKE_LINK, links.revoke)
    await _serve(bus, clock, subjects.GET_SIGNING, links.signing)


async def serve_recordings(bus: Bus, clock: Clock, recordings: Recordings) -> None:
    """Answer all endpoints of recordings."""
    await _serve(bus, clock, recording_subjects.START_RECORDING, recordings.start)
    await _serve(bus, clock, recording_subjects.STOP_RECORDING, recordings.stop)
    await _serve(bus, clock, recording_subjects.GET_RECORDING, recordings.get)
    await _serve(bus, clock, recording_subjects.LIST_RECORDINGS, recordings.page)
    await _serve(bus, clock, recording_subjects.DELETE_RECORDING, recordings.delete)
    await _serve(bus, clock, recording_subjects.LIST_RECORDING_ORDERS, recordings.orders)
    await _serve(bus, clock, recording_subjects.REPORT_RECORDING, recordings.report)
    await _serve(bus, clock, recording_subjects.FORGET_RECORDING, recordings.forget)


async def serve_webhooks(bus: Bus, clock: Clock, webhooks: Webhooks) -> None:
    """Answer all endpoints of webhooks."""
    await _serve(bus, clock, webhook_subjects.CREATE_WEBHOOK, webhooks.create)
    await _serve(bus, clock, webhook_subjects.GET_WEBHOOK, webhooks.get)
    await _serve(bus, clock, webhook_subjects.LIST_WEBHOOKS, webhooks.list)
    await _serve(bus, clock, webhook_subjects.CHANGE_WEBHOOK, webhooks.change)
    await _serve(bus, clock, webhook_subjects.DELETE_WEBHOOK, webhooks.delete)
    await _serve(bus, clock, webhook_subjects.ROTATE_SECRET, webhooks.rotate)
    await _serve(bus, clock, webhook_subjects.LIST_DELIVERIES, webhooks.deliveries)
    await _serve(bus, clock, webhook_subjects.REDELIVER, webhooks.redeliver)
    await _serve(bus, clock, webhook_subjects.SEND_TEST_EVENT, webhooks.test)
    await _serve(bus, clock, webhook_subjects.TAKE_DELIVERIES, webhooks.take)
    await _serve(bus, clock, webhook_subjects.REPORT_DELIVERY, webhooks.report)


async def take_reports(
    bus: Bus, owners: Owners, playheads: Playheads, viewer_usage: ViewerUsage, latents: Latents
) -> None:
    """Receive what gateways report of viewers, and latents of workers. Each report goes to one instance."""

    # One subscription: in a queue group, each of two would get some of the reports.
    async def on_playhead(report: Playhead, body: bytes) -> None:
        viewer_usage.add(report)
        await playheads.report(report, body)

    await bus.subscribe(subjects.PLAYHEAD, "*", on_playhead, queue=QUEUE)
    await bus.subscribe(subjects.LATENTS, "*", partial(latents.keep_of_owner, owners), queue=QUEUE)
