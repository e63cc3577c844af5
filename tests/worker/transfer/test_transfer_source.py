"""The source's side in one process: accepted peers, refusals, and the threads that it waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

import pytest
import torch

from tests.helpers.waiting import eventually
from tests.worker.transfer.transfer_peer import KEY, MIGRATION, MODEL, SESSION, TARGET
from turboserve.worker.engine.state_pages import SOURCES_AT_ONCE, Page
from turboserve.worker.transfer import handshake, shm
from turboserve.worker.transfer import source as source_module
from turboserve.worker.transfer.channel import FRAME_LIMIT, Channel
from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import MigrationNotOfferedError, PeerLostError
from turboserve.worker.transfer.frames import Frame, Hello, Open, Taken, Welcome
from turboserve.worker.transfer.link import Link
from turboserve.worker.transfer.links import Links
from turboserve.worker.transfer.network import listen
from turboserve.worker.transfer.pace import CopyLimits
from turboserve.worker.transfer.source import Source
from turboserve.worker.transfer.transfer_attempt import TransferAttempt

PATIENCE_S = 60.0
HELLO = Hello(model=MODEL, backends=("shm",), machine=shm.machine(), limit_s=PATIENCE_S)


class Giver:
    """Notes the requests to it, and never has a state to give."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.harm: Exception | None = None

    def key(self, session: str, migration: int) -> bytes | None:
        return KEY

    def check(self, session: str, migration: int, target: str) -> None:
        self.said.append("check")
        if self.harm is not None:
            raise self.harm

    def offer(self, session: str, migration: int, target: str) -> bool:
        self.said.append("offer")
        return False

    async def pages(self, session: str) -> Sequence[Page]:
        self.said.append("pages")
        await asyncio.Event().wait()
        return []

    async def rest(self, session: str, migration: int) -> Any:
        raise NotImplementedError

    async def acknowledged(self, session: str, migration: int, next_chunk: int) -> None:
        raise NotImplementedError

    def sending_manifest(self, session: str, migration: int) -> None:
        raise NotImplementedError

    def over(self, session: str, migration: int) -> None:
        self.said.append("over")


Say = Callable[..., Awaitable[Channel]]


@pytest.fixture
async def provider() -> Giver:
    return Giver()


class Beside:
    """Side transfers that do not end."""

    def __init__(self) -> None:
        self.begun = self.ended = 0

    def key(self, grant: str) -> bytes | None:
        return KEY if grant.startswith("side") else None

    async def serve(self, channel: Channel, opened: Open, keys: handshake.Keys) -> None:
        self.begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.ended += 1


@pytest.fixture
async def source(provider: Giver) -> AsyncIterator[Source]:
    links = Links(["shm"], torch.device("cpu"), MODEL)
    yield Source(provider, links, CopyLimits(least_s=PATIENCE_S, most_s=PATIENCE_S))
    links.close()


@pytest.fixture
async def hello(source: Source) -> AsyncIterator[Say]:
    """Connects, is admitted, and says hello."""
    server, port = await listen(source.serve, "127.0.0.1", 0)
    channels: list[Channel] = []

    async def say(session: str = SESSION) -> Channel:
        channel = Channel(*await asyncio.open_connection("127.0.0.1", port))
        channels.append(channel)
        opened = Open(session=session, migration=MIGRATION, worker=TARGET, nonce=handshake.new_nonce())
        await handshake.authenticate(channel, opened, KEY, PATIENCE_S)
        await channel.send(HELLO, PATIENCE_S)
        return channel

    yield say
    source.close()
    for channel in channels:
        channel.abort()
    server.close()


async def heard(channel: Channel) -> Any:
    return await channel.receive(PATIENCE_S)


async def until(provider: Giver, said: list[str]) -> None:
    await eventually(lambda: provider.said == said, PATIENCE_S, lambda: str(provider.said))


async def test_a_refused_client_takes_nothing_from_the_one_being_served(provider: Giver, hello: Say) -> None:
    await hello()
    await until(provider, ["check", "offer", "pages"])
    provider.harm = MigrationNotOfferedError("not this one")
    assert (await heard(await hello())).code == "not_offered"
    assert provider.said == ["check", "offer", "pages", "check"]


async def test_a_newer_connection_takes_the_place_of_the_older_once_that_has_ended(
    provider: Giver, hello: Say
) -> None:
    await hello()
    await until(provider, ["check", "offer", "pages"])
    await hello()
    await until(provider, ["check", "offer", "pages", "check", "over", "offer", "pages"])


