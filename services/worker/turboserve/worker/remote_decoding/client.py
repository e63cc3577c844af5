"""A worker's connections to the decode workers, and its chunks' way to them.

The event loop has the connections. The engine's decode executor waits for the frames on its own thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

from turboserve import logs
from turboserve.contracts.decoding import EACH_LIMIT, DecodeCapacity
from turboserve.tasks import stop
from turboserve.worker import metrics
from turboserve.worker.engine.decode_jobs import DecodeJob
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.remote_decoding.allotments import AllottedSessions
from turboserve.worker.remote_decoding.connection import DecodeConnection
from turboserve.worker.remote_decoding.frames import (
    PURPOSE,
    DecodeChannel,
    DecodeHello,
    NoCache,
)
from turboserve.worker.remote_decoding.introduction import introduce
from turboserve.worker.remote_decoding.linking import make_links, offered
from turboserve.worker.remote_decoding.payload_links import BackendRests
from turboserve.worker.remote_decoding.ports import RolePorts
from turboserve.worker.remote_decoding.routing import (
    RECONNECT_S,
    WORKERS_PER_CHUNK,
    AllotmentKnown,
    AskFailed,
    AskWorker,
    CacheMissed,
    ChunkAbandoned,
    ChunkDecoded,
    ChunkWaits,
    DecodeHere,
    DecoderConnected,
    DecoderDisconnected,
    DecodeRouter,
    RoomRefused,
    RoutingEvent,
    next_pause_s,
)
from turboserve.worker.transfer.errors import DeadlineExceededError, TransferError
from turboserve.worker.transfer.links import Links
from turboserve.worker.transfer.target import parse_address

CONNECT_S = 5.0
ASK_S = 2.0
"""Pause between two questions for the allotment, seconds."""
ALLOTMENT_S = 30.0
"""Longest time until its answer, seconds. The answer waits for no decode."""

log = logs.get("decoding")
MACHINE = RolePorts()
"""Those of this machine."""


class DecodeClient:
    """See `RemoteDecoder`. Keeps a connection to each decode worker."""

    def __init__(
        self,
        worker: str,
        model: str,
        config: ModelConfig,
        addresses: Sequence[str],
        key: bytes,
        timeout_s: float,
        capacity: int,
        own: int = 0,
        ports: RolePorts = MACHINE,
        links: Links | None = None,
    ) -> None:
        """`worker`, `model`: id and `state_fingerprint` of this worker. `addresses`, `key`: of the decode
        workers. `timeout_s`: limit of one question, seconds. `capacity`: K of this worker. `own`: sessions
        that it can decode itself. `links`: over which payloads pass where both ends can. The client closes
        them."""
        self._worker, self._model, self._config = worker, model, config
        self._addresses, self._key, self._timeout_s = addresses, key, timeout_s
        self._connect, self._now, self._wait = ports.connect, ports.now, ports.wait
        self._links, self._rests = links, {address: BackendRests(ports.now) for address in addresses}
        self.router = DecodeRouter()
        self._capacity = capacity
        self._allotted = AllottedSessions(addresses, own, ports.now())
        self._known = asyncio.Event()
        """Set when all allotments are known."""
        self._connections: dict[str, DecodeConnection] = {}
        self._jobs = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> None:
        """Keep the connections until canceled."""
        self._loop = asyncio.get_running_loop()
        try:
            await asyncio.gather(*(self._keep_connected(address) for address in self._addresses))
        finally:
            self._loop = None
            for connection in [*self._connections.values()]:
                connection.close()
            if self._links is not None:
                self._links.close()

    async def wait_until_known(self, seconds: float) -> None:
        """Wait until every decode worker has said what it allots, for so long at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._known.wait()

    @property
    def link_kinds(self) -> str:
        """Backends over which payloads pass, of all connections. Empty: over the connections themselves."""
        kinds = (connection.link_kinds for connection in self._connections.values())
        return "/".join(dict.fromkeys(filter(None, kinds)))

    def limited(self, capacity: int) -> int:
        """Return K, or fewer sessions if the decode workers allot no more."""
        limit = self._allotted.limit(self._now())
        return capacity if limit is None else min(capacity, limit)

    def capacity(self, denoised: int) -> DecodeCapacity | None:
        """See `DecodeLimit.capacity`."""
        carried = self._allotted.carried(self._now())
        if carried is None:
            return None
        return DecodeCapacity(
            workers=len(carried),
            sessions=sum(carried.values()),
            denoised=denoised,
            each=carried if len(carried) <= EACH_LIMIT else {},
        )

    def decode(self, jobs: Sequence[DecodeJob]) -> list[Tensor | None]:
        """See `RemoteDecoder.decode`. Call it on another thread than the event loop's."""
        found = self._found(jobs)
        if missing := found.count(None):
            metrics.decoded_here.add(missing)
        return found

    def _found(self, jobs: Sequence[DecodeJob]) -> list[Tensor | None]:
        loop = self._loop
        if loop is None or not self.router.workers:
            return [None] * len(jobs)
        # One more than the deadlines of the workers that a chunk may ask.
        limit_s = (WORKERS_PER_CHUNK + 1) * self._timeout_s
        try:
            return self._wait(self._decode_all(jobs), loop, limit_s)
        except (TimeoutError, concurrent.futures.CancelledError):
            pass
        except Exception:
            log.exception("chunks not decoded elsewhere")
        return [None] * len(jobs)

    async def _decode_all(self, jobs: Sequence[DecodeJob]) -> list[Tensor | None]:
        return list(await asyncio.gather(*(self._decode(job) for job in jobs)))

    async def _decode(self, job: DecodeJob) -> Tensor | None:
        number = next(self._jobs)
        try:
            return await self._asked(number, job)
        except BaseException:
            self.router.handle(ChunkAbandoned(number), self._now())
            raise

    async def _asked(self, number: int, job: DecodeJob) -> Tensor | None:
        event: RoutingEvent = ChunkWaits(number, job.session)
        until_s = 0.0
        while True:
            command = self.router.handle(event, self._now())
            if not isinstance(command, AskWorker):
                assert isinstance(command, DecodeHere)
                return None
            if not command.with_context:
                # Both questions of a worker have one deadline: the engine's thread waits for it.
                until_s = self._now() + self._timeout_s
            try:
                connection = self._connections[command.worker]
                left_s = until_s - self._now()
                answer = await connection.ask(job, with_context=command.with_context, seconds=left_s)
            except TransferError as error:
                log.warning(
                    "chunk not decoded by worker",
                    session=job.session,
                    chunk=job.index,
                    worker=command.worker,
                    error=str(error),
                )
                event = AskFailed(number)
                continue
            if isinstance(answer, Tensor):
                self.router.handle(ChunkDecoded(number), self._now())
                return answer
            event = CacheMissed(number) if isinstance(answer, NoCache) else RoomRefused(number)

    async def _keep_connected(self, address: str) -> None:
        pause_s, reported = RECONNECT_S, ""
        while True:
            began_s, late = self._now(), False
            try:
                late = await self._follow(address)
                reported = ""
            except (OSError, TransferError) as error:
                # One line for each reason, however long it lasts: a wrong key does not mend itself.
                if (reason := str(error) or repr(error)) != reported:
                    log.warning("no connection to decode worker", address=address, error=reason)
                reported = reason
            pause_s = next_pause_s(pause_s, self._now() - began_s, late=late)
            await asyncio.sleep(pause_s)

    async def _follow(self, address: str) -> bool:
        """Connect, and keep the connection until it closes. Returns whether that was for a late answer.

        Raises `OSError` and `TransferError`.
        """
        connection = await self._open(address)
        if connection.worker in self._connections:
            connection.close()
            raise TransferError(f"{connection.worker} is connected at another address: ids must differ")
        self._connections[connection.worker] = connection
        self.router.handle(DecoderConnected(connection.worker), self._now())
        metrics.decode_workers.set(self.router.workers)
        log.info(
            "decode worker ready", worker=connection.worker, address=address, links=connection.link_kinds
        )
        asking = asyncio.create_task(self._ask_allotments(connection, address))
        try:
            await connection.closed.wait()
            return connection.late
        finally:
            connection.close()
            # First: an answer that is here already is not taken.
            asking.cancel()
            for backend in connection.failed_links:
                self._rests[address].failed(backend)
            self._allotted.lost(address, self._now())
            self.router.handle(DecoderDisconnected(connection.worker), self._now())
            metrics.decode_workers.set(self.router.workers)
            del self._connections[connection.worker]
            log.warning("decode worker lost", worker=connection.worker, address=address)
            await stop(asking)

    async def _ask_allotments(self, connection: DecodeConnection, address: str) -> None:
        """Ask for the allotment again and again, until the connection is closed."""
        before: int | None = None
        while True:
            try:
                answer = await connection.ask_allotment(ALLOTMENT_S)
            except TransferError as error:
                log.warning("no allotment of decode worker", worker=connection.worker, error=str(error))
                return
            sessions = answer.sessions
            self.router.handle(
                AllotmentKnown(connection.worker, sessions, answer.carried, answer.used), self._now()
            )
            self._allotted.set_allotment(address, connection.worker, sessions, answer.carried)
            if self._allotted.known:
                self._known.set()
            if sessions != before:
                log.info("allotment of decode worker", worker=connection.worker, sessions=sessions)
            before = sessions
            await asyncio.sleep(ASK_S)

    async def _open(self, address: str) -> DecodeConnection:
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await self._connect(*parse_address(address))
        except TimeoutError:
            raise DeadlineExceededError(f"{address}: no connection within {CONNECT_S:g} s") from None
        channel = DecodeChannel(reader, writer)
        links, rests = self._links, self._rests[address]
        usable = () if links is None else rests.usable(links.backends)
        hello = DecodeHello(model=self._model, capacity=self._capacity, link=offered(links, address, usable))
        welcome, keys = await introduce(channel, PURPOSE, self._worker, hello, self._key, CONNECT_S)
        if welcome.link is not None and links is not None:
            try:
                await make_links(
                    links, channel, welcome.link, address, keys.link, first=False, failed=rests.failed
                )
            except BaseException:
                channel.abort()
                raise
        return DecodeConnection(welcome.worker, channel, self._config)
