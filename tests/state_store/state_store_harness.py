"""The vocabulary of the state store's tests: one line per action of another service."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import JsonValue, SecretStr

from tests.helpers import forked_process
from tests.helpers.chunk_headers import chunk_header
from tests.helpers.waiting import eventually
from turboserve import subjects
from turboserve.bus import Ack, Bus, append
from turboserve.cli.embedded import EmbeddedServer
from turboserve.cli.embedded.server import wait_ready
from turboserve.clock import Clock, SystemClock
from turboserve.config import Settings as Shared
from turboserve.contracts.errors import UnavailableError
from turboserve.contracts.events import Event, event_from_bytes
from turboserve.contracts.requests import (
    AbandonMigration,
    BeginMigration,
    CommitMigration,
    CreateSession,
    EndSession,
    ListWorkers,
    PlaceSession,
    Renew,
    SessionRef,
    SetControl,
    SubmitPrompt,
    SuspendIdle,
    WorkerGone,
)
from turboserve.contracts.sessions import ControlReceipt, Decision, PromptReceipt, SessionRecord
from turboserve.contracts.workers import HeldSession, LoadReport, Renewal, WorkerPhase
from turboserve.ids import new_id
from turboserve.lifeline import FD_VARIABLE, PARENT_VARIABLE
from turboserve.service import Runtime
from turboserve.simulation.runtime.broker import MemoryBroker
from turboserve.simulation.runtime.hot import MemoryHotStore, MemoryRedis
from turboserve.simulation.runtime.rows.database import MemoryDatabase
from turboserve.simulation.runtime.rows.server import MemoryPostgres
from turboserve.state_store.app import start
from turboserve.state_store.composition import compose
from turboserve.state_store.settings import Settings
from turboserve.tasks import stop

LIMIT_S = 60.0
"""A longer wait is a failure of the store, not of the machine."""
START_LIMIT_S = 90.0
"""Time limit of a start. A process first imports its packages, which may take long on a busy machine."""
PATIENT: dict[str, Any] = {"transaction_deadline_s": 60.0, "request_deadline_s": 90.0}
"""Settings with long deadlines: an operation that exceeds them was stuck, or there is a deadlock."""


MEMORY_URL = "nats://admin@memory:4222"
"""Settings with this broker mean servers in memory, which every test has for itself."""


async def no_fence() -> int:
    """Return the newest fence of a database without sessions."""
    return 0


class MemoryServers:
    """Broker, Postgres and Redis in memory."""

    def __init__(self) -> None:
        self.broker, self.postgres, self.redis = MemoryBroker(), MemoryPostgres(), MemoryRedis()

    def database(self, settings: Settings) -> MemoryDatabase:
        deadline_s = settings.transaction_deadline_s
        return MemoryDatabase(self.postgres, deadline_s=deadline_s, connections=settings.postgres_pool)


_memory: WeakKeyDictionary[asyncio.AbstractEventLoop, MemoryServers] = WeakKeyDictionary()


def memory_servers(settings: Shared) -> MemoryServers | None:
    """Return the servers of the running test if `settings` mean servers in memory."""
    if settings.nats_url != MEMORY_URL:
        return None
    loop = asyncio.get_running_loop()
    if loop not in _memory:
        _memory[loop] = MemoryServers()
    return _memory[loop]


async def connect(service: str, settings: Shared) -> Bus:
    """Connect a bus to the settings' broker."""
    memory = memory_servers(settings)
    if memory is None:
        return await Bus.connect(service, settings)
    return await Bus.connect(service, settings, memory.broker.connect)


