"""Builds the gateway's services and its ASGI application. Wiring only."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from turboserve.bus import Bus
from turboserve.bus.chunk_log import ChunkLog
from turboserve.clock import Clock
from turboserve.gateway import metrics, openapi
from turboserve.gateway.audit.endpoints import router as audit
from turboserve.gateway.audit.recorder import AuditRecorder
from turboserve.gateway.auth.access import HostRules, Keys, OriginRules
from turboserve.gateway.auth.middleware import Authenticate, Authenticator
from turboserve.gateway.auth.signing import GrantSigner
from turboserve.gateway.auth.stored import KeyFollower
from turboserve.gateway.chunks.endpoints import router as chunks
from turboserve.gateway.console.endpoints import router as console
from turboserve.gateway.context import Gateway, Streams
from turboserve.gateway.cost.endpoints import router as cost
from turboserve.gateway.events.endpoints import router as events
from turboserve.gateway.health.endpoints import router as health
from turboserve.gateway.keys.endpoints import router as keys_router
from turboserve.gateway.keys.service import StoredKeys
from turboserve.gateway.middleware import (
    Application,
    BodyLimit,
    BrowserHeaders,
    HeadAsGet,
    JsonOnly,
    OriginCheck,
)
from turboserve.gateway.page import endpoints as page_endpoints
from turboserve.gateway.pools.endpoints import router as pools
from turboserve.gateway.pools.snapshots import PoolSnapshots
from turboserve.gateway.problems import handlers
from turboserve.gateway.prompt_guides import read_prompt_guides
from turboserve.gateway.recordings.endpoints import router as recordings
from turboserve.gateway.sessions.endpoints import router as sessions
from turboserve.gateway.sessions.service import Sessions
from turboserve.gateway.settings import Settings
from turboserve.gateway.sharing.endpoints import router as sharing
from turboserve.gateway.sharing.service import Sharing
from turboserve.gateway.stream.mp4 import router as mp4
from turboserve.gateway.stream.socket import router as stream
from turboserve.gateway.timeline.service import TimelineService
from turboserve.gateway.usage.endpoints import router as usage
from turboserve.gateway.webhooks.endpoints import router as webhooks
from turboserve.gateway.webhooks.service import TenantWebhooks
from turboserve.gateway.whep.endpoints import router as whep
from turboserve.gateway.whep.peers import Peers
from turboserve.gateway.workers.endpoints import router as workers
from turboserve.ids import new_id
from turboserve.service import Runtime
from turboserve.telemetry_names import REASON

VERSION = "1"


def create_gateway(
    settings: Settings,
    bus: Bus,
    clock: Clock,
    checks: Callable[[], dict[str, bool]],
    warnings: Callable[[], dict[str, str]] = dict,
) -> Gateway:
    """Create the services of the process.

    The caller runs `pools.start()`, `chunks.listen()` and `timeline.run()`, and at the end `streams.close()`.
    Raises KeyFileError.
    """
    keys = Keys(settings.key_set(), settings.operators, clock, stored=settings.api_keys_store)
    signer = GrantSigner(bus, clock)
    sessions = Sessions(bus, clock, settings.default_model)
    gateway = new_id("gtw")
    return Gateway(
        id=gateway,
        settings=settings,
        bus=bus,
        clock=clock,
        checks=checks,
        warnings=warnings,
        keys=keys,
        authenticator=Authenticator(keys, signer, clock, settings.key_failures_per_minute),
        sessions=sessions,
        chunks=ChunkLog(bus, lambda reason: metrics.foreign_chunks.add(1, {REASON: reason})),
        timeline=TimelineService(
            bus, clock, gateway, settings.playhead_interval_s, settings.report_timeout_s
        ),
        # Without keys all callers are one tenant.
        streams=Streams(
            settings.stream_limit,
            settings.tenant_streams if keys else 0,
            per_key=lambda key: keys.stream_limits.get(key),
        ),
        pools=PoolSnapshots(bus, clock),
        prompt_guides=read_prompt_guides(),
        stored_keys=StoredKeys(bus, keys),
        signer=signer,
        audit=AuditRecorder(bus, clock),
        sharing=Sharing(bus, clock, sessions, signer, settings.ticket_lifetime_s),
        webhooks=TenantWebhooks(bus),
    )


async def start_gateway(runtime: Runtime, settings: Settings) -> Gateway:
    """Create and start a gateway without its HTTP server. The caller runs `streams.close()` at the end.

    Raises KeyFileError.
    """
    gateway = create_gateway(settings, runtime.bus, runtime.clock, runtime.checks, runtime.warnings)
    await gateway.pools.start()
    await gateway.chunks.listen()
    runtime.spawn(gateway.timeline.run(), "timeline")
    if settings.api_keys_store:
        follower = KeyFollower(runtime.bus, runtime.clock, gateway.keys)
        runtime.check("api_keys", lambda: gateway.keys.known)
        await follower.listen()
        runtime.spawn(follower.run(), "api keys")
        runtime.spawn(follower.note_uses_forever(), "uses of api keys")
    return gateway


def create_app(gateway: Gateway) -> FastAPI:
    """Create the ASGI application that serves `gateway`."""
    app = Application(
        title="TurboServe",
        version=VERSION,
        summary="Streaming video generation: sessions, live video, controls.",
        description=openapi.DESCRIPTION,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        openapi_tags=openapi.TAGS,
        # The page /docs comes from `page`: FastAPI's own loads scripts from another host.
        docs_url=None,
        redoc_url=None,
        # A redirect would contain the host that the client claims, and would lose the body of a POST.
        redirect_slashes=False,
    )
    app.state.gateway, app.state.peers = gateway, Peers(gateway.id)
    handlers.install(app)
    for router in (
        sessions,
        sharing,
        recordings,
        mp4,
        stream,
        whep,
        events,
        chunks,
        workers,
        pools,
        console,
        cost,
        keys_router,
        audit,
        usage,
        webhooks,
        health,
    ):
        app.include_router(router)
    page_endpoints.install(app)
    # The middleware added last sees a request first: it checks Host and Origin, then the key, then the body.
    app.add_middleware(JsonOnly)
    app.add_middleware(BodyLimit, limit_bytes=gateway.settings.body_limit_bytes)
    app.add_middleware(Authenticate, authenticator=gateway.authenticator, keys=gateway.keys)
    if gateway.settings.page_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(gateway.settings.page_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[
                "Link",
                "Location",
                "RateLimit",
                "RateLimit-Policy",
                "Retry-After",
                "X-Request-Id",
            ],
        )
    app.add_middleware(
        OriginCheck,
        hosts=HostRules(gateway.settings.allowed_hosts, gateway.settings.gateway_host),
        origins=OriginRules(gateway.settings.page_origins),
    )
    app.add_middleware(
        BrowserHeaders,
        embeddable=bool(gateway.settings.cors_origins),
        framed=bool(gateway.settings.frame_ancestors),
    )
    app.add_middleware(HeadAsGet)
    openapi.install(app, keys_needed=bool(gateway.keys))
    return app
