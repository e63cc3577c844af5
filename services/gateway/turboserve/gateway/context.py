"""The services that all endpoints share: one `Gateway` per process, in the application's state."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from turboserve.bus import Bus
from turboserve.clock import Clock
from turboserve.contracts.errors import TenantLimitError
from turboserve.gateway.auth.access import Keys
from turboserve.gateway.auth.middleware import Authenticator
from turboserve.gateway.chunk_log import ChunkLog
from turboserve.gateway.keys.service import StoredKeys
from turboserve.gateway.pools.snapshots import PoolSnapshots
from turboserve.gateway.problems.errors import TooManyStreamsError
from turboserve.gateway.prompt_guides import PromptGuide
from turboserve.gateway.sessions.service import Sessions
from turboserve.gateway.settings import Settings
from turboserve.gateway.timeline.service import TimelineService

RETRY_S = 5.0


class Streams:
    """The open streams. When the gateway stops, it sets `stopping`, and every stream ends."""

    def __init__(self, limit: int, per_tenant: int = 0) -> None:
        """`per_tenant`: maximum number of streams of one tenant; 0: no such limit."""
        self._limit, self._per_tenant = limit, per_tenant
        self._open: Counter[str] = Counter()
        self._none = asyncio.Event()
        self._none.set()
        self.stopping = asyncio.Event()

    def check(self, tenant: str) -> None:
        """Raise TooManyStreamsError at the limit of all streams, TenantLimitError at that of `tenant`."""
        if self._per_tenant and self._open[tenant] >= self._per_tenant:
            raise TenantLimitError(
                f"this tenant has {self._per_tenant} streams at this gateway, which is all that one may have",
                field="tenant_streams",
                limit=self._per_tenant,
                retry_after_s=RETRY_S,
            )
        if self._open.total() >= self._limit:
            raise TooManyStreamsError(
                "this gateway serves no more streams",
                field="streams",
                limit=self._limit,
                retry_after_s=RETRY_S,
            )

    @contextmanager
    def place(self, tenant: str) -> Iterator[None]:
        """Count one stream of `tenant` during the block. Raises TooManyStreamsError and TenantLimitError."""
        self.check(tenant)
        self._open[tenant] += 1
        self._none.clear()
        try:
            yield
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]
            if not self._open:
                self._none.set()

    async def close(self, within_s: float = 2.0) -> None:
        """Ask all streams to end, and wait for them at most `within_s` seconds."""
        self.stopping.set()
        try:
            await asyncio.wait_for(self._none.wait(), within_s)
        except TimeoutError:
            return


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
    prompt_guides: Mapping[str, PromptGuide]
    """What a model understands of a prompt, by the model's name. A model without a guide reads any text."""
    stored_keys: StoredKeys


def gateway_of(connection: HTTPConnection) -> Gateway:
    found: Gateway = connection.app.state.gateway
    return found