class Store:
    """One instance in this process."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    @classmethod
    @asynccontextmanager
    async def running(cls, settings: Settings, clock: Clock | None = None) -> AsyncIterator[Store]:
        memory = memory_servers(settings)
        bus = await connect("state-store", settings)
        runtime = Runtime("state-store", settings, bus)
        runtime.clock = clock or SystemClock()
        try:
            await runtime.watch_streams()
            if memory is None:
                await start(runtime, settings)
            else:
                await compose(runtime, settings, memory.database(settings), MemoryHotStore(memory.redis))
            runtime._started = True
            await bus.flush()
            yield cls(runtime)
        finally:
            runtime.stopping.set()
            for close in reversed(runtime._closers):
                await close()
            await runtime._tasks.stop()
            await bus.close()


class Harness:
    """Gateway, scheduler and workers in one."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    @classmethod
    @asynccontextmanager
    async def connected(cls, settings: Shared) -> AsyncIterator[Harness]:
        bus = await connect("gateway", settings)
        try:
            yield cls(bus)
        finally:
            await bus.close()

    async def answered(self) -> bool:
        """Return whether a store answers at the moment."""
        try:
            await self.bus.call(subjects.LIST_WORKERS, ListWorkers(), deadline_s=3.0)
        except UnavailableError:
            return False
        return True

    # Workers

    async def worker(self, model: str, capacity: int = 4, **fields: Any) -> str:
        """Register a new worker, which renews once. Returns its id."""
        worker = new_id("wk")
        await self.renew(worker, model, capacity, **fields)
        return worker

    async def renew(
        self,
        worker: str,
        model: str,
        capacity: int = 4,
        phase: WorkerPhase = WorkerPhase.READY,
        held: tuple[HeldSession, ...] = (),
        **fields: object,
    ) -> Renewal:
        values = {"worker": worker, "model": model, "capacity": capacity, "phase": phase, "sessions": held}
        load = LoadReport.model_validate(values | fields)
        return await self.bus.call(subjects.RENEW, Renew(load=load))

    async def gone(self, worker: str, reason: str = "killed") -> None:
        await self.bus.call(subjects.WORKER_GONE, WorkerGone(worker=worker, reason=reason))

    # Sessions

    async def create(self, model: str, **fields: object) -> SessionRecord:
        values = {"id": new_id("ses"), "tenant": "acme", "prompt": "a red circle", "seed": 7, **fields}
        return await self.bus.call(
            subjects.CREATE_SESSION, CreateSession.model_validate({"model": model, **values})
        )

    async def get(self, session: str, tenant: str | None = None) -> SessionRecord:
        return await self.bus.call(subjects.GET_SESSION, SessionRef(session=session, tenant=tenant))

    async def place(
        self, record: SessionRecord, worker: str, kind: str = "place", version: int | None = None
    ) -> SessionRecord:
        decision = Decision(session=record.id, epoch=record.epoch, kind=kind, reason="least loaded")
        expected = record.version if version is None else version
        request = PlaceSession(session=record.id, expected_version=expected, worker=worker, decision=decision)
        return await self._fenced(await self.bus.call(subjects.PLACE_SESSION, request))

    async def _fenced(self, record: SessionRecord) -> SessionRecord:
        """Return the record once its epoch, or a later one, is in the log.

        The store answers after a second without it; a sweep writes it then.
        """
        found = record

        async def settled() -> bool:
            nonlocal found
            row = await self.get(record.id)
            if row.epoch == record.epoch:
                found = record.model_copy(update={"own_revision": row.own_revision})
            return row.epoch != record.epoch or row.own_revision is not None

        if record.own_revision is None and record.epoch > 0:
            await eventually(settled)
        return found

    async def begin_migration(self, record: SessionRecord, target: str) -> SessionRecord:
        decision = Decision(session=record.id, epoch=record.epoch, kind="migrate", reason="less loaded")
        request = BeginMigration(
            session=record.id, expected_version=record.version, target=target, decision=decision
        )
        return await self.bus.call(subjects.BEGIN_MIGRATION, request)

    async def commit_migration(
        self, record: SessionRecord, next_chunk: int = 0, **fields: object
    ) -> SessionRecord:
        """Commit the migration that `record` names."""
        values = {"session": record.id, "migration": record.migration, "target": record.target} | fields
        request = CommitMigration.model_validate(
            values | {"next_chunk": next_chunk, "digest": "d1", "numbers": {"bytes_copied": 5.0}}
        )
        return await self._fenced(await self.bus.call(subjects.COMMIT_MIGRATION, request))

    async def abandon_migration(
        self, record: SessionRecord, reason: str = "took too long", *, release: bool = False
    ) -> SessionRecord:
        request = AbandonMigration(
            session=record.id, migration=record.migration or 0, reason=reason, release=release
        )
        return await self._fenced(await self.bus.call(subjects.ABANDON_MIGRATION, request))

    async def decisions(self, session: str) -> list[Decision]:
        page = await self.bus.call(subjects.LIST_DECISIONS, SessionRef(session=session))
        return list(page.decisions)

    async def prompt(self, session: str, prompt: str, prompt_id: str | None = None) -> PromptReceipt:
        request = SubmitPrompt(session=session, prompt_id=prompt_id or new_id("prm"), prompt=prompt)
        return await self.bus.call(subjects.SUBMIT_PROMPT, request)

    async def control(
        self, session: str, name: str, value: JsonValue, control_id: str | None = None, **fields: object
    ) -> ControlReceipt:
        values = {"session": session, "control_id": control_id or new_id("ctl"), "name": name} | fields
        request = SetControl.model_validate(values | {"value": value})
        return await self.bus.call(subjects.SET_CONTROL, request)

    async def pause(self, session: str) -> SessionRecord:
        return await self.bus.call(subjects.PAUSE_SESSION, SessionRef(session=session))

    async def resume(self, session: str) -> SessionRecord:
        return await self.bus.call(subjects.RESUME_SESSION, SessionRef(session=session))

    async def suspend_idle(self, record: SessionRecord) -> SessionRecord:
        request = SuspendIdle(session=record.id, expected_version=record.version)
        return await self.bus.call(subjects.SUSPEND_IDLE, request)

    async def end(self, session: str, tenant: str | None = None) -> SessionRecord:
        return await self.bus.call(subjects.END_SESSION, EndSession(session=session, tenant=tenant))

    async def running(self, model: str, capacity: int = 4) -> SessionRecord:
        """Create a session on a worker of its own."""
        worker = await self.worker(model, capacity)
        return await self.place(await self.create(model), worker)

    # Logs

    async def chunk(
        self,
        record: SessionRecord,
        index: int,
        data: bytes = b"video",
        *,
        control_seq: int = 0,
        worker: str | None = None,
        began: int | None = None,
        deadline_s: float = LIMIT_S,
    ) -> Ack:
        """Append a chunk as the owner that `record` names. Raises as `turboserve.bus.append`."""
        owner = worker or record.worker or "nobody"
        header = chunk_header(record.id, index, record.epoch, owner, began=began, control_seq=control_seq)
        assert record.own_revision is not None
        return await append(
            self.bus,
            subjects.CHUNK.by(record.id, header.worker),
            data,
            message_id=f"{record.id}:{index}",
            headers=header.to_headers(),
            expect=(subjects.OWN.of(record.id), record.own_revision),
            deadline_s=deadline_s,
        )

    async def history(self, subject: str) -> list[tuple[int, bytes]]:
        """Return (sequence, body) of everything that the log holds on `subject`."""
        found: list[tuple[int, bytes]] = []
        log = next(log for log in subjects.LOGS if log.takes(subject))
        jetstream = self.bus.jetstream()
        info = await jetstream.stream_info(log.stream, subjects_filter=subject)
        sequence = 0
        for _ in range((info.state.subjects or {}).get(subject, 0)):
            raw = await jetstream.get_msg(
                log.stream, seq=sequence + 1, subject=subject, direct=True, next=True
            )
            assert raw.seq is not None
            sequence = raw.seq
            found.append((sequence, raw.data or b""))
        return found

    async def events(self, session: str) -> list[Event]:
        history = await self.history(subjects.EVENT.of(session))
        return [event_from_bytes(body) for _, body in history]

    async def event_types(self, session: str) -> list[str]:
        return [event.type for event in await self.events(session)]

    async def until_events(self, session: str, *types: str) -> list[Event]:
        """Wait until the session's events are exactly `types`. Returns them."""

        async def same() -> bool:
            return await self.event_types(session) == list(types)

        try:
            await eventually(same)
        except AssertionError:
            assert await self.event_types(session) == list(types)
        return await self.events(session)


