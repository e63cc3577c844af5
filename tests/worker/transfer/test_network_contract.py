"""Both roles of a migration on a network of sockets and in memory: properties of every network."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.helpers.waiting import eventually
from turboserve.simulation.runtime.device.fabric import FabricFaults, TransferFabric
from turboserve.simulation.runtime.device.network import MemoryNetwork
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.worker.engine.errors import SnapshotRejectedError
from turboserve.worker.engine.state_pages import Page
from turboserve.worker.transfer.errors import (
    AuthenticationError,
    DeadlineExceededError,
    DigestMismatchError,
    LayoutMismatchError,
    MigrationNotOfferedError,
    NoStateError,
    PeerLostError,
    TransferAbortedError,
    TransferError,
)
from turboserve.worker.transfer.fetched_state import FetchedState
from turboserve.worker.transfer.interface import Interface
from turboserve.worker.transfer.network import SocketNetwork, TransferNetwork
from turboserve.worker.transfer.pace import CopyLimits
from turboserve.worker.transfer.source import Source
from turboserve.worker.transfer.target import Target

MODEL, SESSION, MIGRATION, TARGET = "0123456789abcdef", "ses_1", 7, "wrk_target"
KEY = bytes(range(32))
PAGES, SIZE = 4, 1_000
LIMIT_S = 60.0


def content(page: int, *, changed: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(2 * page + changed)
    return torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=generator)


@dataclass
class Giver:
    """See `state_provider.StateProvider`. Its last page changes while the others are sent."""

    quiesced: bool = False
    harm: TransferError | None = None
    """Raised when the state is read."""
    rests: asyncio.Event = field(default_factory=asyncio.Event)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rests.set()

    def key(self, session: str, migration: int) -> bytes | None:
        return KEY if (session, migration) == (SESSION, MIGRATION) else None

    def check(self, session: str, migration: int, target: str) -> None:
        if target != TARGET:
            raise MigrationNotOfferedError(f"not to {target}")

    def offer(self, session: str, migration: int, target: str) -> bool:
        self.said.append("offer")
        return self.quiesced

    async def pages(self, session: str) -> Sequence[Page]:
        self.said.append("pages")
        if self.harm is not None:
            raise self.harm
        return [Page(f"page/{n}", (content(n),), (n, False)) for n in range(PAGES)]

    async def rest(self, session: str, migration: int) -> tuple[Mapping[str, Any], Sequence[Page]]:
        self.said.append("rest")
        await self.rests.wait()
        last = PAGES - 1
        pages = [Page(f"page/{n}", (content(n, changed=n == last),), (n, n == last)) for n in range(PAGES)]
        return {"session": session, "next_chunk": 4}, pages

    async def acknowledged(self, session: str, migration: int, next_chunk: int) -> None:
        assert next_chunk == 4

    def sending_manifest(self, session: str, migration: int) -> None:
        self.said.append("sending_manifest")

    def over(self, session: str, migration: int) -> None:
        self.said.append("over")


class Room:
    """See `fetched_state.ReceiveMemory`."""

    def __init__(self) -> None:
        self.pages: dict[str, Tensor] = {}

    def begin(self) -> None:
        self.pages.clear()

    def place(self, name: str, size: int, dtype: str = "", shape: Sequence[int] = ()) -> tuple[Tensor, ...]:
        if size != SIZE:
            raise SnapshotRejectedError("size", size, SIZE)
        return (self.pages.setdefault(name, torch.zeros(size, dtype=torch.uint8)),)

    def check(self, header: Mapping[str, Any], names: Iterable[str]) -> object:
        return None


@dataclass
class Pair:
    """A source that listens, and a target on the same kind of network."""

    provider: Giver
    room: Room
    source: Source
    target: Target
    networks: tuple[TransferNetwork, TransferNetwork]
    address: str
    fabric: TransferFabric | None

    async def fetch(
        self, key: bytes = KEY, limit_s: float = LIMIT_S, migration: int = MIGRATION
    ) -> FetchedState:
        return await self.target.fetch(SESSION, migration, key, (self.address,), self.room, limit_s)

    async def over(self) -> None:
        await self.until(lambda: self.provider.said[-1:] == ["over"])

    async def until(self, condition: Callable[[], bool]) -> None:
        await eventually(condition, LIMIT_S, lambda: f"the source was asked for {self.provider.said}")


class AttemptClock:
    """A target's time, in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._ahead_s = now, 0.0

    def __call__(self) -> float:
        return self._now() + self._ahead_s

    def end_with_attempts_of(self, target: Target) -> None:
        """Let each failed attempt of the target take its whole timeout."""
        attempt = target._attempt

        async def attempted(*args: Any) -> FetchedState:
            try:
                return await attempt(*args)
            except TransferError:
                self._ahead_s += LIMIT_S
                raise

        target._attempt = attempted  # type: ignore[method-assign, assignment]


