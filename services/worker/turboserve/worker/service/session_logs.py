"""A session's log, its kept latents and the report of its failure, as its worker reads and writes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from turboserve import logs
from turboserve.bus import LAG_WARN_S, Bus
from turboserve.clock import Clock
from turboserve.contracts.errors import FencedError, TurboServeError, UnavailableError
from turboserve.contracts.requests import FailSession
from turboserve.subjects import FAIL_SESSION
from turboserve.telemetry import set_error, tracing, use_span
from turboserve.telemetry_names import EPOCH
from turboserve.wording import counted
from turboserve.worker import metrics
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.service import commands, events
from turboserve.worker.service.engine_commands import FetchedContext
from turboserve.worker.service.packager import PackagedChunk
from turboserve.worker.service.quality import count
from turboserve.worker.service.table import Table
from turboserve.worker.service.takeover import Takeover
from turboserve.worker.service.wire import RETRY_S, ConfigOf, Wire

log = logs.get("worker")

LAG_S = 2.0
"""Time that a replica of the log has to catch up before its end is read as it is, seconds."""

LogCommand = commands.ReadLogEnd | commands.FetchLatents | commands.FailSession


class SessionLogs:
    """Publishes the chunks of all sessions, and reads what other owners published.

    It keeps each packaged chunk until the table forgets it. Belongs to the event loop.
    """

    def __init__(
        self,
        worker: str,
        bus: Bus,
        clock: Clock,
        config: ModelConfig,
        chunk_ttl_s: int,
        send_latents: bool,
        table: Table,
        deliver: Callable[[events.Input], None],
        check_connection: Callable[[], None],
        config_of: ConfigOf | None = None,
        config_of_class: ConfigOf | None = None,
    ) -> None:
        """`config`, `config_of`, `config_of_class`: see `Wire`. `send_latents`: see `Settings`. `deliver`
        takes the outcomes. `check_connection` is called before an answer that may have come over a new
        connection."""
        self._worker, self._bus, self._clock, self._table = worker, bus, clock, table
        self._deliver, self._check_connection = deliver, check_connection
        self._wire = Wire(bus, clock, worker, config, chunk_ttl_s, config_of, config_of_class)
        self._sends_latents = send_latents
        self._takeover = Takeover(self._wire, config, clock, config_of)
        self.chunks: dict[tuple[str, int, int], PackagedChunk] = {}
        """Packaged chunks by session, run and index."""
        self.publishing: dict[tuple[str, int, int], asyncio.Task[None]] = {}
        """Publications in progress. The span of such a chunk ends after it, even if the run is evicted."""
        self._fetched: dict[tuple[str, int], FetchedContext] = {}

    def packaged(self, chunk: PackagedChunk) -> None:
        """Keep a chunk for its publication."""
        self.chunks[chunk.session, chunk.run, chunk.index] = chunk

    def warning(self) -> str | None:
        """Return how many chunks wait for the log and for how long; None if that is short."""
        if not self.chunks:
            return None
        # One chunk after the other may wait all the time, each for a moment: only the oldest one shows a lag.
        waits_s = self._clock.monotonic() - min(chunk.packaged_at_s for chunk in self.chunks.values())
        wait = counted(len(self.chunks), "chunk waits", "chunks wait")
        return f"{wait}, the oldest for {waits_s:.0f} s" if waits_s >= LAG_WARN_S else None

    def carry_out(self, command: LogCommand) -> Coroutine[Any, Any, None]:
        """Begin a command. Returns the rest of it, which the caller runs as a task."""
        match command:
            case commands.ReadLogEnd():
                return self._read_end(command)
            case commands.FetchLatents():
                return self._fetch_latents(command)
            case commands.FailSession():
                return self._fail(command)

    def publish(self, command: commands.PublishChunk) -> None:
        """Begin to publish a chunk."""
        key = command.session, command.run, command.index
        # No callback at the task's end, which would run for each chunk: the task removes itself.
        self.publishing[key] = asyncio.create_task(self._publish(command, self.chunks[key]))

    def close(self) -> None:
        """Cancel all publications."""
        for publication in list(self.publishing.values()):
            publication.cancel()

    def take_context(self, session: str, run: int) -> FetchedContext:
        """Return the latents that were fetched for the run, and drop them here."""
        return self._fetched.pop((session, run), FetchedContext())

    def forget(self, session: str, run: int, index: int) -> None:
        """Drop a chunk that is in the log or not wanted any more."""
        key = session, run, index
        chunk = self.chunks.pop(key, None)
        if chunk is not None and key not in self.publishing:
            chunk.span.end()

    def forget_run(self, session: str, run: int) -> None:
        """Drop everything of a run that was evicted."""
        self._fetched.pop((session, run), None)
        for key in [key for key in self.chunks if key[:2] == (session, run)]:
            self.forget(*key)

    async def _publish(self, command: commands.PublishChunk, chunk: PackagedChunk) -> None:
        started = self._clock.monotonic()
        if tracing():
            chunk.span.set_attribute(EPOCH, command.ownership[0])
        key = command.session, command.run, command.index
        try:
            with use_span(chunk.span):
                if command.before is not None and self._sends_latents:
                    await self._wire.send_latents(chunk, command.ownership[0], command.began, command.before)
                outcome, sequence, duplicate = await self._wire.publish(
                    chunk,
                    command.ownership,
                    command.began,
                    command.contiguous_from,
                    drops_buffer=command.last_control < command.drop_buffer_seq <= chunk.control_seq,
                )
            if outcome is events.PublishOutcome.FENCED:
                set_error(chunk.span, FencedError("the broker refused the chunk"))
            elif outcome is events.PublishOutcome.UNKNOWN:
                set_error(chunk.span, UnavailableError("the broker did not acknowledge the chunk"))
        except Exception as error:
            set_error(chunk.span, error)
            log.exception("publication failed", session=chunk.session, chunk=chunk.index)
            outcome, sequence, duplicate = events.PublishOutcome.UNKNOWN, 0, False
        finally:
            # Also where the worker stops and cancels this publication.
            self.publishing.pop(key, None)
            if key not in self.chunks:
                # The run was evicted meanwhile.
                chunk.span.end()
        try:
            self._tried(command, chunk, started, outcome, sequence, duplicate)
        except Exception:
            log.exception("publication not reported", session=chunk.session, chunk=chunk.index)

    def _tried(
        self,
        command: commands.PublishChunk,
        chunk: PackagedChunk,
        started: float,
        outcome: events.PublishOutcome,
        sequence: int,
        duplicate: bool,
    ) -> None:
        """Count and deliver the outcome of a publication that began at `started`."""
        if outcome is events.PublishOutcome.ACKED:
            metrics.chunks.add(1)
            if chunk.playout is not None:
                count(chunk.playout[1].after(started - chunk.playout[0]))
            metrics.publish_duration.record(self._clock.monotonic() - started)
        elif outcome is events.PublishOutcome.FENCED:
            metrics.fenced.add(1)
            log.warning("chunk refused: not the owner", session=chunk.session, chunk=chunk.index)
        else:
            metrics.publish_retries.add(1)
        self._check_connection()
        self._deliver(
            events.Published(
                chunk.session,
                chunk.run,
                chunk.index,
                command.ownership,
                outcome,
                sequence,
                duplicate,
                chunk.control_seq,
            )
        )

    async def _read_end(self, command: commands.ReadLogEnd) -> None:
        """Read the end of the log, repeatedly while it cannot be read and the answer is wanted."""
        lagging_until = self._clock.monotonic() + LAG_S
        while self._asked(command):
            try:
                # A log that does not get there has lost its end.
                if self._clock.monotonic() < lagging_until and not await self._reaches(command):
                    await asyncio.sleep(RETRY_S)
                    continue
                end = await self._wire.log_end(command.session, command.known)
            except UnavailableError as error:
                log.warning("log not readable", session=command.session, error=error.detail)
                await asyncio.sleep(RETRY_S)
                continue
            # The question may have waited for a new connection, together with a chunk that now ends the log.
            self._check_connection()
            self._deliver(
                events.LogEndRead(
                    command.session,
                    command.query,
                    end.next_chunk,
                    end.mine,
                    end.epoch,
                    end.contiguous_from,
                    end.sequence,
                    end.known_lost,
                    end.control_seq,
                )
            )
            return

    async def _reaches(self, command: commands.ReadLogEnd) -> bool:
        """Whether the log has the fence, and the chunk that the command names. Raises UnavailableError."""
        entry = self._table.entries[command.session]
        known = 0 if command.known is None else command.known[1]
        return await self._wire.reaches(max(known, entry.record.own_revision or 0))

    async def _fetch_latents(self, command: commands.FetchLatents) -> None:
        found = await self._takeover.latents(
            command.session, command.next_chunk, command.epoch, lambda: self._asked(command)
        )
        if self._asked(command):
            self._fetched[command.session, command.run] = found
            self._deliver(events.LatentsFetched(command.session, command.query))

    async def _fail(self, command: commands.FailSession) -> None:
        metrics.failures.add(1)
        try:
            request = FailSession(
                session=command.session, epoch=command.epoch, worker=self._worker, reason=command.reason
            )
            await self._bus.call(FAIL_SESSION, request)
        except UnavailableError as error:
            log.warning("failure not reported yet", session=command.session, error=error.detail)
        except TurboServeError as error:
            log.info("failure of an unassigned session", session=command.session, error=error.detail)

    def _asked(self, command: commands.ReadLogEnd | commands.FetchLatents) -> bool:
        """Whether the answer is still wanted."""
        entry = self._table.entries.get(command.session)
        return entry is not None and entry.awaits(command.query)