class Process:
    """A state store as a process of its own, which may die."""

    def __init__(self, process: forked_process.Started) -> None:
        self.process = process

    @classmethod
    @asynccontextmanager
    async def running(
        cls, settings: Settings, point: str | None = None, variables: Mapping[str, str] | None = None
    ) -> AsyncIterator[Process]:
        """Start the process, with additional environment `variables`, and wait until it serves.

        With `point`, the process dies there.
        """
        script = [str(Path(__file__).with_name("crashing_store.py")), point] if point else []
        command = script or ["-m", "turboserve.state_store"]
        environment = {**os.environ, **_environment(settings), **(variables or {})}
        process = forked_process.start(command, environment, 2)
        try:
            async with Harness.connected(settings) as harness:
                await eventually(harness.answered, START_LIMIT_S)
            yield cls(process)
        finally:
            process.kill()
            process.wait()

    async def died(self) -> int:
        """Wait until the process is dead. Returns its exit status."""
        return await asyncio.to_thread(self.process.wait, LIMIT_S)

    async def dies_of(self, bus: Bus, request: Coroutine[Any, Any, object]) -> None:
        """Send a request over `bus` that makes the process kill itself before it answers."""
        asked = asyncio.create_task(request)
        try:
            assert await self.died() == -signal.SIGKILL
            # An answer that it had sent would have arrived by now.
            await bus.flush()
            assert not asked.done(), asked
        finally:
            await stop(asked)


