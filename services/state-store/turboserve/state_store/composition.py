"""Builds and starts the service: the streams first, then the databases, then repair, then the endpoints.

This module names no server's driver: tests and simulations pass other implementations of the ports.
"""

from __future__ import annotations

import math
from functools import partial

from turboserve.bus import Owners
from turboserve.bus.round_trip import RoundTrip
from turboserve.service import Runtime
from turboserve.state_store import metrics
from turboserve.state_store.accounting import Accounting
from turboserve.state_store.availability import migrate_with_retry, watch
from turboserve.state_store.core.rentals import Pricing
from turboserve.state_store.core.workers import Leases
from turboserve.state_store.endpoints import (
    serve,
    serve_audit,
    serve_keys,
    serve_links,
    serve_pool_history,
    serve_pools,
    serve_recordings,
    serve_webhooks,
    serve_weights,
    take_reports,
)
from turboserve.state_store.hot.probe import HotStoreProbe
from turboserve.state_store.hot.session_state import TTL_S, HotStoreGuard, Latents, Playheads
from turboserve.state_store.leader import lead
from turboserve.state_store.log_counts import LogCounts
from turboserve.state_store.log_histories import LogHistories
from turboserve.state_store.log_space import LogSpace
from turboserve.state_store.periodic_writes import ViewerUsage, WorkerChunks
from turboserve.state_store.ports.database import Database
from turboserve.state_store.ports.hot import HotStore
from turboserve.state_store.publish.canaries import Canaries, LogStatus
from turboserve.state_store.publish.fence import Assignments, Fence, newest_fence
from turboserve.state_store.publish.outbox import Outbox
from turboserve.state_store.retention import Retention
from turboserve.state_store.service.audit import Audit
from turboserve.state_store.service.behavior import LearnedBehavior
from turboserve.state_store.service.controls import Controls
from turboserve.state_store.service.keys import Keys
from turboserve.state_store.service.leaders import Leaders
from turboserve.state_store.service.links import Links
from turboserve.state_store.service.pool_history import PoolHistories
from turboserve.state_store.service.pools import Pools
from turboserve.state_store.service.recordings import Recordings
from turboserve.state_store.service.session_migrations import SessionMigrations
from turboserve.state_store.service.sessions import Sessions
from turboserve.state_store.service.transactions import PostCommit
from turboserve.state_store.service.webhooks import Webhooks
from turboserve.state_store.service.weights import Weights
from turboserve.state_store.service.workers import Workers
from turboserve.state_store.settings import Settings
from turboserve.state_store.streams import Streams
from turboserve.tasks import stop

COUNTING_LOCK = 0x7475_7262_0004
"""Number of the lock of the instance that counts chunks and cost."""


ANSWERED = 0.8
"""Time within which a renewal is answered, as a share of the time for which a worker waits."""


