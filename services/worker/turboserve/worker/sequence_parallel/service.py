"""Loans of one worker: connects to the peers of its host, and carries out the protocol's commands.

The event loop holds the protocol, the engine's thread computes. A donor computes its half of a forward
between two of its own steps, and measures before each whether its own sessions still permit that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar, assert_never

from turboserve import logs
from turboserve.contracts.loans import LoanRole, WorkerLoan
from turboserve.tasks import BackgroundTasks
from turboserve.telemetry_names import LOAN_ROLE
from turboserve.worker import metrics
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.errors import DonorReleasedError, PartnerLostError, UnknownSessionError
from turboserve.worker.engine.parallel_forward import LentForwards
from turboserve.worker.engine.sequence_parallel import ForwardSpec
from turboserve.worker.sequence_parallel.frames import (
    ForwardFrame,
    LoanFrame,
    PeerChannel,
    frame_of,
    message_of,
)
from turboserve.worker.sequence_parallel.loan_messages import (
    BeginBorrowing,
    BeginLending,
    Borrowing,
    DropPeer,
    Lending,
    LoanBroken,
    LoanCommand,
    LoanEvent,
    PeerJoined,
    PeerLeft,
    Received,
    ReturnDonor,
    Send,
    StopLending,
)
from turboserve.worker.sequence_parallel.loans import Loans
from turboserve.worker.sequence_parallel.peers import CONNECT_S, Identity, Peer, PeerNetwork, meet
from turboserve.worker.sequence_parallel.policy import Measured, measure_engine
from turboserve.worker.transfer.errors import TransferError

SCAN_S = 2.0
"""Interval at which the directory is read for new peers."""
MEASURE_S = 0.1
"""Interval at which the worker's sessions are measured."""
QUIET_S = 86_400.0
"""Longest time without a frame from a peer. A frozen peer is noticed by an exchange."""

log = logs.get("loans")
T = TypeVar("T")


