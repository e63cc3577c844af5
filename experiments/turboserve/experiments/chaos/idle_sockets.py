"""Idle connections, as many as a server accepts."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import suppress

PER_ADDRESS = 16
"""Connections from one address of 127.0.0.0/8; a server may limit the number per address."""
LOOK_S = 0.25


class IdleSockets:
    """Holds `count` connections to `port`, and opens another for each that the server closes."""

    def __init__(self, port: int, count: int) -> None:
        self._port, self._count = port, count
        self._open: dict[int, socket.socket] = {}

    async def hold(self, seconds: float) -> None:
        """Hold the connections for `seconds`, and close them in any case."""
        deadline_s = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline_s:
                for number in range(self._count):
                    self._renew(number)
                await asyncio.sleep(LOOK_S)
        finally:
            for each in self._open.values():
                each.close()
            self._open.clear()

    def _renew(self, number: int) -> None:
        if number in self._open:
            if not _closed_by_peer(self._open[number]):
                return
            self._open.pop(number).close()
        # Any address of 127.0.0.0/8 is this machine's. The kernel accepts connections that the server does
        # not.
        address = f"127.0.{1 + number // PER_ADDRESS // 250}.{1 + number // PER_ADDRESS % 250}"
        with suppress(OSError):
            each = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                each.bind((address, 0))
                each.connect_ex(("127.0.0.1", self._port))
            except OSError:
                each.close()
                raise
            self._open[number] = each


def _closed_by_peer(each: socket.socket) -> bool:
    try:
        return each.recv(4096) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
