"""Ending connections that a library gives no way to close."""

from __future__ import annotations

import socket
from contextlib import suppress

from turboserve.worker.transfer.cut import DESCRIPTORS, cut

HOST = "127.0.0.1"


def descriptors() -> int:
    held = 0
    for one in DESCRIPTORS.iterdir():
        # The one that lists them is gone by now.
        with suppress(FileNotFoundError):
            held += bool(one.readlink())
    return held


def test_only_connections_to_that_server_are_cut() -> None:
    with socket.create_server((HOST, 0)) as server, socket.create_server((HOST, 0)) as other:
        port = server.getsockname()[1]
        with socket.create_connection(other.getsockname()) as kept:
            with socket.create_connection((HOST, port)) as lost:
                before = descriptors()
                assert cut(HOST, port) == 1
                assert descriptors() == before
                assert lost.recv(1) == b""
            there, _ = other.accept()
            with there:
                kept.sendall(b"x")
                assert there.recv(1) == b"x"
        assert cut(HOST, port) == 0