class Runner(Protocol):
    """What steps the engine (`service.ports.EngineRunner`)."""

    engine: Engine

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Call `function` between two steps, in its turn. Returns a future for its result or error."""
        ...


class LoanService:
    """Lends this worker to peers of its host, and borrows them for its own sessions."""

    def __init__(
        self,
        identity: Identity,
        runner: Runner,
        network: PeerNetwork,
        now: Callable[[], float],
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        """Allocate the memory for a borrowed session.

        `now`: monotonic seconds on the engine's clock. `changed`: called when a loan has begun or is over.
        Raises `SequenceParallelUnavailableError`.
        """
        self._identity, self._runner, self._network, self._now = identity, runner, network, now
        self._changed = changed
        self._memory = runner.engine.backend.parallel.lent_memory()
        self.loans = Loans()
        self.peers: dict[str, Peer] = {}
        self._connecting: set[str] = set()
        self._lent: tuple[str, LentForwards] | None = None
        """Home and forwards of the loan that this worker has given."""
        self._tasks = BackgroundTasks()
        self._ended = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loan(self) -> WorkerLoan | None:
        """The loan under way."""
        match self.loans.state:
            case Borrowing(donor=peer):
                return WorkerLoan(role=LoanRole.HOME, peer=peer)
            case Lending(home=peer):
                return WorkerLoan(role=LoanRole.DONOR, peer=peer)
            case _:
                return None

    async def run(self) -> None:
        """Serve until canceled, and end with all connections closed and all tasks ended.

        Raises `OSError` if the socket cannot be created.
        """
        self._loop = asyncio.get_running_loop()
        await self._network.listen(lambda channel: self._tasks.create(self._follow(channel, first=False)))
        try:
            self._tasks.create(self._measure())
            while True:
                for worker in self._network.later():
                    if worker not in self.peers and worker not in self._connecting:
                        self._connecting.add(worker)
                        self._tasks.create(self._connect(worker))
                await asyncio.sleep(SCAN_S)
        finally:
            # From here on, no event creates a task.
            self._ended = True
            self._network.close()
            for peer in self.peers.values():
                peer.close()
            await self._tasks.stop()

    # Peers

    async def _connect(self, worker: str) -> None:
        try:
            await self._follow(await self._network.connect(worker), first=True)
        except (OSError, TransferError) as error:
            log.debug("no connection to peer", peer=worker, error=repr(error))
        finally:
            self._connecting.discard(worker)

    async def _follow(self, channel: PeerChannel, *, first: bool) -> None:
        """Serve one connection until its end."""
        try:
            peer = await meet(self._network, channel, self._identity, first=first)
        except BaseException as error:
            channel.abort()
            if not isinstance(error, TransferError | PartnerLostError):
                raise
            log.info("no group with peer", error=str(error))
            return
        if peer.worker in self.peers:
            peer.close()
            return
        self.peers[peer.worker] = peer
        log.info("group with peer ready", peer=peer.worker, backend=peer.group.kind)
        self.handle(PeerJoined(peer.worker))
        try:
            while True:
                frame = await channel.next(QUIET_S)
                if isinstance(frame, LoanFrame):
                    self.handle(Received(peer.worker, message_of(frame)))
                elif isinstance(frame, ForwardFrame):
                    self._serve(peer, frame.spec)
        except TransferError as error:
            log.info("peer left", peer=peer.worker, error=str(error))
        finally:
            del self.peers[peer.worker]
            peer.close()
            self.handle(PeerLeft(peer.worker))

    async def _send(self, peer: Peer, frame: LoanFrame | ForwardFrame) -> None:
        try:
            await peer.channel.post(frame, CONNECT_S)
        except TransferError:
            peer.close()

    # The protocol

    def handle(self, event: LoanEvent) -> None:
        """Take an event, and carry out the commands."""
        before = self.loan
        for command in self.loans.handle(event, self._now()):
            self._carry_out(command)
        if (loan := self.loan) != before:
            for role in LoanRole:
                metrics.loan.set(int(loan is not None and loan.role is role), {LOAN_ROLE: role.value})
            self._changed()

    def _carry_out(self, command: LoanCommand) -> None:
        match command:
            case Send(peer=peer, message=message):
                if peer in self.peers and not self._ended:
                    self._tasks.create(self._send(self.peers[peer], frame_of(message)))
            case BeginBorrowing(loan=loan, session=session, donor=donor):
                log.info("loan begins", session=session, donor=donor, loan=loan)
                metrics.loans.add(1)
                begun = self._runner.call(partial(self._begin, command, self.peers[donor]))
                begun.add_done_callback(partial(self._checked, donor, loan))
            case ReturnDonor():
                self._runner.call(lambda engine: engine.backend.parallel.return_donor())
            case BeginLending(loan=loan, home=home):
                parallel = self._runner.engine.backend.parallel
                lent = parallel.lend(loan, self._memory, self.peers[home].group)
                self._lent = home, lent
            case StopLending():
                self._lent = None
            case DropPeer(peer=peer):
                metrics.loans_broken.add(1)
                log.warning("peer did not take part in a forward", peer=peer)
                if peer in self.peers:
                    # The end of the connection is noticed by `_follow`.
                    self.peers[peer].close()
            case _:
                assert_never(command)

    async def _measure(self) -> None:
        while True:
            await asyncio.sleep(MEASURE_S)
            if self.peers:
                try:
                    self.handle(await asyncio.wrap_future(self._runner.call(self._measured)))
                except asyncio.CancelledError:
                    task = asyncio.current_task()
                    if task is None or task.cancelling():
                        raise

    def _measured(self, engine: Engine) -> Measured:
        borrowable = [name for name, one in engine.sessions.items() if not one.isolated and one.complete]
        return measure_engine(engine, self._now(), borrowable, self._identity.limit_s)

    # At the home, on the engine's thread unless stated

    def _begin(self, command: BeginBorrowing, peer: Peer, engine: Engine) -> None:
        session = engine.sessions.get(command.session)
        if session is None:
            raise UnknownSessionError(command.session, "active")
        if not session.complete:
            raise UnknownSessionError(command.session, "resident")
        # It stays in its slab during the loan.
        session.offloading = False

        def announce(spec: ForwardSpec) -> None:
            self._on_loop(lambda: self._tasks.create(self._send(peer, ForwardFrame(spec=spec))))

        def broken(error: Exception) -> None:
            lost = not isinstance(error, DonorReleasedError)
            self._on_loop(lambda: self.handle(LoanBroken(peer.worker, command.loan, lost)))

        parallel = engine.backend.parallel
        parallel.borrow(command.loan, session.state, announce, peer.group, broken)

    def _checked(self, donor: str, loan: int, begun: Future[None]) -> None:
        if not begun.cancelled() and begun.exception() is not None:
            self._on_loop(lambda: self.handle(LoanBroken(donor, loan, lost=False)))

    # At the donor

    def _serve(self, peer: Peer, spec: ForwardSpec) -> None:
        """Compute a forward in the engine's turn, or decline it."""
        lent = self._lent[1] if self._lent is not None and self._lent[0] == peer.worker else None
        current = lent is not None and lent.loan == spec.loan

        def compute(engine: Engine) -> None:
            if lent is not None and current:
                with peer.group.one_forward():
                    lent(spec, accept=self._measured(engine).lends)
            else:
                parallel = engine.backend.parallel
                parallel.lend(spec.loan, self._memory, peer.group)(spec, accept=False)

        self._runner.call(compute).add_done_callback(partial(self._served, peer, spec.loan))

    def _served(self, peer: Peer, loan: int, computed: Future[None]) -> None:
        error = None if computed.cancelled() else computed.exception()
        if error is not None:
            # The home waits for the rest of the exchange: the end of the group tells it not to.
            peer.group.close()
            log.info("borrowed forward broken", home=peer.worker, error=repr(error))
            self._on_loop(lambda: self._broke(peer, loan))

    def _broke(self, peer: Peer, loan: int) -> None:
        self.handle(LoanBroken(peer.worker, loan, lost=True))
        peer.close()

    def _on_loop(self, call: Callable[[], Any]) -> None:
        def unless_ended() -> None:
            if not self._ended:
                call()

        # The loop may be closed by now.
        with suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(unless_ended)