async def compose(runtime: Runtime, settings: Settings, database: Database, hot_store: HotStore) -> None:
    """Build the service on these ports and start it. Returns once it answers every endpoint."""
    bus, clock = runtime.bus, runtime.clock
    hot = HotStoreGuard(hot_store, clock)
    runtime.on_stop(database.close)
    runtime.on_stop(hot.close)
    streams = Streams(bus, clock, settings, partial(newest_fence, database))
    runtime.check("postgres", lambda: database.reachable)
    runtime.check("streams", lambda: streams.ready)

    await streams.ensure_with_retry()
    runtime.spawn(streams.keep(), "streams")
    # Before the database: existing streams and the video work without it.
    canaries = Canaries(bus, clock, settings)
    await canaries.append_all()
    runtime.spawn(canaries.run(), "canary appends")
    await migrate_with_retry(database)

    playheads = Playheads(hot, clock, TTL_S + math.ceil(settings.abandoned_after_s))
    latents = Latents(hot, kept=settings.latents_kept, ttl_s=settings.latents_ttl_s)
    assignments = Assignments(bus, database, playheads)
    outbox = Outbox(database, bus, clock, settings)
    fence = Fence(database, bus, assignments, canaries)
    post_commit = PostCommit(outbox, fence, assignments, playheads)
    owners = Owners(bus, lambda: metrics.foreign_chunks.add(1))
    interval_s = settings.progress_interval_s
    worker_chunks = WorkerChunks(database, clock, enabled=settings.chunk_history_s > 0)
    accounting = Accounting(database, bus, owners, playheads, clock, interval_s, outbox.wake, worker_chunks)

    writes = RoundTrip()
    runtime.warn("postgres", lambda: writes.warning(clock.monotonic()))
    runtime.spawn(watch(database, writes, clock.monotonic), "postgres")
    runtime.warn("outbox", outbox.warning)
    runtime.warn("accounting", accounting.warning)
    # The store works without Redis, whose content may be lost. So Redis does not affect readiness.
    probe = HotStoreProbe(hot)
    runtime.warn("redis", probe.warning)
    runtime.spawn(probe.watch(), "redis")
    runtime.spawn(outbox.run(), "outbox")
    runtime.spawn(outbox.measure(), "outbox gauges")
    runtime.spawn(fence.sweep_forever(settings.sweep_s, lambda: streams.made), "fence")
    runtime.spawn(playheads.flush_forever(), "playheads")
    if settings.chunk_history_s:
        runtime.spawn(worker_chunks.run(), "chunks of workers")
    histories = LogHistories(bus, owners, settings)
    runtime.spawn(histories.run(), "log histories")
    space = LogSpace(database, bus, clock, canaries, histories, settings)
    runtime.warn("log_space", space.warning)
    runtime.spawn(space.run(), "log space")
    status = LogStatus(canaries, settings)
    behavior = LearnedBehavior(database, clock, settings.behavior_s)
    if settings.behavior_s:
        runtime.spawn(behavior.run(), "behavior")
    sessions = Sessions(
        database, post_commit, playheads, latents, status, clock, settings, behavior.found_full
    )
    runtime.spawn(Retention(database, sessions, playheads, hot, bus, clock, settings).run(), "retention")
    pools = Pools(database, clock, settings)
    works = accounting.run, pools.accrue_forever
    counting = runtime.spawn(
        lead(database, COUNTING_LOCK, *works, timeout_s=settings.store_lead_timeout_s), "counting"
    )
    runtime.on_stop(worker_chunks.close)
    runtime.on_stop(partial(stop, counting))
    leases = Leases(settings.lease_s, settings.worker_timeout_s, clock.monotonic())
    # A worker waits a third of its lease for the answer, and only an answer excuses it.
    renewal_s = min(settings.transaction_deadline_s, ANSWERED * settings.lease_s / 3)
    await serve_pools(bus, clock, pools)
    await serve_pool_history(bus, clock, PoolHistories(database, settings))
    await serve_keys(bus, clock, Keys(database, bus, clock))
    await serve_audit(bus, clock, Audit(database, clock, settings.audit_retention_s))
    await serve_links(bus, clock, Links(database, bus, clock, settings.link_rules))
    await serve_recordings(bus, clock, Recordings(database, post_commit, status, clock, settings))
    webhooks = Webhooks(database, clock, settings)
    runtime.spawn(webhooks.run(), "retention of deliveries")
    await serve_webhooks(bus, clock, webhooks)
    await serve_weights(bus, clock, Weights(database, bus))
    viewer_usage = ViewerUsage(database, clock)
    runtime.spawn(viewer_usage.run(), "use by viewers")
    runtime.on_stop(viewer_usage.close)

    await take_reports(bus, owners, playheads, viewer_usage, latents)
    await serve(
        bus,
        clock,
        sessions,
        Controls(database, post_commit, status, clock, settings),
        SessionMigrations(database, post_commit, clock, settings),
        Workers(
            database,
            post_commit,
            playheads,
            clock,
            leases,
            partial(getattr, bus, "connection"),
            settings.poison,
            Pricing(settings.prices, settings.currency),
            LogCounts(owners, renewal_s / 2),
            renewal_s,
        ),
        Leaders(database),
    )
