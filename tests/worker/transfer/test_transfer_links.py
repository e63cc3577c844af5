"""Creation of links: to stopped peers, and through the control channel alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from tests.helpers.waiting import eventually
from turboserve.worker.transfer import pair, rendezvous
from turboserve.worker.transfer.channel import Channel
from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import (
    DeadlineExceededError,
    PeerLostError,
    TransferError,
    TransferProtocolError,
)
from turboserve.worker.transfer.frames import Linked, Refuse, StoreEntry, Wait
from turboserve.worker.transfer.link import Link
from turboserve.worker.transfer.links import Links

HOST = "127.0.0.1"
PATIENCE_S = 60.0
KEY = bytes(32)
ENDS = pair.LinkEndpoints(KEY, HOST, (HOST,))


@pytest.fixture
def links() -> Iterator[Links]:
    links = Links(["gloo"], torch.device("cpu"), "0123456789abcdef")
    yield links
    links.close()


@pytest.fixture
async def channels() -> AsyncIterator[tuple[Channel, Channel]]:
    """Both ends of one connection."""
    accepted: asyncio.Queue[Channel] = asyncio.Queue()
    server = await asyncio.start_server(lambda r, w: accepted.put_nowait(Channel(r, w)), HOST, 0)
    one = Channel(*await asyncio.open_connection(*server.sockets[0].getsockname()))
    other = await accepted.get()
    yield one, other
    for channel in (one, other):
        channel.abort()
    server.close()


async def connection_to_a_full_queue() -> None:
    await eventually(
        lambda: not any(thread.name == "transfer-connect" for thread in threading.enumerate()), PATIENCE_S
    )


async def test_two_sides_find_each_other_through_the_channel(channels: tuple[Channel, Channel]) -> None:
    """Bytes of any value. Each side waits for the other's, and both end together."""
    value = bytes(range(256))

    async def side(channel: Channel, mine: str, theirs: str) -> bytes:
        store = rendezvous.new_store(PATIENCE_S)

        def make() -> bytes:
            store.set(mine, value)  # type: ignore[arg-type]
            return store.get(theirs)

        making = asyncio.ensure_future(asyncio.to_thread(make))
        await rendezvous.exchange(channel, store, making, Deadline(PATIENCE_S))
        return making.result()

    one, other = channels
    assert list(await asyncio.gather(side(one, "a", "b"), side(other, "b", "a"))) == [value, value]
    # Nothing of it is left in the channel.
    await one.send(Wait(), PATIENCE_S)
    assert await other.receive(PATIENCE_S) == Wait()


async def test_a_rendezvous_ends_with_what_the_other_side_says(channels: tuple[Channel, Channel]) -> None:
    one, other = channels
    forever: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    await other.send(Refuse(code="backend_failed", detail="no such device"), PATIENCE_S)
    with pytest.raises(TransferError, match="no such device"):
        await rendezvous.exchange(one, rendezvous.new_store(1.0), forever, Deadline(PATIENCE_S))


async def test_a_rendezvous_takes_no_more_entries_than_two_sides_have(
    channels: tuple[Channel, Channel],
) -> None:
    one, other = channels
    forever: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    for number in range(rendezvous.ENTRIES_LIMIT + 1):
        await other.send(StoreEntry(key=f"key/{number}", value="00"), PATIENCE_S)
    with pytest.raises(TransferProtocolError):
        await rendezvous.exchange(one, rendezvous.new_store(1.0), forever, Deadline(PATIENCE_S))


async def test_a_peer_that_stands_still_while_a_link_is_made_costs_an_error_and_no_thread(
    links: Links, channels: tuple[Channel, Channel]
) -> None:
    silent, _ = channels
    store = rendezvous.new_store(0.5)
    making = asyncio.create_task(
        links.connecting(
            lambda: pair.GlooLink("link", store, pair.TARGET, ENDS, 0.5), 0.5, lambda late: late.close()
        )
    )
    with pytest.raises((PeerLostError, DeadlineExceededError)):
        await rendezvous.exchange(silent, store, making, Deadline(PATIENCE_S))
    await connection_to_a_full_queue()


async def test_a_link_that_stands_on_one_side_alone_is_none(channels: tuple[Channel, Channel]) -> None:
    one, other = channels
    made = asyncio.get_running_loop().create_future()
    made.set_result(True)
    waiting = asyncio.create_task(
        rendezvous.exchange(one, rendezvous.new_store(1.0), made, Deadline(PATIENCE_S))
    )
    assert await other.receive(PATIENCE_S) == Linked()
    await other.close()
    with pytest.raises(PeerLostError):
        await waiting


async def test_what_comes_too_late_is_given_up(links: Links) -> None:
    go, dropped = threading.Event(), list[bool]()
    waiting = asyncio.create_task(links.connecting(go.wait, 60.0, dropped.append))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go.set()
    await eventually(lambda: dropped, PATIENCE_S)
    assert dropped == [True]


async def test_an_error_is_the_callers(links: Links) -> None:
    def fail() -> Link:
        raise PeerLostError("nobody")

    with pytest.raises(PeerLostError, match="nobody"):
        await links.connecting(fail, 60.0, Link.close)
