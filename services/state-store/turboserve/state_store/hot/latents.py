"""Latents in the hot store, which may be lost."""

from __future__ import annotations

from turboserve.bus import Owners, skip
from turboserve.contracts.chunks import LatentsHeader
from turboserve.contracts.errors import NotFoundError, UnavailableError
from turboserve.contracts.requests import GetLatents
from turboserve.contracts.versions import SchemaVersionError
from turboserve.state_store import metrics
from turboserve.state_store.hot.session_state import HotStoreGuard
from turboserve.state_store.ports.hot import HotStore
from turboserve.subjects import LATENTS


class Latents:
    """Stores latents under one key per session: chunk index → header line, then raw bytes.

    Late latents of a former owner replace and remove nothing. Chunk 0, the sink, is always kept.
    """

    def __init__(self, hot: HotStoreGuard, *, kept: int, ttl_s: float) -> None:
        self._hot, self._kept, self._ttl_s = hot, kept, int(ttl_s)

    async def keep_of_owner(self, owners: Owners, header: LatentsHeader, data: bytes) -> None:
        """Keep the latents if the worker that sent them owns or owned the session at that epoch."""
        try:
            owned = bool(header.worker) and await owners.has_owned(
                header.session, header.epoch, str(header.worker)
            )
        except UnavailableError:
            # The log does not answer. Without these latents, a takeover continues from the kept ones.
            return
        if owned:
            await self.keep(header, data)
        else:
            metrics.foreign_latents.add(1)

    async def keep(self, header: LatentsHeader, data: bytes) -> None:
        value = header.to_bytes() + b"\n" + data
        key = _latents_key(header.session)

        async def run(store: HotStore) -> None:
            await store.keep_latents(
                key, header.index, header.epoch, value, kept=self._kept, ttl_s=self._ttl_s
            )

        await self._hot.attempt(run)

    async def get(self, request: GetLatents) -> tuple[LatentsHeader, bytes]:
        """Return kept latents.

        Raises NotFoundError if there are none, Redis is down, or they are of another MAJOR schema version.

        The caller then continues from an empty context.
        """

        value = await self._hot.attempt(
            lambda store: store.latents(_latents_key(request.session), request.index)
        )
        if value is None:
            raise NotFoundError(
                f"the latents of chunk {request.index} of session {request.session} are not kept",
                field="index",
                limit=self._kept,
            )
        head, _, data = value.partition(b"\n")
        try:
            return LatentsHeader.from_bytes(head), data
        except SchemaVersionError as error:
            skip(LATENTS.of(request.worker or "*"), error)
            raise NotFoundError(
                f"the latents of chunk {request.index} of session {request.session}: {error}", field="index"
            ) from None

    async def forget(self, session: str) -> None:
        await self._hot.attempt(lambda store: store.delete(_latents_key(session)))


def _latents_key(session: str) -> str:
    return f"latents:{session}"
