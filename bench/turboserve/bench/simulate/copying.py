"""The data plane in small: a state goes from one engine to another, step by step, each of which may fail.

`worker.transfer.source` and `target` over a direct connection: it does not pass the broker, so a worker that
is cut off from the broker can still give its sessions away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from turboserve.bench.simulate.engine import State
from turboserve.bench.simulate.kernel import Awaited, sleep
from turboserve.worker.service import commands as do
from turboserve.worker.service import inputs as told
from turboserve.worker.transfer.errors import (
    DeadlinePassed,
    DigestMismatch,
    NotOffered,
    PeerLost,
    TransferError,
)

if TYPE_CHECKING:
    from turboserve.bench.simulate.worker import Worker

ATTEMPTS_S = (3.0, 10.0)
"""For all attempts together: between these, so that now its target and now the scheduler gives a move up."""
SILENCE_S = 3.0
BULK_S = 0.4
STATE_BYTES = 1_000_000

T = TypeVar("T")


@dataclasses.dataclass(eq=False)
class Gift:
    """One connection, as its source sees it."""

    session: str
    move: int
    rest: Awaited[bool] = dataclasses.field(default_factory=Awaited)
    seal: Awaited[bool] = dataclasses.field(default_factory=Awaited)

    def broken(self, error: TransferError) -> None:
        self.rest.settle(error=error)
        self.seal.settle(error=error)


class Source:
    """What one worker does for those that fetch from it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._open: dict[str, Gift] = {}

    def greet(self, session: str, move: int, target: str) -> tuple[Gift, bool]:
        """Hello: the connection, and whether the state is at rest. A newer one takes an older one's place."""
        at_rest = self._worker.table.offer(session, move, target)
        older = self._open.pop(session, None)
        if older is not None:
            older.broken(NotOffered("a newer connection has come"))
        gift = self._open[session] = Gift(session, move)
        if at_rest:
            gift.rest.settle(True)
        return gift, at_rest

    def freeze(self, gift: Gift) -> None:
        self._worker.tell(told.FreezeWanted(gift.session, gift.move))

    def copy(self, gift: Gift) -> State:
        """The state as it stands still."""
        state = self._worker.engine.states.get(gift.session)
        if state is None:
            raise PeerLost("its state is not there any more")
        return dataclasses.replace(state)

    def sealing(self, gift: Gift) -> None:
        """From here on the target may own it."""
        if self._open.get(gift.session) is not gift:
            raise NotOffered("the move is over here")
        self._worker.tell(told.GiftSealed(gift.session, gift.move))

    def over(self, gift: Gift) -> None:
        """The connection has ended, however it did."""
        if self._open.get(gift.session) is gift:
            del self._open[gift.session]
            self._worker.tell(told.GiftBroken(gift.session, gift.move))

    def carry_out(self, command: do.GiveRest | do.GiveSeal | do.EndGift) -> None:
        gift = self._open.get(command.session)
        if gift is None:
            return
        if isinstance(command, do.EndGift):
            del self._open[command.session]
            gift.broken(NotOffered("the move is over here"))
        elif gift.move == command.move:
            (gift.rest if isinstance(command, do.GiveRest) else gift.seal).settle(True)


class Target:
    """What one worker fetches."""

    def __init__(self, worker: Worker, peer: Callable[[str], Worker | None]) -> None:
        self._worker, self._peer = worker, peer
        self.under_way: dict[tuple[str, int], do.Fetch] = {}

    def fetch(self, command: do.Fetch) -> None:
        self.under_way[command.session, command.run] = command
        self._worker.program.spawn(self._fetch(command))

    def drop(self, command: do.DropArrival) -> None:
        if self.under_way.pop((command.session, command.run), None) is not None:
            self._worker.engine.unreserve(command.session, command.run)
        state = self._worker.engine.states.get(command.session)
        if state is not None and state.run == command.run:
            del self._worker.engine.states[command.session]

    def _wanted(self, command: do.Fetch) -> bool:
        return (command.session, command.run) in self.under_way

    async def _fetch(self, command: do.Fetch) -> None:
        kernel, engine = self._worker.program.kernel, self._worker.engine
        session, run, began = command.session, command.run, kernel.now
        if not self._wanted(command):
            return
        if not engine.reserve(session, run, command.on_host):
            self._failed(command, "memory: none is free")
            return
        limit_s = kernel.random.uniform(*ATTEMPTS_S)
        if kernel.chance(0.5):
            # Else its scheduler does not hear it in time, and waits as long as for a target that is silent.
            self._worker.tell(told.CopyBegins(session, run, limit_s))
        while self._wanted(command):
            try:
                state = await self._attempt(command)
            except TransferError as error:
                if not error.retryable or kernel.now - began >= limit_s:
                    engine.unreserve(session, run)
                    self._failed(command, f"{error.code}: {error}", error.code)
                    return
                await sleep(0.3)
                continue
            if not self._wanted(command):
                return
            del self.under_way[session, run]
            engine.land(state, run, command.on_host)
            self._worker.tell(
                told.Arrived(
                    session,
                    run,
                    state.next_chunk,
                    state.control_seq,
                    state.digest,
                    STATE_BYTES,
                    kernel.now - began,
                )
            )

    def _failed(self, command: do.Fetch, reason: str, code: str | None = None) -> None:
        if self.under_way.pop((command.session, command.run), None) is not None:
            self._worker.tell(told.ArrivalFailed(command.session, command.run, reason, code))

    async def _attempt(self, command: do.Fetch) -> State:
        peer = self._peer(command.source[0]) if command.source else None
        if peer is None:
            raise PeerLost("its source has no address")
        gift, at_rest = await self._asked(
            peer, lambda: peer.source.greet(command.session, command.move, self._worker.id)
        )
        try:
            if not at_rest:
                await sleep(self._worker.program.kernel.random.uniform(0.1, 1.0) * BULK_S)
                await self._asked(peer, lambda: peer.source.freeze(gift))
            await self._patiently(peer, gift.rest)
            state = await self._asked(peer, lambda: peer.source.copy(gift))
            await self._patiently(peer, gift.seal)
            await self._asked(peer, lambda: peer.source.sealing(gift))
            sealed = await self._asked(peer, lambda: peer.source.copy(gift).digest)
        finally:
            peer.program.after(0.01, lambda: peer.source.over(gift))
        if state.digest != sealed:
            raise DigestMismatch(state.digest, sealed)
        return state

    async def _asked(self, peer: Worker, question: Callable[[], T]) -> T:
        """A frame there and one back; the peer may be gone, stand still, or refuse."""
        kernel, faults = self._worker.program.kernel, self._worker.network.faults
        answer: Awaited[T] = Awaited()

        def ask() -> None:
            try:
                value = question()
            except TransferError as error:
                answer.settle(error=error)
            else:
                answer.settle(value)

        lost = kernel.chance(faults.transfer_fails)
        if lost and kernel.chance(0.5):
            raise PeerLost("the connection was lost")
        if not peer.program.up:
            raise PeerLost("nobody answers there")
        if not lost:
            peer.program.after(kernel.random.expovariate(1.0 / faults.delay_s), ask)
        kernel.at(SILENCE_S, lambda: answer.settle(error=DeadlinePassed("the source says nothing")))
        return await answer

    async def _patiently(self, peer: Worker, word: Awaited[bool]) -> None:
        """The source says that it is there while it makes the target wait; a dead one is noticed."""
        while not word.done:
            await self._asked(peer, lambda: None)
            if not word.done:
                await sleep(0.1)
        await word