async def test_a_source_that_is_not_ready_yet_says_that_it_is_there(hello: Say) -> None:
    channel = await hello()
    assert (await heard(channel)).type == "welcome"
    assert [(await heard(channel)).type for _ in range(2)] == ["wait", "wait"]


async def test_no_more_than_the_budget_counts_send_while_their_sessions_generate(
    provider: Giver, hello: Say
) -> None:
    """Each keeps a second cache of the decoder. The next waits, and reports it, until one has ended."""
    first, *_ = [await hello(f"s{n}") for n in range(SOURCES_AT_ONCE)]
    await eventually(lambda: provider.said.count("pages") >= SOURCES_AT_ONCE, PATIENCE_S)
    ended: list[int] = []
    for hangs_up in (True, False):
        third = await hello("third")
        assert (await heard(third)).type == "welcome"
        assert [(await heard(third)).type for _ in range(2)] == ["wait", "wait"]
        assert provider.said.count("pages") == SOURCES_AT_ONCE
        if hangs_up:
            # A source that gives up while it waits takes no other's turn along.
            ended.append(provider.said.count("over"))
            third.abort()
            await eventually(lambda: provider.said.count("over") != ended[-1], PATIENCE_S)
    first.abort()
    await eventually(lambda: provider.said.count("pages") != SOURCES_AT_ONCE, PATIENCE_S)


async def test_so_does_one_that_is_still_busy_when_all_has_been_taken() -> None:
    """A large state takes long to hash at both ends, and not equally long."""
    said: list[str] = []
    hashed = asyncio.Event()

    class Taken3(Channel):
        async def receive(self, seconds: float, limit: int = FRAME_LIMIT) -> Frame:
            return Taken(number=3, size=1)

        async def send(self, frame: Frame, seconds: float) -> None:
            said.append(frame.type)
            if len(said) == 2:
                hashed.set()

    async def send() -> str:
        await hashed.wait()
        return "sent"

    channel = Taken3(cast(asyncio.StreamReader, None), cast(asyncio.StreamWriter, None))
    gift = TransferAttempt(cast(Open, None), channel, cast(Link, None), Deadline(PATIENCE_S), rounds=3)
    assert await gift.until_taken(send()) == "sent"
    assert said == ["wait", "wait"]


async def test_unexpected_messages_are_refused_too(provider: Giver, hello: Say) -> None:
    provider.harm = RuntimeError("a bug")
    answer = await heard(await hello())
    assert (answer.type, answer.code) == ("refuse", "transfer_error")
    assert "a bug" in answer.detail


async def test_side_transfers_take_no_connections_from_states_and_end_with_the_source(
    provider: Giver, source: Source, hello: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "CONNECTIONS_LIMIT", 1)
    monkeypatch.setattr(source_module, "SIDE_TRANSFERS_LIMIT", 3)
    source.side_transfers = beside = Beside()
    for number in range(3):
        await hello(f"side{number}")
    await eventually(lambda: beside.begun == 3, PATIENCE_S)
    refused = await heard(await hello("side3"))
    assert (refused.type, "side transfers: more than 3" in refused.detail) == ("refuse", True)
    await hello()
    await until(provider, ["check", "offer", "pages"])
    refused = await heard(await hello("s2"))
    assert (refused.type, "connections: more than 1" in refused.detail) == ("refuse", True)
    source.close()
    await eventually(lambda: beside.ended == 3, PATIENCE_S)


async def test_a_warm_link_that_went_meanwhile_is_no_reason_to_give_the_migration_up() -> None:
    """Others had displaced it from the warm links between the target's hello and the source's answer."""
    links = Links(["shm"], torch.device("cpu"), MODEL)
    welcome = Welcome(backend="shm", link="gone", warm=True)
    with pytest.raises(PeerLostError) as caught:
        await links.take(cast(Channel, None), welcome, "tcp://127.0.0.1:1", KEY, Deadline(PATIENCE_S))
    assert caught.value.retryable
    links.close()


async def test_a_second_cancellation_waits_for_the_thread_as_well() -> None:
    links = Links(["shm"], torch.device("cpu"), MODEL)
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def copy() -> None:
        begun.set()
        go_on.wait(PATIENCE_S)
        ended.set()

    task = asyncio.create_task(links.blocking(copy, Deadline(PATIENCE_S)))
    await asyncio.to_thread(begun.wait, PATIENCE_S)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.02)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    links.close()
