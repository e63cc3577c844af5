"""End the connections of a library that waits without end and gives no way to close them."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

DESCRIPTORS = Path("/proc/self/fd")


def cut(host: str, port: int) -> int:
    """Shut down every TCP connection of this process to the server at `host:port`; returns how many.

    Who reads from one, on whatever thread, gets an error at once, and closes it. Only a system with `/proc`
    tells which there are; elsewhere there are none.
    """
    try:
        wanted = {found[4][0] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        open_ones = [int(one.name) for one in DESCRIPTORS.iterdir()]
    except OSError:
        return 0
    return sum(_shut(one, wanted, port) for one in open_ones)


def _shut(descriptor: int, hosts: set[str | int], port: int) -> bool:
    try:
        # Others open and close descriptors meanwhile: a copy stays what it was when it was looked at.
        copy = os.dup(descriptor)
    except OSError:
        return False
    try:
        found = socket.socket(fileno=copy)
    except OSError:
        # A file, a pipe.
        os.close(copy)
        return False
    with found, suppress(OSError):
        if found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6):
            peer = found.getpeername()
            if peer[1] == port and peer[0].removeprefix("::ffff:") in hosts:
                found.shutdown(socket.SHUT_RDWR)
                return True
    return False
