"""Creation of links: to stopped peers, and through the control channel alone."""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.waiting import eventually
from tests.worker.transfer.transfer_peer import (
    KEY as MIGRATION_KEY,
)
from tests.worker.transfer.transfer_peer import (
    MIGRATION,
    MODEL,
    SESSION,
    TARGET,
    Giver,
    Room,
    State,
    Steps,
)
from turboserve.worker.settings import Settings
from turboserve.worker.transfer import links as links_module
from turboserve.worker.transfer import nccl, pair, rendezvous, shm
from turboserve.worker.transfer.channel import Channel
from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import (
    DeadlineExceededError,
    PeerLostError,
    TransferBackendError,
    TransferError,
    TransferProtocolError,
)
from turboserve.worker.transfer.frames import Linked, Refuse, StoreEntry, Wait
from turboserve.worker.transfer.link import PIECE_BYTES, Link, LocalPages, RemotePages
from turboserve.worker.transfer.links import Links
from turboserve.worker.transfer.network import listen
from turboserve.worker.transfer.pace import CopyLimits
from turboserve.worker.transfer.source import Source
from turboserve.worker.transfer.target import Target

HOST = "127.0.0.1"
PATIENCE_S = 60.0
CPU = torch.device("cpu")
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


def test_workers_on_one_gpu_do_not_use_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses two processes on one GPU. A peer that does not name its GPU may have another one."""
    monkeypatch.setattr(links_module, "available", lambda backend, device: True)

    def on(uuid: str) -> Links:
        monkeypatch.setattr(nccl, "gpu_uuid", lambda device: uuid)
        return Links(["nccl", "gloo"], torch.device("cuda"), MODEL)

    one, same, other = on("gpu-1"), on("gpu-1"), on("gpu-2")
    same_hello = same.hello("tcp://one", PATIENCE_S)
    assert one._choose(same_hello, quiesced=False) == "gloo"
    assert one._choose(other.hello("tcp://one", PATIENCE_S), quiesced=False) == "nccl"
    assert one._choose(same_hello.model_copy(update={"gpu": ""}), quiesced=False) == "nccl"
    for made in (one, same, other):
        made.close()


async def test_a_state_comes_over_the_next_backend_if_no_link_of_the_first_can_be_created() -> None:
    tried: list[str] = []

    class LinksWithoutGloo(Links):
        async def _make(self, backend: str, *args: Any) -> Link:
            tried.append(backend)
            if backend == "gloo":
                raise PeerLostError("invalid usage")
            return await super()._make(backend, *args)

    assert await backend_of(*(LinksWithoutGloo(["gloo", "shm"], CPU, MODEL) for _ in range(2))) == "shm"
    assert tried.count("shm") == 2
    assert "gloo" in tried


async def test_workers_of_two_users_on_one_machine_take_the_next_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel does not let one open the other's memory."""
    open_file, refused = os.open, list[str]()

    def opened(path: Any, *args: Any, **options: Any) -> int:
        if str(path).startswith(f"/proc/{os.getpid()}/fd/"):
            refused.append(path)
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open_file(path, *args, **options)

    monkeypatch.setattr(os, "open", opened)
    assert await backend_of(*(Links(["shm", "gloo"], CPU, MODEL) for _ in range(2))) == "gloo"
    assert len(refused) == 1


async def test_workers_of_one_machine_share_memory_unless_they_have_a_gpu_each() -> None:
    defaults = Settings.model_fields["transfer_backends"].default
    assert await backend_of(*(Links(defaults, CPU, MODEL) for _ in range(2))) == "shm"


async def backend_of(source_links: Links, target_links: Links) -> str:
    """The backend over which a state is transferred. Closes both."""
    size, ours = 1_000, Pipe()
    provider = Giver(size, Steps(ours[0], None), quiesced=False)
    source = Source(provider, source_links, CopyLimits(most_s=PATIENCE_S, still_s=PATIENCE_S))
    server, port = await listen(source.serve, HOST, 0)
    room, target = Room(size), Target(TARGET, target_links, PATIENCE_S)
    fetched = await target.fetch(
        SESSION, MIGRATION, MIGRATION_KEY, [f"tcp://{HOST}:{port}"], room, PATIENCE_S
    )
    assert room.holds(State(size))
    source.close()
    server.close()
    for made in (source_links, target_links):
        made.close()
    for pipe in ours:
        pipe.close()
    return fetched.backend


def pages_of(size: int) -> LocalPages:
    return LocalPages([[torch.zeros(size, dtype=torch.uint8)]])


async def test_an_idle_link_of_shared_memory_keeps_none(links: Links) -> None:
    source, target = (shm.ShmLink("link") for _ in range(2))

    async def transferred() -> None:
        memory = pages_of(1_000)
        memory.pages[0][0].fill_(7)
        deadline, room = Deadline(PATIENCE_S), pages_of(1_000)
        offer = RemotePages(source.offer(memory, range(1), deadline))
        await asyncio.gather(
            asyncio.to_thread(source.transfer, SESSION, memory, RemotePages(), range(1), deadline),
            asyncio.to_thread(target.transfer, SESSION, offer, room, range(1), deadline),
        )
        assert torch.equal(room.pages[0][0], memory.pages[0][0])

    before = shared_memory()
    await transferred()
    assert shared_memory() > before
    links.put_back("target", source, giving=True)
    links.put_back("source", target, giving=False)
    assert shared_memory() == before
    await transferred()
    assert links.idle == 2


def shared_memory() -> int:
    """Number of mappings and open files of shared memory in this process."""
    found = Path("/proc/self/maps").read_text().count("turboserve-transfer")
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found += "turboserve-transfer" in str(each.readlink())
    return found


def test_shared_memory_of_another_link_is_not_taken() -> None:
    """The number of a file that was closed is given to the next one."""
    offered, other, target = (shm.ShmLink(f"link-{n}") for n in range(3))
    memory, deadline = pages_of(10), Deadline(PATIENCE_S)
    offers = [link.offer(memory, range(1), deadline) for link in (offered, other)]
    stale = RemotePages({**offers[0], "file": offers[1]["file"]})
    with pytest.raises(TransferBackendError, match="not the one"):
        target.transfer(SESSION, stale, memory, range(1), deadline)
    for link in (offered, other):
        link.close()


SOURCE_PROCESS = """
import os, struct, sys
file = os.memfd_create("source")
os.ftruncate(file, int(sys.argv[1]))
# One piece is there, and the nonce has no bit set.
os.pwrite(file, struct.pack("q", 1), 0)
print(file, flush=True)
sys.stdin.read()
"""


def test_the_end_of_a_process_that_shares_memory_is_noticed_during_a_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shm, "STOPPED_S", PATIENCE_S)
    arguments = [sys.executable, "-S", "-c", SOURCE_PROCESS, str(shm.FILE_BYTES)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as source:
        assert source.stdout is not None
        offer = {
            "pid": source.pid,
            "file": int(source.stdout.readline()),
            "nonce": bytes(shm.NONCE_BYTES).hex(),
            "bytes": PIECE_BYTES + 1,
            "slots": shm.SLOTS,
        }
        room = LocalPages(pages_of(PIECE_BYTES + 1).pages, lambda size: source.kill())
        with pytest.raises(PeerLostError, match="has ended"):
            shm.ShmLink("link").transfer(SESSION, RemotePages(offer), room, range(1), Deadline(PATIENCE_S))


def test_shared_memory_is_for_processors_that_keep_the_order_of_stores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    made = Links(["shm", "gloo"], CPU, MODEL)
    assert made.backends == ("gloo",)
    made.close()
