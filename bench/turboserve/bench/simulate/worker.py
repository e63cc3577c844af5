"""One worker: the real session table and conductor, the shell in small, a model of the engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from turboserve import subjects
from turboserve.bench.simulate.copying import Source, Target
from turboserve.bench.simulate.engine import CHUNK_S, FRAMES, LOST, Chunk, Engine, Made, begin, link
from turboserve.bench.simulate.kernel import Awaited, Program, sleep
from turboserve.bench.simulate.log import Stream
from turboserve.bench.simulate.network import Network
from turboserve.bench.simulate.store.hot import LATENTS_KEPT, Latents
from turboserve.bus.client import NoServerError
from turboserve.contracts import requests
from turboserve.contracts.chunks import ChunkHeader
from turboserve.contracts.errors import (
    DeadlineError,
    FencedError,
    NotFoundError,
    TurboServeError,
    UnavailableError,
    WorkerGoneError,
)
from turboserve.contracts.workers import Assignment, LoadReport, Renewal, WorkerPhase
from turboserve.subjects import CHUNK, OWN
from turboserve.worker.service import commands as do
from turboserve.worker.service import inputs as told
from turboserve.worker.service.table import Table

MODEL = "toyworld"
TICK_S = 0.25
RETRY_S = 0.2
LATENTS_RETRY_S = 0.5
PAUSE_S, GOODBYE_S, FAREWELL_S, PATIENCE_S = 0.05, 0.3, 2.0, 10.0
"""As in the worker's shell, which would bring torch with it."""


