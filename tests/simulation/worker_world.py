"""Workers' own service code on a virtual loop, with an in-memory broker, and rows in a dictionary."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nats.js.api import DiscardPolicy, StreamConfig

from turboserve.bus import Bus, append
from turboserve.bus.log import Entry, next_entry
from turboserve.contracts.chunks import ChunkHeader, LatentsHeader, Ownership
from turboserve.contracts.errors import NotFoundError
from turboserve.contracts.requests import FailSession, GetLatents, Renew
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import (
    Assignment,
    Incoming,
    LoadReport,
    MigrationKey,
    MigrationStage,
    Playhead,
    Renewal,
    WorkerPhase,
)
from turboserve.ids import use_source
from turboserve.service import Runtime, run_service
from turboserve.simulation.runtime.broker import MemoryBroker
from turboserve.simulation.runtime.device.contents import ChunkContents
from turboserve.simulation.runtime.device.fabric import TransferFabric
from turboserve.simulation.runtime.device.faults import DeviceFaults
from turboserve.simulation.runtime.device.platform import VirtualPlatform
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.simulation.runtime.process import Process
from turboserve.simulation.service import HostClock, SeededRandomness
from turboserve.subjects import (
    ASSIGN,
    CHUNK,
    CHUNKS,
    FAIL_SESSION,
    GET_LATENTS,
    LATENTS,
    OWN,
    PLAYHEAD,
    RENEW,
)
from turboserve.worker.service.app import compose
from turboserve.worker.service.worker import Worker
from turboserve.worker.settings import Settings

PROFILE = DeviceProfile(slabs=2, host_states=4, load_s=1.0)


@dataclass(eq=False)
class WorkerIncarnation:
    """One incarnation of a worker's process."""

    process: Process
    platform: VirtualPlatform
    worker: Worker | None = None
    status: int | None = None
    """Exit status, if the process ended by itself."""
    runtime: Runtime | None = None
    left: str | None = None
    """Reason, if the process left at once."""

    @property
    def faults(self) -> DeviceFaults:
        return self.platform.faults


