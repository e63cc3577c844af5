"""Creates the two streams, and keeps their configuration and size as this version requires."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping

import nats
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, NotFoundError

from turboserve import logs
from turboserve.bus import Bus
from turboserve.clock import Clock
from turboserve.contracts.errors import UnavailableError
from turboserve.state_store.settings import Settings
from turboserve.subjects import CANARY_CHUNKS, CANARY_EVENTS, CHUNK, CHUNKS, EVENT, EVENTS, OWN, WORKER_EVENT

LOOK_S = 0.5
CHECK_S = 5.0
LARGEST_BYTES = 64 * 2**30
SMALLEST_BYTES = 2**20
STEP = 0.8
"""Factor between attempted sizes. A broker only reports whether a size is too large, not the largest one."""
TOO_LARGE = frozenset({10005, 10023, 10047})
"""Error codes of a size that the broker has no room for: no server of a cluster has it (10005, also while too
few servers are there), or the server (10023, 10047) has not."""

log = logs.get("streams")


def wanted(settings: Settings) -> tuple[api.StreamConfig, ...]:
    """Return the configurations without `max_bytes`.

    With `discard: new`, a limit on bytes never removes messages, such as the fence of a live session: the
    state store chooses what to remove. `discard_new_per_subject` stays off, so that the newest chunk of a
    session replaces the oldest.
    """
    return (
        api.StreamConfig(
            name=CHUNKS,
            description="The fence (own.*) and the chunk log (chunk.*): one order for both",
            subjects=[OWN.every, CHUNK.every, CANARY_CHUNKS.every],
            storage=api.StorageType.FILE,
            num_replicas=settings.log_replicas,
            discard=api.DiscardPolicy.NEW,
            max_msgs_per_subject=settings.chunks_kept,
            duplicate_window=settings.duplicate_window_s,
            allow_direct=True,
            allow_msg_ttl=True,
            republish=api.RePublish(src=">", dest="live.>"),
        ),
        api.StreamConfig(
            name=EVENTS,
            description="Session and worker events, in the order of their commits",
            subjects=[EVENT.every, WORKER_EVENT.every, CANARY_EVENTS.every],
            storage=api.StorageType.FILE,
            num_replicas=settings.log_replicas,
            discard=api.DiscardPolicy.NEW,
            max_age=settings.events_retention_s,
            duplicate_window=settings.duplicate_window_s,
            allow_direct=True,
            allow_msg_ttl=True,
            republish=api.RePublish(src=">", dest="live.>"),
        ),
    )


class Streams:
    """Keeps the streams: creates them again on a broker that has lost its disk."""

    def __init__(
        self, bus: Bus, clock: Clock, settings: Settings, newest_fence: Callable[[], Awaitable[int]]
    ) -> None:
        """`newest_fence` returns the greatest sequence that a fence ever had, and raises UnavailableError."""
        self._bus, self._clock, self._wanted = bus, clock, wanted(settings)
        self._total = settings.log_max_bytes
        self._shares: Mapping[str, float] = {
            CHUNKS: settings.log_chunks_share,
            EVENTS: settings.log_events_share,
        }
        self._newest_fence = newest_fence
        self.ready = False
        self.made = 0
        """Number of streams that this process created."""

    async def ensure(self, *, resize: bool) -> None:
        """Create missing streams and update those that differ. With `resize`, make them as large as allowed.

        Raises nats' errors while the broker does not answer, and UnavailableError while CHUNKS is missing and
        the database does not answer.
        """
        jetstream = self._bus.jetstream(3.0)
        current = {name: await _config(jetstream, name) for name in self._shares}
        bounded = {name: _bound(config) for name, config in current.items()}
        if resize or not all(bounded.values()):
            await self._resize(jetstream, bounded)
        else:
            await self._apply(jetstream, bounded)
        self.ready = True

    async def ensure_with_retry(self) -> None:
        """Call `ensure` until it succeeds."""
        while True:
            try:
                return await self.ensure(resize=True)
            except (TimeoutError, OSError, nats.errors.Error, UnavailableError) as error:
                log.warning("streams not created yet", error=repr(error))
                await asyncio.sleep(0.5)

    async def keep(self) -> None:
        """Check the streams every `CHECK_S` and after every reconnect; never returns."""
        seen, checked_at = int(self._bus.client.stats["reconnects"]), self._clock.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            connects, now = int(self._bus.client.stats["reconnects"]), self._clock.monotonic()
            if connects == seen and self.ready and now < checked_at + CHECK_S:
                continue
            resize = connects != seen
            checked_at = now
            try:
                # A restarted broker may have another disk.
                await self.ensure(resize=resize)
                seen = connects
            except (TimeoutError, OSError, nats.errors.Error, UnavailableError) as error:
                self.ready = False
                log.warning("streams not checked", error=repr(error))

    async def _resize(self, jetstream: JetStreamContext, before: Mapping[str, int]) -> None:
        """Apply the largest sizes that the broker reserves, not below `before` unless the setting says so."""
        refusal: APIError | None = None
        asked = self._total or await _account_limit(jetstream)
        for total in _totals(asked):
            sizes = {name: int(share * total) for name, share in self._shares.items()}
            if total != self._total:
                sizes = {name: max(size, before[name]) for name, size in sizes.items()}
            try:
                await self._apply(jetstream, sizes)
            except APIError as error:
                if error.err_code not in TOO_LARGE:
                    raise
                refusal = error
                continue
            if self._total and total != self._total:
                log.warning("broker reserved less space than requested", asked=self._total, bytes=total)
            return
        assert refusal is not None
        raise refusal

    async def _apply(self, jetstream: JetStreamContext, sizes: Mapping[str, int]) -> None:
        for config in self._wanted:
            assert config.name is not None
            want = config.evolve(max_bytes=sizes[config.name])
            current = await _config(jetstream, config.name)
            if current is None:
                if config.name == CHUNKS:
                    # A worker that was cut off keeps the fence of the lost stream. No fence of the new one
                    # has the same sequence.
                    want = want.evolve(first_seq=1 + await self._newest_fence())
                await jetstream.add_stream(want)
                self.made += 1
                log.info("stream created", stream=want.name, max_bytes=want.max_bytes)
            elif _differs(current, want):
                await jetstream.update_stream(want)
                log.info("stream updated", stream=want.name, max_bytes=want.max_bytes)


def _totals(asked: int | None) -> Iterator[int]:
    """Yield the total sizes to try, largest first."""
    total = asked or LARGEST_BYTES
    while total >= SMALLEST_BYTES or total == asked:
        yield total
        total = int(total * STEP)


async def _account_limit(jetstream: JetStreamContext) -> int | None:
    """Return the bytes that the account may store; None if it has no limit of its own."""
    limit = (await jetstream.account_info()).limits.max_storage
    return limit if limit > 0 else None


async def _config(jetstream: JetStreamContext, stream: str) -> api.StreamConfig | None:
    try:
        return (await jetstream.stream_info(stream)).config
    except NotFoundError:
        return None


def _bound(config: api.StreamConfig | None) -> int:
    return max(0, config.max_bytes or 0) if config is not None else 0


def _differs(current: api.StreamConfig, want: api.StreamConfig) -> bool:
    names = (
        *("subjects", "max_msgs_per_subject", "max_age", "max_bytes", "discard", "duplicate_window"),
        *("allow_direct", "allow_msg_ttl", "republish", "num_replicas"),
    )
    return any((getattr(current, name) or None) != (getattr(want, name) or None) for name in names)
