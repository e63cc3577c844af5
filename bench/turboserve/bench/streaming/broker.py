"""The baseline: the same chunks, read straight from the broker by the process that plays them."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from turboserve.contracts.chunks import ChunkHeader
from turboserve.subjects import CHUNK


class BrokerTap:
    """Records when each accepted chunk reached this process, without a gateway in between."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: Client | None = None
        self.received_at: dict[tuple[str, int], float] = {}
        """(session, chunk index) → wall time."""

    async def __aenter__(self) -> Self:
        self._client = await nats.connect(self._url, connect_timeout=5)
        await self._client.subscribe(CHUNK.live("*"), cb=self._receive)
        await self._client.flush()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()

    async def _receive(self, message: Msg) -> None:
        now = time.time()
        header = ChunkHeader.from_headers(message.headers or {})
        self.received_at.setdefault((header.session, header.index), now)
