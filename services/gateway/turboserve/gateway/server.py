"""uvicorn inside the service runner, which owns the signals."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

SOCKET_MESSAGE_BYTES = 1 << 20
"""Beyond this a WebSocket closes with 1009; the gateway's own limit, far below, answers with an error."""
GRACE_S = 2


class Server(uvicorn.Server):
    """Serves `app` on `host:port` between `start` and `stop`."""

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                # Both logs would show addresses, and those may carry an access token.
                access_log=False,
                log_level="warning",
                server_header=False,
                lifespan="off",
                ws="websockets-sansio",
                ws_max_size=SOCKET_MESSAGE_BYTES,
                ws_per_message_deflate=False,  # Video does not compress.
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._host, self._port = host, port
        self._serving: asyncio.Task[None] | None = None
        self.port = port
        """Where it really listens."""

    async def start(self) -> None:
        """Bind and accept. Raises OSError if the address is taken."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        # Named as TCP, which connections inherit: asyncio turns Nagle's algorithm off for those only. With it
        # on, the second message of a chunk waits up to 40 ms for the first one's acknowledgement.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((self._host, self._port))
        except OSError as error:
            listening.close()
            raise OSError(error.errno, f"{self._host}:{self._port}: {error.strerror}") from None
        self.port = int(listening.getsockname()[1])
        self._serving = asyncio.create_task(self.serve(sockets=[listening]), name="http")
        while not self.started and not self._serving.done():
            await asyncio.sleep(0.01)
        if self._serving.done():
            self._serving.result()

    async def wait(self) -> None:
        """Until it stops, for whatever reason."""
        if self._serving is not None:
            await asyncio.shield(self._serving)

    async def stop(self) -> None:
        self.should_exit = True
        await self.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
