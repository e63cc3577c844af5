"""Finds free TCP ports for servers that need a port number at their start."""

from __future__ import annotations

import errno
import random
import socket
import time
from collections.abc import Container

LOWEST, HIGHEST = 20_000, 32_000
"""Bounds of the ports to choose from. Both lie below the range that the kernel uses for outgoing connections:
such a connection could otherwise take the port before its server starts, or during a restart."""
ATTEMPTS = 1_000
RESERVED_S = 120.0
"""Time for which no other process chooses the same port, seconds: its server starts meanwhile."""

_reserved: list[tuple[float, socket.socket]] = []
"""When each reservation was made, by the monotonic clock, and the socket that holds it."""


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on `port` of `host` (IPv4) now.

    A closed connection in state TIME_WAIT does not block the port.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def any_free(host: str = "127.0.0.1", besides: Container[int] = ()) -> int:
    """Return a random free port between `LOWEST` and `HIGHEST` that is not one of `besides`.

    Two processes that choose at the same time get different ports: the port is reserved while this process
    lives, or until it chooses again after `RESERVED_S`. Raises OSError (EADDRINUSE) if no free port is found.
    """
    now = time.monotonic()
    while _reserved and _reserved[0][0] + RESERVED_S < now:
        _reserved.pop(0)[1].close()
    generator = random.SystemRandom()
    for _ in range(ATTEMPTS):
        port = generator.randrange(LOWEST, HIGHEST)
        if port not in besides and is_free(port, host) and _reserve(port, now):
            return port
    raise OSError(errno.EADDRINUSE, f"no free port found on {host} between {LOWEST} and {HIGHEST}")


def _reserve(port: int, now: float) -> bool:
    """Reserve the port. Returns False if it is reserved already. Where there is no such name, do nothing."""
    reservation = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        # A name outside the file system, which exists as long as the socket is open.
        reservation.bind(f"\0turboserve-port-{port}")
    except OSError as error:
        reservation.close()
        return error.errno != errno.EADDRINUSE
    _reserved.append((now, reservation))
    return True
