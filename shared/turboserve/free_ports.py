"""Free TCP ports for servers that are started with a port's number."""

from __future__ import annotations

import errno
import random
import socket

LOWEST, HIGHEST = 20_000, 32_000
"""Below the range from which the kernel takes ports for outgoing connections. One of those could otherwise
sit on the port before its server starts, or while the server is being restarted."""
ATTEMPTS = 1_000


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on `port` of `host` (IPv4) now.

    The remains of a closed connection (TIME_WAIT) do not count.
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
    """A random free port between `LOWEST` and `HIGHEST`, so that another process hardly finds the same one.

    Raises OSError (EADDRINUSE) if none is found.
    """
    generator = random.SystemRandom()
    for _ in range(ATTEMPTS):
        port = generator.randrange(LOWEST, HIGHEST)
        if is_free(port, host):
            return port
    raise OSError(errno.EADDRINUSE, f"no free port found on {host} between {LOWEST} and {HIGHEST}")
