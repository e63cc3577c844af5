"""The two streams: made at start, brought to the configuration that this version wants."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import nats
from nats.js import api
from nats.js.errors import NotFoundError

from turboserve import logs
from turboserve.bus import Bus
from turboserve.state_store.settings import Settings
from turboserve.subjects import CANARY_CHUNKS, CANARY_EVENTS, CHUNK, CHUNKS, EVENT, EVENTS, OWN, WORKER_EVENT

LOOK_S = 0.5
CHECK_S = 5.0
RETIRED = ((EVENTS, "scheduler"), (CHUNKS, "accounting"))
"""Durable consumers of earlier versions: nobody reads them, and a broker keeps count for them for ever."""

log = logs.get("streams")


def wanted(settings: Settings) -> tuple[api.StreamConfig, ...]:
    return (
        api.StreamConfig(
            name=CHUNKS,
            description="The fence (own.*) and the chunk log (chunk.*): one order for both",
            subjects=[OWN.every, CHUNK.every, CANARY_CHUNKS.every],
            storage=api.StorageType.FILE,
            max_msgs_per_subject=settings.chunks_kept,
            duplicate_window=settings.duplicate_window_s,
            allow_direct=True,
            allow_msg_ttl=True,
            # Of the fence too, which no service may listen to: a stream republishes by one pattern only.
            republish=api.RePublish(src=">", dest="live.>"),
        ),
        api.StreamConfig(
            name=EVENTS,
            description="Session and worker events, in the order of their commits",
            subjects=[EVENT.every, WORKER_EVENT.every, CANARY_EVENTS.every],
            storage=api.StorageType.FILE,
            max_age=settings.events_retention_s,
            duplicate_window=settings.duplicate_window_s,
            allow_direct=True,
            allow_msg_ttl=True,
            republish=api.RePublish(src=">", dest="live.>"),
        ),
    )


class Streams:
    """Keeps them there: a broker that lost its disk gets them again."""

    def __init__(self, bus: Bus, settings: Settings) -> None:
        self._bus, self._wanted = bus, wanted(settings)
        self.ready = False

    async def ensure(self) -> None:
        """Raises nats' errors while the broker does not answer."""
        for config in self._wanted:
            await self._ensure(config)
        self.ready = True

    async def ensure_patiently(self) -> None:
        """Until it is done, as long as that takes."""
        while True:
            try:
                await self.ensure()
                return await self._retire()
            except (TimeoutError, OSError, nats.errors.Error) as error:
                log.warning("streams cannot be made yet", error=repr(error))
                await asyncio.sleep(0.5)

    async def keep(self) -> None:
        """Look again now and then, and after every reconnect; never returns."""
        seen, checked_at = -1, 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            connects, now = int(self._bus.client.stats["reconnects"]), time.monotonic()
            if connects == seen and self.ready and now < checked_at + CHECK_S:
                continue
            seen, checked_at = connects, now
            try:
                await self.ensure()
            except (TimeoutError, OSError, nats.errors.Error) as error:
                self.ready = False
                log.warning("streams cannot be checked", error=repr(error))

    async def _retire(self) -> None:
        for stream, consumer in RETIRED:
            with suppress(NotFoundError):
                await self._bus.jetstream(3.0).delete_consumer(stream, consumer)
                log.info("old consumer removed", stream=stream, consumer=consumer)

    async def _ensure(self, config: api.StreamConfig) -> None:
        jetstream = self._bus.jetstream(3.0)
        assert config.name is not None
        try:
            current = (await jetstream.stream_info(config.name)).config
        except NotFoundError:
            await jetstream.add_stream(config)
            log.info("stream made", stream=config.name)
            return
        if _differs(current, config):
            await jetstream.update_stream(config)
            log.info("stream updated", stream=config.name)


def _differs(current: api.StreamConfig, want: api.StreamConfig) -> bool:
    names = (
        *("subjects", "max_msgs_per_subject", "max_age", "duplicate_window"),
        *("allow_direct", "allow_msg_ttl", "republish"),
    )
    return any((getattr(current, name) or None) != (getattr(want, name) or None) for name in names)