def _environment(settings: Settings) -> dict[str, str]:
    values = {name: getattr(settings, name) for name in settings.model_fields_set}
    plain = {
        name: value.get_secret_value() if isinstance(value, SecretStr) else value
        for name, value in values.items()
    }
    texts = {n: json.dumps(value) if isinstance(value, dict) else str(value) for n, value in plain.items()}
    return {f"TURBOSERVE_{name.upper()}": text for name, text in texts.items()}


class Machine:
    """A server that tests kill, stop and start again."""

    def __init__(self, server: EmbeddedServer, log: Path) -> None:
        self.server, self._log = server, log
        self._guard: asyncio.subprocess.Process | None = None
        self._lifeline: tuple[int, int] | None = None

    async def start(self) -> None:
        await self.server.prepare()
        self._lifeline = os.pipe()
        lifeline = {FD_VARIABLE: str(self._lifeline[0]), PARENT_VARIABLE: str(os.getpid())}
        with self._log.open("ab") as output:
            self._guard = await asyncio.create_subprocess_exec(
                *self.server.command(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **lifeline},
                pass_fds=(self._lifeline[0],),
                start_new_session=True,
            )
        await wait_ready(self.server, 60.0)

    def signal(self, sign: signal.Signals) -> None:
        """Signal the server itself, not its guard."""
        os.kill(int(self.server.pid_file.read_text()), sign)

    async def kill(self) -> None:
        """Kill with `kill -9`, and wait until it is dead."""
        self.signal(signal.SIGKILL)
        await self.stop()

    async def stop(self) -> None:
        if self._guard is not None:
            if self._guard.returncode is None:
                with suppress(ProcessLookupError):
                    self._guard.terminate()
            await self._guard.wait()
            self._guard = None
        for end in self._lifeline or ():
            os.close(end)
        self._lifeline = None


@asynccontextmanager
async def machine(server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[Machine]:
    """Run the server until the end of the block."""
    server.directory.mkdir(parents=True, exist_ok=True)
    one = Machine(server, tmp_path / f"{server.name}.log")
    await one.start()
    try:
        yield one
    finally:
        await one.stop()
