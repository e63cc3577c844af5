"""Live migration in the worker's shell: connects the data plane, the engine and the session table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from turboserve import logs
from turboserve.tasks import stop
from turboserve.telemetry_names import ERROR_TYPE, MIGRATION_BYTES, MIGRATION_ROUNDS, TRANSFER_ROLE
from turboserve.worker import metrics
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.errors import EngineError, UnknownSessionError
from turboserve.worker.engine.state_pages import Page
from turboserve.worker.service import commands, events, migration_commands
from turboserve.worker.service.assignments import MigrationKeys
from turboserve.worker.service.ports import EngineRunner
from turboserve.worker.service.reserved_memory import ReservedMemory
from turboserve.worker.service.spans import SendSpans, fetch_span
from turboserve.worker.service.table import Table
from turboserve.worker.settings import Settings
from turboserve.worker.transfer.errors import (
    AuthenticationError,
    MigrationNotOfferedError,
    NoStateError,
    SourceNotReadyError,
    TransferError,
)
from turboserve.worker.transfer.fetched_state import FetchedState
from turboserve.worker.transfer.network import TransferNetwork
from turboserve.worker.transfer.pace import CopyLimits, CopyRate
from turboserve.worker.transfer.source import Source
from turboserve.worker.transfer.target import Target, host_of

log = logs.get("migrations")
T = TypeVar("T")
NO_FURTHER_MODELS: Mapping[str, str] = {}

Command = (
    migration_commands.SendFinalDelta
    | migration_commands.SendManifest
    | migration_commands.CancelTransfer
    | migration_commands.FetchState
    | migration_commands.CancelFetch
)


@dataclass(eq=False)
class _IncomingCopy:
    """A session on its way to this worker."""

    task: asyncio.Task[None]
    run: int


class Migrations:
    """Runs this worker's migrations on the event loop's thread. It is its source's `StateProvider`."""

    def __init__(
        self,
        worker: str,
        settings: Settings,
        engine: EngineRunner,
        network: TransferNetwork,
        table: Table,
        deliver_event: Callable[[events.Input], None],
        now: Callable[[], float],
        models: Mapping[str, str] = NO_FURTHER_MODELS,
    ) -> None:
        """`models`: fingerprint of each class, where the worker serves several."""
        self._engine, self._table, self._deliver, self._now = engine, table, deliver_event, now
        self.keys = MigrationKeys()
        self._network, self.links = network, network.links
        limits = CopyLimits(
            least_s=settings.migration_timeout_s,
            most_s=settings.migration_timeout_max_s,
            bytes_per_s=settings.transfer_bytes_per_s,
            still_s=settings.migration_quiesce_max_s,
        )
        self._pace = CopyRate(limits)
        self.source = Source(self, self.links, limits, now)
        self._target = Target(worker, self.links, limits.least_s, network.connect, now)
        if models:
            self.source.further_models = tuple(models.values())
            self._target.model_of = lambda session: models[self.class_of(session)]
        self.machine = network.machine
        """The value of `LoadReport.host`."""
        self.addresses: tuple[str, ...] = ()
        """Addresses at which other workers fetch state; empty before `start`."""
        self._copies: dict[str, _IncomingCopy] = {}
        self._quiesced: dict[str, asyncio.Event] = {}
        self._manifest_ready: dict[str, tuple[asyncio.Event, set[int]]] = {}
        self._spans = SendSpans()

    async def start(self) -> None:
        """Listen. Raises `OSError`."""
        address = await self._network.listen(self.source.serve)
        self.addresses = (f"{address}?backend={','.join(self.links.backends)}",)

    def fetch_no_more(self) -> None:
        """Cancel the copies to this worker, which will not run their sessions. Copies from it continue."""
        for copy in self._copies.values():
            copy.task.cancel()

    async def stop(self) -> None:
        """Close all connections, and release what is on its way to this worker."""
        self._network.close()
        await stop(*(copy.task for copy in self._copies.values()))
        self.source.close()
        self.links.close()

    def carry_out(self, command: Command) -> None:
        match command:
            case migration_commands.SendFinalDelta(session=session):
                if session in self._quiesced:
                    self._quiesced[session].set()
            case migration_commands.SendManifest(session=session, next_chunk=next_chunk):
                if session in self._manifest_ready:
                    event, numbers = self._manifest_ready[session]
                    numbers.add(next_chunk)
                    event.set()
            case migration_commands.CancelTransfer(session=session):
                self.source.abort(session)
            case migration_commands.FetchState():
                self._copies[command.session] = _IncomingCopy(
                    asyncio.create_task(self._fetch(command)), command.run
                )
            case migration_commands.CancelFetch(session=session, run=run):
                copy = self._copies.pop(session, None)
                if copy is not None:
                    copy.task.cancel()
                self._engine.submit(commands.Evict(session, run))

    # The source

    def key(self, session: str, migration: int) -> bytes | None:
        """See `StateProvider.key`."""
        return self.keys.of(session, migration)

    def check(self, session: str, migration: int, target: str) -> None:
        """See `StateProvider.check`."""
        self._table.check(session, migration, target)

    def offer(self, session: str, migration: int, target: str) -> bool:
        """See `StateProvider.offer`."""
        quiesced = self._table.offer(session, migration, target)
        self._spans.began(session, self._table.entries[session].record.migration_traceparent)
        self._quiesced[session] = asyncio.Event()
        self._manifest_ready[session] = asyncio.Event(), set()
        return quiesced

    async def pages(self, session: str) -> Sequence[Page]:
        """See `StateProvider.pages`."""
        pages = await self._on_engine(session, lambda engine: engine.pages(session))
        if not pages:
            raise SourceNotReadyError(f"session {session}: its state is being copied into its slab")
        return pages

    async def rest(self, session: str, migration: int) -> tuple[Mapping[str, Any], Sequence[Page]]:
        """See `StateProvider.rest`."""
        quiesced = self._quiesced[session]
        with self._spans.step("quiesce session", session):
            self._deliver(events.QuiesceRequested(session, migration))
            await quiesced.wait()
        return await self._on_engine(session, lambda engine: engine.export_session(session))

    async def acknowledged(self, session: str, migration: int, next_chunk: int) -> None:
        """See `StateProvider.acknowledged`."""
        event, numbers = self._manifest_ready[session]
        with self._spans.step("append last chunks", session):
            while next_chunk not in numbers:
                event.clear()
                await event.wait()

    def sending_manifest(self, session: str, migration: int) -> None:
        """See `StateProvider.sending_manifest`."""
        entry = self._table.entries.get(session)
        if (
            entry is None
            or entry.outgoing_migration is None
            or entry.outgoing_migration.migration != migration
        ):
            raise MigrationNotOfferedError(
                f"session {session}: migration {migration} has ended on this worker"
            )
        self._deliver(events.ManifestSent(session, migration))

    def over(self, session: str, migration: int) -> None:
        """See `StateProvider.over`."""
        self._quiesced.pop(session, None)
        self._manifest_ready.pop(session, None)
        self._spans.ended(session)
        self._deliver(events.TransferEnded(session, migration))

    def class_of(self, session: str) -> str:
        """Name of the class of a session that is here or arrives; empty for another one."""
        known = self._table.entries.get(session) or self._table.incoming.get(session)
        return "" if known is None else known.record.model

    async def _on_engine(self, session: str, read: Callable[[Engine], T]) -> T:
        try:
            return await asyncio.wrap_future(self._engine.call(read, self.class_of(session)))
        except UnknownSessionError as error:
            raise NoStateError(str(error)) from error

    # The target

    async def _fetch(self, command: migration_commands.FetchState) -> None:
        session, run = command.session, command.run
        kept = ReservedMemory(self.class_of(session))
        answer: events.Input
        try:
            with fetch_span(command) as span:
                fetched = await self._copy_and_adopt(command, kept)
                span.set_attribute(MIGRATION_ROUNDS, fetched.rounds)
                span.set_attribute(MIGRATION_BYTES, fetched.bytes_copied)
            answer = events.StateReceived(
                session,
                run,
                next_chunk=fetched.next_chunk,
                control_seq=int(fetched.header["control_seq"]),
                digest=fetched.digest,
                bytes_copied=fetched.bytes_copied,
                seconds=fetched.seconds,
                state_bytes=fetched.state_bytes,
            )
            log.info(
                "state fetched",
                session=session,
                chunk=fetched.next_chunk,
                backend=fetched.backend,
                rounds=fetched.rounds,
                bytes=fetched.bytes_copied,
                seconds=round(fetched.seconds, 3),
            )
        except (TransferError, EngineError) as error:
            answer = events.StateFetchFailed(session, run, f"{error.code}: {error}"[:500], error.code)
            if isinstance(error, EngineError):
                # The engine has no room, or the state is not of this model. Other transfer errors are counted
                # where they occur.
                metrics.transfers_broken.add(1, {TRANSFER_ROLE: "target", ERROR_TYPE: error.code})
            log.warning("state not fetched", session=session, reason=answer.reason)
        except Exception as error:
            answer = events.StateFetchFailed(session, run, f"internal: {error!r}"[:500])
            log.exception("state not fetched", session=session)
        finally:
            # The fetch has ended: no transfer writes to the memory any more.
            self._engine.call(kept.release, kept.model)
        copy = self._copies.get(session)
        if copy is not None and copy.run == run:
            del self._copies[session]
        self._deliver(answer)

    async def _copy_and_adopt(
        self, command: migration_commands.FetchState, kept: ReservedMemory
    ) -> FetchedState:
        session, on_host = command.session, command.on_host
        key = self.keys.of(session, command.migration)
        if key is None:
            raise AuthenticationError(
                f"session {session}: the row has no key for migration {command.migration}"
            )
        reserving = self._engine.call(lambda engine: kept.reserve(engine, on_host), kept.model)
        buffer = await asyncio.wrap_future(reserving)
        host = host_of(command.source)
        limit_s = self._pace.limit_s(host, buffer.most_bytes)
        self._deliver(events.CopyStarted(session, command.run, limit_s))
        try:
            fetched = await self._target.fetch(
                session, command.migration, key, command.source, buffer, limit_s
            )
        except TransferError:
            self._pace.forget(host)
            raise
        self._pace.took(host, fetched.bytes_copied, fetched.seconds)
        now = self._now()
        await asyncio.wrap_future(
            self._engine.adopt(
                session,
                command.run,
                lambda engine: kept.adopt(engine, fetched.header, fetched.pages, now),
                kept.model,
            )
        )
        return fetched
