"""Loans between simulated workers of one host: the network by which they meet, and the split of a forward.

Protocol, policy and service of loans are the worker's own (`worker/sequence_parallel`). Modelled are the
connections, and the exchange of a forward: both devices compute for a declared share of its time. The home
waits for the donor before, and each waits for the other after it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from turboserve.simulation.runtime.device.blocking import BlockingCalls
from turboserve.simulation.runtime.device.clock import DeviceClock
from turboserve.simulation.runtime.device.fabric import Listener, TransferFabric
from turboserve.simulation.runtime.device.network import open_connection
from turboserve.simulation.runtime.process import current
from turboserve.worker.engine.errors import (
    DonorReleasedError,
    PartnerLostError,
    SequenceParallelUnavailableError,
)
from turboserve.worker.engine.sequence_parallel import Exchange, ForwardSpec
from turboserve.worker.engine.state import SessionState
from turboserve.worker.sequence_parallel.frames import Greeting, PeerChannel
from turboserve.worker.sequence_parallel.peers import CONNECT_S, Identity
from turboserve.worker.transfer.channel import ByteReader, ByteWriter


class VirtualGroup:
    """One worker's end of a group of two (`peers.PeerGroup`)."""

    kind = "virtual"

    def __init__(
        self, calls: BlockingCalls, clock: DeviceClock, loop: asyncio.AbstractEventLoop, limit_s: float
    ) -> None:
        self._calls, self._clock, self._loop, self._limit_s = calls, clock, loop, limit_s
        self._arrived: deque[list[Tensor]] = deque()
        self._closed = False
        self._rest_s: float | None = None
        """What is left of the time of a forward. None: each exchange has its own limit."""
        self.other: VirtualGroup | None = None
        self.joined = asyncio.Event()

    def join(self, other: VirtualGroup) -> None:
        """Connect two ends."""
        self.other, other.other = other, self
        self.joined.set()
        other.joined.set()

    def __call__(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """See `Exchange`. Waits for the other end; the group is closed after an error."""
        self._calls.catch_up()
        other = self.other
        if self._closed or other is None:
            raise PartnerLostError("the group is closed")
        other._arrived.append(list(sent))
        other._calls.wake()
        began_s = self._loop.time()
        until = began_s + (self._limit_s if self._rest_s is None else self._rest_s)
        while not self._arrived:
            if self._closed:
                raise PartnerLostError("the group is closed")
            if self._loop.time() >= until:
                self.close()
                raise PartnerLostError(f"no exchange within {until - began_s:g} s")
            self._calls.wait(until)
        if self._rest_s is not None:
            self._rest_s = max(0.0, self._rest_s - (self._loop.time() - began_s))
        self._clock.catch_up()
        for into, part in zip(received, self._arrived.popleft(), strict=True):
            into.copy_(part)

    @contextmanager
    def one_forward(self) -> Iterator[None]:
        """See `PeerGroup.one_forward`."""
        self._rest_s = self._limit_s
        try:
            yield
        finally:
            self._rest_s = None

    def close(self) -> None:
        """See `PeerGroup.close`."""
        for end in (self, self.other):
            if end is not None and not end._closed:
                end._closed = True
                end._calls.wake()


class VirtualPeers:
    """See `peers.PeerNetwork`."""

    def __init__(
        self,
        fabric: TransferFabric,
        directory: Path,
        worker: str,
        calls: BlockingCalls,
        clock: DeviceClock,
    ) -> None:
        self._fabric, self._worker, self._calls, self._clock = fabric, worker, calls, clock
        self._listeners = fabric.hosts.setdefault(str(directory), {})

    async def listen(self, serve: Callable[[PeerChannel], object]) -> None:
        """See `PeerNetwork.listen`."""

        async def served(reader: ByteReader, writer: ByteWriter) -> None:
            serve(PeerChannel(reader, writer))

        self._listeners[self._worker] = Listener(current() or self._fabric.loop.world, served)

    def later(self) -> list[str]:
        """See `PeerNetwork.later`."""
        return sorted(name for name in self._listeners if name > self._worker)

    async def connect(self, worker: str) -> PeerChannel:
        """See `PeerNetwork.connect`."""
        connection = await open_connection(self._fabric, self._worker, worker, self._listeners, worker)
        return PeerChannel(*connection)

    async def group(
        self, channel: PeerChannel, own: Identity, agreed: Greeting, *, first: bool
    ) -> VirtualGroup:
        """See `PeerNetwork.group`."""
        end = VirtualGroup(self._calls, self._clock, self._fabric.loop, own.limit_s)
        groups = self._fabric.groups
        other = groups.pop(agreed.group, None)
        if isinstance(other, VirtualGroup):
            end.join(other)
            return end
        groups[agreed.group] = end
        try:
            async with asyncio.timeout(CONNECT_S):
                await end.joined.wait()
        except TimeoutError:
            raise PartnerLostError(f"no group within {CONNECT_S:g} s") from None
        finally:
            groups.pop(agreed.group, None)
        return end

    def close(self) -> None:
        """See `PeerNetwork.close`."""
        self._listeners.pop(self._worker, None)


class VirtualLoans:
    """See `parallel_forward.ForwardLoans`."""

    def __init__(self, compute: Callable[[float], None], share: float | None) -> None:
        """`compute` lets time pass. `share`: see `DeviceProfile.parallel_share`."""
        self._compute, self._share = compute, share
        self._borrowed: tuple[int, str, Callable[[ForwardSpec], None], Exchange] | None = None
        self._on_broken: Callable[[Exception], None] | None = None
        self.split = False
        """See `Backend.split`."""
        self.begun = 0
        """Number of loans that this worker has begun as home."""
        self.forwards = 0
        """Number of forwards that a donor has computed half of."""

    def borrow(
        self,
        loan: int,
        state: SessionState,
        announce: Callable[[ForwardSpec], None],
        exchange: Exchange,
        on_broken: Callable[[Exception], None],
    ) -> None:
        """See `ForwardLoans.borrow`."""
        self._borrowed, self._on_broken = (loan, state.session, announce, exchange), on_broken
        self.begun += 1

    def return_donor(self) -> None:
        """See `ForwardLoans.return_donor`."""
        self._borrowed = self._on_broken = None

    @property
    def borrowed(self) -> str | None:
        """The session of the loan under way. None: every forward is computed alone."""
        return None if self._borrowed is None else self._borrowed[1]

    def forward(self, frames: int, seconds: float) -> bool:
        """Compute a forward of the borrowed session together with the donor.

        `seconds`: its time on one device. Returns False if the forward is broken: it is then computed alone.
        """
        assert self._borrowed is not None
        assert self._share is not None
        (loan, _, announce, exchange), on_broken = self._borrowed, self._on_broken
        part_s, accepted = torch.tensor([seconds * self._share]), torch.zeros(1)
        try:
            announce(ForwardSpec(loan, frames, 0, 0.0, (), 0, 0, (), 0, (), 0.0, 0, False))
            exchange((), (accepted,))
            if not accepted.item():
                raise DonorReleasedError("the donor ends the loan")
            exchange((part_s,), ())
            self._compute(float(part_s))
            exchange((), ())
        except Exception as error:
            self.return_donor()
            if on_broken is not None:
                on_broken(error)
            if isinstance(error, DonorReleasedError | PartnerLostError):
                return False
            raise
        self.forwards += 1
        return True

    def lent_memory(self) -> None:
        """See `ForwardLoans.lent_memory`. A virtual device has no memory to allocate."""
        if self._share is None:
            raise SequenceParallelUnavailableError("parallel_share", 0)

    def lend(self, loan: int, memory: None, exchange: Exchange) -> VirtualLentForward:
        """See `ForwardLoans.lend`."""
        return VirtualLentForward(loan, self._compute, exchange)


class VirtualLentForward:
    """See `parallel_forward.LentForwards`."""

    def __init__(self, loan: int, compute: Callable[[float], None], exchange: Exchange) -> None:
        self.loan, self._compute, self._exchange = loan, compute, exchange

    def __call__(self, spec: ForwardSpec, *, accept: bool = True) -> None:
        """See `LentForwards.__call__`."""
        self._exchange((torch.tensor([float(accept)]),), ())
        if not accept:
            return
        part_s = torch.zeros(1)
        self._exchange((), (part_s,))
        self._compute(float(part_s))
        self._exchange((), ())
