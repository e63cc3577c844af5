"""The services that all endpoints share: one `Gateway` per process, in the application's state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from turboserve.bus import Bus
from turboserve.clock import Clock
from turboserve.gateway.auth.authenticator import Authenticator
from turboserve.gateway.auth.service import Keys
from turboserve.gateway.pools.snapshots import PoolSnapshots
from turboserve.gateway.sessions.service import Sessions
from turboserve.gateway.settings import Settings
from turboserve.gateway.stream.chunks import ChunkLog
from turboserve.gateway.stream.registry import Streams
from turboserve.gateway.timeline.service import TimelineService


@dataclass(frozen=True)
class Gateway:
    """Services of the process."""

    settings: Settings
    bus: Bus
    clock: Clock
    checks: Callable[[], dict[str, bool]]
    warnings: Callable[[], dict[str, str]]
    keys: Keys
    authenticator: Authenticator
    sessions: Sessions
    chunks: ChunkLog
    timeline: TimelineService
    streams: Streams
    pools: PoolSnapshots


def gateway_of(connection: HTTPConnection) -> Gateway:
    found: Gateway = connection.app.state.gateway
    return found