class WorkerWorld:
    """Rows that the test changes by hand, and the workers that react to them."""

    def __init__(self, seed: int = 1, profile: DeviceProfile = PROFILE) -> None:
        self.loop = VirtualLoop(seed)
        self.profile = profile
        self.clock = HostClock(self.loop)
        use_source(SeededRandomness(self.clock, seed))
        self.broker = MemoryBroker(random.Random(seed), loop=self.loop)
        self.fabric = TransferFabric(self.loop, random.Random(seed + 1))
        self.rows: dict[str, SessionRecord] = {}
        self.incarnations: dict[str, WorkerIncarnation] = {}
        self.loads: dict[str, LoadReport] = {}
        self.latents: dict[tuple[str, int], tuple[LatentsHeader, bytes]] = {}
        self.gone: set[str] = set()
        self.failed: dict[str, str] = {}
        self.refuses_migrations = False
        """Whether verified states are not given to their targets."""
        self.bus: Bus

    def run(self, seconds: float) -> None:
        self.loop.advance(seconds)

    def until(self, condition: Callable[[], object], what: str, most_s: float = 120.0) -> None:
        deadline = self.loop.time() + most_s
        while not condition():
            assert self.loop.time() < deadline, what
            self.run(0.1)

    def call(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        self.loop.close()

    async def serve(self) -> None:
        """Act as the state store."""
        settings = Settings(nats_url="nats://state-store@memory")
        self.bus = await Bus.connect("state-store", settings, self.broker.connect)
        config = StreamConfig(
            name=CHUNKS,
            subjects=[OWN.every, CHUNK.every],
            discard=DiscardPolicy.NEW,
            allow_direct=True,
            allow_msg_ttl=True,
        )
        await self.bus.jetstream().add_stream(config)
        await self.bus.serve(RENEW, self._renew)
        await self.bus.serve(FAIL_SESSION, self._fail)
        await self.bus.serve_raw(GET_LATENTS, self._get_latents)
        await self.bus.subscribe(LATENTS, "*", self._keep_latents)

    def start(self, worker: str, profile: DeviceProfile | None = None) -> WorkerIncarnation:
        process = Process(worker)
        settings = Settings(
            worker_id=worker, worker_max_sessions=2, nats_url="nats://worker@memory", lease_s=8.0
        )
        incarnation = WorkerIncarnation(process, None)  # type: ignore[arg-type]

        def leave(reason: str) -> None:
            incarnation.left = reason
            self.loop.kill(process)

        incarnation.platform = VirtualPlatform(
            profile or self.profile, settings, self.clock, self.fabric, worker.replace("_", "-"), leave
        )

        async def main() -> None:
            bus = await Bus.connect("worker", settings, self.broker.connect)
            incarnation.runtime = Runtime("worker", settings, bus, self.clock)

            async def begin(runtime: Runtime) -> None:
                incarnation.worker = await compose(runtime, settings, incarnation.platform)

            incarnation.status = await run_service(incarnation.runtime, begin)

        self.loop.spawn(process, main(), worker)
        self.incarnations[worker] = incarnation
        return incarnation

    # Rows

    def change(self, session: str, **changes: Any) -> SessionRecord:
        row = self.rows[session]
        row = self.rows[session] = row.model_copy(update={"version": row.version + 1, **changes})
        return row

    async def place(self, session: str, worker: str, **changes: Any) -> None:
        """Make the worker the owner, under a new epoch."""
        if session not in self.rows:
            fields = {"prompt": "a red circle", "seed": 7, **changes}
            self.rows[session] = SessionRecord.model_validate(
                {
                    "id": session,
                    "tenant": "t",
                    "model": "toyworld",
                    "phase": Phase.REQUESTED,
                    "version": 1,
                    "epoch": 0,
                    "created_at": 0,
                    "updated_at": 0,
                    **fields,
                }
            )
        await self._own(session, worker, phase=Phase.ACTIVE, **changes)
        await self.handle(session, worker)

    async def migrate(self, session: str, target: str) -> int:
        row = self.rows[session]
        migration = row.version + 1
        phase = row.phase if row.phase is Phase.SUSPENDED else Phase.MIGRATING
        self.change(session, phase=phase, target=target, migration=migration)
        await self.handle(session, str(row.worker))
        await self.handle(session, target)
        return migration

    async def handle(self, session: str, worker: str) -> None:
        row = self.rows[session]
        incoming = self._incoming(row) if row.target == worker else None
        await self.bus.publish(ASSIGN, worker, Assignment(record=row, incoming=incoming, key=_key(row)))

    async def watch(self, session: str, playhead_s: float, viewers: int = 1) -> None:
        await self.bus.publish(
            PLAYHEAD, session, Playhead(session=session, playhead_s=playhead_s, viewers=viewers)
        )

    async def _own(self, session: str, worker: str, **changes: Any) -> None:
        row = self.rows[session]
        epoch = row.epoch + 1
        self.change(session, worker=worker, epoch=epoch, own_revision=None, **changes)
        body = Ownership(session=session, epoch=epoch, worker=worker).to_bytes()
        ack = await append(self.bus, OWN.of(session), body, message_id=f"own-{session}-{epoch}")
        self.change(session, own_revision=ack.sequence)

    def _incoming(self, row: SessionRecord) -> Incoming:
        load = self.loads.get(str(row.worker))
        return Incoming(record=row, source=load.transfer if load else ())

    # What workers ask

    async def _renew(self, request: Renew, _: object) -> Renewal:
        load = request.load
        self.loads[load.worker] = load
        if load.phase is WorkerPhase.GONE:
            self.gone.add(load.worker)
        for report in load.migrations:
            row = self.rows[report.session]
            if (
                report.stage is MigrationStage.VERIFIED
                and row.migration == report.migration
                and not self.refuses_migrations
            ):
                phase = Phase.ACTIVE if row.phase is Phase.MIGRATING else row.phase
                source = str(row.worker)
                await self._own(
                    row.id, load.worker, phase=phase, target=None, migration=None, state_digest=report.digest
                )
                await self.handle(row.id, source)
        rows = self.rows.values()
        return Renewal(
            worker=load.worker,
            assigned=tuple(row for row in rows if row.worker == load.worker and not row.phase.ended),
            incoming=tuple(self._incoming(row) for row in rows if row.target == load.worker),
            keys=tuple(key for row in rows if load.worker in (row.worker, row.target) and (key := _key(row))),
        )

    async def _fail(self, request: FailSession, _: object) -> SessionRecord:
        self.failed[request.session] = request.reason
        return self.change(request.session, phase=Phase.FAILED, reason=request.reason)

    async def _get_latents(self, request: GetLatents, _: object) -> tuple[LatentsHeader, bytes]:
        found = self.latents.get((request.session, request.index))
        if found is None:
            raise NotFoundError(f"latents: none of {request.session} {request.index}")
        return found

    async def _keep_latents(self, header: LatentsHeader, data: bytes) -> None:
        self.latents[header.session, header.index] = header, data

    # The log

    async def entries(self, session: str) -> list[Entry]:
        found: list[Entry] = []
        while True:
            sequence = found[-1].sequence + 1 if found else 1
            entry = await next_entry(self.bus, CHUNKS, CHUNK.of(session), sequence)
            if entry is None:
                return found
            found.append(entry)

    def chunks(self, session: str) -> list[tuple[ChunkHeader, ChunkContents]]:
        """Return all chunks of the log. Their indices are contiguous."""
        entries = self.call(self.entries(session))
        chunks = [
            (ChunkHeader.from_headers(entry.headers), ChunkContents.of_payload(entry.data))
            for entry in entries
        ]
        assert [header.index for header, _ in chunks] == list(range(len(chunks)))
        return chunks


def _key(row: SessionRecord) -> MigrationKey | None:
    if row.migration is None:
        return None
    return MigrationKey.model_validate(
        {"session": row.id, "migration": row.migration, "key": f"{row.migration:064x}"}
    )