class Kind(ABC):
    """A kind of network, and the loop that it runs on."""

    @abstractmethod
    def network(self, name: str, model: str) -> TransferNetwork: ...

    @abstractmethod
    def run(self, work: Coroutine[Any, Any, None]) -> None: ...

    fabric: TransferFabric | None = None

    def play(
        self,
        scenario: Callable[[Pair], Coroutine[Any, Any, None]],
        *,
        model: str = MODEL,
        impatient: bool = False,
        worker: str = TARGET,
        **provider: Any,
    ) -> None:
        """Run a scenario. `model` is the target's; `provider` gives fields of `Giver`.

        With `impatient`, the target's timeout is over after its first attempt that fails.
        """

        async def played() -> None:
            now = asyncio.get_running_loop().time
            here, there = self.network("here", MODEL), self.network("there", model)
            gives = Giver(**provider)
            limits = CopyLimits(least_s=LIMIT_S, most_s=LIMIT_S, still_s=LIMIT_S)
            source = Source(gives, here.links, limits, now)
            address = await here.listen(source.serve)
            clock = AttemptClock(now)
            target = Target(worker, there.links, LIMIT_S, there.connect, clock)
            if impatient:
                clock.end_with_attempts_of(target)
            pair = Pair(gives, Room(), source, target, (here, there), address, self.fabric)
            try:
                await scenario(pair)
            finally:
                source.close()
                for network in pair.networks:
                    network.close()
                    network.links.close()

        self.run(played())


class Sockets(Kind):
    """TCP on loopback, and memory that two processes of one machine share."""

    def network(self, name: str, model: str) -> TransferNetwork:
        return SocketNetwork(Interface(), 0, ["shm"], torch.device("cpu"), model)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run(work)


class InMemory(Kind):
    """A network on a virtual loop."""

    def __init__(self, seed: int = 1, faults: FabricFaults | None = None) -> None:
        self.loop = VirtualLoop(seed)
        self.fabric = TransferFabric(self.loop, Random(seed))
        self.fabric.faults = faults or FabricFaults()

    def network(self, name: str, model: str) -> TransferNetwork:
        assert self.fabric is not None
        return MemoryNetwork(self.fabric, name, model)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            self.loop.run_until_complete(work)
        finally:
            self.loop.close()


@pytest.fixture(params=["sockets", "memory"])
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    # A network sets variables for libraries that read them when they start.
    with mock.patch.dict(os.environ):
        yield Sockets() if request.param == "sockets" else InMemory()


def is_here(room: Room) -> bool:
    last = PAGES - 1
    wanted = {f"page/{n}": content(n, changed=n == last) for n in range(PAGES)}
    return room.pages.keys() == wanted.keys() and all(
        torch.equal(room.pages[name], page) for name, page in wanted.items()
    )


def test_a_state_arrives_whole_and_only_what_changed_is_sent_twice(kind: Kind) -> None:
    async def scenario(pair: Pair) -> None:
        fetched = await pair.fetch()
        assert is_here(pair.room)
        assert (fetched.next_chunk, fetched.rounds) == (4, 2)
        assert (fetched.bytes_copied, fetched.state_bytes) == ((PAGES + 1) * SIZE, PAGES * SIZE)
        await pair.over()
        assert pair.provider.said.count("sending_manifest") == 1

    kind.play(scenario)


def test_a_state_at_rest_is_sent_once(kind: Kind) -> None:
    async def scenario(pair: Pair) -> None:
        fetched = await pair.fetch()
        assert is_here(pair.room)
        assert (fetched.rounds, fetched.bytes_copied) == (1, PAGES * SIZE)

    kind.play(scenario, quiesced=True)


def test_one_state_after_the_other(kind: Kind) -> None:
    async def scenario(pair: Pair) -> None:
        digests = {(await pair.fetch()).digest for _ in range(3)}
        assert len(digests) == 1

    kind.play(scenario)


def test_no_listener(kind: Kind) -> None:
    async def scenario(pair: Pair) -> None:
        pair.networks[0].close()
        await asyncio.sleep(0.1)
        with pytest.raises(PeerLostError):
            await pair.fetch()

    kind.play(scenario, impatient=True)


