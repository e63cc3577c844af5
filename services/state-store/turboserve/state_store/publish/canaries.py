"""Appends canaries to every stream. The acknowledgement of a canary shows that the stream accepts appends."""

from __future__ import annotations

import asyncio

from turboserve import ids, logs
from turboserve.bus import Bus, append
from turboserve.clock import Clock
from turboserve.contracts.canaries import Canary, SpaceLevel
from turboserve.contracts.errors import DeadlineError, LogFullError, LogUnavailableError, TurboServeError
from turboserve.state_store import metrics
from turboserve.state_store.settings import Settings
from turboserve.subject_types import Log
from turboserve.subjects import CANARIES
from turboserve.telemetry_names import STREAM

TTL_INTERVALS = 10
"""Number of intervals for which a canary stays in the log: the newest is kept, and old ones use no space."""
DEADLINE_S = 1.5
ADVANCE_TOGETHER = 64
"""Maximum number of canaries in flight while a stream is advanced."""
ADVANCE_LIMIT = 10_000
"""Maximum number of canaries with which one call advances a stream. The next call continues."""

log = logs.get("canaries")


class Canaries:
    """The canaries of one instance of the state store."""

    def __init__(self, bus: Bus, clock: Clock, settings: Settings) -> None:
        self.space = SpaceLevel.ENOUGH
        """Level of the room in the log, which every canary contains."""
        self.without_room: set[str] = set()
        """Streams that refused the newest canary because they are full."""
        self._bus, self._clock = bus, clock
        self._interval_s, self._timeout_s = settings.canary_interval_s, settings.canary_timeout_s
        self._ttl_s = max(1, round(TTL_INTERVALS * settings.canary_interval_s))
        self._instance = ids.new_id("canary")
        self._acked_at: dict[str, float] = {}
        self._refusals: dict[str, str] = {}
        self._late: set[str] = set()
        self._number = 0
        self._advancing = asyncio.Lock()

    def refused_by(self) -> dict[str, str]:
        """Return why a stream accepts no appends, by stream; empty while all streams accept them.

        A refusal counts at once. Silence, which a busy machine causes as well, counts after
        `canary_timeout_s`.
        """
        now = self._clock.monotonic()
        reasons = dict(self._refusals)
        for canary in CANARIES:
            at = self._acked_at.get(canary.stream)
            if canary.stream not in reasons and (at is None or now - at > self._timeout_s):
                reasons[canary.stream] = f"no acknowledgement for {self._timeout_s:g} s"
        return reasons

    async def run(self) -> None:
        """Append canaries to all streams every `canary_interval_s`; never returns."""
        while True:
            started = self._clock.monotonic()
            await self.append_all()
            await asyncio.sleep(max(0.0, started + self._interval_s - self._clock.monotonic()))

    async def append_all(self) -> None:
        """Append one canary to every stream. Never raises for a broker that refuses or is away."""
        canary = self._next()
        await asyncio.gather(*(self._append(where, canary) for where in CANARIES))
        refused = self.refused_by()
        for where in CANARIES:
            metrics.log_accepts.set(int(where.stream not in refused), {STREAM: where.stream})

    async def advance(self, where: Log, sequence: int) -> None:
        """Append canaries until the stream has reached `sequence`: any later message is behind it.

        Raises the errors of `append`, and `LogUnavailableError` after `ADVANCE_LIMIT` canaries.
        """
        async with self._advancing:
            reached = await self._put(where, self._next())
            for _ in range(ADVANCE_LIMIT // ADVANCE_TOGETHER):
                if reached >= sequence:
                    return
                count = min(sequence - reached, ADVANCE_TOGETHER)
                canaries = [self._next() for _ in range(count)]
                reached = max(await asyncio.gather(*(self._put(where, canary) for canary in canaries)))
        if reached < sequence:
            raise LogUnavailableError(
                f"{where.stream} has lost its end: it is at {reached}, before {sequence}",
                field=where.stream,
                limit=sequence,
                retry_after_s=DEADLINE_S,
            )

    def _next(self) -> Canary:
        self._number += 1
        return Canary(instance=self._instance, number=self._number, space=self.space)

    async def _put(self, where: Log, canary: Canary) -> int:
        ack = await append(
            self._bus,
            where.every,
            canary.to_bytes(),
            # Workers read canaries and append to the same stream. A worker that guessed the id could use it
            # first, and the broker would drop the canary as a repetition.
            message_id=ids.new_id("msg"),
            ttl_s=self._ttl_s,
            deadline_s=DEADLINE_S,
        )
        return ack.sequence

    async def _append(self, where: Log, canary: Canary) -> None:
        stream = where.stream
        try:
            await self._put(where, canary)
        except DeadlineError as error:
            if stream not in self._late:
                log.warning("canary not acknowledged", stream=stream, error=error.detail)
            self._late.add(stream)
        except TurboServeError as error:
            if stream not in self._refusals:
                log.error("stream refuses appends", stream=stream, error=error.detail)
            self._refusals[stream] = error.detail
            if isinstance(error, LogFullError):
                self.without_room.add(stream)
        else:
            if self._refusals.pop(stream, None) is not None or stream in self._late:
                log.info("stream accepts appends again", stream=stream)
            self._late.discard(stream)
            self.without_room.discard(stream)
            self._acked_at[stream] = self._clock.monotonic()


class LogStatus:
    """The state of the log, for admission."""

    def __init__(self, canaries: Canaries, settings: Settings) -> None:
        self._canaries, self._retry_s = canaries, settings.admission_retry_s

    @property
    def level(self) -> SpaceLevel:
        return self._canaries.space

    def require(self) -> None:
        """Raise LogUnavailableError while the log could not store the video of another session."""
        for stream, reason in self._canaries.refused_by().items():
            raise LogUnavailableError(
                f"the stream {stream} accepts no appends: {reason}",
                field=stream,
                retry_after_s=self._retry_s,
            )
        if self.level is SpaceLevel.FULL:
            raise LogUnavailableError(
                "the log has no room for another session", field="log_space", retry_after_s=self._retry_s
            )
