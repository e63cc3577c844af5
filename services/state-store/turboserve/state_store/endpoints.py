"""The endpoints on the bus. `turboserve.subjects` lists the callers of each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from turboserve import recording_subjects, subjects
from turboserve.bus import Bus
from turboserve.clock import Clock
from turboserve.contracts.base import Contract
from turboserve.contracts.errors import ConflictError, ForbiddenError, TurboServeError
from turboserve.contracts.requests import FailSession, GetLatents, Renew, WorkerGone
from turboserve.state_store import metrics
from turboserve.state_store.service.audit import Audit
from turboserve.state_store.service.controls import Controls
from turboserve.state_store.service.keys import Keys
from turboserve.state_store.service.leaders import Leaders
from turboserve.state_store.service.links import Links
from turboserve.state_store.service.pools import Pools
from turboserve.state_store.service.recordings import Recordings
from turboserve.state_store.service.session_migrations import SessionMigrations
from turboserve.state_store.service.sessions import Sessions
from turboserve.state_store.service.workers import Workers
from turboserve.subject_types import Caller, Endpoint, identity_of
from turboserve.telemetry_names import DESTINATION, ERROR_TYPE

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

    async def one(endpoint: Endpoint[Req, Resp], handler: Callable[[Req], Awaitable[Resp]]) -> None:
        await bus.serve(endpoint, answering(clock, endpoint, handler))

    await one(subjects.CREATE_SESSION, sessions.create)
    await one(subjects.GET_SESSION, sessions.get)
    await one(subjects.LIST_SESSIONS, sessions.list)
    await one(subjects.SUBMIT_PROMPT, controls.submit_prompt)
    await one(subjects.SET_CONTROL, controls.set_control)
    await one(subjects.PAUSE_SESSION, sessions.pause)
    await one(subjects.RESUME_SESSION, sessions.resume)
    await one(subjects.CHANGE_SESSION, sessions.change)
    await one(subjects.END_SESSION, sessions.end)
    await one(subjects.FAIL_SESSION, sessions.fail)
    await one(subjects.PLACE_SESSION, sessions.place)
    await one(subjects.BEGIN_MIGRATION, session_migrations.begin)
    await one(subjects.COMMIT_MIGRATION, session_migrations.commit)
    await one(subjects.ABANDON_MIGRATION, session_migrations.abandon)
    await one(subjects.NOTE_DECISION, sessions.note)
    await one(subjects.RELEASE_SESSION, sessions.release)
    await one(subjects.SUSPEND_IDLE, sessions.suspend_idle)
    await one(subjects.LIST_DECISIONS, sessions.decisions)
    await one(subjects.RENEW, workers.renew)
    await one(subjects.WORKER_GONE, workers.gone)
    await one(subjects.DRAIN_WORKER, workers.drain)
    await one(subjects.LIST_WORKERS, workers.list)
    await one(subjects.GET_LEADER, leaders.get)
    await one(subjects.CAMPAIGN, leaders.campaign)
    await one(subjects.KEEP_LEAD, leaders.keep)
    await one(subjects.STEP_DOWN, leaders.step_down)
    await bus.serve_raw(subjects.GET_LATENTS, answering(clock, subjects.GET_LATENTS, sessions.latents))


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
    state store can refuse a scheduler that does not lead or is mistaken. A worker with its own broker user
    may only make requests for workers of its identity.
    """
    if isinstance(request, WorkerGone) and caller.role == "scheduler":
        for field in ("term", "renewed_at"):
            if getattr(request, field) is None:
                raise ForbiddenError(f"{field}: required from a scheduler", field=field)
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
    return request.worker if isinstance(request, FailSession | GetLatents) else None


async def serve_pools(bus: Bus, clock: Clock, pools: Pools) -> None:
    """Answer all endpoints of pools."""
    await bus.serve(subjects.REPORT_POOL, answering(clock, subjects.REPORT_POOL, pools.report))
    await bus.serve(subjects.ORDER_POOL, answering(clock, subjects.ORDER_POOL, pools.order))
    await bus.serve(subjects.CORRECT_COST, answering(clock, subjects.CORRECT_COST, pools.correct))
    await bus.serve(subjects.GET_COST, answering(clock, subjects.GET_COST, pools.cost))
    await bus.serve(subjects.LIST_USAGE, answering(clock, subjects.LIST_USAGE, pools.usage))


async def serve_keys(bus: Bus, clock: Clock, keys: Keys) -> None:
    """Answer all endpoints of API keys."""
    await bus.serve(subjects.CREATE_KEY, answering(clock, subjects.CREATE_KEY, keys.create))
    await bus.serve(subjects.GET_KEY, answering(clock, subjects.GET_KEY, keys.get))
    await bus.serve(subjects.LIST_KEYS, answering(clock, subjects.LIST_KEYS, keys.list))
    await bus.serve(subjects.CHANGE_KEY, answering(clock, subjects.CHANGE_KEY, keys.change))
    await bus.serve(subjects.REVOKE_KEY, answering(clock, subjects.REVOKE_KEY, keys.revoke))
    await bus.serve(subjects.GET_VALID_KEYS, answering(clock, subjects.GET_VALID_KEYS, keys.valid))
    await bus.serve(subjects.NOTE_KEY_USES, answering(clock, subjects.NOTE_KEY_USES, keys.note_uses))


async def serve_audit(bus: Bus, clock: Clock, audit: Audit) -> None:
    """Answer all endpoints of the audit log."""
    await bus.serve(subjects.NOTE_AUDIT, answering(clock, subjects.NOTE_AUDIT, audit.note))
    await bus.serve(subjects.LIST_AUDIT, answering(clock, subjects.LIST_AUDIT, audit.list))


async def serve_links(bus: Bus, clock: Clock, links: Links) -> None:
    """Answer all endpoints of links."""
    await bus.serve(subjects.CREATE_LINK, answering(clock, subjects.CREATE_LINK, links.create))
    await bus.serve(subjects.LIST_LINKS, answering(clock, subjects.LIST_LINKS, links.list))
    await bus.serve(subjects.REVOKE_LINK, answering(clock, subjects.REVOKE_LINK, links.revoke))
    await bus.serve(subjects.GET_SIGNING, answering(clock, subjects.GET_SIGNING, links.signing))


async def serve_recordings(bus: Bus, clock: Clock, recordings: Recordings) -> None:
    """Answer all endpoints of recordings."""

    async def one(endpoint: Endpoint[Req, Resp], handler: Callable[[Req], Awaitable[Resp]]) -> None:
        await bus.serve(endpoint, answering(clock, endpoint, handler))

    await one(recording_subjects.START_RECORDING, recordings.start)
    await one(recording_subjects.STOP_RECORDING, recordings.stop)
    await one(recording_subjects.GET_RECORDING, recordings.get)
    await one(recording_subjects.LIST_RECORDINGS, recordings.page)
    await one(recording_subjects.DELETE_RECORDING, recordings.delete)
    await one(recording_subjects.LIST_RECORDING_ORDERS, recordings.orders)
    await one(recording_subjects.REPORT_RECORDING, recordings.report)
    await one(recording_subjects.FORGET_RECORDING, recordings.forget)