def test_a_target_with_another_key_is_not_admitted(kind: Kind) -> None:
    async def scenario(pair: Pair) -> None:
        with pytest.raises(AuthenticationError):
            await pair.fetch(key=bytes(32))
        with pytest.raises(AuthenticationError):
            await pair.fetch(migration=MIGRATION + 1)
        assert pair.provider.said == []

    kind.play(scenario, impatient=True)


def test_a_target_that_the_row_does_not_name_is_refused(kind: Kind) -> None:
    async def scenario(pair: Pair) -> None:
        with pytest.raises(MigrationNotOfferedError):
            await pair.fetch()

    kind.play(scenario, worker="wrk_other", impatient=True)


def test_another_model_is_refused(kind: Kind) -> None:
    async def scenario(pair: Pair) -> None:
        with pytest.raises(LayoutMismatchError):
            await pair.fetch()

    kind.play(scenario, model="another")


def test_the_source_s_reason_reaches_the_target(kind: Kind) -> None:
    async def scenario(pair: Pair) -> None:
        with pytest.raises(NoStateError, match="gone a moment ago"):
            await pair.fetch()
        await pair.over()

    kind.play(scenario, harm=NoStateError("gone a moment ago"))


def test_a_source_that_does_not_come_to_rest_costs_the_deadline(kind: Kind) -> None:
    async def scenario(pair: Pair) -> None:
        pair.provider.rests.clear()
        loop = asyncio.get_running_loop()
        for limit_s in (3.0, 15.0, 45.0):
            began = loop.time()
            with pytest.raises(TransferError) as error:
                await pair.fetch(limit_s=limit_s)
            assert loop.time() - began >= limit_s
            # A busy machine may need the time until the source is asked for its rest.
            if "rest" in pair.provider.said and isinstance(error.value, DeadlineExceededError):
                break
        else:
            raise error.value
        await pair.over()

    kind.play(scenario)


def test_a_source_that_gives_up_ends_the_transfer(kind: Kind) -> None:
    async def scenario(pair: Pair) -> None:
        pair.provider.rests.clear()
        fetching = asyncio.ensure_future(pair.fetch())
        await pair.until(lambda: "rest" in pair.provider.said)
        pair.provider.harm = NoStateError("over")
        pair.source.abort(SESSION)
        with pytest.raises(TransferError):
            await fetching
        await pair.over()

    kind.play(scenario)


def test_a_target_that_is_cancelled_hangs_up(kind: Kind) -> None:
    async def scenario(pair: Pair) -> None:
        pair.provider.rests.clear()
        fetching = asyncio.ensure_future(pair.fetch())
        await pair.until(lambda: "rest" in pair.provider.said)
        fetching.cancel()
        await asyncio.wait([fetching])
        assert fetching.cancelled()
        await pair.over()
        pair.provider.rests.set()
        await pair.fetch()
        assert is_here(pair.room)

    kind.play(scenario)


def test_a_newer_target_takes_the_place_of_an_older(kind: Kind) -> None:
    async def scenario(pair: Pair) -> None:
        pair.provider.rests.clear()
        older = asyncio.ensure_future(pair.fetch(limit_s=5.0))
        await pair.until(lambda: "rest" in pair.provider.said)
        room, pair.room = pair.room, Room()
        newer = asyncio.ensure_future(pair.fetch())
        await pair.until(lambda: pair.provider.said.count("offer") >= 2)
        older.cancel()
        pair.provider.rests.set()
        await newer
        assert is_here(pair.room)
        assert not is_here(room)

    kind.play(scenario)


@pytest.mark.parametrize(
    "faults",
    [
        FabricFaults(breaks=0.05),
        FabricFaults(breaks=0.05, silent=1.0),
        FabricFaults(corrupts=0.4),
        FabricFaults(stalls=0.4),
        FabricFaults(breaks=0.03, corrupts=0.2, stalls=0.2),
    ],
    ids=["breaks", "falls silent", "corrupts", "stalls", "all"],
)
@pytest.mark.parametrize("seed", range(10))
def test_what_breaks_in_memory_is_an_error_or_a_whole_state(faults: FabricFaults, seed: int) -> None:
    async def scenario(pair: Pair) -> None:
        try:
            await pair.fetch()
        except TransferError as error:
            harms = (PeerLostError, DeadlineExceededError, DigestMismatchError, TransferAbortedError)
            if not isinstance(error, harms):
                raise
        else:
            assert is_here(pair.room)
        assert pair.fabric is not None
        pair.fabric.faults = FabricFaults()
        await asyncio.sleep(60.0)
        assert pair.provider.said.count("offer") == pair.provider.said.count("over")
        assert pair.fabric.wires == {}
        await pair.fetch()
        assert is_here(pair.room)

    InMemory(seed, faults).play(scenario)
