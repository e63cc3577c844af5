"""Making links to peers that stand still."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from turboserve.worker.transfer import pair
from turboserve.worker.transfer.cut import cut
from turboserve.worker.transfer.errors import PeerLost
from turboserve.worker.transfer.link import Link
from turboserve.worker.transfer.links import Links

HOST = "127.0.0.1"
SERVER = (HOST, 9)
"""Nobody connects to it."""
SERVES = """
import time
from turboserve.worker.transfer import pair
store = pair.serve_store("127.0.0.1", 60.0)
print(store.port, flush=True)
time.sleep(600.0)
"""


@pytest.fixture
def rendezvous() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that serves one, and its port."""
    process = subprocess.Popen([sys.executable, "-c", SERVES], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
def links() -> Iterator[Links]:
    links = Links(["gloo"], torch.device("cpu"), "0123456789abcdef")
    yield links
    links.close()


async def nobody_connects() -> None:
    async with asyncio.timeout(60.0):
        while any(thread.name == "transfer-connect" for thread in threading.enumerate()):
            await asyncio.sleep(0.05)


async def test_a_rendezvous_that_stands_still_costs_an_error_and_no_thread(
    links: Links, rendezvous: tuple[subprocess.Popen[str], int]
) -> None:
    """Past its time-out torch's store asks the server to forget the question, and waits for that answer."""
    process, port = rendezvous
    store = pair.join_store(HOST, port, 0.5)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(PeerLost):
        await links.connecting(
            lambda: pair.GlooLink("link", store, pair.TARGET, HOST, 0.5),
            0.5,
            (HOST, port),
            lambda late: late.close(),
        )
    await nobody_connects()


async def test_joining_a_rendezvous_that_stands_still_leaves_nothing_behind(links: Links) -> None:
    with socket.create_server((HOST, 0)) as still:
        port = still.getsockname()[1]
        with pytest.raises(PeerLost):
            await links.connecting(
                lambda: pair.join_store(HOST, port, 0.2), 0.2, (HOST, port), lambda late: None
            )
        await nobody_connects()
        assert cut(HOST, port) == 0


async def test_nor_does_one_that_nobody_waits_for_any_more(links: Links) -> None:
    """A move is given up, or the worker stops, while the rendezvous is being joined."""
    with socket.create_server((HOST, 0)) as still:
        port = still.getsockname()[1]
        joining = asyncio.create_task(
            links.connecting(lambda: pair.join_store(HOST, port, 0.2), 60.0, (HOST, port), lambda late: None)
        )
        await asyncio.sleep(0.05)
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
        await nobody_connects()


async def test_what_comes_too_late_is_given_up(links: Links) -> None:
    go, dropped = threading.Event(), list[bool]()
    waiting = asyncio.create_task(links.connecting(go.wait, 60.0, SERVER, dropped.append))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go.set()
    async with asyncio.timeout(60.0):
        while not dropped:
            await asyncio.sleep(0.01)
    assert dropped == [True]


async def test_an_error_is_the_callers(links: Links) -> None:
    def fail() -> Link:
        raise PeerLost("nobody")

    with pytest.raises(PeerLost, match="nobody"):
        await links.connecting(fail, 60.0, SERVER, Link.close)
