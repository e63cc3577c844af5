"""Finds free TCP ports for servers that need a port number at their start."""

from __future__ import annotations

import errno
import random
import socket

LOWEST, HIGHEST = 20_000, 32_000
"""Bounds of the ports to choose from. Both lie below the range that the kernel uses for outgoing connections:
such a connection could otherwise take the port before its server starts, or during a restart."""
ATTEMPTS = 1_000


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


def any_free(host: str = "127.0.0.1") -> int:
    """Return a random free port between `LOWEST` and `HIGHEST`.

    The choice is random, so that two processes rarely choose the same port. Raises OSError (EADDRINUSE) if no
    free port is found.
    """
    generator = random.SystemRandom()
    for _ in range(ATTEMPTS):
        port = generator.randrange(LOWEST, HIGHEST)
        if is_free(port, host):
            return port
    raise OSError(errno.EADDRINUSE, f"no free port found on {host} between {LOWEST} and {HIGHEST}")
