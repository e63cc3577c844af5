"""Ports for servers that cannot choose one themselves."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """Different loopback ports that are free now."""
    with ExitStack() as held:
        # All are held until the last is found: the kernel may give one that was let go a second time.
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
