"""Putting it together: the streams first, then the databases, then repair, then service."""

from __future__ import annotations

import asyncio
import math

from alembic.util import CommandError
from sqlalchemy.exc import SQLAlchemyError

from turboserve import logs
from turboserve.service import Runtime
from turboserve.state_store.accounting import Accounting
from turboserve.state_store.core.leases import Leases
from turboserve.state_store.database import Database, transient
from turboserve.state_store.endpoints import serve
from turboserve.state_store.hot.latents import Latents
from turboserve.state_store.hot.playheads import TTL_S, Playheads
from turboserve.state_store.hot.redis import Hot
from turboserve.state_store.leader import lead
from turboserve.state_store.log_space import LogSpace
from turboserve.state_store.log_status import LogStatus
from turboserve.state_store.migrate import migrate
from turboserve.state_store.pool_endpoints import serve_pools
from turboserve.state_store.publish.assignments import Assignments
from turboserve.state_store.publish.canaries import Canaries
from turboserve.state_store.publish.fence import Fence
from turboserve.state_store.publish.outbox import Outbox
from turboserve.state_store.retention import Retention
from turboserve.state_store.service.aftermath import Aftermath
from turboserve.state_store.service.leaders import Leaders
from turboserve.state_store.service.moves import Moves
from turboserve.state_store.service.pools import Pools
from turboserve.state_store.service.sessions import Sessions
from turboserve.state_store.service.workers import Workers
from turboserve.state_store.settings import Settings
from turboserve.state_store.streams import Streams
from turboserve.subjects import LATENTS, PLAYHEAD

ACCOUNTING_LOCK = 0x7475_7262_0004
COST_LOCK = 0x7475_7262_0011
QUEUE = "state-store"
NO_DATABASE = "3D000"
"""SQLSTATE of a server that has just been set up: its database is made a moment after it answers."""

log = logs.get("state-store")


async def start(runtime: Runtime, settings: Settings) -> None:
    """Returns once every endpoint is answered."""
    bus, clock = runtime.bus, runtime.clock
    database = Database(settings)
    hot = Hot(settings)
    runtime.on_stop(database.close)
    runtime.on_stop(hot.close)
    streams = Streams(bus, settings)
    runtime.check("postgres", lambda: database.reachable)
    runtime.check("streams", lambda: streams.ready)

    await streams.ensure_patiently()
    runtime.spawn(streams.keep(), "streams")
    # Before the database: the log works without it, and so does the video.
    canaries = Canaries(bus, clock, settings)
    await canaries.append_all()
    runtime.spawn(canaries.run(), "canary appends")
    await migrate_patiently(database)

    playheads = Playheads(hot, clock, TTL_S + math.ceil(settings.abandoned_after_s))
    latents = Latents(hot, kept=settings.latents_kept, ttl_s=settings.latents_ttl_s)
    assignments = Assignments(bus, database, playheads)
    outbox = Outbox(database, bus, clock, settings)
    fence = Fence(database, bus, assignments)
    aftermath = Aftermath(outbox, fence, assignments, playheads)
    accounting = Accounting(database, bus, playheads, clock, outbox.wake)

    runtime.spawn(database.watch(), "postgres")
    # What Redis holds may be lost, and the store goes on without: that does not make it unready.
    runtime.warn("redis", hot.warning)
    runtime.spawn(hot.watch(), "redis")
    runtime.spawn(outbox.run(), "outbox")
    runtime.spawn(outbox.measure(), "outbox gauges")
    runtime.spawn(fence.sweep_forever(settings.sweep_s), "fence")
    runtime.spawn(playheads.flush_forever(), "playheads")
    runtime.spawn(lead(database, ACCOUNTING_LOCK, accounting.run), "accounting")
    space = LogSpace(database, bus, clock, canaries, settings)
    runtime.warn("log_space", space.warning)
    runtime.spawn(space.run(), "log space")
    status = LogStatus(canaries, settings)
    sessions = Sessions(database, aftermath, playheads, latents, status, clock, settings)
    runtime.spawn(Retention(database, sessions, bus, clock, settings).run(), "retention")
    pools = Pools(database, clock, settings)
    runtime.spawn(lead(database, COST_LOCK, pools.accrue_forever), "cost")
    leases = Leases(settings.lease_s, settings.worker_timeout_s, clock.monotonic())
    await serve_pools(bus, pools)
    await bus.subscribe(PLAYHEAD, "*", playheads.report, queue=QUEUE)
    await bus.subscribe(LATENTS, "*", latents.keep, queue=QUEUE)
    await serve(
        bus,
        sessions,
        Moves(database, aftermath, clock, settings),
        Workers(database, aftermath, playheads, clock, leases, lambda: bus.connection),
        Leaders(database),
        latents,
    )


async def migrate_patiently(database: Database) -> None:
    """Bring the schema up to date, waiting for Postgres as long as it takes."""
    while True:
        try:
            await migrate(database.engine)
            await database.ping()
            return
        except CommandError:
            raise
        except (SQLAlchemyError, OSError, Exception) as error:
            if (
                not transient(error)
                and getattr(getattr(error, "orig", error), "sqlstate", None) != NO_DATABASE
            ):
                raise
            log.warning("Postgres not reachable yet", error=repr(error).splitlines()[0][:200])
            await asyncio.sleep(0.5)
