"""A server that stands still costs who connects to it an error, and neither a thread nor a descriptor."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from turboserve.worker.transfer import pair
from turboserve.worker.transfer.cut import DESCRIPTORS, cut
from turboserve.worker.transfer.errors import PeerLost
from turboserve.worker.transfer.links import Links

PATIENCE_S = 60.0


@pytest.fixture
def still() -> Iterator[socket.socket]:
    """A server whose system accepts, and that never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def descriptors() -> list[str]:
    found = []
    for one in DESCRIPTORS.iterdir():
        # The one that lists them is gone by now.
        with suppress(FileNotFoundError):
            found.append(str(one.readlink()))
    return found


def sockets() -> int:
    return sum(what.startswith("socket:") for what in descriptors())


def test_only_connections_to_that_server_are_cut(still: socket.socket) -> None:
    host, port = still.getsockname()
    with socket.create_server((host, 0)) as other, socket.create_connection(other.getsockname()) as kept:
        with socket.create_connection((host, port)) as lost:
            before = len(descriptors())
            assert cut(host, port) == 1
            assert len(descriptors()) == before
            assert lost.recv(1) == b""
        there, _ = other.accept()
        with there:
            kept.sendall(b"x")
            assert there.recv(1) == b"x"
    assert cut(host, port) == 0


async def test_joining_a_rendezvous_that_stands_still_leaves_nothing_behind(still: socket.socket) -> None:
    host, port = still.getsockname()
    links = Links(["gloo"], torch.device("cpu"), "model")
    before = sockets()
    with pytest.raises(PeerLost):
        await links.connecting(lambda: pair.join_store(host, port, 0.2), 0.2, (host, port), lambda late: None)
    end = time.monotonic() + PATIENCE_S
    while sockets() > before or any(t.name == "transfer-connect" for t in threading.enumerate()):
        assert time.monotonic() < end
        await asyncio.sleep(0.05)
    links.close()