class Worker:
    """One worker's only life: a process that ends is replaced under another id."""

    def __init__(
        self,
        program: Program,
        network: Network,
        chunks: Stream,
        capacity: int,
        slot: str,
        lease_s: float,
        heartbeat_s: float,
        report: Callable[[LoadReport], None],
        latents: Callable[[Program, str, Latents], None],
        peer: Callable[[str], Worker | None],
    ) -> None:
        """`report` and `latents` publish hints on the worker's behalf."""
        self.program, self.network = program, network
        self.id = program.name
        self.table = Table(self.id, MODEL, capacity, lease_s)
        self.engine = Engine(program, capacity, 2 * capacity, lambda: network.faults, self._from_engine)
        self.loading, self.stopping = True, False
        self.source, self.target = Source(self), Target(self, peer)
        self.made: dict[tuple[str, int, int], Made] = {}
        self._chunks, self._slot = chunks, slot
        self._heartbeat_s, self._report, self._latents = heartbeat_s, report, latents
        self._fetched: dict[tuple[str, int], int] = {}
        self._wanted: Awaited[bool] = Awaited()
        self._started_at = program.kernel.now

    def load_model(self, seconds: float) -> None:
        """Known as starting meanwhile; infinite: it never gets ready."""
        self.program.spawn(self._announce(self._now + seconds))

    async def _announce(self, until: float) -> None:
        """`announcement.announced`: its last renewal has ended before it says anything else."""
        while self._now < until and not self.stopping:
            await self._beat()
            await sleep(max(0.0, min(self._heartbeat_s, until - self._now)))
        if not self.stopping:
            self.loading = False
            self._boot()

    def _boot(self) -> None:
        self.program.every(TICK_S, lambda: self.tell(told.Tick()))
        self.program.spawn(self._beat_for_ever())

    async def stop(self) -> None:
        """Told to end: publish what is made, as far as that takes a moment, and say goodbye."""
        self.stopping = True
        self.engine.submit(do.StopGenerating())
        deadline = self._now + FAREWELL_S
        while self.table.unpublished and self._now < deadline:
            await sleep(0.05)
        # As the shell ends the engine's thread: after the goodbye its sessions are others'.
        self.engine.end()
        load = self.load().model_copy(update={"phase": WorkerPhase.GONE})
        with suppress(TurboServeError):
            await self._call(subjects.RENEW.subject, requests.Renew(load=load), GOODBYE_S)
        self.program.kill("stopped")

    @property
    def _now(self) -> float:
        return self.program.kernel.now

    def _call(self, name: str, request: Any, deadline_s: float = 2.0) -> Awaited[Any]:
        return self.network.call(self.program, "state-store", name, request, deadline_s)

    @property
    def copies(self) -> int:
        """States that are being copied here, and memory kept for them."""
        return len(self.target.under_way) + len(self.engine.landings)

    # Heartbeat

    def load(self) -> LoadReport:
        draining = self.table.draining or self.stopping
        if self.loading:
            return LoadReport(
                worker=self.id,
                model=MODEL,
                capacity=0,
                phase=WorkerPhase.STARTING,
                pool_slot=self._slot,
                started_at=self._started_at,
            )
        return LoadReport(
            worker=self.id,
            model=MODEL,
            capacity=self.table.capacity,
            phase=WorkerPhase.DRAINING if draining else WorkerPhase.READY,
            sessions=self.table.held(lambda index: index * CHUNK_S),
            refusals=self.table.refusals(),
            moves=self.table.arrivals.reports(),
            transfer=(self.id,),
            pool_slot=self._slot,
            started_at=self._started_at,
        )

    async def _beat_for_ever(self) -> None:
        while not self.stopping:
            self._wanted = Awaited()
            await self._beat()
            await sleep(PAUSE_S)
            self.program.after(self._heartbeat_s - PAUSE_S, self._wanted.settle)
            await self._wanted

    async def _beat(self) -> None:
        load, asked_at = self.load(), self._now
        self._report(load)
        try:
            answer: Renewal = await self._call(subjects.RENEW.subject, requests.Renew(load=load))
        except NoServerError:
            self.tell(told.NobodyRenews(asked_at))
        except WorkerGoneError:
            if not self.stopping:
                self.program.kill("declared gone")
        except UnavailableError as error:
            if error.answered:
                self.tell(told.NobodyRenews(asked_at))
        else:
            self.tell(told.Renewed(asked_at, answer.assigned, answer.drain, answer.incoming))

    # Inputs

    def assigned(self, assignment: Assignment) -> None:
        self.tell(told.Assigned(assignment.record, assignment.incoming))

    def playhead(self, session: str, playhead_s: float, viewers: int) -> None:
        if session in self.table.entries:
            self.tell(told.PlayheadMoved(session, playhead_s, viewers > 0))

    def tell(self, message: told.Input) -> None:
        if self.loading:
            # Nothing is assigned to a worker that starts, and a drain is said again.
            return
        if isinstance(message, told.Renewed | told.NobodyRenews):
            self.program.kernel.note(self.id, type(message).__name__, f"asked at {message.asked_at:.3f}")
        for command in self.table.tell(message, self._now):
            self._carry_out(command)

    def _from_engine(self, item: Made | told.Input) -> None:
        self.program.after(0.002, lambda: self._arrived(item))

    def _arrived(self, item: Made | told.Input) -> None:
        if isinstance(item, Made):
            self.made[item.session, item.run, item.index] = item
            self.tell(told.ChunkPackaged(item.session, item.run, item.index, item.control_seq))
        else:
            self.tell(item)

    # Commands

    def _carry_out(self, command: do.Command) -> None:
        match command:
            case do.ReadLogEnd():
                self.program.spawn(self._read_log_end(command))
            case do.FetchLatents():
                self.program.spawn(self._fetch_latents(command))
            case do.Admit():
                lost = begin(command.seed) if command.next_chunk == 0 else link(LOST, command.next_chunk)
                chain = self._fetched.pop((command.session, command.run), lost)
                self.engine.admit(command, chain)
            case do.PublishChunk():
                chunk = self.made[command.session, command.run, command.index]
                self.program.spawn(self._publish(command, chunk))
            case do.PublishLatents():
                chunk = self.made[command.session, command.run, command.index]
                self._latents(self.program, chunk.session, Latents(chunk.index, command.epoch, chunk.chain))
            case do.ForgetChunk():
                self.made.pop((command.session, command.run, command.index), None)
            case do.GiveRest() | do.GiveSeal() | do.EndGift():
                self.source.carry_out(command)
            case do.Fetch():
                self.target.fetch(command)
            case do.DropArrival():
                self.target.drop(command)
            case do.FailSession():
                self.program.spawn(self._fail(command))
            case do.Report():
                self._wanted.settle(True)
            case do.Evict():
                self._fetched.pop((command.session, command.run), None)
                for key in [key for key in self.made if key[:2] == (command.session, command.run)]:
                    del self.made[key]
                self.engine.submit(command)
            case do.GenerateUntil() if self.stopping:
                pass
            case _:
                self.engine.submit(command)

    async def _publish(self, command: do.PublishChunk, chunk: Made) -> None:
        outcome = await self._append(command, chunk)
        self.tell(told.Published(chunk.session, chunk.run, chunk.index, command.ownership, outcome))

    async def _append(self, command: do.PublishChunk, chunk: Made) -> told.Outcome:
        """`wire.Wire.publish`."""
        epoch, revision = command.ownership
        header = header_of(chunk, epoch, self.id)
        subject = CHUNK.of(chunk.session)
        try:
            ack = await self._chunks.publish(
                self.program,
                subject,
                Chunk(header, chunk.parent, chunk.chain),
                f"{chunk.session}:{chunk.index}",
                (OWN.of(chunk.session), revision),
            )
            if not ack.duplicate:
                return told.Outcome.ACKED
            entry = await self._chunks.read_next(self.program, subject, ack.sequence)
        except FencedError:
            return told.Outcome.FENCED
        except DeadlineError:
            return told.Outcome.UNKNOWN
        mine = entry is None or entry.body.header.worker == self.id
        return told.Outcome.ACKED if mine else told.Outcome.FENCED

    async def _read_log_end(self, command: do.ReadLogEnd) -> None:
        while self._asked(command):
            try:
                entry = await self._chunks.read_last(self.program, CHUNK.of(command.session))
            except DeadlineError:
                await sleep(RETRY_S)
                continue
            header = None if entry is None else entry.body.header
            end = 0 if header is None else header.index + 1
            mine = header is not None and header.worker == self.id
            epoch = 0 if header is None else header.epoch
            self.tell(told.LogEndRead(command.session, command.query, end, mine, epoch))
            return

    async def _fetch_latents(self, command: do.FetchLatents) -> None:
        """`takeover.Takeover.latents`: the newest kept ones, as far back as they reach."""
        deadline = self._now + PATIENCE_S
        newest: Latents | None = None
        for index in range(command.next_chunk - 1, max(-1, command.next_chunk - 1 - LATENTS_KEPT), -1):
            found = await self._ask_latents(command, index, deadline)
            if found is None or (newest is None and command.epoch and found.epoch != command.epoch):
                break
            newest = newest or found
        if self._asked(command):
            if newest is not None:
                self._fetched[command.session, command.run] = newest.chain
            self.tell(told.LatentsFetched(command.session, command.query))

    async def _ask_latents(self, command: do.FetchLatents, index: int, deadline: float) -> Latents | None:
        request = requests.GetLatents(session=command.session, index=index)
        while self._asked(command):
            try:
                found: Latents = await self._call(subjects.GET_LATENTS.subject, request)
                return found
            except NotFoundError:
                return None
            except UnavailableError:
                if self._now >= deadline:
                    return None
                await sleep(LATENTS_RETRY_S)
        return None

    def _asked(self, command: do.ReadLogEnd | do.FetchLatents) -> bool:
        entry = self.table.entries.get(command.session)
        return entry is not None and entry.awaiting is not None and entry.query == command.query

    async def _fail(self, command: do.FailSession) -> None:
        request = requests.FailSession(
            session=command.session, epoch=command.epoch, worker=self.id, reason=command.reason
        )
        with suppress(TurboServeError):
            await self._call(subjects.FAIL_SESSION.subject, request)


def header_of(chunk: Made, epoch: int, worker: str) -> ChunkHeader:
    return ChunkHeader.model_construct(
        session=chunk.session,
        index=chunk.index,
        epoch=epoch,
        worker=worker,
        control_seq=chunk.control_seq,
        first_frame=chunk.index * FRAMES,
        frames=FRAMES,
        fps=FRAMES / CHUNK_S,
        width=1,
        height=1,
        codec="",
        init_bytes=0,
    )
